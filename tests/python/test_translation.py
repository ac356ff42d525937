"""smp.nn.huggingface: state dicts of transformers to our names and back."""
import importlib

import pytest
import torch

from shardsmith.errors import Error

TINY = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, vocab_size=30)
FAMILIES = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", dict(n_embd=16, n_layer=2, n_head=4, vocab_size=30, n_positions=12)),
    "llama": ("LlamaForCausalLM", "LlamaConfig", dict(TINY, num_key_value_heads=2, head_dim=4)),
    "mistral": ("MistralForCausalLM", "MistralConfig", dict(TINY, num_key_value_heads=2, head_dim=4)),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", dict(TINY, num_key_value_heads=2)),
    "bert": ("BertForMaskedLM", "BertConfig", dict(TINY, max_position_embeddings=12)),
}


def make(family, **more):
    import transformers

    model, config, options = FAMILIES[family]
    torch.manual_seed(3)
    return getattr(transformers, model)(getattr(transformers, config)(**options, **more))


def functions(family):
    module = importlib.import_module(f"shardsmith.smp.nn.huggingface.{family}")
    return (getattr(module, f"translate_hf_state_dict_to_smdistributed_{family}"),
            getattr(module, f"translate_state_dict_to_hf_{family}"))


@pytest.mark.parametrize("family, more", [("gpt2", {}), ("gpt2", {"n_inner": 20}), ("gpt2", {"tie_word_embeddings": False}),
                                          ("llama", {}), ("llama", {"attention_bias": True, "tie_word_embeddings": True}),
                                          ("mistral", {}), ("qwen2", {}), ("bert", {})])
def test_there_and_back_is_the_same(family, more):
    there, back = functions(family)
    before = make(family, **more).state_dict()
    given = dict(before)
    ours = there(given)
    assert not given, "the dict is emptied"
    assert "transformer.seq_layers.1.attention.query.weight" in ours and "word_embedding.weight" in ours
    assert ours["transformer.seq_layers.0.attention.query.weight"].shape == (16, 16)
    again = back(ours, max_seq_len=12)
    assert not ours and again.keys() == before.keys()
    for name, value in before.items():
        assert torch.equal(again[name], value), name


def test_values_are_where_they_belong():
    there, _ = functions("gpt2")
    model = make("gpt2")
    fused = model.transformer.h[1].attn.c_attn
    ours = there(dict(model.state_dict()))
    prefix = "transformer.seq_layers.1."
    for i, part in enumerate(("query", "key", "value")):
        assert torch.equal(ours[f"{prefix}attention.{part}.weight"], fused.weight[:, 16 * i:16 * (i + 1)].T)
        assert torch.equal(ours[f"{prefix}attention.{part}.bias"], fused.bias[16 * i:16 * (i + 1)])
    assert torch.equal(ours[f"{prefix}output.dense1.weight"], model.transformer.h[1].mlp.c_fc.weight.T)
    assert torch.equal(ours["lm_head.weight"], ours["word_embedding.weight"])


def test_our_layers_take_translated_weights_and_compute_what_transformers_does():
    from shardsmith.smp import nn

    there, _ = functions("gpt2")
    model = make("gpt2").eval()
    ours = nn.DistributedTransformerLMHead(
        num_layers=2, num_attention_heads=4, attention_head_size=4, hidden_size=16, intermediate_size=64, vocab_size=30,
        num_positions=12, activation="gelu_new", causal_mask_size=12, pre_layernorm=True, post_layernorm=False).eval()
    ids = torch.randint(0, 30, (2, 9))
    ours.load_state_dict(there(dict(model.state_dict())))
    plain = model(input_ids=ids, labels=ids)
    loss, logits = ours((ids, None, None, None, ids))
    torch.testing.assert_close(logits, plain.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(loss, plain.loss)


def test_what_is_missing_or_strange_is_named():
    there, back = functions("gpt2")
    values = dict(make("gpt2").state_dict())
    del values["transformer.h.1.ln_1.bias"]
    with pytest.raises(Error, match="has no transformer.h.1.ln_1.bias"):
        there(values)
    values = dict(make("gpt2").state_dict(), extra=torch.zeros(1))
    with pytest.raises(Error, match="extra is no tensor of a gpt2"):
        there(values)
    ours = there(dict(make("gpt2").state_dict()))
    ours["transformer.seq_layers.0.attention.query.weight"] = torch.zeros(3, 3)
    with pytest.raises(Error, match=r"query.weight has shape \[3, 3\]"):
        back(ours)
    with pytest.raises(Error, match="doesn't say its attention heads"):
        functions("gptneox")[0]({"embed_in.weight": torch.zeros(2, 2)})


def test_families_that_come_later_refuse():
    for family, older in (("gptj", "translate_hf_gptj_state_dict_to_smdistributed"), ("roberta", "translate_state_dict_to_smdistributed"),
                          ("gptneo", "translate_hf_gptneo_state_dict_to_smdistributed")):
        module = importlib.import_module(f"shardsmith.smp.nn.huggingface.{family}")
        for function in (*functions(family), getattr(module, older)):
            with pytest.raises(Error, match="is not there in this version; there are gpt2") as refused:
                function({}, 128)
            assert refused.value.kind == "unsupported"
