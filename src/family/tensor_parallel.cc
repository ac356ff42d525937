#include "family/tensor_parallel.h"

#include <algorithm>

#include "base/error.h"

namespace shardsmith {
namespace {

bool fits(const ModelDescription& model, int degree) {
  if (model.model_type == "torch_module") return true;  // its layers have looked for themselves
  const int64_t kv = model.num_key_value_heads;
  return model.num_attention_heads % degree == 0 && (kv % degree == 0 || degree % kv == 0) &&
         model.intermediate_size >= degree;
}

bool ends_with_any(const std::string& name, std::initializer_list<std::string_view> ends) {
  return std::any_of(ends.begin(), ends.end(), [&](std::string_view end) { return name.ends_with(end); });
}

// `count` of dimension `d` from `offset` on.
Box part(const Shape& shape, size_t d, int64_t offset, int64_t count) {
  Box box = whole(shape);
  box.offset[d] = offset;
  box.extent[d] = count;
  return box;
}

// The rank's share of dimension `d`: equal ones where the degree divides it, otherwise they differ by one. Rank 0's is
// a largest one.
Box share(const Shape& shape, size_t d, int rank, int degree) {
  const auto begin = [&](int r) { return (shape[d] * r + degree - 1) / degree; };
  return part(shape, d, begin(rank), begin(rank + 1) - begin(rank));
}

}  // namespace

void check_tensor_parallel(const ModelDescription& model, int degree) {
  if (degree < 1)
    fail(ErrorKind::kInvalidArgument, "the tensor-parallel degree is ", degree, ", it must be at least 1");
  if (fits(model, degree)) return;
  std::string works;
  for (int d = 1; d <= model.num_attention_heads && d <= 64; ++d)
    if (fits(model, d)) works += (works.empty() ? "" : ", ") + std::to_string(d);
  fail(ErrorKind::kInvalidArgument, model.num_attention_heads, " attention heads, ", model.num_key_value_heads,
       " KV heads and an MLP of ", model.intermediate_size, " can't be dealt out to ", degree,
       " tensor-parallel ranks; degrees that work: ", works, "; or use more pipeline stages");
}

Box tensor_parallel_box(const ModelDescription& model, const std::string& name, const Shape& shape, int rank,
                        int degree) {
  if (degree == 1 || shape.empty()) return whole(shape);
  if (model.model_type == "torch_module") {
    const auto axis = model.split_axes.find(name);
    return axis == model.split_axes.end() ? whole(shape)
                                          : share(shape, static_cast<size_t>(axis->second), rank, degree);
  }
  const int64_t rows = shape[0];
  if (name == "word_embedding.weight" || name == "lm_head.weight" || name == "lm_head.bias") {
    const int64_t each = (rows + degree - 1) / degree, begin = std::min(rows, each * rank);
    return part(shape, 0, begin, std::min(each, rows - begin));
  }
  if (ends_with_any(name, {".key.weight", ".key.bias", ".value.weight", ".value.bias"}) &&
      model.num_key_value_heads < degree) {
    const int64_t head = rank * model.num_key_value_heads / degree;
    return part(shape, 0, head * model.attention_head_size, model.attention_head_size);
  }
  if (ends_with_any(name, {".query.weight", ".query.bias", ".key.weight", ".key.bias", ".value.weight", ".value.bias",
                           ".gate.weight", ".gate.bias", ".up.weight", ".up.bias", ".dense1.weight", ".dense1.bias"})) {
    return share(shape, 0, rank, degree);
  }
  if (shape.size() == 2 && ends_with_any(name, {".attention.dense.weight", ".down.weight", ".dense2.weight"})) {
    return share(shape, 1, rank, degree);
  }
  return whole(shape);
}

}  // namespace shardsmith
