// Llama and what is built like it (SmolLM2, Mistral, Qwen2): rotary positions, RMSNorm, gated feed-forward, grouped
// key-value heads. Qwen2 has biases on query, key and value; Mistral has none; Llama's are optional.
#include <algorithm>

#include "base/error.h"
#include "family/families.h"

namespace shardsmith {
namespace {

// Up to a window's length a sequence is computed the same with and without it, so longer ones are refused: the window
// is the longest sequence. (Mistral's may be null; Qwen2's is only looked at where use_sliding_window says so, and
// holds for some layers.)
int64_t positions(const Config& config, const std::string& type) {
  const int64_t all = config.size("max_position_embeddings");
  const bool windowed = type == "mistral" ? !config.is_null("sliding_window")
                                          : type == "qwen2" && config.flag("use_sliding_window", false);
  return windowed ? std::min(all, config.size("sliding_window", 4096)) : all;
}

// transformers' own values where config.json doesn't have the key; null means one for each head.
int64_t key_value_heads(const Config& config, const std::string& type, int64_t heads) {
  if (type == "llama" || config.is_null("num_key_value_heads")) return config.size("num_key_value_heads", heads);
  return config.size("num_key_value_heads", type == "mistral" ? 8 : 32);
}

ModelDescription read(const Config& config) {
  ModelDescription d;
  d.model_type = config.word("model_type", "llama");
  const std::string& type = d.model_type;
  d.num_layers = config.size("num_hidden_layers");
  d.hidden_size = config.size("hidden_size");
  d.num_attention_heads = config.size("num_attention_heads");
  d.num_key_value_heads = key_value_heads(config, type, d.num_attention_heads);
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
  d.num_positions = positions(config, type);
  d.padding_idx = padding_row(config, d.vocab_size);
  d.norm = NormKind::kRmsNorm;
  d.layernorm_epsilon = config.number("rms_norm_eps", 1e-6);
  read_rotary(config, "rope_theta", "partial_rotary_factor", 1, d);
  d.activation = activation_from(config.word("hidden_act", "silu"));
  d.gated = true;
  d.attention_bias = d.dense_bias = type == "llama" && config.flag("attention_bias", false);
  if (type == "qwen2") d.attention_bias = true;
  d.mlp_bias = type == "llama" && config.flag("mlp_bias", false);
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
  const std::string& type = model.description.model_type;
  model.architecture = type == "mistral" ? "MistralForCausalLM"
                       : type == "qwen2" ? "Qwen2ForCausalLM"
                                         : "LlamaForCausalLM";
  model.ignored_suffixes = {".rotary_emb.inv_freq"};
  const ModelDescription& d = model.description;
  const int64_t h = d.hidden_size, f = d.intermediate_size;
  const int64_t q = d.num_attention_heads * d.attention_head_size, kv = d.num_key_value_heads * d.attention_head_size;
  TensorList list(model);
  list.plain(-1, "embed_tokens.weight", "word_embedding.weight", {d.vocab_size, h});
  for (int i = 0; i < d.num_layers; ++i) {
    const std::string hf = str("layers.", i, "."), ours = block_name(i);
    const auto linear = [&](const std::string& name, const std::string& our, int64_t out, int64_t in, bool bias) {
      list.linear(i, hf + name, ours + our, out, in, bias);
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
