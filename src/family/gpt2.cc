// GPT-2. Its linear layers are Conv1D: weights are [in, out], and c_attn holds query | key | value along dimension 1.
#include "base/error.h"
#include "family/families.h"

namespace shardsmith {
namespace {

ModelDescription read(const Config& config) {
  ModelDescription d;
  d.model_type = "gpt2";
  d.num_layers = config.size("n_layer");
  read_equal_heads(config, "n_embd", "n_head", d);
  d.intermediate_size = config.size("n_inner", 4 * d.hidden_size);
  d.vocab_size = config.size("vocab_size");
  d.num_positions = config.size("n_positions");
  d.layernorm_epsilon = config.number("layer_norm_epsilon", 1e-5);
  d.activation = activation_from(config.word("activation_function", "gelu_new"));
  d.tied_head = config.flag("tie_word_embeddings", true);
  d.scale_by_inverse_layer = config.flag("scale_attn_by_inverse_layer_idx", false);
  d.scale_attention = config.flag("scale_attn_weights", true) ? -1 : 1;
  d.embedding_dropout = config.probability("embd_pdrop", 0.1);
  d.attention_dropout = config.probability("attn_pdrop", 0.1);
  d.hidden_dropout = config.probability("resid_pdrop", 0.1);
  d.initializer_range = config.number("initializer_range", 0.02);
  if (config.flag("add_cross_attention", false)) {
    fail(ErrorKind::kUnsupported, "config.json: add_cross_attention is not supported for model_type gpt2");
  }
  return d;
}

// c_attn: three logical tensors that lie side by side along the last dimension.
void add_attention(TensorList& list, int place, const std::string& hf, const std::string& ours, int64_t h) {
  FamilyTensor weight{.hf_name = hf + "weight", .shape = {h, 3 * h}, .pieces = {}, .place = place};
  FamilyTensor bias{.hf_name = hf + "bias", .shape = {3 * h}, .pieces = {}, .place = place};
  int64_t at = 0;
  for (const char* part : {"query.", "key.", "value."}) {
    weight.pieces.push_back({ours + part + "weight", {h, h}, {1, 0}, {0, at}});
    bias.pieces.push_back({ours + part + "bias", {h}, {0}, {at}});
    at += h;
  }
  list.add(std::move(weight));
  list.add(std::move(bias));
}

}  // namespace

FamilyModel describe_gpt2(const Value& value) {
  FamilyModel model;
  model.description = read(Config(value));
  model.prefix = "transformer.";
  model.architecture = "GPT2LMHeadModel";
  model.ignored_suffixes = {".attn.bias", ".attn.masked_bias"};
  const ModelDescription& d = model.description;
  const int64_t h = d.hidden_size, f = d.intermediate_size;
  TensorList list(model);
  list.plain(-1, "wte.weight", "word_embedding.weight", {d.vocab_size, h});
  list.plain(-1, "wpe.weight", "position_embedding.weight", {d.num_positions, h});
  const auto linear = [&](int place, const std::string& hf, const std::string& ours, int64_t out, int64_t in) {
    list.transposed(place, hf + ".weight", ours + ".weight", out, in);
    list.plain(place, hf + ".bias", ours + ".bias", {out});
  };
  for (int i = 0; i < d.num_layers; ++i) {
    const std::string hf = str("h.", i, "."), ours = block_name(i);
    list.layernorm(i, hf + "ln_1", ours + "attention.pre_layernorm");
    add_attention(list, i, hf + "attn.c_attn.", ours + "attention.", h);
    linear(i, hf + "attn.c_proj", ours + "attention.dense", h, h);
    list.layernorm(i, hf + "ln_2", ours + "output.pre_layernorm");
    linear(i, hf + "mlp.c_fc", ours + "output.dense1", f, h);
    linear(i, hf + "mlp.c_proj", ours + "output.dense2", h, f);
  }
  list.layernorm(static_cast<int>(d.num_layers), "ln_f", "layernorm");
  list.head("lm_head.weight");
  return model;
}

}  // namespace shardsmith
