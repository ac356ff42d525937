"""`shardsmith verify`: numbers that are none, what a format can't say, and every format's damage."""

import math
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from test_cli_helpers import (  # noqa: F401
    copied,
    distinct,
    fails,
    flip,
    gpt2,
    large,
    llama,
    make_partial,
    peak_memory,
    run,
    run_json,
    saved,
)


def test_it_says_what_a_format_gives_no_means_to_check(llama, tmp_path):
    for path in (llama, llama / "model.safetensors"):
        text = run("verify", path).stdout
        assert "names, sizes and coverage were checked" in text and "the format has no checksums" in text
        assert run_json("verify", path)["checked"][0]["unchecked"] == ["the bytes of tensors: the format has no checksums"]
    torch.save({"w": torch.arange(1000)}, tmp_path / "x.pt")
    got = run_json("verify", tmp_path / "x.pt")["checked"][0]
    assert got["checksums"] and got["unchecked"] == []


def without_checksums(path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.arange(1000)}, path)
    finally:
        torch.serialization.set_crc32_options(True)


def test_records_that_were_written_without_a_checksum_are_counted(tmp_path):
    without_checksums(tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as file:
        none = [i for i in file.infolist() if i.CRC == 0 and i.file_size]
    assert none, "torch wrote checksums after all"
    got = run_json("verify", tmp_path / "x.pt")["checked"][0]
    assert any(f"{len(none)} of " in line and "have no checksum" in line for line in got["unchecked"])


def test_every_flipped_byte_of_many_records_is_found(tmp_path):
    """Records from a few bytes to several reads, in one file."""
    path = tmp_path / "x.pt"
    sizes = [1, 3, 1000, 1_000_000, 2_500_000, 5, 700_000]
    torch.save({f"w{i}": torch.arange(n, dtype=torch.int32) for i, n in enumerate(sizes)}, path)
    run("verify", path)
    with zipfile.ZipFile(path) as file:
        infos = [i for i in file.infolist() if "/data/" in i.filename]
    for info in infos:
        with open(path, "rb") as file:
            file.seek(info.header_offset + 26)
            lengths = file.read(4)
        begin = info.header_offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
        for at in {begin, begin + info.file_size // 2, begin + info.file_size - 1}:
            flip(path, at)
            damage = run_json("verify", path, code=4)["checked"][0]["damage"]
            assert len(damage) == 1 and info.filename in damage[0]
            flip(path, at)
    run("verify", path, "--threads", 1)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_damaged_blocks_are_found_by_any_number_of_threads(large, tmp_path, threads):
    folder = Path(shutil.copytree(large / "ck/t_partial", tmp_path / "t_partial"))
    file = folder / "model_0_0.pt"
    places = [5 * 2**20 + 3, 6 * 2**20 + 1, 90 * 2**20, file.stat().st_size - 3 * 2**20]
    for at in places:
        flip(file, at)
    damage = run_json("verify", folder, "--threads", threads, code=4)["checked"][0]["damage"]
    assert len(damage) == 3 and "blocks 5 to 6" in damage[0] and "block 90" in damage[1]


# Values


def test_values_that_are_no_numbers_are_counted(tmp_path):
    x = torch.ones(4, 300)
    x[1, 7] = math.nan
    x[2, :3] = math.inf
    x[3, 0] = -math.inf
    tensors = {
        "x": x, "half": x.half(), "bf": x.bfloat16(), "double": x.double(), "fine": torch.ones(5), "int": torch.ones(5).int(),
        "f8": torch.tensor([0x7F, 0x01], dtype=torch.uint8).view(torch.float8_e4m3fn),
        "complex": torch.tensor([complex(math.nan, 1), complex(1, math.inf), complex(math.nan, math.inf), 1]),
    }  # fmt: skip
    save_file(tensors, tmp_path / "x.safetensors")
    run("verify", tmp_path / "x.safetensors")
    got = run_json("verify", tmp_path / "x.safetensors", "--values", code=4)
    assert got["sound"] and not got["finite"]
    values = got["checked"][0]["values"]
    found = {t["name"]: (t["nan"], t["inf"]) for t in values["not_finite"]}
    assert found == {"x": (1, 4), "half": (1, 4), "bf": (1, 4), "double": (1, 4), "f8": (1, 0), "complex": (2, 1)}
    assert values["tensors"] == 7
    text = run("verify", tmp_path / "x.safetensors", "--values", code=4).stdout
    assert "tensor 'x' float32 [4, 300]: 1 NaN, 4 Inf of 1200" in text and "'fine'" not in text


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e5m2fnuz, torch.float8_e4m3fnuz,
                                   torch.float8_e8m0fnu, torch.float16, torch.bfloat16], ids=str)  # fmt: skip
def test_every_value_of_a_small_type_is_counted_as_torch_does(tmp_path, dtype):
    bits = 256 if dtype.itemsize == 1 else 65536
    tensor = torch.arange(bits).to(torch.uint8 if bits == 256 else torch.uint16).view(dtype)
    save_file({"x": tensor}, tmp_path / "x.safetensors")
    numbers = tensor.double()
    [got] = run_json("verify", tmp_path / "x.safetensors", "--values", code=4)["checked"][0]["values"]["not_finite"]
    assert (got["nan"], got["inf"]) == (int(numbers.isnan().sum()), int(numbers.isinf().sum()))


def test_values_of_a_checkpoint_and_of_a_folder(saved, tmp_path, llama):
    assert run_json("verify", saved, "--values")["finite"]
    assert "finite" in run("verify", saved / "a_partial", "--values").stdout
    model = Path(shutil.copytree(llama, tmp_path / "model"))
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][3] = math.nan
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    make_partial(model, tmp_path / "ck", "t", 1)
    got = run_json("verify", tmp_path / "ck", "--values", code=4)["checked"][0]
    assert {t["name"] for t in got["values"]["not_finite"]} == {
        "model/layernorm.weight", "optimizer/state/layernorm.weight/exp_avg", "optimizer/state/layernorm.weight/exp_avg_sq",
    }  # fmt: skip
    assert all(t["nan"] == 1 for t in got["values"]["not_finite"])


def test_repeated_and_tied_values_are_counted_once_each(tmp_path):
    x = torch.tensor([1.0, math.nan])
    torch.save({"e": x.expand(1000, 2), "a": x, "b": x}, tmp_path / "x.pt")
    values = run_json("verify", tmp_path / "x.pt", "--values", code=4)["checked"][0]["values"]["not_finite"]
    assert {t["name"]: t["nan"] for t in values} == {"e": 1000, "a": 1}


def test_values_need_little_memory(large):
    assert peak_memory("verify", "-q", "--values", large / "ck/t_partial") < 300e6
    assert peak_memory("verify", "-q", "--values", large / "ck/t_partial", "--memory-limit", "40MB") < 120e6
    assert peak_memory("verify", "-q", large / "ck/t_partial") < 60e6


# Other formats


def save_dcp(folder, state):
    dcp.save(state, checkpoint_id=str(folder), no_dist=True)
    return folder


def test_a_distributed_checkpoint_has_checksums_in_each_item(tmp_path):
    folder = save_dcp(tmp_path / "dcp", {"model": {"w": distinct([300, 200], torch.float32), "b": torch.ones(7)}, "step": 3})
    got = run_json("verify", folder)["checked"][0]
    assert got["format"] == "dcp" and got["checksums"] and got["sound"]
    [data] = folder.glob("*.distcp")
    whole = data.read_bytes()
    at = whole.index(distinct([300, 200], torch.float32).numpy().tobytes()) + 1234
    flip(data, at)
    damage = run_json("verify", folder, code=4)["checked"][0]["damage"]
    assert len(damage) == 1 and data.name in damage[0]
    flip(data, at)
    data.write_bytes(whole[:-100])
    run("verify", folder, code=4)


def test_a_full_checkpoint_is_checked_with_its_companions(saved, tmp_path):
    run("merge", saved / "a_partial", tmp_path / "a", "--to", "full")
    got = run_json("verify", tmp_path / "a")["checked"][0]
    assert got["format"] == "full" and got["checksums"] and got["sound"]
    names = sorted(f.name for f in tmp_path.iterdir())
    assert "user_content_a" in names
    for name in names:
        path = tmp_path / name
        for at in (path.stat().st_size // 3, path.stat().st_size // 2):
            flip(path, at)
            damage = run_json("verify", tmp_path / "a", code=4)["checked"][0]["damage"]
            assert name in damage[0]
            flip(path, at)
    run("verify", tmp_path / "a")


def test_mistakes(saved, llama):
    fails(2, "verify", llama, "--threads", 0)
    fails(2, "verify", llama, "--memory-limit", "some")
    assert "did you mean" in fails(2, "verify", saved / "a")
