#include "optim/gradient_norm.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "nn/elements.h"

namespace shardsmith {
namespace {

using elements::Bf16;
using elements::Fp16;
using elements::load;

constexpr int64_t kChunk = 32768;

template <typename T>
inline double square_loop(const T* x, int64_t n) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) {
    const double value = load(x[i]);
    sum += value * value;
  }
  return sum;
}
SHARDSMITH_VECTOR_CLONES double squares_float(const float* x, int64_t n) { return square_loop(x, n); }
SHARDSMITH_VECTOR_CLONES double squares_bf16(const Bf16* x, int64_t n) { return square_loop(x, n); }
SHARDSMITH_VECTOR_CLONES double squares_fp16(const Fp16* x, int64_t n) { return square_loop(x, n); }

bool has_kernel(const at::Tensor& tensor) {
  const at::ScalarType type = tensor.scalar_type();
  return tensor.is_cpu() && tensor.is_non_overlapping_and_dense() &&
         (type == at::kFloat || type == at::kBFloat16 || type == at::kHalf);
}

double squares_of_range(const at::Tensor& tensor, int64_t begin, int64_t end) {
  const void* data = tensor.const_data_ptr();
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return squares_float(static_cast<const float*>(data) + begin, end - begin);
    case at::kBFloat16:
      return squares_bf16(static_cast<const Bf16*>(data) + begin, end - begin);
    default:
      return squares_fp16(static_cast<const Fp16*>(data) + begin, end - begin);
  }
}

double squares(const at::Tensor& tensor) {
  if (!has_kernel(tensor)) {
    const double norm = at::linalg_vector_norm(tensor, 2, at::OptionalIntArrayRef{}, false, at::kDouble).item<double>();
    return norm * norm;
  }
  std::vector<double> sums(static_cast<size_t>((tensor.numel() + kChunk - 1) / kChunk));
  at::parallel_for(0, static_cast<int64_t>(sums.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c)
      sums[static_cast<size_t>(c)] = squares_of_range(tensor, c * kChunk, std::min((c + 1) * kChunk, tensor.numel()));
  });
  double sum = 0;
  for (const double part : sums) sum += part;
  return sum;
}

}  // namespace

GradientNorm::GradientNorm(double type) : type_(type) {
  if (!(type > 0)) fail(ErrorKind::kInvalidArgument, "norm_type must be a number above 0 or infinity, not ", type);
}

bool GradientNorm::is_maximum() const { return std::isinf(type_); }

double GradientNorm::partial(const std::vector<at::Tensor>& gradients) const {
  at::NoGradGuard no_grad;
  double result = 0;
  for (const at::Tensor& gradient : gradients) {
    if (gradient.numel() == 0) continue;
    if (type_ == 2) {
      result += squares(gradient);
    } else if (is_maximum()) {
      const double largest = gradient.abs().max().item<double>();
      result = std::isnan(largest) ? largest : std::isnan(result) ? result : std::max(result, largest);
    } else {
      result += gradient.to(at::kDouble).abs().pow_(type_).sum().item<double>();
    }
  }
  return result;
}

double GradientNorm::combine(double own, std::optional<Group>& group, at::Device device) const {
  if (!group || group->size() == 1) return own;
  // Gathered, as a maximum can't be summed; a few bytes either way.
  const at::Tensor all = group->all_gather(at::full({1}, own, at::TensorOptions(device).dtype(at::kDouble))).wait();
  return (is_maximum() ? all.max() : all.sum()).item<double>();
}

double GradientNorm::finish(double combined) const {
  return is_maximum() ? combined : type_ == 2 ? std::sqrt(combined) : std::pow(combined, 1 / type_);
}

}  // namespace shardsmith
