"""merge, convert, reshard and export: every format that we read to every one that we write, each checked by the other
tool's own reader; layouts; what a target can't hold; what goes wrong on the way."""

import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from test_cli import PROGRAM, fails, gpt2, llama, make_partial, run, run_json, saved, state_of  # noqa: F401

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
]  # fmt: skip


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def assert_equal(found, expected):
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        other = found[name]
        assert other.dtype == tensor.dtype and other.shape == tensor.shape, name
        assert bits(other) == bits(tensor), name


def tensor_of(rng, dtype, shape):
    """Elements that differ from their neighbours, whatever the dtype."""
    count = 1
    for extent in shape:
        count *= extent
    if dtype == torch.bool:
        return torch.tensor([rng.random() < 0.5 for _ in range(count)], dtype=torch.bool).reshape(shape)
    raw = torch.tensor(list(rng.randbytes(count * dtype.itemsize)), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def random_state(seed, ties=True, views=True):
    """Shapes with 0 and 1, every dtype, ties, strides."""
    rng = random.Random(seed)
    state = {}
    for i, dtype in enumerate(DTYPES):
        shape = [rng.choice([0, 1, 1, 2, 3, 5, 17]) for _ in range(rng.randrange(0, 4))]
        state[f"layer.{i}.{str(dtype).removeprefix('torch.')}"] = tensor_of(rng, dtype, shape)
    state["large"] = tensor_of(rng, torch.float32, [300, 211])
    state["with/slash~and tilde"] = tensor_of(rng, torch.float32, [3])
    if views:
        base = tensor_of(rng, torch.int32, [12, 10])
        state["turned"], state["rows"], state["steps"] = base.t(), base[2:5], base[::3, 1::4]
        state["same for all"] = torch.tensor([rng.random()]).expand(4, 3)
    if ties:
        state["tied"] = state["large"]
    return state


def without_ties(state):
    """As safetensors wants it: packed, each on its own."""
    return {name: tensor.contiguous().clone() for name, tensor in state.items()}


def write_source(kind, state, folder):
    """`state` in a format, by that format's own writer where another tool has one. Returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "source"
    if kind == "pt":
        torch.save(state, path)
    elif kind == "legacy":
        torch.save(state, path, _use_new_zipfile_serialization=False)
    elif kind == "safetensors":
        safetensors.torch.save_file(without_ties(state), path)
    elif kind == "dcp":
        dcp.save(without_ties(state), storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    elif kind in ("bin", "hf"):
        path.mkdir()
        if kind == "bin":
            torch.save(state, path / "pytorch_model.bin")
        else:
            safetensors.torch.save_file(without_ties(state), path / "model.safetensors", metadata={"format": "pt"})
        (path / "config.json").write_text('{"model_type": "nobody-knows"}')
    else:
        torch.save(state, folder / "before")
        run("convert", folder / "before", path, "--to", kind)
    return path


def read_target(kind, path, scratch):
    """A flat dict of tensors, by the format's own reader."""
    if kind in ("pt", "full"):
        return torch.load(path, weights_only=True, mmap=True)
    if kind == "safetensors":
        return safetensors.torch.load_file(path)
    if kind == "hf":
        assert json.loads((path / "config.json").read_text())["model_type"]
        return safetensors.torch.load_file(path / "model.safetensors")
    if kind == "dcp":
        dcp_to_torch_save(path, scratch)
        return torch.load(scratch, weights_only=True)
    return torch.load(path / "model_0_0.pt", weights_only=True, mmap=True)


READABLE = ["pt", "legacy", "safetensors", "dcp", "bin", "hf", "partial", "full"]
WRITABLE = ["pt", "safetensors", "hf", "dcp", "partial", "full"]
SOURCE_HOLDS_TIES = {"pt", "legacy", "bin", "partial", "full"}
TARGET_HOLDS_TIES = {"pt", "dcp", "partial", "full"}


def check_pair(source, target, seed, tmp_path):
    state = random_state(seed)
    path = write_source(source, state, tmp_path)
    out = tmp_path / "out"
    words = ["--config", tmp_path / "config.json"] if target == "hf" else []
    (tmp_path / "config.json").write_text('{"model_type": "nobody-knows"}')
    result = run_json("convert", path, out, "--to", target, *words)
    assert result["output"] == str(out) and result["format"] == target
    expected = dict(state)
    if target not in TARGET_HOLDS_TIES and source in SOURCE_HOLDS_TIES:
        del expected["tied"]  # said in the metadata
    assert_equal(read_target(target, out, tmp_path / "scratch"), expected)
    assert sorted(name for name in os.listdir(tmp_path) if name.startswith(".")) == []
    run("verify", out)


@pytest.mark.parametrize("source, target", list(itertools.product(READABLE, WRITABLE)))
def test_every_format_to_every_other(source, target, tmp_path):
    check_pair(source, target, hash((source, target)) % 1000, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_every_format_to_every_other_on_more_states(seed, tmp_path):
    for source, target in itertools.product(READABLE, WRITABLE):
        check_pair(source, target, 1000 + seed, tmp_path / f"{source}-{target}")


def test_ties_come_back_as_ties(tmp_path):
    torch.save(random_state(1), tmp_path / "a.pt")
    run("convert", tmp_path / "a.pt", tmp_path / "b.safetensors", "--to", "safetensors")
    run("convert", tmp_path / "b.safetensors", tmp_path / "c.pt", "--to", "pt")
    state = torch.load(tmp_path / "c.pt", weights_only=True)
    assert state["tied"].data_ptr() == state["large"].data_ptr()


def test_safetensors_have_the_reference_writers_bytes(tmp_path):
    state = without_ties(random_state(3, ties=False))
    torch.save(state, tmp_path / "a.pt")
    run("convert", tmp_path / "a.pt", tmp_path / "b", "--to", "safetensors")
    safetensors.torch.save_file(state, tmp_path / "c", metadata={"format": "pt"})
    assert (tmp_path / "b").read_bytes() == (tmp_path / "c").read_bytes()


def test_a_training_state_keeps_everything(tmp_path):
    content = {
        "model": {"w": torch.randn(4, 6), "b": torch.zeros(0)},
        "optimizer": {"state": {0: {"exp_avg": torch.randn(4, 6), "step": torch.tensor(3.0)}},
                      "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "params": [0]}]},
        "epoch": 3, "done": False, "note": "ü", "nothing": None,
    }  # fmt: skip
    torch.save(content, tmp_path / "a.pt")
    run("convert", tmp_path / "a.pt", tmp_path / "d", "--to", "dcp")
    run("convert", tmp_path / "d", tmp_path / "b.pt", "--to", "pt")
    back = torch.load(tmp_path / "b.pt", weights_only=True)
    # DCP's keys are texts, as torch itself flattens them.
    assert torch.equal(back["model"]["w"], content["model"]["w"])
    assert torch.equal(back["optimizer"]["state"]["0"]["exp_avg"], content["optimizer"]["state"][0]["exp_avg"])
    assert back["optimizer"]["param_groups"] == content["optimizer"]["param_groups"]
    assert {k: back[k] for k in ("epoch", "done", "note", "nothing")} == {"epoch": 3, "done": False, "note": "ü", "nothing": None}
    flat = run("convert", tmp_path / "a.pt", tmp_path / "s", "--to", "safetensors")
    assert "left out" in flat.stderr and "optimizer" in flat.stderr
    assert set(safetensors.torch.load_file(tmp_path / "s")) == {"w", "b"}


def test_what_a_target_cannot_hold_is_refused_by_name(tmp_path):
    torch.save({"fine": torch.ones(2), "wide": torch.ones(2, dtype=torch.complex128)}, tmp_path / "a.pt")
    assert "'wide'" in fails(2, "convert", tmp_path / "a.pt", tmp_path / "out", "--to", "safetensors", "-q")
    assert not (tmp_path / "out").exists()
    run("convert", tmp_path / "a.pt", tmp_path / "out", "--to", "safetensors", "--exclude", "wide")
    torch.save({"s": torch.eye(3).to_sparse(), "d": torch.ones(2)}, tmp_path / "sparse.pt")
    assert "'s'" in fails(2, "convert", tmp_path / "sparse.pt", tmp_path / "sp", "--to", "safetensors", "-q")
    assert "config.json" in fails(2, "convert", tmp_path / "a.pt", tmp_path / "hf", "--to", "hf", "-q")
    assert "--config" in fails(2, "convert", tmp_path / "a.pt", tmp_path / "p", "--to", "partial", "--pipeline-parallel-degree", 2, "-q")


def test_dtype_and_globs(tmp_path):
    state = {"a.weight": torch.randn(5, 7), "a.bias": torch.randn(5), "ids": torch.arange(4)}
    torch.save(state, tmp_path / "a.pt")
    result = run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to", "pt", "--dtype", "bfloat16")
    assert "2 tensors lose precision" in result.stderr
    back = torch.load(tmp_path / "b.pt", weights_only=True)
    assert torch.equal(back["a.weight"], state["a.weight"].bfloat16()) and torch.equal(back["ids"], state["ids"])
    run("convert", tmp_path / "a.pt", tmp_path / "c.pt", "--to", "pt", "--include", "a.*", "--exclude", "*bias")
    assert list(torch.load(tmp_path / "c.pt", weights_only=True)) == ["a.weight"]
    assert "no tensor" in fails(2, "convert", tmp_path / "a.pt", tmp_path / "d.pt", "--to", "pt", "--include", "z*", "-q")


# Layouts.
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (4, 2)]


def files_of(folder):
    return sorted(name for name in os.listdir(folder) if re.fullmatch(r"(model|optimizer)_\d+_\d+\.pt", name))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_from_layout_to_layout(family, tmp_path, request):
    model = request.getfixturevalue(family)
    make_partial(model, tmp_path / "ck", "t", 7, 2, 2)
    source = tmp_path / "ck" / "t_partial"
    for pp, tp in LAYOUTS:
        out = tmp_path / f"{pp}{tp}_partial"
        run("reshard", source, out, "--pipeline-parallel-degree", pp, "--tensor-parallel-degree", tp)
        assert files_of(out) == sorted(f"{kind}_{p}_{t}.pt" for kind in ("model", "optimizer") for p in range(pp) for t in range(tp))
        run("verify", out)
        run("diff", source, out)
        back = tmp_path / f"{pp}{tp}_back"
        run("reshard", out, back, "--pipeline-parallel-degree", 2, "--tensor-parallel-degree", 1, "--world-size", 4)
        run("diff", source, back)
        run("export", out, tmp_path / f"{pp}{tp}_hf")
        assert_equal(state_of(tmp_path / f"{pp}{tp}_hf"), state_of(model))
        for name in files_of(out):  # each is a file that torch reads, with only its share of the elements
            torch.load(out / name, weights_only=True, mmap=True)
    sizes = [sum(p.stat().st_size for p in (tmp_path / f"{pp}{tp}_partial").glob("model_*.pt")) for pp, tp in LAYOUTS]
    weights = sum(t.numel() * t.element_size() for t in state_of(model).values())
    assert max(sizes) < 1.2 * weights + 4096 * 40 * 8, "nothing stands twice"


def test_a_key_value_head_for_several_ranks_stands_once(llama, tmp_path):
    run("convert", llama, tmp_path / "a_partial", "--to", "partial")
    run("reshard", tmp_path / "a_partial", tmp_path / "b_partial", "--tensor-parallel-degree", 2)
    wrong = fails(2, "reshard", tmp_path / "a_partial", tmp_path / "c", "--tensor-parallel-degree", 4, "-q")
    assert "6 attention heads" in wrong and "1, 2" in wrong and "pipeline" in wrong
    assert "6 attention heads" in fails(2, "plan", "--config", llama, "--tensor-parallel-degree", 4)


def test_weights_alone(saved, tmp_path):
    run("reshard", saved / "a_partial", tmp_path / "w", "--pipeline-parallel-degree", 1, "--weights-only")
    assert files_of(tmp_path / "w") == ["model_0_0.pt"]


def test_merge_gives_a_state_dict_for_transformers(gpt2, llama, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    for number, model in enumerate((gpt2, llama)):
        make_partial(model, tmp_path / f"ck{number}", "t", 7, 2)
        source = tmp_path / f"ck{number}" / "t_partial"
        run("merge", source, tmp_path / f"{number}.pt")
        fresh = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
        fresh.load_state_dict(torch.load(tmp_path / f"{number}.pt", weights_only=True, mmap=True))
        assert_equal(fresh.state_dict(), state_of(model))
        run("merge", source, tmp_path / f"{number}.safetensors", "--to", "safetensors")
        run("diff", tmp_path / f"{number}.safetensors", model)


def test_full_keeps_optimizer_and_user_content(saved, tmp_path):
    run("merge", saved / "a_partial", tmp_path / "a.pt", "--to", "full")
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "optimizer_a.pt", "user_content_a.pt"]
    assert torch.load(tmp_path / "user_content_a.pt", weights_only=True)["note"] == "made for a test"
    run("verify", tmp_path / "a.pt")
    run("convert", tmp_path / "a.pt", tmp_path / "b_partial", "--to", "partial", "--pipeline-parallel-degree", 2)
    run("diff", saved / "a_partial", tmp_path / "b_partial")
    assert "already" in fails(2, "merge", saved / "a_partial", tmp_path / "a.pt", "--to", "full", "-q")
    run("merge", saved / "z_partial", tmp_path / "a.pt", "--to", "full", "--overwrite")
    os.remove(tmp_path / "optimizer_a.pt")
    assert "optimizer_a.pt" in fails(5, "merge", tmp_path / "a.pt", tmp_path / "c.pt", "-q")


def test_a_plain_training_file_becomes_a_checkpoint(gpt2, tmp_path):
    state = {name.removeprefix("transformer."): t for name, t in state_of(gpt2).items() if name != "lm_head.weight"}
    moments = {name: {"exp_avg": torch.randn_like(t), "exp_avg_sq": torch.rand_like(t), "step": torch.tensor(5.0)}
               for name, t in state.items()}  # fmt: skip
    torch.save({"model": state, "optimizer": {"state": moments, "param_groups": [{"lr": 0.1, "params": list(state)}]}},
               tmp_path / "a.pt")
    run("convert", tmp_path / "a.pt", tmp_path / "p", "--to", "partial", "--config", gpt2)
    run("reshard", tmp_path / "p", tmp_path / "q", "--pipeline-parallel-degree", 2, "--tensor-parallel-degree", 2)
    run("diff", tmp_path / "p", tmp_path / "q")
    key = "transformer.seq_layers.1.attention.key.weight"
    both = torch.load(tmp_path / "p" / "optimizer_0_0.pt", weights_only=True)["state"]
    part = torch.load(tmp_path / "q" / "optimizer_0_1.pt", weights_only=True)["state"]
    width = state["h.1.attn.c_attn.weight"].shape[0]
    fused = moments["h.1.attn.c_attn.weight"]["exp_avg"]
    assert torch.equal(both[key]["exp_avg"], fused[:, width : 2 * width].t())
    assert torch.equal(part[key]["exp_avg"], fused[:, width + width // 2 : 2 * width].t())
    assert part[key]["step"] == 5
    # Without a config, from the shapes.
    run("convert", tmp_path / "a.pt", tmp_path / "f", "--to", "partial", "--family", "gpt2")
    assert "--config" in fails(2, "convert", tmp_path / "a.pt", tmp_path / "g", "--to", "partial", "--family", "llama", "-q")


def test_shards(llama, tmp_path):
    run("convert", llama, tmp_path / "out", "--to", "safetensors", "--max-shard-size", "50KB")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    run("diff", tmp_path / "out", llama)


# What goes wrong.
def test_mistakes(saved, tmp_path):
    assert "'partial'" in fails(2, "convert", saved / "a_partial", tmp_path / "x", "--to", "partal")
    fails(2, "convert", saved / "a_partial", tmp_path / "x")
    assert "where to" in fails(2, "merge", saved / "a_partial")
    assert "layout" in fails(2, "reshard", saved / "a_partial", tmp_path / "x")
    assert "float32" in fails(2, "convert", saved / "a_partial", tmp_path / "x", "--to", "pt", "--dtype", "flot32")
    fails(3, "merge", saved / "a_partial", tmp_path / "x", "--memory-limit", "1MB")
    assert "both" in fails(2, "convert", saved / "a_partial", saved / "a_partial", "--to", "partial", "--overwrite")
    (tmp_path / "there").write_text("mine")
    assert "--overwrite" in fails(2, "merge", saved / "a_partial", tmp_path / "there")
    assert (tmp_path / "there").read_text() == "mine"
    run("merge", saved / "a_partial", tmp_path / "there", "--overwrite")
    torch.load(tmp_path / "there", weights_only=True)
    fails(2, "convert", saved / "a_partial", saved, "--to", "partial", "--overwrite")


def test_damage_is_found_on_the_way_and_nothing_is_left(saved, tmp_path):
    bad = Path(shutil.copytree(saved, tmp_path / "bad")) / "a_partial" / "model_0_0.pt"
    data = bytearray(bad.read_bytes())
    data[len(data) // 2] ^= 1
    bad.write_bytes(data)
    for words in (["--to", "pt"], ["--to", "dcp"], ["--to", "full"], ["--to", "partial"], ["--to", "safetensors"]):
        assert "model_0_0.pt" in fails(5, "convert", bad.parent, tmp_path / "out", *words, "-q")
        assert sorted(os.listdir(tmp_path)) == ["bad"]


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """400 MB in one file."""
    path = tmp_path_factory.mktemp("big") / "big.pt"
    torch.save({f"t{i}": torch.full((25, 1_000_000), float(i)) for i in range(4)}, path)
    return path


@pytest.mark.parametrize("target", ["pt", "safetensors", "dcp", "partial", "full"])
def test_memory_stays_within_the_limit(big, tmp_path, target):
    script = ("import resource, subprocess, sys; code = subprocess.run(sys.argv[1:]).returncode;"
              "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(code)")  # fmt: skip
    done = subprocess.run(["python3", "-c", script, PROGRAM, "convert", "-q", big, tmp_path / "out", "--to", target],
                          capture_output=True, text=True, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) * 1024 < 300 << 20


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("target", ["pt", "dcp", "full", "partial"])
def test_a_signal_leaves_nothing(big, tmp_path, target, number, code):
    process = subprocess.Popen([PROGRAM, "convert", "-q", big, tmp_path / "out", "--to", target], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not any(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.001)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == code and list(tmp_path.iterdir()) == []
