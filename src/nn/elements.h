// Elements of float32, bfloat16 and float16 as float and back, written so that a loop over them vectorizes.
#pragma once

#include <c10/util/Half.h>

#include <bit>
#include <cstdint>

// A loop is plain; the compiler makes a copy of it for each vector width and picks one at load time.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define SHARDSMITH_VECTOR_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define SHARDSMITH_VECTOR_CLONES
#endif

namespace shardsmith::elements {

struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};

inline float load(float x) { return x; }
inline float load(Bf16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }
inline float load(Fp16 x) { return c10::detail::fp16_ieee_to_fp32_value(x.bits); }

// To nearest, ties to even; not-a-number stays one.
inline void store(float& to, float x) { to = x; }
inline void store(Bf16& to, float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  to.bits = static_cast<uint16_t>(x != x ? 0x7fc0 : rounded);
}
inline void store(Fp16& to, float x) { to.bits = c10::detail::fp16_ieee_from_fp32_value(x); }

}  // namespace shardsmith::elements
