#include "nn/softmax_cpu.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <limits>

#include "nn/cpu_tensor.h"
#include "nn/vector_math.h"

namespace shardsmith::cpu {
namespace {

using elements::Bf16;
using elements::load;
using elements::store;

constexpr int64_t kSumPiece = 4096;  // summed in float32, the pieces in double

template <typename T>
inline float maximum_loop(const T* x, int64_t n) {
  float largest = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, load(x[i]));
  return largest;
}
template <typename T>
inline float sum_loop(const T* x, int64_t n, float maximum) {
  float sum = 0, strange = 0;  // 0 x infinity and not-a-number are not-a-number
#pragma omp simd reduction(+ : sum, strange)
  for (int64_t i = 0; i < n; ++i) {
    const float d = load(x[i]) - maximum;
    sum += vector_math::exponential(d);
    strange += 0.0f * d;
  }
  return sum + strange;
}
template <typename T>
inline void gradient_loop(T* x, int64_t n, float maximum, float factor) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) store(x[i], factor * vector_math::exponential(load(x[i]) - maximum));
}

#define SHARDSMITH_SOFTMAX(T)                                                                                     \
  SHARDSMITH_VECTOR_CLONES float maximum_of(const T* x, int64_t n) { return maximum_loop(x, n); }                 \
  SHARDSMITH_VECTOR_CLONES float sum_of(const T* x, int64_t n, float maximum) { return sum_loop(x, n, maximum); } \
  SHARDSMITH_VECTOR_CLONES void to_gradient(T* x, int64_t n, float maximum, float factor) {                       \
    gradient_loop(x, n, maximum, factor);                                                                         \
  }
SHARDSMITH_SOFTMAX(float)
SHARDSMITH_SOFTMAX(Bf16)
#undef SHARDSMITH_SOFTMAX

template <typename T>
void facts_of_row(const T* x, int64_t n, int64_t label, float* maximum, float* total, float* at_label) {
  *maximum = maximum_of(x, n);
  double sum = 0;
  for (int64_t begin = 0; begin < n; begin += kSumPiece)
    sum += sum_of(x + begin, std::min(kSumPiece, n - begin), *maximum);
  *total = static_cast<float>(sum);
  *at_label = label >= 0 && label < n ? load(x[label]) : 0.0f;
}

template <typename T>
void gradient_of_row(T* x, int64_t n, int64_t label, float maximum, float total, float scale) {
  const bool is_here = label >= 0 && label < n;
  const float at_label = is_here ? load(x[label]) : 0.0f, factor = scale / total;
  to_gradient(x, n, maximum, factor);
  // Not by subtracting from what was rounded.
  if (is_here) store(x[label], factor * vector_math::exponential(at_label - maximum) - scale);
}

}  // namespace

bool has_softmax(const at::Tensor& logits) {
  return is_kernel_dtype(logits) && logits.is_contiguous() && logits.dim() == 2;
}

void softmax_facts(const at::Tensor& logits, const at::Tensor& labels, const at::Tensor& facts) {
  const int64_t rows = logits.size(0), n = logits.size(1);
  const int64_t* label = labels.const_data_ptr<int64_t>();
  float* all = out<float>(facts);
  by_dtype(logits, [&](auto t) {
    using T = decltype(t);
    const T* x = in<T>(logits);
    at::parallel_for(0, rows, kGrain / std::max<int64_t>(n, 1) + 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        facts_of_row(x + i * n, n, label[i], all + i, all + rows + i, all + 2 * rows + i);
    });
  });
}

void softmax_gradient(const at::Tensor& logits, const at::Tensor& labels, const at::Tensor& maximum,
                      const at::Tensor& total, const at::Tensor& scale) {
  const int64_t rows = logits.size(0), n = logits.size(1);
  const int64_t* label = labels.const_data_ptr<int64_t>();
  const float *m = in<float>(maximum), *sum = in<float>(total), *factor = in<float>(scale);
  by_dtype(logits, [&](auto t) {
    using T = decltype(t);
    T* x = out<T>(logits);
    at::parallel_for(0, rows, kGrain / std::max<int64_t>(n, 1) + 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) gradient_of_row(x + i * n, n, label[i], m[i], sum[i], factor[i]);
    });
  });
}

}  // namespace shardsmith::cpu
