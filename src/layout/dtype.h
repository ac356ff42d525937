// Element types, by torch's names.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace shardsmith {

enum class Dtype : uint8_t {
  kBool,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kF8E8M0,
  kF8E4M3Fnuz,
  kF8E5M2Fnuz,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kC32,
  kC64,
  kF64,
  kI64,
  kU64,
  kC128,
  kQI8,
  kQU8,
  kQI32,
};

// Bytes of one element.
int64_t size_of(Dtype dtype);
bool is_floating(Dtype dtype);  // of any width, float8_e4m3fn among them
// "float32", "bfloat16", "float8_e4m3fn", "complex64", ...: torch's word.
std::string_view to_string(Dtype dtype);
std::optional<Dtype> dtype_from_torch(std::string_view name);
// "F32", "BF16", "F8_E4M3", ...: safetensors' word; empty where it has none.
std::string_view safetensors_name(Dtype dtype);
std::optional<Dtype> dtype_from_safetensors(std::string_view name);

}  // namespace shardsmith
