#include "nn/embedding.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "nn/leaf_gradient.h"

namespace shardsmith {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct WordRows : torch::autograd::Function<WordRows> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& weight, const at::Tensor& ids,
                            int64_t padding_idx) {
    context->save_for_backward({weight, ids});
    context->saved_data["padding_idx"] = padding_idx;
    return at::embedding(weight, ids);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const variable_list saved = context->get_saved_variables();
    at::Tensor weight = saved[0];
    const at::Tensor ids = saved[1].reshape({-1});
    const int64_t padding_idx = context->saved_data["padding_idx"].toInt();
    at::Tensor rows = grads[0].reshape({-1, weight.size(1)}).to(weight.scalar_type());
    if (padding_idx >= 0) rows = rows.masked_fill(ids.eq(padding_idx).unsqueeze(1), 0);
    if (is_watched(weight)) return {at::zeros_like(weight).index_add_(0, ids, rows), at::Tensor(), at::Tensor()};
    if (!weight.grad().defined()) weight.mutable_grad() = at::zeros_like(weight);
    weight.mutable_grad().index_add_(0, ids, rows);
    return {at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor embed_words(const at::Tensor& weight, const at::Tensor& ids, int64_t padding_idx) {
  return WordRows::apply(weight, ids, padding_idx);
}

}  // namespace shardsmith
