"""`shardsmith diff`: what it calls equal, what it finds, and in how much memory."""

import json
import math
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
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

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
    torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e5m2fnuz, torch.float8_e4m3fnuz, torch.float8_e8m0fnu,
]  # fmt: skip


def put(path, tensors):
    save_file(tensors, path)
    return path


def pair(tmp_path, a, b):
    return put(tmp_path / "a.safetensors", a), put(tmp_path / "b.safetensors", b)


def only(got):
    assert len(got["tensors"]) == 1, got["tensors"]
    return got["tensors"][0]


# Layouts and formats


def test_another_layout_is_equal(gpt2, tmp_path):
    for tag, pp in (("a", 1), ("b", 3)):
        make_partial(gpt2, tmp_path / "ck", tag, 7, pp)
    text = run("diff", tmp_path / "ck/a_partial", tmp_path / "ck/b_partial").stdout
    assert text.startswith("equal: ") and "value" in text
    got = run_json("diff", tmp_path / "ck/a_partial", tmp_path / "ck/b_partial")
    assert got["equal"] and got["compared"]["tensors"] == len(run_json("inspect", tmp_path / "ck/a_partial")["tensors"])


def test_partial_checkpoints_are_compared_whole(saved):
    got = run_json("diff", saved / "a_partial", saved / "z_partial", code=4)
    assert [v["path"] for v in got["values"]] == ["step"] and got["tensors"] == []
    assert (got["values"][0]["a"], got["values"][0]["b"]) == ("20", "10")
    assert run_json("diff", saved / "a_partial", saved / "z_partial", "--weights-only")["equal"]


@pytest.mark.parametrize("pp", [1, 2])
def test_a_checkpoint_equals_the_model_that_it_was_made_of(llama, gpt2, tmp_path, pp):
    for name, model in (("llama", llama), ("gpt2", gpt2)):
        make_partial(model, tmp_path / name, "t", 1, pp)
        result = run("diff", tmp_path / name / "t_partial", model)
        assert result.stdout.startswith("equal: ")
        notices = result.stderr.splitlines()
        assert any("only the weights" in n and "A also holds optimizer, user_content" in n for n in notices)
        assert any("Hugging Face's names" in n for n in notices)
        assert run_json("diff", model, tmp_path / name / "t_partial")["equal"]
        assert run_json("diff", model / "model.safetensors", tmp_path / name / "t_partial")["equal"]


def test_what_a_checkpoint_was_converted_to_is_compared_whole(gpt2, tmp_path):
    """Any format that holds nested dicts says the same of the same content; a changed moment is found."""
    make_partial(gpt2, tmp_path / "ck", "t", 1)
    source = tmp_path / "ck/t_partial"
    tensors = len(run_json("inspect", source)["tensors"])
    for to in ("pt", "dcp"):
        run("convert", source, tmp_path / to, "--to", to)
        got = run_json("diff", source, tmp_path / to)
        assert got["equal"] and got["compared"]["tensors"] == tensors and got["compared"]["values"] >= 2
    assert run_json("diff", tmp_path / "pt", tmp_path / "dcp")["compared"]["tensors"] == tensors
    content = torch.load(tmp_path / "pt", weights_only=True)
    content["optimizer"]["state"]["word_embedding.weight"]["exp_avg"][3, 4] += 1
    content["user_content"]["epoch"] = 2
    torch.save(content, tmp_path / "pt")
    got = run_json("diff", source, tmp_path / "pt", code=4)
    assert only(got)["name"] == "optimizer/state/word_embedding.weight/exp_avg" and only(got)["index"] == [3, 4]
    assert [v["path"] for v in got["values"]] == ["user_content/epoch"]


def test_our_names_are_known_in_any_format(gpt2, tmp_path):
    make_partial(gpt2, tmp_path / "ck", "t", 1)
    run("convert", tmp_path / "ck/t_partial", tmp_path / "x.dcp", "--to", "dcp")
    run("merge", tmp_path / "ck/t_partial", tmp_path / "x.full", "--to", "full")
    assert run_json("diff", tmp_path / "x.dcp", gpt2)["equal"]
    assert run_json("diff", tmp_path / "x.full", gpt2)["equal"]
    assert run_json("diff", tmp_path / "x.full", tmp_path / "x.dcp")["equal"]
    assert run_json("diff", tmp_path / "x.full", tmp_path / "ck/t_partial")["equal"]


def test_a_two_by_two_layout_equals_the_model_and_the_one_that_it_came_from(llama, gpt2, tmp_path):
    for name, model in (("llama", llama), ("gpt2", gpt2)):
        make_partial(model, tmp_path / name, "t", 1, pp=1)
        source, out = tmp_path / name / "t_partial", tmp_path / name / "two/t_partial"
        run("reshard", source, out, "--pipeline-parallel-degree", 2, "--tensor-parallel-degree", 2)
        got = run_json("diff", source, out)
        assert got["equal"] and got["compared"]["tensors"] == len(run_json("inspect", source)["tensors"])
        assert run_json("diff", out, model)["equal"]


def test_one_changed_element_of_a_model_is_named_with_its_place(llama, saved, tmp_path):
    model = Path(shutil.copytree(llama, tmp_path / "model"))
    name = "model.layers.3.self_attn.k_proj.weight"
    tensors = load_file(model / "model.safetensors")
    before = tensors[name][5, 7].item()
    tensors[name][5, 7] += 0.5
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    got = only(run_json("diff", saved / "a_partial", model, code=4))
    assert got["name"] == name and got["kind"] == "values" and got["differing"] == 1 and got["index"] == [5, 7]
    assert math.isclose(got["largest"], 0.5, rel_tol=1e-6) and math.isclose(float(got["a_element"]), before, rel_tol=1e-7)
    text = run("diff", saved / "a_partial", model, code=4).stdout
    assert f"{name}: 1 of 768 elements differs, by 0.5" in text and "[5, 7]" in text
    assert text.splitlines()[-1].startswith("different: 1 of ")


def test_a_fused_matrix_is_compared_in_its_own_orientation(gpt2, tmp_path):
    """A changed element of the [in, out] c_attn is at the same place in the checkpoint's export names."""
    make_partial(gpt2, tmp_path / "ck", "t", 1)
    model = Path(shutil.copytree(gpt2, tmp_path / "model"))
    tensors = load_file(model / "model.safetensors")
    name = "transformer.h.2.attn.c_attn.weight"
    tensors[name][3, 70] = 9.0
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    got = only(run_json("diff", tmp_path / "ck/t_partial", model, code=4))
    assert got["name"] == name and got["index"] == [3, 70] and got["b_element"] == "9"


def test_a_file_with_other_names_of_the_family_is_compared(gpt2, tmp_path):
    """As the hub's gpt2: no prefix, with mask buffers, and a head that repeats the embedding."""
    make_partial(gpt2, tmp_path / "ck", "t", 1)
    tensors = {n.removeprefix("transformer."): t for n, t in load_file(gpt2 / "model.safetensors").items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 48, 48)
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    file = put(tmp_path / "hub.safetensors", tensors)
    result = run("diff", tmp_path / "ck/t_partial", file)
    assert "prefix 'transformer.'" in result.stderr and "buffers" in result.stderr
    tensors["lm_head.weight"][0, 0] += 1
    put(file, tensors)
    assert only(run_json("diff", tmp_path / "ck/t_partial", file, code=4))["name"] == "lm_head.weight"


def test_a_torch_file_equals_a_safetensors_file(tmp_path):
    tensors = {"x.y": distinct([4, 5], torch.float32), "z": distinct([3], torch.int64)}
    torch.save(tensors, tmp_path / "a.pt")
    put(tmp_path / "b.safetensors", tensors)
    assert run_json("diff", tmp_path / "a.pt", tmp_path / "b.safetensors")["equal"]


def test_ties_that_one_format_leaves_out_are_no_difference(tmp_path):
    shared = distinct([4, 5], torch.float32)
    torch.save({"a": shared, "b": shared}, tmp_path / "a.pt")
    put(tmp_path / "b.safetensors", {"a": shared})
    result = run("diff", tmp_path / "a.pt", tmp_path / "b.safetensors")
    assert "1 tied name" in result.stderr
    torch.save({"a": shared}, tmp_path / "c.pt")
    assert only(run_json("diff", tmp_path / "a.pt", tmp_path / "c.pt", code=4))["kind"] == "only_in_a"


def test_strides_deflated_records_and_repetitions(tmp_path):
    base = distinct([6, 8], torch.float32)
    torch.save({"t": base.t(), "e": distinct([1, 5], torch.int32).expand(7, 5), "s": base[1:5:2, ::3]}, tmp_path / "a.pt")
    torch.save({"t": base.t().contiguous(), "e": distinct([1, 5], torch.int32).expand(7, 5).contiguous(),
                "s": base[1:5:2, ::3].clone()}, tmp_path / "b.pt")  # fmt: skip
    assert run_json("diff", tmp_path / "a.pt", tmp_path / "b.pt")["equal"]
    with zipfile.ZipFile(tmp_path / "b.pt") as old, zipfile.ZipFile(tmp_path / "c.pt", "w", zipfile.ZIP_DEFLATED) as new:
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
    assert run_json("diff", tmp_path / "a.pt", tmp_path / "c.pt")["equal"]
    torch.save({"x": distinct([1, 5], torch.int32).expand(7, 5)}, tmp_path / "x.pt")
    torch.save({"x": distinct([1, 5], torch.int32, 3).expand(7, 5)}, tmp_path / "y.pt")
    assert only(run_json("diff", tmp_path / "x.pt", tmp_path / "y.pt", code=4))["differing"] == 35


def test_scalars_and_tensors_without_elements(tmp_path):
    a, b = pair(tmp_path, {"s": torch.tensor(1.5), "z": torch.zeros(0, 3)}, {"s": torch.tensor(1.5), "z": torch.zeros(0, 3)})
    assert run_json("diff", a, b)["equal"]
    put(b, {"s": torch.tensor(2.5), "z": torch.zeros(0, 3)})
    got = only(run_json("diff", a, b, code=4))
    assert got["name"] == "s" and got["index"] == [] and got["largest"] == 1.0


# Element types


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_changed_element_of_every_type(tmp_path, dtype):
    tensor = distinct([5, 11], torch.float32).to(dtype) if dtype.itemsize == 1 else distinct([5, 11], dtype)
    changed = tensor.clone()
    changed.view(torch.uint8).flatten()[(3 * 11 + 4) * dtype.itemsize] ^= 1
    a, b = pair(tmp_path, {"x": tensor}, {"x": changed})
    assert run_json("diff", a, a)["equal"]
    got = only(run_json("diff", a, b, code=4))
    assert got["differing"] == 1 and got["index"] == [3, 4] and got["a"]["dtype"] == str(dtype).removeprefix("torch.")
    assert got["a_element"] != got["b_element"]


@pytest.mark.parametrize("dtype", [d for d in DTYPES if str(d).startswith("torch.float8")], ids=str)
def test_every_8_bit_float_is_the_number_that_torch_says(tmp_path, dtype):
    tensor = torch.arange(256).to(torch.uint8).view(dtype)
    a, b = pair(tmp_path, {"x": tensor}, {"x": tensor.to(torch.float32)})
    assert run_json("diff", a, b, "--ignore-dtype")["equal"]
    other = tensor.to(torch.float32)
    other[0x21] += 1
    put(b, {"x": other})
    assert only(run_json("diff", a, b, "--ignore-dtype", code=4))["index"] == [0x21]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_16_bit_float_is_the_number_that_torch_says(tmp_path, dtype):
    tensor = torch.arange(65536).to(torch.uint16).view(dtype)
    a, b = pair(tmp_path, {"x": tensor}, {"x": tensor.to(torch.float64)})
    assert run_json("diff", a, b, "--ignore-dtype")["equal"]


def test_another_type_with_the_same_values_is_a_difference_unless_asked(tmp_path):
    numbers = torch.randn(7, 9).to(torch.bfloat16)
    a, b = pair(tmp_path, {"x": numbers}, {"x": numbers.float()})
    got = only(run_json("diff", a, b, code=4))
    assert got["kind"] == "dtype" and (got["a"]["dtype"], got["b"]["dtype"]) == ("bfloat16", "float32")
    assert "the values are equal" in run("diff", a, b, code=4).stdout
    assert not run_json("diff", a, b, "--rtol", "1", code=4)["equal"]
    assert run_json("diff", a, b, "--ignore-dtype")["equal"]


def test_bits_decide_where_nothing_else_is_asked(tmp_path):
    a, b = pair(tmp_path, {"x": torch.tensor([0.0, 1.0])}, {"x": torch.tensor([-0.0, 1.0])})
    got = only(run_json("diff", a, b, code=4))
    assert got["differing"] == 1 and got["largest"] == 0 and (got["a_element"], got["b_element"]) == ("0", "-0")
    assert "only in their bits" in run("diff", a, b, code=4).stdout
    assert run_json("diff", a, b, "--atol", "0")["equal"]


def test_64_bit_integers_are_exact(tmp_path):
    big = 2**60
    a, b = pair(tmp_path, {"x": torch.tensor([big, 5])}, {"x": torch.tensor([big + 1, 5])})
    got = only(run_json("diff", a, b, "--atol", "0.5", code=4))
    assert got["largest"] == 1 and (got["a_element"], got["b_element"]) == (str(big), str(big + 1))
    assert run_json("diff", a, b, "--atol", "1")["equal"]


def test_tolerances_mean_what_torch_means(tmp_path):
    torch.manual_seed(5)
    a = torch.randn(4000, dtype=torch.float64)
    b = a + torch.randn(4000, dtype=torch.float64) * torch.rand(4000).double() * 1e-3
    for number, value in ((3, math.nan), (4, math.inf), (5, -math.inf)):
        a[number] = b[number] = value
    a[6], b[6] = math.nan, 1.0
    a[7], b[7] = math.inf, 1.0
    a[8], b[8] = 1.0, math.inf
    a[9], b[9] = math.inf, -math.inf
    files = pair(tmp_path, {"x": a}, {"x": b})
    for rtol, atol in ((0, 0), (1e-3, 0), (0, 1e-4), (1e-4, 1e-5), (1, 1)):
        got = only(run_json("diff", *files, "--rtol", rtol, "--atol", atol, code=4))
        expected = ~torch.isclose(a, b, rtol=rtol, atol=atol, equal_nan=True)
        assert got["differing"] == int(expected.sum()) and got["largest"] == "infinity" and got["index"] == [6]
    a[6:10] = b[6:10] = 0
    files = pair(tmp_path, {"x": a}, {"x": b})
    got = only(run_json("diff", *files, "--rtol", 1e-4, code=4))
    distance = torch.nan_to_num((a - b).abs()) * ~torch.isclose(a, b, rtol=1e-4, atol=0, equal_nan=True)
    assert got["largest"] == distance.max().item() and got["index"] == [distance.argmax().item()]


def test_complex_numbers_are_compared_by_their_distance(tmp_path):
    a, b = pair(tmp_path, {"x": torch.tensor([1 + 1j, 2 - 2j])}, {"x": torch.tensor([1 + 1j, 5 + 2j])})
    got = only(run_json("diff", a, b, code=4))
    assert got["largest"] == 5 and (got["a_element"], got["b_element"]) == ("2-2j", "5+2j")
    assert run_json("diff", a, b, "--atol", 5)["equal"]


# Names, shapes, values


def test_names_and_shapes(tmp_path):
    a, b = pair(tmp_path, {"x": torch.zeros(2), "only.a": torch.zeros(1)}, {"x": torch.zeros(3), "only.b": torch.zeros(1)})
    got = {t["name"]: t["kind"] for t in run_json("diff", a, b, code=4)["tensors"]}
    assert got == {"x": "shape", "only.a": "only_in_a", "only.b": "only_in_b"}
    text = run("diff", a, b, code=4).stdout
    assert "x: A has float32 [2], B has float32 [3]" in text and "only.a: only in A: float32 [1]" in text


def test_patterns_choose_names(tmp_path):
    a, b = pair(tmp_path, {"h.0.w": torch.zeros(2), "h.1.w": torch.zeros(2)}, {"h.0.w": torch.ones(2), "h.1.w": torch.ones(2)})
    names = lambda *words: [t["name"] for t in run_json("diff", a, b, *words, code=4)["tensors"]]  # noqa: E731
    assert names("--include", "h.0*") == ["h.0.w"] and names("--exclude", "*.0.*") == ["h.1.w"]
    assert names("--include", "h.0*", "--include", "h.1*") == ["h.0.w", "h.1.w"]
    assert run_json("diff", a, b, "--exclude", "h.0*", "--exclude", "*1*")["equal"]


def test_values_beside_the_tensors(tmp_path):
    w = torch.ones(2)
    torch.save({"w": w, "step": 3, "lr": 0.1, "n": {"a": [1, 2], "gone": None}, "same": "x"}, tmp_path / "a.pt")
    torch.save({"w": w, "same": "x", "lr": 0.1 + 1e-12, "step": 4, "n": {"a": [1, 3], "new": True}}, tmp_path / "b.pt")
    got = run_json("diff", tmp_path / "a.pt", tmp_path / "b.pt", code=4)
    found = {v["path"]: (v["a"], v["b"]) for v in got["values"]}
    assert found == {
        "step": ("3", "4"),
        "lr": ("0.1", repr(0.1 + 1e-12)),
        "n/a/#1": ("2", "3"),
        "n/gone": ("null", None),
        "n/new": (None, "true"),
    }
    assert got["tensors"] == [] and got["values_differing"] == 5
    left = run_json("diff", tmp_path / "a.pt", tmp_path / "b.pt", "--rtol", 1e-9, "--exclude", "n/*", code=4)
    assert [v["path"] for v in left["values"]] == ["step"]
    assert run_json("diff", tmp_path / "a.pt", tmp_path / "b.pt", "--weights-only")["equal"]


def test_the_list_has_an_end(tmp_path):
    a, b = pair(tmp_path, {f"t{i:03}": torch.zeros(1) for i in range(150)}, {f"t{i:03}": torch.ones(1) for i in range(150)})
    lines = run("diff", a, b, code=4).stdout.splitlines()
    assert len(lines) == 102 and lines[100].startswith("... and 50 more") and lines[101] == "different: 150 of 150 tensors"
    assert len(run("diff", a, b, "--max-lines", 3, code=4).stdout.splitlines()) == 5
    assert len(run_json("diff", a, b, code=4)["tensors"]) == 150


def test_control_characters_stay_out_of_the_terminal(tmp_path):
    a, b = pair(tmp_path, {"a\033[31m": torch.zeros(1)}, {"a\033[31m": torch.ones(1)})
    assert "\033" not in run("diff", a, b, code=4).stdout


# Size


def test_tensors_larger_than_the_memory_in_any_orientation(tmp_path):
    rows, columns = 3000, 7001
    base = torch.arange(rows * columns, dtype=torch.int32).reshape(rows, columns)
    put(tmp_path / "a.safetensors", {"x": base})
    changed = base.clone()
    changed[2718, 6999] = -7
    torch.save({"x": changed.t().contiguous().t()}, tmp_path / "b.pt")
    words = ["diff", tmp_path / "a.safetensors", tmp_path / "b.pt", "--memory-limit", "32MiB"]
    got = only(run_json(*words, code=4))
    assert got["differing"] == 1 and got["index"] == [2718, 6999] and got["b_element"] == "-7"
    assert peak_memory(*words, "-q", code=4) < 100e6


def test_a_large_model_is_compared_in_little_memory(large):
    assert peak_memory("diff", "-q", large / "ck/t_partial", large / "model") < 300e6
    assert peak_memory("diff", "-q", large / "ck/t_partial", large / "model", "--memory-limit", "40MB") < 120e6


# Mistakes


def test_mistakes_are_one_line(saved, llama, tmp_path):
    line = fails(2, "diff", saved / "a_partal", llama)
    assert "did you mean" in line and "a_partial" in line
    assert "a_partial?" in fails(2, "diff", saved / "a", llama)
    assert "shardsmith ls" in fails(2, "diff", saved, llama)
    (tmp_path / "text").write_text("no checkpoint")
    fails(5, "diff", tmp_path / "text", llama)
    fails(2, "diff", llama)
    fails(2, "diff", llama, llama, "--rtol", "-1")
    fails(2, "diff", llama, llama, "--threads", "0")
    assert "--memory-limit" in fails(2, "diff", llama, llama, "--memory-limit", "1MB")
    assert "--ignore-dtype" in fails(2, "diff", llama, llama, "--ignore-dtyp")


def test_damage_is_said_and_no_difference(copied, saved):
    path = copied / "a_partial/model_1_0.pt"
    flip(path, path.stat().st_size // 2)
    assert "model_1_0.pt" in fails(5, "diff", saved / "a_partial", copied / "a_partial")


def test_a_view_that_repeats_too_much_is_refused(tmp_path):
    """A few bytes that claim to be more elements than anyone can look at."""
    one = torch.ones(1)
    torch.save({"x": torch.as_strided(one, (2**40, 1), (0, 1))}, tmp_path / "a.pt")
    assert run_json("diff", tmp_path / "a.pt", tmp_path / "a.pt")["equal"]
    torch.save({"x": torch.as_strided(torch.ones(2), (2**40, 2), (0, 1))}, tmp_path / "b.pt")
    torch.save({"x": torch.as_strided(torch.ones(2**20), (2**40, 2), (0, 1))}, tmp_path / "c.pt")
    run("diff", tmp_path / "b.pt", tmp_path / "c.pt")
    torch.save({"x": torch.as_strided(torch.ones(2**10), (2**20, 2**10), (0, 1))}, tmp_path / "d.pt")
    torch.save({"x": torch.as_strided(torch.ones(2**20), (2**20, 2**10), (1, 0))}, tmp_path / "e.pt")
    assert "repeats its bytes" in fails(2, "diff", tmp_path / "d.pt", tmp_path / "e.pt")


def test_json_is_one_object(saved, llama):
    result = run("diff", saved / "a_partial", llama, "--json")
    assert json.loads(result.stdout)["notices"] and "only the weights" in result.stderr
