"""What the tests of the verbs share, and its own tests."""

import subprocess
import sys
from pathlib import Path

import torch
from test_cli import (  # noqa: F401
    BUILD,
    PROGRAM,
    copied,
    fails,
    flip,
    gpt2,
    large,
    llama,
    make_partial,
    run,
    run_json,
    save_model,
    saved,
)

PEAK = (
    "import resource, subprocess, sys; code = subprocess.run(sys.argv[1:]).returncode;"
    "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(code)"
)


def peak_memory(*words, code=0):
    """Bytes that the program has held at most."""
    result = subprocess.run([sys.executable, "-c", PEAK, PROGRAM, *map(str, words)], capture_output=True, text=True)
    assert result.returncode == code, result.stdout + result.stderr
    return int(result.stdout.splitlines()[-1]) * 1024


def distinct(shape, dtype, start=0):
    """A tensor of distinct elements, as far as the type can tell them apart."""
    numbers = torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    if dtype == torch.bool:
        return numbers % 2 == 1
    if dtype.is_complex:
        return torch.complex(numbers, -numbers).to(dtype)
    return numbers.to(dtype)


def sparse_safetensors(path, tensors):
    """A file of {name: (dtype word, bytes of one element, shape)} whose data are a hole."""
    import json
    import math

    header, at = {}, 0
    for name, (word, size, shape) in tensors.items():
        end = at + size * math.prod(shape)
        header[name] = {"dtype": word, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    return Path(path)


def test_sparse_files_are_what_they_say(tmp_path):
    from safetensors import safe_open

    path = sparse_safetensors(tmp_path / "x.safetensors", {"a": ("F32", 4, [3, 5]), "b": ("BF16", 2, [7])})
    with safe_open(path, "pt") as file:
        assert file.get_tensor("a").shape == (3, 5) and file.get_tensor("b").dtype == torch.bfloat16


def test_every_verb_names_what_may_be_meant(saved, llama, tmp_path):  # noqa: F811
    for verb in ("merge", "convert", "reshard", "export"):
        assert "did you mean" in fails(2, verb, saved / "a_partal", tmp_path / "out", *["--to", "pt"][: 2 * (verb == "convert")])
    assert "did you mean safetensors?" in fails(2, "merge", saved / "a_partial", tmp_path / "out", "--to", "safetensor")
    assert "did you mean 'safetensors'?" in fails(2, "convert", llama, tmp_path / "out", "--to", "safetensor")
    assert "did you mean bfloat16?" in fails(2, "convert", llama, tmp_path / "out", "--to", "pt", "--dtype", "bfloat6")
    assert "did you mean logical?" in fails(2, "convert", llama, tmp_path / "out", "--to", "pt", "--names", "logcal")
    assert list(tmp_path.iterdir()) == []
