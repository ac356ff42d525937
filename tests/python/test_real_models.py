"""The file verbs on real pretrained weights: a GPT-2 whose .bin an old torch saved from a GPU, and a bare BERT in safetensors.
Each goes through every format that we write, and back, and is the same."""

import json
import shutil

import pytest
import safetensors.torch
import torch

from parity import models
from test_cli import fails, run, run_json

MODELS = {"microformer": (models.microformer, "pytorch_model.bin"), "minilm": (models.minilm, "model.safetensors")}


def weights_of(folder, name):
    path = folder / name
    return safetensors.torch.load_file(path) if name.endswith("safetensors") else torch.load(path, weights_only=True, map_location="cpu")


@pytest.fixture(scope="module", params=list(MODELS))
def model(request):
    make, name = MODELS[request.param]
    folder = make()
    return folder, name, weights_of(folder, name)


def test_inspect_and_verify(model):
    folder, name, state = model
    for path in (folder, folder / name):
        told = run_json("inspect", path)
        assert len(told["tensors"]) == len(state)
        assert {t["name"]: (t["dtype"], t["shape"]) for t in told["tensors"]} == {
            key: (str(t.dtype).removeprefix("torch."), list(t.shape)) for key, t in state.items()}  # fmt: skip
        run("verify", path)
        run("verify", "--values", path)


@pytest.mark.parametrize("target", ["pt", "safetensors", "hf", "dcp", "partial", "full"])
def test_through_every_format_and_back(model, target, tmp_path):
    folder, name, state = model
    run("convert", folder, tmp_path / "there", "--to", target)
    run("verify", tmp_path / "there")
    # A Hugging Face folder has a tied tensor once.
    run("diff", folder, tmp_path / "there", "--weights-only", *(["--exclude", "lm_head.weight"] if target == "hf" else []))
    run("convert", tmp_path / "there", tmp_path / "back", "--to", "safetensors")
    back = safetensors.torch.load_file(tmp_path / "back")
    # Buffers (masks, BERT's positions) and a head that is tied are no parameters of their own.
    assert set(back) <= set(state) and len(back) >= 0.8 * len(state)
    for key, tensor in back.items():
        assert tensor.dtype == state[key].dtype and torch.equal(tensor, state[key]), key
    missing = set(state) - set(back)
    assert all(key.endswith((".attn.bias", ".attn.masked_bias", "lm_head.weight", ".position_ids")) for key in missing), missing


def test_a_changed_weight_is_found(model, tmp_path):
    folder, _, state = model
    key = next(key for key, tensor in state.items() if tensor.dim() == 2 and min(tensor.shape) > 2)
    other = {name: tensor.clone() for name, tensor in state.items()}
    other[key][1, 2] += 1
    torch.save(other, tmp_path / "other.pt")
    result = run("diff", folder, tmp_path / "other.pt", code=4)
    assert key in result.stdout and "[1, 2]" in result.stdout


def test_a_model_of_no_known_family_is_one_stage(tmp_path):
    folder = tmp_path / "minilm"
    shutil.copytree(models.minilm(), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "newer"}))
    wrong = fails(2, "convert", folder, tmp_path / "out", "--to", "partial", "--pipeline-parallel-degree", 2, "-q")
    assert "one stage" in wrong and not (tmp_path / "out").exists()


def test_a_bert_is_split_and_put_together_again(tmp_path):
    run("convert", models.minilm(), tmp_path / "split", "--to", "partial", "--pipeline-parallel-degree", 2,
        "--tensor-parallel-degree", 2, "-q")
    run("reshard", tmp_path / "split", tmp_path / "other", "--pipeline-parallel-degree", 3, "-q")
    run("export", tmp_path / "other", tmp_path / "exported", "-q")
    before, after = weights_of(models.minilm(), "model.safetensors"), weights_of(tmp_path / "exported", "model.safetensors")
    before.pop("embeddings.position_ids", None)
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
