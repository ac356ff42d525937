# Writes fixtures/families.json: configurations of transformers' own classes, with the names and shapes of their
# tensors in module order. Run: .venv/bin/python tests/core/tools/make_family_fixtures.py > tests/core/fixtures/families.json
import json

from transformers import (BertConfig, BertForMaskedLM, BertForSequenceClassification, BertModel, GPT2Config,
                          GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM,
                          MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM)

SMALL = dict(vocab_size=19, bos_token_id=0, eos_token_id=0)
ENCODER = dict(vocab_size=19, num_hidden_layers=2, hidden_size=12, num_attention_heads=3, intermediate_size=20,
               max_position_embeddings=16)


def case(name, model_class, config):
    model = model_class(config)
    config.architectures = [model_class.__name__]
    tied = set(model._tied_weights_keys or {}) if config.tie_word_embeddings else set()
    tensors = [[key, list(value.shape)] for key, value in model.state_dict().items() if key not in tied]
    if config.model_type == "gpt_neox":  # as save_pretrained writes it
        tensors = [[key.replace("lm_head.", "embed_out."), shape] for key, shape in tensors]
    return json.dumps({"name": name, "config": config.to_dict(), "tensors": tensors})


llama3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
cases = [
    case("gpt2", GPT2LMHeadModel, GPT2Config(n_layer=2, n_embd=12, n_head=3, n_positions=16, **SMALL)),
    case("gpt2_untied", GPT2LMHeadModel, GPT2Config(
        n_layer=1, n_embd=8, n_head=2, n_inner=20, n_positions=16, tie_word_embeddings=False,
        activation_function="relu", scale_attn_weights=False, scale_attn_by_inverse_layer_idx=True,
        resid_pdrop=0.0, embd_pdrop=0.25, attn_pdrop=0.5, **SMALL)),
    case("llama", LlamaForCausalLM, LlamaConfig(
        num_hidden_layers=2, hidden_size=12, num_attention_heads=3, intermediate_size=20, max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 123.0}, **SMALL)),
    case("llama_grouped", LlamaForCausalLM, LlamaConfig(
        num_hidden_layers=1, hidden_size=12, num_attention_heads=4, num_key_value_heads=2, head_dim=6,
        intermediate_size=20, max_position_embeddings=16384, tie_word_embeddings=True, attention_bias=True,
        mlp_bias=True, rope_parameters=llama3, **SMALL)),
    case("mistral", MistralForCausalLM, MistralConfig(
        num_hidden_layers=2, hidden_size=12, num_attention_heads=4, num_key_value_heads=2, head_dim=4,
        intermediate_size=20, max_position_embeddings=64, sliding_window=24, **SMALL)),
    case("qwen2", Qwen2ForCausalLM, Qwen2Config(
        num_hidden_layers=2, hidden_size=16, num_attention_heads=4, num_key_value_heads=2, intermediate_size=20,
        max_position_embeddings=64, tie_word_embeddings=True, **SMALL)),
    case("gpt_neox", GPTNeoXForCausalLM, GPTNeoXConfig(
        num_hidden_layers=2, hidden_size=24, num_attention_heads=3, intermediate_size=20, max_position_embeddings=64,
        **SMALL)),
    case("gpt_neox_plain", GPTNeoXForCausalLM, GPTNeoXConfig(
        num_hidden_layers=1, hidden_size=24, num_attention_heads=2, intermediate_size=20, max_position_embeddings=64,
        attention_bias=False, use_parallel_residual=False, tie_word_embeddings=True, hidden_dropout=0.25,
        rope_parameters={"rope_type": "default", "rope_theta": 99.0, "partial_rotary_factor": 0.5}, **SMALL)),
    case("bert", BertModel, BertConfig(**ENCODER)),
    case("bert_masked", BertForMaskedLM, BertConfig(**ENCODER)),
    case("bert_classification", BertForSequenceClassification, BertConfig(
        num_labels=3, classifier_dropout=0.375, problem_type="single_label_classification", **ENCODER)),
]
print("[\n" + ",\n".join(cases) + "\n]")
