// The parameters that one rank holds, under their Hugging Face names and in their own orientation, and the layers'
// logical view on them: query, key and value may be one fused tensor, a weight may be [out, in] or [in, out].
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "family/family.h"

namespace shardsmith {

// y = x W^T + b for weight [out, in], y = x W + b for [in, out] (`in_out`). x [..., in] -> y [..., out].
struct Linear {
  at::Tensor weight;
  at::Tensor bias;  // undefined: none
  bool in_out = false;
  bool by_head = false;  // of query, key and value fused: y is [..., heads, 3, d] rather than one after the other
  at::Tensor operator()(const at::Tensor& x) const;
  // Without the bias.
  at::Tensor product(const at::Tensor& x) const;
};

struct Norm {
  at::Tensor weight;
  at::Tensor bias;  // undefined: none
};

// Handles only: the tensors stay the caller's (a Python Parameter and this are one tensor). Not thread-safe to build,
// free to read from any thread.
class Parameters {
 public:
  // `model` is the whole one; `held` are what tensor-parallel rank `rank` of `degree` has of it (family/local_model.h).
  // Throws kInvalidArgument that names a tensor that `model` doesn't have, or whose shape differs.
  Parameters(const FamilyModel& model, std::map<std::string, at::Tensor> held, int rank = 0, int degree = 1);

  // A parameter that is a whole tensor, by logical name. Throws kInvalidArgument if this rank doesn't hold it.
  const at::Tensor& get(const std::string& logical) const;
  // The layers of these logical names ("...attention.query", without ".weight"): one Linear for all if they tile one
  // held tensor in this order, otherwise one each.
  std::vector<Linear> linears(const std::vector<std::string>& names) const;
  Linear linear(const std::string& name) const { return linears({name}).front(); }

  Norm norm(const std::string& name) const;  // without ".weight"

  // How many neighbouring tensor-parallel ranks hold the same as this one of a tensor, by Hugging Face name.
  int copies(const std::string& hf_name) const { return copies_.at(hf_name); }
  // The row of the whole vocabulary with which this rank's part begins.
  int64_t first_row() const { return first_row_; }

  // By Hugging Face name, in the family's order.
  const std::vector<std::pair<std::string, at::Tensor>>& held() const { return held_; }

 private:
  struct Place {
    size_t held;      // index into held_
    size_t position;  // this piece's number in the held tensor
    size_t pieces;    // how many pieces that tensor has
    bool transposed;
    bool in_runs;  // the piece's rows don't lie together
  };
  const Place* find(const std::string& logical) const;

  std::vector<std::pair<std::string, at::Tensor>> held_;
  std::unordered_map<std::string, Place> places_;
  std::unordered_map<std::string, int> copies_;
  int64_t first_row_ = 0;
  bool norms_have_bias_ = false;
};

}  // namespace shardsmith
