#include "nn/transformer.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "base/error.h"
#include "nn/embedding.h"
#include "nn/loss.h"

namespace shardsmith {
namespace {

constexpr int64_t kLossRows = 512;  // logits that exist at a time

// bool [B, 1, S or 1, S], or undefined where nothing is hidden beyond what causality hides.
at::Tensor attention_mask(const at::Tensor& keep, bool causal) {
  if (!keep.defined() || keep.ne(0).all().item<bool>()) return {};
  const int64_t sequence = keep.size(1);
  const at::Tensor kept = keep.ne(0).view({-1, 1, 1, sequence});
  const auto options = keep.options().dtype(at::kBool);
  // A query that may look at nothing at all would get NaN, which counts nowhere but spreads: it sees all, or itself.
  if (!causal) return at::logical_or(kept, kept.any(3, true).logical_not()).expand({-1, 1, sequence, sequence});
  const at::Tensor before = at::ones({sequence, sequence}, options).tril();
  return at::logical_or(at::logical_and(before, kept), at::eye(sequence, options));
}

// On a GPU it would have to be waited for.
void require_within(const at::Tensor& numbers, int64_t count, const char* name, const char* what) {
  if (!numbers.defined() || !numbers.is_cpu() || numbers.numel() == 0) return;
  const auto [low, high] = at::aminmax(numbers);
  const int64_t first = low.item<int64_t>(), last = high.item<int64_t>();
  if (first < 0 || last >= count)
    fail(ErrorKind::kInvalidArgument, name, " hold ", first < 0 ? first : last, ", but the model has ", count, " ",
         what, ", 0 to ", count - 1);
}

}  // namespace

StageModel::StageModel(const FamilyModel& model, const Partition& partition, int stage, const Parameters& parameters,
                       const TensorParallel& ranks, bool own_batch, const BlockSwitches& switches)
    : description_(model.description),
      ranks_(ranks),
      own_batch_(own_batch && ranks.size() > 1),
      wide_stream_(switches.fp32_residual_addition) {
  const ModelDescription& m = description_;
  first_row_ = parameters.first_row();
  if (stage == 0) {
    word_embedding_ = parameters.get("word_embedding.weight");
    if (m.position == PositionKind::kLearned) position_embedding_ = parameters.get("position_embedding.weight");
    if (m.num_token_types > 0) token_type_embedding_ = parameters.get("token_type_embedding.weight");
    if (m.embedding_layernorm) embedding_norm_ = parameters.norm("embedding_layernorm");
  }
  const auto s = static_cast<size_t>(stage);
  first_layer_ = partition.first.at(s);
  for (int64_t layer = first_layer_; layer < partition.first.at(s + 1); ++layer)
    blocks_.emplace_back(m, parameters, layer, ranks, switches);
  checkpoints_.resize(blocks_.size());
  is_last_ = stage == partition.stages() - 1;
  if (is_last_) {
    if (!m.post_layernorm) norm_ = parameters.norm("layernorm");
    if (m.head == HeadKind::kCausalLm || m.head == HeadKind::kMaskedLm)
      head_ = parameters.get(m.tied_head ? "word_embedding.weight" : "lm_head.weight");
    if (m.head_bias) head_bias_ = parameters.get("lm_head.bias");
    if (m.head_transform) {
      head_transform_ = parameters.linear("lm_head.transform");
      head_norm_ = parameters.norm("lm_head.layernorm");
    }
    if (m.has_pooler) pooler_ = parameters.linear("pooler");
    if (m.head == HeadKind::kClassification) classifier_ = parameters.linear("classifier");
  }
  if (m.position == PositionKind::kRotary)
    rotary_ = make_rotary_table(m, m.num_positions, parameters.held().front().second.options());
}

void StageModel::set_activation_checkpointing(const std::vector<ActivationCheckpoint>& layers) {
  if (!layers.empty() && layers.size() != static_cast<size_t>(description_.num_layers))
    fail(ErrorKind::kInvalidArgument, "activation checkpointing of ", layers.size(), " layers, the model has ",
         description_.num_layers);
  checkpoints_.assign(blocks_.size(), {});
  if (layers.empty()) return;
  const auto own = layers.begin() + first_layer_;
  std::copy(own, own + static_cast<std::ptrdiff_t>(blocks_.size()), checkpoints_.begin());
}

// When the gradient of h is there, whatever was computed from it has gone backward: autograd runs what was computed
// last first, and a leaf's gradient before all else.
at::Tensor StageModel::watched(const at::Tensor& h, int64_t place) const {
  if (on_gradients_ && h.requires_grad() && !h.is_leaf())
    h.register_hook([this, place](const at::Tensor&) { on_gradients_(static_cast<int>(place)); });
  return h;
}

at::Tensor StageModel::run_blocks(at::Tensor h, const BlockContext& context) const {
  for (size_t first = 0, end = 0; first < blocks_.size(); first = end) {
    const int64_t segment = checkpoints_[first].segment;
    h = watched(h, first_layer_ + static_cast<int64_t>(first));
    bool trainable = false;
    for (; end < blocks_.size() && (end == first || (segment >= 0 && checkpoints_[end].segment == segment)); ++end)
      trainable = trainable || blocks_[end].is_trainable();
    if (segment < 0) {
      h = blocks_[first].forward(h, context, checkpoints_[first]);
      continue;
    }
    const auto run = [this, first, end, context](at::Tensor x) {
      for (size_t i = first; i < end; ++i) x = blocks_[i].forward(x, context, {});
      return x;
    };
    h = checkpointed(h, run, trainable);
  }
  return is_last_ ? watched(h, description_.num_layers) : h;
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
  if (token_type_embedding_.defined()) {
    const at::Tensor table = ranks_.replicated(token_type_embedding_);
    x = x + (inputs.token_type_ids.defined()
                 ? at::embedding(table, inputs.token_type_ids.slice(1, own.begin, own.begin + own.count))
                 : table[0]);
  }
  if (embedding_norm_.weight.defined()) x = normed(x, embedding_norm_);
  return dropout(x, description_.embedding_dropout, 0, dropout_context,
                 static_cast<uint64_t>(own.begin * description_.hidden_size));
}

at::Tensor StageModel::forward(const at::Tensor& x, const Inputs& inputs, const DropoutContext& dropout_context) const {
  const int64_t sequence = inputs.input_ids.size(1);
  if (sequence > description_.num_positions)
    fail(ErrorKind::kInvalidArgument, "input_ids have ", sequence, " positions, the model has ",
         description_.num_positions);
  require_within(inputs.input_ids, description_.vocab_size, "input_ids", "tokens");
  require_within(inputs.position_ids, description_.num_positions, "position_ids", "positions");
  if (description_.num_token_types > 0)
    require_within(inputs.token_type_ids, description_.num_token_types, "token_type_ids", "token types");
  at::Tensor h = has_embedding() ? embed(inputs, dropout_context) : x;
  if (wide_stream_ && has_embedding() && h.scalar_type() != at::kDouble) h = h.to(at::kFloat);
  const BlockContext context{sequence, attention_mask(inputs.attention_mask, description_.causal), inputs.position_ids,
                             &rotary_, dropout_context};
  h = run_blocks(h, context);
  return norm_.weight.defined() ? normed(h, norm_) : h;
}

std::vector<int64_t> StageModel::hidden_shape(const Inputs& inputs) const {
  return {inputs.input_ids.size(0), ranks_.positions(inputs.input_ids.size(1)).count, description_.hidden_size};
}

at::Tensor StageModel::transformed(const at::Tensor& hidden) const {
  if (!head_transform_.weight.defined()) return hidden;
  const at::Tensor h =
      at::linear(hidden, ranks_.replicated(head_transform_.weight), ranks_.replicated(head_transform_.bias));
  return normed(activate(h, description_.activation), head_norm_);
}

at::Tensor StageModel::loss(const at::Tensor& hidden, const Inputs& inputs, const DropoutContext& dropout,
                            double loss_scale) const {
  if (description_.head == HeadKind::kClassification) {
    at::Tensor labels = inputs.labels;
    if (own_batch_) labels = labels.chunk(ranks_.size())[static_cast<size_t>(ranks_.rank())];
    return classification_loss(output(hidden, inputs, dropout), labels);
  }
  if (!head_.defined())
    fail(ErrorKind::kInvalidArgument, "a ", description_.model_type,
         " without a head has no loss: labels can't be given");
  LossOptions options{kLossRows, head_gradient_.get()};
  options.logits = logits_.get();
  options.scale = loss_scale;
  if (ranks_.size() > 1) options.ranks = &ranks_;
  options.first_row = first_row_;
  options.vocab_size = description_.vocab_size;
  options.parts = own_batch_ ? ranks_.size() : 1;
  const at::Tensor h = ranks_.enter(transformed(hidden), inputs.input_ids.size(1));
  const at::Tensor loss = description_.head == HeadKind::kCausalLm
                              ? causal_lm_loss(h, head_, inputs.labels, options)
                              : linear_cross_entropy(h, head_, head_bias_, inputs.labels, options);
  return own_batch_ ? ranks_.own_rows(loss).select(0, 0) : loss;
}

at::Tensor StageModel::output(const at::Tensor& hidden, const Inputs& inputs,
                              const DropoutContext& dropout_context) const {
  const int64_t sequence = inputs.input_ids.size(1);
  if (description_.head == HeadKind::kNone) return own(ranks_.gather(hidden, sequence));
  if (description_.head == HeadKind::kClassification) {
    const uint64_t site = 1 + 3 * static_cast<uint64_t>(description_.num_layers);  // after the blocks' sites
    const at::Tensor pooled = pooled_of_all(hidden, inputs);
    return classifier_(own(dropout(pooled, description_.classifier_dropout, site, dropout_context)));
  }
  const at::Tensor h = ranks_.enter(transformed(hidden), sequence);
  return own(ranks_.gather_columns(at::linear(h, head_, head_bias_), description_.vocab_size));
}

at::Tensor StageModel::pooled_of_all(const at::Tensor& hidden, const Inputs& inputs) const {
  return at::tanh(pooler_(ranks_.gather(hidden, inputs.input_ids.size(1)).select(1, 0)));
}

at::Tensor StageModel::pooled(const at::Tensor& hidden, const Inputs& inputs) const {
  return own(pooled_of_all(hidden, inputs));
}

// As transformers' ForSequenceClassificationLoss.
at::Tensor StageModel::classification_loss(const at::Tensor& logits, at::Tensor labels) const {
  labels = labels.to(logits.device());
  const bool whole_numbers = !labels.is_floating_point();
  ProblemKind problem = description_.problem;
  if (problem == ProblemKind::kByLabels && description_.num_labels == 1) problem = ProblemKind::kRegression;
  if (problem == ProblemKind::kByLabels) problem = whole_numbers ? ProblemKind::kSingleLabel : ProblemKind::kMultiLabel;
  const at::Tensor wide = logits.scalar_type() == at::kDouble ? logits : logits.to(at::kFloat);
  if (problem == ProblemKind::kSingleLabel) {
    const at::Tensor y = labels.reshape({-1}).to(at::kLong);
    const at::Tensor bad = at::logical_and(y.ne(kIgnoredLabel), at::logical_or(y.lt(0), y.ge(wide.size(1))));
    if (y.numel() != wide.size(0) || bad.any().item<bool>())
      fail(ErrorKind::kInvalidArgument, "labels of a classification are one of 0 to ", wide.size(1) - 1,
           " for each of the ", wide.size(0), " rows");
    return at::cross_entropy_loss(wide, y);
  }
  if (labels.numel() != wide.numel())
    fail(ErrorKind::kInvalidArgument, "labels have ", labels.numel(), " numbers, the model's output has ",
         wide.numel());
  const at::Tensor y = labels.to(wide.scalar_type()).view_as(wide);
  return problem == ProblemKind::kRegression ? at::mse_loss(wide, y) : at::binary_cross_entropy_with_logits(wide, y);
}

}  // namespace shardsmith
