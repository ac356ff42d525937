"""`shardsmith inspect`: sums, slices, the page, and how long a large checkpoint takes."""

import html.parser
import math
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from test_cli_helpers import (  # noqa: F401
    PROGRAM,
    distinct,
    fails,
    gpt2,
    llama,
    make_partial,
    run,
    run_json,
    saved,
    sparse_safetensors,
)


def test_sums_by_prefixes_of_any_depth(llama, tmp_path):
    assert set(run_json("inspect", llama)["by_prefix"]) == {"model"}
    two = run_json("inspect", llama, "--depth", 2)["by_prefix"]
    assert set(two) == {"model.layers", "model.embed_tokens", "model.norm"}
    four = run_json("inspect", llama, "--depth", 4)["by_prefix"]
    assert four["model.layers.3.self_attn"]["elements"] == 48 * 48 * 2 + 2 * 16 * 48
    assert sum(t["bytes"] for t in four.values()) == run_json("inspect", llama)["by_prefix"]["model"]["bytes"]
    save_file({"alone": torch.zeros(3)}, tmp_path / "x.safetensors")
    assert set(run_json("inspect", tmp_path / "x.safetensors", "--depth", 3)["by_prefix"]) == {"(top)"}
    fails(2, "inspect", llama, "--depth", 0)


def test_slices_say_where_they_lie(saved, tmp_path):
    text = run("inspect", saved / "a_partial", "--slices", "--filter", "seq_layers.4.attention.key.weight").stdout
    lines = [line.split() for line in text[text.index("\nSlices\n") :].splitlines() if line.startswith("  model/")]
    [words] = lines
    name, box, file, place, size, strides = words[0], words[1:3], words[3], words[4], words[5:7], words[8:]
    assert name.endswith("key.weight") and box == ["[0:16,", "0:48]"] and file == "model_1_0.pt"
    assert size == ["3.1", "kB"] and strides == ["[48,", "1]"]
    data = (saved / "a_partial" / file).read_bytes()
    begin = int(place.removeprefix("@"))
    state = torch.load(saved / "a_partial" / file, weights_only=True)
    assert data[begin : begin + 16 * 48 * 4] == state[name.removeprefix("model/")].numpy().tobytes()


class Page(html.parser.HTMLParser):
    """Balanced tags, no script, nothing from elsewhere."""

    VOID = ("meta", "br")

    def __init__(self, text):
        super().__init__()
        self.open, self.titles, self.words, self.tags = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        assert tag not in ("script", "link", "img", "iframe", "object", "form")
        self.tags.append(tag)
        for name, value in attributes:
            assert name not in ("src", "href") and not name.startswith("on")
            assert "url(" not in (value or "")
            if name == "title":
                self.titles.append(value)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def page_of(path, out):
    run("inspect", path, "--html", out)
    text = out.read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in text and "url(" not in text and "@import" not in text
    return Page(text)


def test_a_page_shows_ranks_and_layers(saved, tmp_path):
    page = page_of(saved / "a_partial", tmp_path / "page.html")
    words = " ".join(page.words)
    assert "Ranks and layers" in words and "rank 0" in words and "rank 1" in words and "step 20" in words
    first, last = (next(t for t in page.titles if t.startswith(f"rank {r} ") and f", layer {layer}: " in t) for r, layer in
                   ((0, 0), (1, 4)))  # fmt: skip
    assert "stage 0: embedding" in first and "model/transformer.seq_layers.0." in first
    assert "norm and head" in last and not any(t.startswith("rank 0 ") and ", layer 4: " in t for t in page.titles)
    for tensor in run_json("inspect", saved / "a_partial")["tensors"]:
        assert tensor["name"] in page.words
    assert [f.name for f in tmp_path.iterdir()] == ["page.html"]


def test_a_page_of_any_format(llama, tmp_path):
    shared = distinct([4, 4], torch.float32)
    torch.save({"a": shared, "b": shared, "step": 3}, tmp_path / "x.pt")
    page = page_of(tmp_path / "x.pt", tmp_path / "x.html")
    assert "tied" in page.words and " = a" in page.words
    page_of(llama, tmp_path / "y.html")


def test_padding_and_slices_of_tensor_parallel_ranks_are_shown(llama, tmp_path):
    make_partial(llama, tmp_path / "ck", "t", 1, pp=1)
    run("reshard", tmp_path / "ck/t_partial", tmp_path / "new/t_partial", "--tensor-parallel-degree", 2,
        "--pipeline-parallel-degree", 2)  # fmt: skip
    page = page_of(tmp_path / "new/t_partial", tmp_path / "page.html")
    assert len([w for w in page.words if w.startswith("rank ")]) == 4
    text = run("inspect", tmp_path / "new/t_partial", "--filter", "model/word_embedding").stdout
    assert "padded: the last holds 65 of 66 rows" in text and "model_0_1.pt" in text
    assert "padded" in page.words and "the last slice holds 65 of 66 rows" in page.titles


def test_names_in_a_page_are_text(tmp_path):
    evil = "</td><script>alert(1)</script>\"' onmouseover=x &amp; \x1b[31m\n"
    save_file({evil + ".0.w": torch.zeros(2)}, tmp_path / "x.safetensors", {"note": "<script>"})
    page = page_of(tmp_path / "x.safetensors", tmp_path / "x.html")
    assert "script" not in page.tags and any("alert(1)" in w for w in page.words)
    assert b"\x1b" not in (tmp_path / "x.html").read_bytes()


def test_a_page_replaces_only_a_page(llama, tmp_path):
    out = tmp_path / "x.html"
    run("inspect", llama, "--html", out)
    run("inspect", llama, "--html", out)
    for other in ("model.safetensors", "notes.html"):
        (tmp_path / other).write_text("<!doctype html> the only copy")
        assert "choose another name" in fails(2, "inspect", llama, "--html", tmp_path / other)
        assert (tmp_path / other).read_text() == "<!doctype html> the only copy"
    fails(2, "inspect", llama, "--html", tmp_path)
    fails(2, "inspect", llama, "--html", tmp_path / "absent/x.html")
    assert run_json("inspect", llama, "--html", out)["html"] == str(out)


def test_a_page_appears_whole_or_not_at_all(llama, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", str(small)], capture_output=True).returncode != 0:
        pytest.skip("no right to mount a small file system")
    try:
        assert "ENOSPC" in fails(1, "inspect", llama, "--html", small / "x.html")
        assert list(small.iterdir()) == []
    finally:
        subprocess.run(["umount", str(small)], check=True)


# 100 GB


def median_time(*words):
    times = []
    for _ in range(5):
        start = time.perf_counter()
        run(*words)
        times.append(time.perf_counter() - start)
    return sorted(times)[2]


def said(capsys, what, path, seconds):
    size = sum(f.stat().st_size for f in ([path] if path.is_file() else path.iterdir()))
    with capsys.disabled():
        print(f"\ninspect of {what}, {size / 1e9:.0f} GB: {seconds * 1e3:.0f} ms")
    assert size > 100e9


def llama_shapes(layers=80, hidden=8192, kv=1024, inner=28672, vocab=128256):
    yield "model.embed_tokens.weight", (vocab, hidden)
    for i in range(layers):
        for name, shape in (("self_attn.q_proj", (hidden, hidden)), ("self_attn.k_proj", (kv, hidden)),
                            ("self_attn.v_proj", (kv, hidden)), ("self_attn.o_proj", (hidden, hidden)),
                            ("mlp.gate_proj", (inner, hidden)), ("mlp.up_proj", (inner, hidden)),
                            ("mlp.down_proj", (hidden, inner)), ("input_layernorm", (hidden,)),
                            ("post_attention_layernorm", (hidden,))):  # fmt: skip
            yield f"model.layers.{i}.{name}.weight", shape
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)


def test_a_large_safetensors_file_takes_milliseconds(tmp_path, capsys):
    path = sparse_safetensors(tmp_path / "x.safetensors", {n: ("BF16", 2, s) for n, s in llama_shapes()})
    said(capsys, "a safetensors file", path, median_time("inspect", path))


def hollow(tmp_path, shape):
    """A tensor over a hole in a file, as large as one likes."""
    file = tmp_path / "hole"
    numel = math.prod(shape)
    with open(file, "ab") as hole:
        hole.truncate(max(file.stat().st_size, 2 * numel))
    return torch.from_file(str(file), shared=True, size=numel, dtype=torch.bfloat16).reshape(shape)


def test_a_large_torch_file_takes_milliseconds(tmp_path, capsys):
    path = tmp_path / "x.pt"
    with torch.serialization.skip_data():
        torch.save({n: hollow(tmp_path, s) for n, s in llama_shapes()}, path)
    said(capsys, "a torch file", path, median_time("inspect", path))


def sparse_partial(tmp_path, llama):
    """A 1-stage checkpoint of 100 GB in holes: what `inspect` reads of it is real, the blocks' checksums are made up."""
    import json
    import zipfile
    import zlib

    make_partial(llama, tmp_path / "small", "t", 1, pp=1)
    folder = Path(shutil.copytree(tmp_path / "small/t_partial", tmp_path / "t_partial"))
    shapes = {n.replace("model.layers", "transformer.seq_layers"): s for n, s in llama_shapes(60)}
    manifest = json.loads((folder / "manifest.json").read_text())
    files = {f["name"]: f for f in manifest["files"]}
    moments = ("exp_avg", "exp_avg_sq")
    with torch.serialization.skip_data():
        torch.save({n: hollow(tmp_path, s) for n, s in shapes.items()}, folder / "model_0_0.pt")
        torch.save({"state": {n: {m: hollow(tmp_path, s) for m in moments} for n, s in shapes.items()},
                    "param_groups": []}, folder / "optimizer_0_0.pt")  # fmt: skip
    names = {
        "model_0_0.pt": [(f"model/{n}", s) for n, s in shapes.items()],
        "optimizer_0_0.pt": [(f"optimizer/state/{n}/{m}", s) for n, s in shapes.items() for m in moments],
    }
    for name, tensors in names.items():
        path = folder / name
        with zipfile.ZipFile(path, "a") as file:
            prefix = file.namelist()[0].split("/")[0]
            covered = file.start_dir
            slices = [{"tensor": i, "name": n, "shape": s, "offset": [0] * len(s), "extent": s}
                      for i, (n, s) in enumerate(tensors)]  # fmt: skip
            record = {"version": 1, "block_size": 2**20, "covered": covered, "slices": slices, "extra": {},
                      "crc": "00000000" * -(-covered // 2**20)}  # fmt: skip
            text = json.dumps(record, separators=(",", ":"))
            file.writestr(f"{prefix}/shardsmith", text)
        files[name] |= {"size": path.stat().st_size, "digest": f"{zlib.crc32(text.encode()):08x}"}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_a_large_partial_checkpoint_takes_milliseconds(tmp_path, llama, capsys):
    folder = sparse_partial(tmp_path, llama)
    assert len(run_json("inspect", folder)["tensors"]) > 1000
    said(capsys, "a partial checkpoint", folder, median_time("inspect", folder))


def test_a_large_sharded_model_takes_milliseconds(tmp_path, llama, capsys):
    import json

    shutil.copy(llama / "config.json", tmp_path)
    weight_map, shards = {}, {}
    for number, (name, shape) in enumerate(llama_shapes()):
        file = f"model-{number * 30 // 723 + 1:05d}-of-00030.safetensors"
        weight_map[name] = file
        shards.setdefault(file, {})[name] = ("BF16", 2, shape)
    for file, tensors in shards.items():
        sparse_safetensors(tmp_path / file, tensors)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    said(capsys, f"a model in {len(shards)} files", tmp_path, median_time("inspect", tmp_path))


def test_the_program_alone_answers_at_once():
    assert os.access(PROGRAM, os.X_OK)
    assert median_time("--version") < 0.2


def test_full_checkpoints_are_listed_among_the_others(saved, tmp_path):
    folder = Path(shutil.copytree(saved, tmp_path / "saved"))
    run("merge", folder / "a_partial", folder / "whole", "--to", "full")
    found = {f["name"]: f for f in run_json("ls", folder)["checkpoints"]}
    assert set(found) == {"a_partial", "z_partial", "whole"}
    assert found["whole"]["kind"] == "full" and found["whole"]["complete"] and found["whole"]["manifest"]["step"] == 20
    assert found["a_partial"]["kind"] == "partial"
    files = [f for f in folder.iterdir() if f.is_file() and f.name.endswith("whole")]
    assert found["whole"]["bytes"] == sum(f.stat().st_size for f in files) and len(files) == 3
    assert "full, one file" in run("ls", folder).stdout
    assert len(run("verify", folder).stdout.splitlines()) == 3
    (folder / "user_content_whole").unlink()
    [broken] = [f for f in run_json("ls", folder)["checkpoints"] if f["name"] == "whole"]
    assert not broken["complete"] and "user_content_whole" in broken["why_not"]
    run("verify", folder, code=4)


def test_many_ranks_are_a_number(saved, tmp_path):
    """A manifest may speak of millions of ranks."""
    import json

    folder = Path(shutil.copytree(saved / "a_partial", tmp_path / "t_partial"))
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"world_size": 2 * 10**6, "rdp": 10**6}))
    assert "... (1000000 ranks)" in run("inspect", folder).stdout
    page_of(folder, tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 10**6
