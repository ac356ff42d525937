"""The commands in the documents run as they stand there.

A fenced `sh` block after the line `<!-- run -->` is run in a folder that holds `model` (a Hugging Face folder) and `out`
(its checkpoints step20_partial and step40_partial).
"""

import os
import re
import subprocess
from pathlib import Path

import pytest
from test_cli import BUILD, llama, make_partial  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^<!-- run -->\n+```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks():
    for document in DOCUMENTS:
        for number, match in enumerate(BLOCK.finditer(document.read_text(encoding="utf-8"))):
            yield pytest.param(match.group(1), id=f"{document.relative_to(ROOT)}-{number}")


@pytest.mark.parametrize("commands", list(blocks()))
def test_commands(commands, llama, tmp_path):  # noqa: F811
    os.symlink(llama, tmp_path / "model")
    make_partial(llama, tmp_path / "out", "step20", 20)
    make_partial(llama, tmp_path / "out", "step40", 40)
    path = f"{BUILD}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=tmp_path,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_there_are_commands_to_run():
    assert len(list(blocks())) >= 2


def test_links_between_documents_lead_somewhere():
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8")):
            assert (document.parent / target).exists(), f"{document}: {target}"


def test_every_option_of_finetune_is_documented():
    from shardsmith.finetune.config import FinetuneConfig

    text = (ROOT / "docs/finetune.md").read_text(encoding="utf-8")
    for name, field in FinetuneConfig.model_fields.items():
        option = "--" + (field.alias or name).replace("_", "-")
        assert f"| `{option}` |" in text, option
