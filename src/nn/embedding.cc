#include "nn/embedding.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "nn/leaf_gradient.h"

namespace shardsmith {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct WordRows : torch::autograd::Function<WordRows> {
  // `strangers`: ids that stand for rows of other ranks, undefined where there are none.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& weight, const at::Tensor& ids,
                            const std::optional<at::Tensor>& given, int64_t padding_row) {
    const at::Tensor strangers = given.value_or(at::Tensor());
    context->save_for_backward({weight, ids, strangers});
    context->saved_data["padding_row"] = padding_row;
    const at::Tensor rows = at::embedding(weight, ids);
    return strangers.defined() ? rows.masked_fill_(strangers.unsqueeze(-1), 0) : rows;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const variable_list saved = context->get_saved_variables();
    at::Tensor weight = saved[0];
    const at::Tensor ids = saved[1].reshape({-1});
    const int64_t padding_row = context->saved_data["padding_row"].toInt();
    at::Tensor rows = grads[0].reshape({-1, weight.size(1)}).to(weight.scalar_type());
    if (padding_row >= 0) rows = rows.masked_fill(ids.eq(padding_row).unsqueeze(1), 0);
    if (saved[2].defined()) rows = rows.masked_fill(saved[2].reshape({-1, 1}), 0);
    const auto give = [](at::Tensor gradient) {
      return variable_list{std::move(gradient), at::Tensor(), at::Tensor(), at::Tensor()};
    };
    if (is_watched(weight)) return give(at::zeros_like(weight).index_add_(0, ids, rows));
    if (!weight.grad().defined()) weight.mutable_grad() = at::zeros_like(weight);
    weight.mutable_grad().index_add_(0, ids, rows);
    return give({});
  }
};

}  // namespace

at::Tensor embed_words(const at::Tensor& weight, const at::Tensor& ids, int64_t padding_idx, int64_t first_row,
                       bool is_part) {
  if (!is_part) return WordRows::apply(weight, ids, std::nullopt, padding_idx);
  if (weight.size(0) == 0) {  // more ranks than rows
    std::vector<int64_t> shape = ids.sizes().vec();
    shape.push_back(weight.size(1));
    return at::zeros(shape, weight.options().requires_grad(false)) + weight.sum();  // part of the graph all the same
  }
  const at::Tensor rows = ids - first_row;
  const at::Tensor strangers = at::logical_or(rows.lt(0), rows.ge(weight.size(0)));
  return WordRows::apply(weight, rows.masked_fill(strangers, 0), std::optional(strangers), padding_idx - first_row);
}

}  // namespace shardsmith
