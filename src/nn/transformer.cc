#include "nn/transformer.h"

#include <ATen/ATen.h>

#include "base/error.h"
#include "nn/embedding.h"
#include "nn/loss.h"

namespace shardsmith {
namespace {

// Every query sees itself, so that rows that are all padding stay finite; they count nowhere.
at::Tensor attention_mask(const at::Tensor& keep) {
  if (!keep.defined() || keep.ne(0).all().item<bool>()) return {};
  const int64_t sequence = keep.size(1);
  const at::Tensor causal = at::ones({sequence, sequence}, keep.options().dtype(at::kBool)).tril();
  const at::Tensor seen = at::logical_and(causal, keep.ne(0).view({-1, 1, 1, sequence}));
  return at::logical_or(seen, at::eye(sequence, keep.options().dtype(at::kBool)));
}

// What a description may say beyond what is computed here.
void check_computed(const ModelDescription& m) {
  if (m.post_layernorm || m.parallel_residual || m.rotary_dims != 0 || m.head != HeadKind::kCausalLm || !m.causal)
    fail(ErrorKind::kUnsupported, "models of type ", m.model_type,
         " can't be trained yet; their files can be converted");
}

}  // namespace

StageModel::StageModel(const FamilyModel& model, const Partition& partition, int stage, const Parameters& parameters,
                       const TensorParallel& ranks, bool own_batch)
    : description_(model.description), ranks_(ranks), own_batch_(own_batch && ranks.size() > 1) {
  const ModelDescription& m = description_;
  check_computed(m);
  first_row_ = parameters.first_row();
  if (stage == 0) {
    word_embedding_ = parameters.get("word_embedding.weight");
    if (m.position == PositionKind::kLearned) position_embedding_ = parameters.get("position_embedding.weight");
  }
  const auto s = static_cast<size_t>(stage);
  for (int64_t layer = partition.first.at(s); layer < partition.first.at(s + 1); ++layer)
    blocks_.emplace_back(m, parameters, layer, ranks);
  if (stage == partition.stages() - 1) {
    norm_weight_ = parameters.get("layernorm.weight");
    if (m.norm == NormKind::kLayerNorm) norm_bias_ = parameters.get("layernorm.bias");
    head_ = parameters.get(m.tied_head ? "word_embedding.weight" : "lm_head.weight");
  }
  if (m.position == PositionKind::kRotary)
    rotary_ = make_rotary_table(m, m.num_positions, parameters.held().front().second.options());
}

at::Tensor StageModel::looked_up(const Inputs& inputs) const {
  const at::Tensor ids = inputs.input_ids.reshape({-1});
  if (ranks_.size() == 1 || !has_embedding()) return ids;
  const at::Tensor rows = ids - first_row_;
  return rows.masked_select(at::logical_and(rows.ge(0), rows.lt(word_embedding_.size(0))));
}

at::Tensor StageModel::embed(const Inputs& inputs, const DropoutContext& dropout_context) const {
  const int64_t sequence = inputs.input_ids.size(1);
  const TensorParallel::Positions own = ranks_.positions(sequence);
  at::Tensor x = ranks_.leave(
      embed_words(word_embedding_, inputs.input_ids, description_.padding_idx, first_row_, ranks_.size() > 1));
  if (position_embedding_.defined()) {
    const at::Tensor table = ranks_.replicated(position_embedding_);
    x = x + (inputs.position_ids.defined()
                 ? at::embedding(table, inputs.position_ids.slice(1, own.begin, own.begin + own.count))
                 : table.slice(0, own.begin, own.begin + own.count));
  }
  return dropout(x, description_.embedding_dropout, 0, dropout_context,
                 static_cast<uint64_t>(own.begin * description_.hidden_size));
}

at::Tensor StageModel::forward(const at::Tensor& x, const Inputs& inputs, const DropoutContext& dropout_context) const {
  const int64_t sequence = inputs.input_ids.size(1);
  if (sequence > description_.num_positions)
    fail(ErrorKind::kInvalidArgument, "input_ids have ", sequence, " positions, the model has ",
         description_.num_positions);
  at::Tensor h = has_embedding() ? embed(inputs, dropout_context) : x;
  const BlockContext context{sequence, attention_mask(inputs.attention_mask), inputs.position_ids, &rotary_,
                             dropout_context};
  for (const Block& block : blocks_) h = block.forward(h, context);
  if (!has_head()) return h;
  return normalize(h, ranks_.replicated(norm_weight_), ranks_.replicated(norm_bias_), description_.norm,
                   description_.layernorm_epsilon);
}

std::vector<int64_t> StageModel::hidden_shape(const Inputs& inputs) const {
  return {inputs.input_ids.size(0), ranks_.positions(inputs.input_ids.size(1)).count, description_.hidden_size};
}

constexpr int64_t kLossRows = 512;  // logits that exist at a time

at::Tensor StageModel::loss(const at::Tensor& hidden, const at::Tensor& labels) const {
  LossOptions options{kLossRows, head_gradient_.get()};
  if (ranks_.size() > 1) options.ranks = &ranks_;
  options.first_row = first_row_;
  options.vocab_size = description_.vocab_size;
  options.parts = own_batch_ ? ranks_.size() : 1;
  const at::Tensor loss = causal_lm_loss(ranks_.enter(hidden, labels.size(1)), head_, labels, options);
  return own_batch_ ? ranks_.own_rows(loss).select(0, 0) : loss;
}

at::Tensor StageModel::logits(const at::Tensor& hidden, const Inputs& inputs) const {
  const at::Tensor whole = ranks_.enter(hidden, inputs.input_ids.size(1));
  const at::Tensor logits = ranks_.gather_columns(at::linear(whole, head_), description_.vocab_size);
  return own_batch_ ? ranks_.own_rows(logits) : logits;
}

}  // namespace shardsmith
