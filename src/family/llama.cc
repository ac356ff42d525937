// Llama and what is built like it (SmolLM2): rotary positions, RMSNorm, gated feed-forward, grouped key-value heads.
#include "base/error.h"
#include "family/families.h"

namespace shardsmith {
namespace {

// transformers 5 keeps all of it in `rope_parameters`; before, `rope_theta` stood alone and the rest in `rope_scaling`.
void read_rotary(const Config& config, ModelDescription& d) {
  d.position = PositionKind::kRotary;
  d.rotary_theta = config.number("rope_theta", 10000);
  const Value* dict = config.find("rope_parameters");
  if (!dict) dict = config.find("rope_scaling");
  if (!dict) return;
  if (!dict->get_if<Dict>()) fail(ErrorKind::kCorrupt, "config.json: rope_parameters is no object: ", to_json(*dict));
  const Config rope(*dict);
  d.rotary_theta = rope.number("rope_theta", d.rotary_theta);
  const std::string type = rope.word("rope_type", rope.word("type", "default"));
  if (rope.number("partial_rotary_factor", 1) != 1) {
    fail(ErrorKind::kUnsupported, "config.json: partial_rotary_factor is not supported for model_type llama");
  }
  if (type == "default") return;
  if (type != "llama3") {
    fail(ErrorKind::kUnsupported, "config.json: rope_type '", type, "' is not supported; default and llama3 are");
  }
  d.rotary_factor = rope.number("factor");
  d.rotary_low_freq_factor = rope.number("low_freq_factor");
  d.rotary_high_freq_factor = rope.number("high_freq_factor");
  d.rotary_original_positions = rope.size("original_max_position_embeddings");
  if (d.rotary_factor < 1 || d.rotary_low_freq_factor <= 0 || d.rotary_high_freq_factor <= d.rotary_low_freq_factor) {
    fail(ErrorKind::kCorrupt, "config.json: rope_parameters ", to_json(*dict),
         " make no sense: factor must be at least 1, and high_freq_factor above low_freq_factor");
  }
}

// transformers gives pad_token_id to the embedding as its padding_idx; a negative one counts from the end.
int64_t padding_row(const Config& config, int64_t vocab_size) {
  const double none = 0.5;
  const double given = config.number("pad_token_id", none);
  if (given == none) return -1;
  const bool in_range = given >= -9e15 && given <= 9e15;  // otherwise the cast is undefined
  const auto row = in_range ? static_cast<int64_t>(given) : 0;
  if (!in_range || static_cast<double>(row) != given || row < -vocab_size || row >= vocab_size) {
    fail(ErrorKind::kCorrupt, "config.json: pad_token_id ", given, " is no row of a vocabulary of ", vocab_size);
  }
  return row < 0 ? row + vocab_size : row;
}

ModelDescription read(const Config& config) {
  ModelDescription d;
  d.model_type = "llama";
  d.num_layers = config.size("num_hidden_layers");
  d.hidden_size = config.size("hidden_size");
  d.num_attention_heads = config.size("num_attention_heads");
  d.num_key_value_heads = config.size("num_key_value_heads", d.num_attention_heads);
  if (d.num_attention_heads % d.num_key_value_heads != 0) {
    fail(ErrorKind::kCorrupt, "config.json: num_attention_heads ", d.num_attention_heads,
         " is not a multiple of num_key_value_heads ", d.num_key_value_heads);
  }
  if (!config.find("head_dim") && d.hidden_size % d.num_attention_heads != 0) {
    fail(ErrorKind::kCorrupt, "config.json: hidden_size ", d.hidden_size, " is not a multiple of num_attention_heads ",
         d.num_attention_heads, ", and there is no head_dim");
  }
  d.attention_head_size = config.size("head_dim", d.hidden_size / d.num_attention_heads);
  if (d.attention_head_size % 2 != 0) {
    fail(ErrorKind::kCorrupt, "config.json: head_dim ", d.attention_head_size, " is odd; rotary positions need pairs");
  }
  d.intermediate_size = config.size("intermediate_size");
  d.vocab_size = config.size("vocab_size");
  d.num_positions = config.size("max_position_embeddings");
  d.padding_idx = padding_row(config, d.vocab_size);
  d.norm = NormKind::kRmsNorm;
  d.layernorm_epsilon = config.number("rms_norm_eps", 1e-6);
  read_rotary(config, d);
  d.activation = activation_from(config.word("hidden_act", "silu"));
  d.gated = true;
  d.attention_bias = d.dense_bias = config.flag("attention_bias", false);
  d.mlp_bias = config.flag("mlp_bias", false);
  d.tied_head = config.flag("tie_word_embeddings", false);
  d.attention_dropout = config.probability("attention_dropout", 0);
  d.initializer_range = config.number("initializer_range", 0.02);
  return d;
}

}  // namespace

FamilyModel describe_llama(const Value& value) {
  FamilyModel model;
  model.description = read(Config(value));
  model.prefix = "model.";
  model.ignored_suffixes = {".rotary_emb.inv_freq"};
  const ModelDescription& d = model.description;
  const int64_t h = d.hidden_size, f = d.intermediate_size;
  const int64_t q = d.num_attention_heads * d.attention_head_size, kv = d.num_key_value_heads * d.attention_head_size;
  TensorList list(model);
  list.plain(-1, "embed_tokens.weight", "word_embedding.weight", {d.vocab_size, h});
  for (int i = 0; i < d.num_layers; ++i) {
    const std::string hf = str("layers.", i, "."), ours = block_name(i);
    const auto linear = [&](const std::string& name, const std::string& our, int64_t out, int64_t in, bool bias) {
      list.plain(i, hf + name + ".weight", ours + our + ".weight", {out, in});
      if (bias) list.plain(i, hf + name + ".bias", ours + our + ".bias", {out});
    };
    linear("self_attn.q_proj", "attention.query", q, h, d.attention_bias);
    linear("self_attn.k_proj", "attention.key", kv, h, d.attention_bias);
    linear("self_attn.v_proj", "attention.value", kv, h, d.attention_bias);
    linear("self_attn.o_proj", "attention.dense", h, q, d.dense_bias);
    linear("mlp.gate_proj", "output.gate", f, h, d.mlp_bias);
    linear("mlp.up_proj", "output.up", f, h, d.mlp_bias);
    linear("mlp.down_proj", "output.down", h, f, d.mlp_bias);
    list.plain(i, hf + "input_layernorm.weight", ours + "attention.pre_layernorm.weight", {h});
    list.plain(i, hf + "post_attention_layernorm.weight", ours + "output.pre_layernorm.weight", {h});
  }
  list.plain(static_cast<int>(d.num_layers), "norm.weight", "layernorm.weight", {h});
  list.head("lm_head.weight");
  return model;
}

}  // namespace shardsmith
