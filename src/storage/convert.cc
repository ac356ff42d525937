#include "storage/convert.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace shardsmith {

uint16_t float_to_half(float value) {
  uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00 | ((bits >> 13) & 0x3ff));  // stays a NaN
  if (bits >= 0x47800000) return sign | 0x7c00;                                                 // 65536 and more
  if (bits < 0x38800000) {
    // Subnormal: adding 0.5 makes the float unit round at 2^-24, the half's last place.
    const float shifted = std::bit_cast<float>(bits) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u));
  }
  const uint32_t odd = (bits >> 13) & 1;
  bits += 0xc8000fffu + odd;  // exponent bias 127 -> 15, and half of the last place less one
  return static_cast<uint16_t>(sign | (bits >> 13));
}

float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  uint32_t bits = static_cast<uint32_t>(half & 0x7fff) << 13;
  const uint32_t exponent = bits & 0x0f800000;
  bits += 112u << 23;
  if (exponent == 0x0f800000) {
    bits += 112u << 23;  // infinity or NaN
  } else if (exponent == 0) {
    bits += 1u << 23;  // zero or subnormal: normalised by a subtraction
    bits = std::bit_cast<uint32_t>(std::bit_cast<float>(bits) - std::bit_cast<float>(113u << 23));
  }
  return std::bit_cast<float>(bits | sign);
}

uint16_t float_to_bfloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>((bits >> 16) | 0x40);  // stays a NaN
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float bfloat16_to_float(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

float double_to_float_odd(double value) {
  const float rounded = static_cast<float>(value);
  if (std::isnan(value) || static_cast<double>(rounded) == value) return rounded;
  if (std::isinf(rounded)) return rounded;
  // Of the two neighbours take the one whose last bit is set: it remembers that something was cut off.
  uint32_t bits = std::bit_cast<uint32_t>(rounded);
  if (bits & 1) return rounded;
  const bool away = std::fabs(static_cast<double>(rounded)) > std::fabs(value);  // rounded up in magnitude
  bits += away ? -1 : 1;
  return std::bit_cast<float>(bits);
}

namespace {

struct F64 {
  using Bits = double;
  static double load(double v) { return v; }
  static double store(double v) { return v; }
  static double store(float v) { return v; }
};
struct F32 {
  using Bits = float;
  static float load(float v) { return v; }
  static float store(double v) { return static_cast<float>(v); }
  static float store(float v) { return v; }
};
struct F16 {
  using Bits = uint16_t;
  static float load(uint16_t v) { return half_to_float(v); }
  static uint16_t store(double v) { return float_to_half(double_to_float_odd(v)); }
  static uint16_t store(float v) { return float_to_half(v); }
};
struct BF16 {
  using Bits = uint16_t;
  static float load(uint16_t v) { return bfloat16_to_float(v); }
  static uint16_t store(double v) { return float_to_bfloat16(double_to_float_odd(v)); }
  static uint16_t store(float v) { return float_to_bfloat16(v); }
};

template <typename From, typename To>
void row(const std::byte* source, std::byte* destination, int64_t n, int64_t source_step, int64_t destination_step) {
  const auto one = [](const std::byte* s, std::byte* d) {
    typename From::Bits in;
    std::memcpy(&in, s, sizeof(in));
    const typename To::Bits out = To::store(From::load(in));
    std::memcpy(d, &out, sizeof(out));
  };
  if (source_step == sizeof(typename From::Bits) && destination_step == sizeof(typename To::Bits)) {
    for (int64_t i = 0; i < n; ++i)  // constant steps, so that it vectorises
      one(source + i * sizeof(typename From::Bits), destination + i * sizeof(typename To::Bits));
    return;
  }
  for (int64_t i = 0; i < n; ++i) one(source + i * source_step, destination + i * destination_step);
}

template <typename From>
ConvertRow from(Dtype to) {
  switch (to) {
    case Dtype::kF64:
      return row<From, F64>;
    case Dtype::kF32:
      return row<From, F32>;
    case Dtype::kF16:
      return row<From, F16>;
    case Dtype::kBF16:
      return row<From, BF16>;
    default:
      return nullptr;
  }
}

}  // namespace

ConvertRow convert_row(Dtype source, Dtype to) {
  switch (source) {
    case Dtype::kF64:
      return from<F64>(to);
    case Dtype::kF32:
      return from<F32>(to);
    case Dtype::kF16:
      return from<F16>(to);
    case Dtype::kBF16:
      return from<BF16>(to);
    default:
      return nullptr;
  }
}

}  // namespace shardsmith
