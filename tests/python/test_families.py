"""Every family against transformers' own classes: a small random model goes into checkpoints split in several ways, and comes
back as transformers would have saved it."""

import pytest
import safetensors.torch
import torch
import transformers

from test_cli import run

SMALL = {"vocab_size": 51, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48,
         "max_position_embeddings": 32}
FAMILIES = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"vocab_size": 51, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", SMALL | {"num_key_value_heads": 2}),
    "mistral": ("MistralForCausalLM", "MistralConfig", SMALL | {"num_key_value_heads": 2, "sliding_window": 16}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", SMALL | {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", SMALL),
    "gpt_neox_tied": ("GPTNeoXForCausalLM", "GPTNeoXConfig", SMALL | {"tie_word_embeddings": True, "attention_bias": False}),
    "bert": ("BertModel", "BertConfig", SMALL),
    "bert_masked": ("BertForMaskedLM", "BertConfig", SMALL),
    "bert_classification": ("BertForSequenceClassification", "BertConfig", SMALL | {"num_labels": 5}),
}


@pytest.fixture(params=FAMILIES)
def saved(request, tmp_path):
    """The folder that save_pretrained wrote, and the model: all its weights random, biases and norms too."""
    model_class, config_class, values = FAMILIES[request.param]
    torch.manual_seed(1)
    config = getattr(transformers, config_class)(**values, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    model = getattr(transformers, model_class)(config)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_()
    model.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved", model


def same(folder, model):
    ours = safetensors.torch.load_file(folder / "model.safetensors")
    theirs = safetensors.torch.load_file(folder.parent / "saved" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name
    loaded, info = type(model).from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for (name, value), other in zip(model.state_dict().items(), loaded.state_dict().values(), strict=True):
        assert torch.equal(value, other), name


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (2, 2), (3, 1), (1, 4)])
def test_split_and_exported(saved, pp, tp):
    folder, model = saved
    out = folder.parent
    run("convert", folder, out / "split", "--to", "partial", "--pipeline-parallel-degree", pp, "--tensor-parallel-degree", tp,
        "-q")
    run("verify", out / "split", "-q")
    run("export", out / "split", out / "exported", "-q")
    same(out / "exported", model)


def test_resharded_by_columns_rows_and_heads(saved):
    folder, model = saved
    out = folder.parent
    run("convert", folder, out / "whole", "--to", "partial", "-q")
    run("reshard", out / "whole", out / "halves", "--tensor-parallel-degree", 2, "-q")
    run("reshard", out / "halves", out / "quarters", "--tensor-parallel-degree", 4, "--pipeline-parallel-degree", 2, "-q")
    run("reshard", out / "quarters", out / "again", "--tensor-parallel-degree", 2, "-q")
    run("diff", out / "halves", out / "again", "-q")
    run("diff", folder, out / "again", "-q")
    run("export", out / "again", out / "exported", "-q")
    same(out / "exported", model)


def test_heads_of_gpt_neox_are_told_apart(tmp_path):
    """Independent of our own way back: rank 1 of 2 has the second half of the heads' queries, keys and values."""
    torch.manual_seed(1)
    model = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SMALL))
    model.save_pretrained(tmp_path / "saved")
    run("convert", tmp_path / "saved", tmp_path / "split", "--to", "partial", "--tensor-parallel-degree", 2, "-q")
    held = torch.load(tmp_path / "split" / "model_0_1.pt", weights_only=True)
    fused = model.gpt_neox.layers[1].attention.query_key_value.weight.detach().view(4, 3, 8, 32)
    for number, part in enumerate(("query", "key", "value")):
        expected = fused[2:, number].reshape(16, 32)
        assert torch.equal(held[f"transformer.seq_layers.1.attention.{part}.weight"], expected)
