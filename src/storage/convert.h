// Conversions between floating dtypes, round to nearest even. Pure; any thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "layout/dtype.h"

namespace shardsmith {

uint16_t float_to_half(float value);
float half_to_float(uint16_t bits);
uint16_t float_to_bfloat16(float value);
float bfloat16_to_float(uint16_t bits);
// Rounds a double so that a second rounding, to a 16-bit type, gives what one rounding would have given.
float double_to_float_odd(double value);

// Converts n elements; steps are in bytes, addresses need no alignment.
using ConvertRow = void (*)(const std::byte* source, std::byte* destination, int64_t n, int64_t source_step,
                            int64_t destination_step);
// Null where there is no conversion between the two: only f64, f32, f16 and bf16 have any.
ConvertRow convert_row(Dtype from, Dtype to);

}  // namespace shardsmith
