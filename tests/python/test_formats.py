"""Our formats against the real writers and readers: torch.save, torch.load, safetensors, transformers' folders.

The C++ side is reached through `format_tool` (tests/core/tools), found in $SHARDSMITH_BUILD (default build).
"""

import argparse
import collections
import json
import os
import pathlib
import pickle
import re
import subprocess
import zipfile
import zlib

import numpy as np
import pytest
import safetensors.torch
import torch

from parity import models

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOOL = pathlib.Path(os.environ.get("SHARDSMITH_BUILD", ROOT / "build")) / "format_tool"

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
]  # fmt: skip


def tool(*args, code=0):
    done = subprocess.run([TOOL, *map(str, args)], capture_output=True, text=True, timeout=120)
    assert done.returncode == code, f"exit {done.returncode}: {done.stderr}"
    if code:
        assert len(done.stderr.strip().splitlines()) == 1, "an error is one line"
        return done.stderr
    return done.stdout


def random_tensor(dtype, shape):
    """Random bits, as far as the dtype has a number for each."""
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def raw(tensor):
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def crc(tensor):
    return zlib.crc32(raw(tensor)) if tensor.numel() else 0


def described(path):
    out = json.loads(tool("read", path))
    return out, {t["name"]: t for t in out["tensors"]}


def assert_same(ours, tensor):
    assert ours["dtype"] == str(tensor.dtype).removeprefix("torch.")
    assert ours["shape"] == list(tensor.shape)
    assert ours["crc"] == crc(tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_are_read(tmp_path, dtype):
    tensors = {"a": random_tensor(dtype, (5, 7)), "scalar": random_tensor(dtype, ()), "none": random_tensor(dtype, (0, 3))}
    tensors["transposed"] = tensors["a"].t()
    tensors["part"] = random_tensor(dtype, (40, 40))[3:9, 1:30:4]
    torch.save(tensors, tmp_path / "m.pt")
    _, ours = described(tmp_path / "m.pt")
    for name, tensor in tensors.items():
        assert_same(ours[name], tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_reads_what_we_write(tmp_path, dtype):
    tensors = {"a": random_tensor(dtype, (5, 7)), "scalar": random_tensor(dtype, ()), "large": random_tensor(dtype, (300, 333))}
    torch.save(tensors, tmp_path / "m.pt")
    tool("copy", tmp_path / "m.pt", tmp_path / "ours.pt")
    back = torch.load(tmp_path / "ours.pt", weights_only=True, mmap=True)
    assert list(back) == list(tensors)
    for name, tensor in tensors.items():
        assert back[name].dtype == dtype and back[name].shape == tensor.shape
        assert raw(back[name]) == raw(tensor)


@pytest.mark.parametrize("extra", [[], ["--plain"]])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_values_come_back_through_our_writer(tmp_path, extra, protocol):
    value = {
        "ints": [0, -1, 255, 256, 65536, 2**31, -(2**31) - 1, 2**63 - 1, -(2**63), 2**64, -(2**100), 10**400],
        "floats": [0.0, -0.0, 1e-310, float("inf"), 1.5],
        "text": ["", "é", "\n", "𝄞", "x" * 300],
        "bytes": b"\x00\x7f\x80\xff",
        "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
        "set": {1, 2, 3},
        "none": None,
        "bools": [True, False],
        "complex": 1 - 2.5j,
        "dtype": torch.bfloat16,
        3: {"nested": {"deeper": [torch.ones(2)]}},
        (1, "t"): "tuple key",
    }
    torch.save(value, tmp_path / "m.pt", pickle_protocol=protocol)
    tool("copy", tmp_path / "m.pt", tmp_path / "ours.pt", *extra)
    back = torch.load(tmp_path / "ours.pt", weights_only=True)
    assert back.pop(3)["nested"]["deeper"][0].equal(value.pop(3)["nested"]["deeper"][0])
    assert back == value
    assert str(back["floats"][1]) == "-0.0"


def test_sharing_survives(tmp_path):
    base = torch.arange(12.0)
    torch.save({"w": base.reshape(3, 4), "tied": base.reshape(3, 4), "other": base[:4]}, tmp_path / "m.pt")
    _, ours = described(tmp_path / "m.pt")
    assert ours["tied"]["alias_of"] == "w" and ours["other"]["alias_of"] == "" and ours["w"]["alias_of"] == ""
    tool("copy", tmp_path / "m.pt", tmp_path / "ours.pt")
    back = torch.load(tmp_path / "ours.pt", weights_only=True)
    assert back["tied"].data_ptr() == back["w"].data_ptr()
    back["w"][0, 0] = 77
    assert back["tied"][0, 0] == 77


def test_modules_optimizers_and_parameters_are_read(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "p": next(model.parameters())}, tmp_path / "m.pt")
    out, ours = described(tmp_path / "m.pt")
    for name, tensor in model.state_dict().items():
        assert_same(ours["model/" + name], tensor)
    for number, state in optimizer.state_dict()["state"].items():
        for name, tensor in state.items():
            assert_same(ours[f"optimizer/state/#{number}/{name}"], tensor)
    assert out["values"]["optimizer"]["param_groups"][0]["lr"] == 1e-3


def test_large_records_are_aligned_and_no_alignment_is_promised(tmp_path):
    tensors = {f"t{i}": torch.randn(n) for i, n in enumerate([1, 100, 16383, 16384, 50000, 3])}
    torch.save(tensors, tmp_path / "m.pt")
    tool("copy", tmp_path / "m.pt", tmp_path / "ours.pt")
    reader = torch._C.PyTorchFileReader(str(tmp_path / "ours.pt"))
    for i, tensor in enumerate(tensors.values()):
        assert reader.get_record_offset(f"data/{i}") % (4096 if tensor.nbytes >= 65536 else 64) == 0
    assert not reader.has_record(".format_version")
    from torch.utils.serialization import config

    with config.patch({"load.calculate_storage_offsets": True}):
        back = torch.load(tmp_path / "ours.pt", weights_only=True, mmap=True)
    for name, tensor in tensors.items():
        assert back[name].equal(tensor)


def test_pythons_zipfile_finds_every_crc_right(tmp_path):
    torch.save({"a": torch.randn(700_000), "b": torch.randn(5)}, tmp_path / "m.pt")
    tool("copy", tmp_path / "m.pt", tmp_path / "ours.pt")
    with zipfile.ZipFile(tmp_path / "ours.pt") as archive:
        assert archive.testzip() is None
        record = archive.read("archive/shardsmith")
    digest, extra = tool("record", tmp_path / "ours.pt").split(" ", 1)
    assert int(digest, 16) == zlib.crc32(record)
    assert json.loads(extra) == {"made_by": "format_tool"}
    parsed, data = json.loads(record), (tmp_path / "ours.pt").read_bytes()
    block = parsed["block_size"]
    for i in range(0, parsed["covered"], block):
        expected = zlib.crc32(data[i : min(i + block, parsed["covered"])])
        assert int(parsed["crc"][i // block * 8 :][:8], 16) == expected
    assert [s["name"] for s in parsed["slices"]] == ["a", "b"]


def test_a_damaged_tensor_is_named(tmp_path):
    torch.save({"first": torch.randn(400_000), "second": torch.randn(400_000)}, tmp_path / "m.pt")
    tool("copy", tmp_path / "m.pt", tmp_path / "ours.pt")
    data = bytearray((tmp_path / "ours.pt").read_bytes())
    data[len(data) - 500_000] ^= 4
    (tmp_path / "ours.pt").write_bytes(data)
    assert "'second'" in tool("read", tmp_path / "ours.pt", code=5)


def test_deflated_archives_are_read(tmp_path):
    tensors = {"a": torch.arange(1000.0), "b": torch.arange(3)}
    torch.save(tensors, tmp_path / "m.pt")
    with zipfile.ZipFile(tmp_path / "m.pt") as source, zipfile.ZipFile(tmp_path / "z.pt", "w", zipfile.ZIP_DEFLATED) as out:
        for name in source.namelist():
            out.writestr(name, source.read(name))
    _, ours = described(tmp_path / "z.pt")
    for name, tensor in tensors.items():
        assert_same(ours[name], tensor)


class Runs:
    def __init__(self, call):
        self.call = call

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize(
    "call, name",
    [((os.system, ("touch EXECUTED",)), f"{os.system.__module__}.system"), ((eval, ("1",)), "eval"),
     ((getattr, (Runs((exec, ("1",))), "x")), "getattr"), ((subprocess.Popen, (["touch", "EXECUTED"],)), "Popen")],
    ids=["system", "eval", "nested", "popen"],
)  # fmt: skip
def test_nothing_in_a_pickle_is_executed(tmp_path, monkeypatch, protocol, call, name):
    monkeypatch.chdir(tmp_path)
    torch.save({"a": torch.ones(2), "evil": Runs(call)}, tmp_path / "m.pt", pickle_protocol=protocol)
    error = tool("read", tmp_path / "m.pt", code=5)
    assert error.startswith("corrupt: ") and "forbidden" in error
    assert name in error  # protocol 2 spells modules as Python 2 did
    assert not (tmp_path / "EXECUTED").exists()


@pytest.mark.parametrize(
    "make, code, word",
    [
        (lambda p: torch.save(argparse.Namespace(a=1), p), 5, "argparse.Namespace"),
        (lambda p: torch.save({"x": np.float64(1)}, p), 5, "numpy"),
        (lambda p: torch.save({"x": torch.nested.nested_tensor([torch.ones(3)])}, p), 2, "nested"),
        (lambda p: torch.save({"x": torch.ones(3, device="meta")}, p), 2, "meta"),
        (lambda p: torch.jit.script(torch.nn.Linear(2, 2)).save(str(p)), 2, "TorchScript"),
        (lambda p: p.write_bytes(pickle.dumps({"x": 1})), 5, ""),
    ],
    ids=["namespace", "numpy", "nested", "meta", "torchscript", "bare"],
)
@pytest.mark.filterwarnings("ignore")
def test_what_is_not_held_is_one_clear_line(tmp_path, make, code, word):
    make(tmp_path / "m.pt")
    assert word in tool("read", tmp_path / "m.pt", code=code)


def test_safetensors_bytes_equal_the_reference_writers(tmp_path):
    # complex64 is the widest that it has a word for
    tensors = {f"t.{i}.{d}": random_tensor(d, (i + 1, 3)) for i, d in enumerate(DTYPES) if d not in (torch.complex128,)}
    tensors |= {"zz": torch.zeros(0, 4), "aa": torch.ones(()), 'quo"te\\é\n': torch.ones(2)}
    for metadata in (None, {"format": "pt"}):
        safetensors.torch.save_file(tensors, tmp_path / "ref.safetensors", metadata)
        _, ours = described(tmp_path / "ref.safetensors")
        for name, tensor in tensors.items():
            assert_same(ours[name], tensor)
        tool("safetensors", tmp_path / "ref.safetensors", tmp_path / "ours.safetensors")
        assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "ref.safetensors").read_bytes()


def test_pt_becomes_safetensors(tmp_path):
    tensors = {"b": torch.randn(4, 5).t(), "a": torch.arange(9)}
    torch.save(tensors, tmp_path / "m.pt")
    tool("safetensors", tmp_path / "m.pt", tmp_path / "m.safetensors")
    back = safetensors.torch.load_file(tmp_path / "m.safetensors")
    assert all(back[name].equal(tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("safe", [True, False])
def test_sharded_folders_are_read(tmp_path, safe):
    shards = [{"a": torch.randn(3, 4)}, {"b": torch.randn(5), "c": torch.randn(2).to(torch.bfloat16)}]
    weight_map = {}
    for i, shard in enumerate(shards, 1):
        name = f"model-0000{i}-of-00002.safetensors" if safe else f"pytorch_model-0000{i}-of-00002.bin"
        safetensors.torch.save_file(shard, tmp_path / name) if safe else torch.save(shard, tmp_path / name)
        weight_map |= dict.fromkeys(shard, name)
    index = "model.safetensors.index.json" if safe else "pytorch_model.bin.index.json"
    (tmp_path / index).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    out, ours = described(tmp_path)
    assert out["format"] == "hf" and out["values"]["model_type"] == "gpt2"
    for shard in shards:
        for name, tensor in shard.items():
            assert_same(ours[name], tensor)


def dumped(document):
    """The bytes of the hexadecimal dump in a document."""
    lines = (ROOT / "docs" / "formats" / document).read_text().splitlines()
    rows = [m for line in lines if (m := re.fullmatch(r"([0-9a-f]{8}): ((?:[0-9a-f]{2,4} ?)+) .*", line))]
    data = b"".join(bytes.fromhex(m[2].replace(" ", "")) for m in rows)
    assert len(rows) > 5 and int(rows[-1][1], 16) == (len(data) - 1) // 16 * 16
    return data


def test_the_documents_examples_are_what_is_written(tmp_path):
    torch.save({"w": torch.arange(6.0).reshape(2, 3), "step": 7}, tmp_path / "m.pt")
    tool("copy", tmp_path / "m.pt", tmp_path / "ours.pt")
    assert (tmp_path / "ours.pt").read_bytes() == dumped("pt.md")
    tensors = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1.0, 2.0], dtype=torch.bfloat16)}
    safetensors.torch.save_file(tensors, tmp_path / "m.safetensors", {"format": "pt"})
    tool("safetensors", tmp_path / "m.safetensors", tmp_path / "ours.safetensors")
    assert (tmp_path / "ours.safetensors").read_bytes() == dumped("safetensors.md")


def test_a_real_model_saved_from_a_gpu(tmp_path):
    source = tmp_path
    with zipfile.ZipFile(models.wheel("microformer_mgm")) as wheel:
        wheel.extractall(source)
    weights = next(source.rglob("pytorch_model.bin"))
    _, ours = described(weights)
    real = torch.load(weights, map_location="cpu", weights_only=True)
    assert set(ours) == set(real) and len(real) > 50
    for name, tensor in real.items():
        assert_same(ours[name], tensor)
    arguments = next(source.rglob("training_args.bin"))
    error = tool("read", arguments, code=5)
    assert "forbidden" in error and "transformers" in error
