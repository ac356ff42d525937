// GPT-NeoX (Pythia). query_key_value is fused by head: its rows are, for each head, the query's, the key's and the
// value's. Rotary positions on a part of each head; attention and feed-forward side by side or one after the other.
#include "base/error.h"
#include "family/families.h"

namespace shardsmith {
namespace {

ModelDescription read(const Config& config) {
  ModelDescription d;
  d.model_type = "gpt_neox";
  d.num_layers = config.size("num_hidden_layers");
  read_equal_heads(config, "hidden_size", "num_attention_heads", d);
  d.intermediate_size = config.size("intermediate_size");
  d.vocab_size = config.size("vocab_size");
  d.num_positions = config.size("max_position_embeddings", 2048);
  d.layernorm_epsilon = config.number("layer_norm_eps", 1e-5);
  read_rotary(config, "rotary_emb_base", "rotary_pct", 0.25, d);
  d.activation = activation_from(config.word("hidden_act", "gelu"));
  d.parallel_residual = config.flag("use_parallel_residual", true);
  d.attention_bias = d.dense_bias = config.flag("attention_bias", true);
  d.tied_head = config.flag("tie_word_embeddings", false);
  d.attention_dropout = config.probability("attention_dropout", 0);
  d.embedding_dropout = d.hidden_dropout = config.probability("hidden_dropout", 0);
  d.initializer_range = config.number("initializer_range", 0.02);
  return d;
}

void add_attention(TensorList& list, int place, const std::string& hf, const std::string& ours,
                   const ModelDescription& d) {
  const int64_t h = d.hidden_size, head = d.attention_head_size;
  FamilyTensor weight{.hf_name = hf + "weight", .shape = {3 * h, h}, .pieces = {}, .place = place};
  FamilyTensor bias{.hf_name = hf + "bias", .shape = {3 * h}, .pieces = {}, .place = place};
  int64_t at = 0;
  for (const char* part : {"query.", "key.", "value."}) {
    weight.pieces.push_back({ours + part + "weight", {h, h}, {0, 1}, {at, 0}, head, 3 * head});
    bias.pieces.push_back({ours + part + "bias", {h}, {0}, {at}, head, 3 * head});
    at += head;
  }
  list.add(std::move(weight));
  if (d.attention_bias) list.add(std::move(bias));
}

}  // namespace

FamilyModel describe_gpt_neox(const Value& value) {
  FamilyModel model;
  model.description = read(Config(value));
  model.prefix = "gpt_neox.";
  model.architecture = "GPTNeoXForCausalLM";
  model.ignored_suffixes = {".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"};
  const ModelDescription& d = model.description;
  const int64_t h = d.hidden_size, f = d.intermediate_size;
  TensorList list(model);
  list.plain(-1, "embed_in.weight", "word_embedding.weight", {d.vocab_size, h});
  for (int i = 0; i < d.num_layers; ++i) {
    const std::string hf = str("layers.", i, "."), ours = block_name(i);
    list.layernorm(i, hf + "input_layernorm", ours + "attention.pre_layernorm");
    list.layernorm(i, hf + "post_attention_layernorm", ours + "output.pre_layernorm");
    add_attention(list, i, hf + "attention.query_key_value.", ours + "attention.", d);
    list.linear(i, hf + "attention.dense", ours + "attention.dense", h, h, d.dense_bias);
    list.linear(i, hf + "mlp.dense_h_to_4h", ours + "output.dense1", f, h);
    list.linear(i, hf + "mlp.dense_4h_to_h", ours + "output.dense2", h, f);
  }
  list.layernorm(static_cast<int>(d.num_layers), "final_layer_norm", "layernorm");
  list.head("embed_out.weight");
  // transformers 5 calls it so in memory, and still embed_out in files.
  (d.tied_head ? model.tensors.front() : model.tensors.back()).aliases = {"lm_head.weight"};
  return model;
}

}  // namespace shardsmith
