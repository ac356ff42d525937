// Which elements of two packed arrays differ, and where they differ most.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "layout/dtype.h"

namespace shardsmith::cli {

struct Tolerance {
  bool given = false;  // otherwise: bits where the dtypes are the same, exact numbers where they are not
  double rtol = 0, atol = 0;
};

// |a - b| <= atol + rtol * |b|; NaN equals NaN, an infinity only itself.
bool close(double a, double b, const Tolerance& tolerance);

class ElementComparison {
 public:
  ElementComparison(Dtype a, Dtype b, const Tolerance& tolerance);

  // n elements; the first of them is number `first`, to be remembered by. `repeats`: each counts as so many.
  void add(const std::byte* a, const std::byte* b, int64_t n, int64_t first, int64_t repeats = 1);

  int64_t differing() const { return differing_; }
  // Of those that differ: infinite where one is no finite number. Where only the bits differ it is 0.
  double largest() const { return largest_; }
  int64_t where() const { return where_; }  // the first one of the largest difference
  // Its elements, in their own dtypes.
  const std::byte* a() const { return a_element_.data(); }
  const std::byte* b() const { return b_element_.data(); }

 private:
  template <typename Real>
  void add_numbers(const std::byte* a, const std::byte* b, int64_t n, int64_t first, int64_t repeats);

  const Dtype a_dtype_, b_dtype_;
  const Tolerance tolerance_;
  const bool bitwise_, wide_;
  int64_t differing_ = 0, where_ = 0;
  double largest_ = -1;
  std::array<std::byte, 16> a_element_{}, b_element_{};
};

}  // namespace shardsmith::cli
