#include "cli/diff_elements.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "storage/numbers.h"

namespace shardsmith::cli {
namespace {

constexpr int64_t kChunk = 512;

template <typename Real>
bool same(Real a, Real b) {
  return a == b || (std::isnan(a) && std::isnan(b));
}

// What lies between two numbers; infinite where one of them is not finite and the other is not the same.
template <typename Real>
Real distance(Real a, Real b) {
  if (same(a, b)) return 0;
  const Real d = std::fabs(a - b);
  return std::isnan(d) ? std::numeric_limits<Real>::infinity() : d;
}

template <typename Real>
bool within(Real difference, Real size_of_b, const Tolerance& tolerance) {
  return std::isfinite(difference) && difference <= tolerance.atol + tolerance.rtol * size_of_b;
}

}  // namespace

bool close(double a, double b, const Tolerance& tolerance) {
  return same(a, b) || within(distance(a, b), std::fabs(b), tolerance);
}

ElementComparison::ElementComparison(Dtype a, Dtype b, const Tolerance& tolerance)
    : a_dtype_(a),
      b_dtype_(b),
      tolerance_(tolerance),
      bitwise_(a == b && !tolerance.given),
      wide_(is_wide_integer(a) || is_wide_integer(b)) {}

void ElementComparison::add(const std::byte* a, const std::byte* b, int64_t n, int64_t first, int64_t repeats) {
  const int64_t a_size = size_of(a_dtype_), b_size = size_of(b_dtype_);
  for (int64_t at = 0; at < n; at += kChunk) {
    const int64_t count = std::min(kChunk, n - at);
    const std::byte *left = a + at * a_size, *right = b + at * b_size;
    // The same bits are equal by any measure.
    if (a_dtype_ == b_dtype_ && std::memcmp(left, right, static_cast<size_t>(count * a_size)) == 0) continue;
    if (wide_)
      add_numbers<long double>(left, right, count, first + at, repeats);
    else
      add_numbers<double>(left, right, count, first + at, repeats);
  }
}

template <typename Real>
void ElementComparison::add_numbers(const std::byte* a, const std::byte* b, int64_t n, int64_t first, int64_t repeats) {
  const int64_t a_size = size_of(a_dtype_), b_size = size_of(b_dtype_);
  std::array<Real, kChunk> a_real, a_imaginary, b_real, b_imaginary;
  load_numbers(a_dtype_, a, n, a_real.data(), a_imaginary.data());
  load_numbers(b_dtype_, b, n, b_real.data(), b_imaginary.data());
  const bool complex = is_complex(a_dtype_) || is_complex(b_dtype_);
  if (complex && !is_complex(a_dtype_)) a_imaginary.fill(0);
  if (complex && !is_complex(b_dtype_)) b_imaginary.fill(0);
  for (int64_t i = 0; i < n; ++i) {
    Real difference = distance(a_real[i], b_real[i]), size = std::fabs(b_real[i]);
    if (complex) {
      difference = std::hypot(difference, distance(a_imaginary[i], b_imaginary[i]));
      size = std::hypot(b_real[i], b_imaginary[i]);
    }
    const std::byte *left = a + i * a_size, *right = b + i * b_size;
    const bool equal = bitwise_ ? std::memcmp(left, right, static_cast<size_t>(a_size)) == 0
                                : difference == 0 || (tolerance_.given && within(difference, size, tolerance_));
    if (equal) continue;
    differing_ += repeats;
    if (static_cast<double>(difference) <= largest_) continue;
    largest_ = static_cast<double>(difference);
    where_ = first + i;
    std::memcpy(a_element_.data(), left, static_cast<size_t>(a_size));
    std::memcpy(b_element_.data(), right, static_cast<size_t>(b_size));
  }
}

}  // namespace shardsmith::cli
