// Elements of any dtype as numbers, for those who compare, count or print them. Pure; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "layout/dtype.h"

namespace shardsmith {

bool is_complex(Dtype dtype);
// Whether an element can be a NaN or an infinity.
bool has_specials(Dtype dtype);
// 64-bit integers, which a double does not hold exactly.
bool is_wide_integer(Dtype dtype);

// 8-bit floating types only.
float float8_to_float(Dtype dtype, uint8_t bits);

// n packed little-endian elements, at any address. `imaginary` is written for complex dtypes only. Exact, but for
// 64-bit integers as double. Defined for double and long double.
template <typename Real>
void load_numbers(Dtype dtype, const std::byte* source, int64_t n, Real* real, Real* imaginary);

// Elements that are no numbers, and those that are no finite ones; a complex element counts once.
struct Specials {
  int64_t nan = 0, infinite = 0;
};
Specials count_specials(Dtype dtype, std::span<const std::byte> packed);

// One element as text that tells it from every other of its dtype: "0.1", "-3", "true", "1-2j", "nan".
std::string element_text(Dtype dtype, const std::byte* element);

}  // namespace shardsmith
