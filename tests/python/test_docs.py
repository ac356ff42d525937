"""The commands in the documents run as they stand there.

A fenced `sh` block after the line `<!-- run -->` is run in a folder that holds `model` (a Hugging Face folder) and `out`
(its checkpoints step20_partial and step40_partial).
A fenced `python` block after `<!-- run 2 -->` is a program that 2 ranks run in such a folder, one after the other in the
order of the page; before it stand the page's blocks that come after `<!-- common -->`.
"""

import os
import re
import subprocess
from pathlib import Path

import preloaded
import pytest
from smp_helpers import environment, free_port
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


PROGRAM = re.compile(r"^<!-- (common|run (\d+)) -->\n+```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def programs():
    for document in DOCUMENTS:
        found = [(int(ranks or 0), text) for _, ranks, text in PROGRAM.findall(document.read_text(encoding="utf-8"))]
        if any(ranks for ranks, _ in found):
            yield pytest.param(found, id=str(document.relative_to(ROOT)))


@pytest.mark.parametrize("page", list(programs()))
def test_programs(page, llama, tmp_path, monkeypatch):  # noqa: F811
    os.symlink(llama, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    common = ""
    for count, text in page:
        if not count:
            common += text
            continue
        port, processes = free_port(), []
        for rank in range(count):
            own = {} if count == 1 else {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
                                         "LOCAL_WORLD_SIZE": str(count), "MASTER_PORT": str(port)}
            processes.append(preloaded.Process(common + text, [], environment(**own)))
        outs = [process.communicate(timeout=120)[0] for process in processes]
        assert [process.returncode for process in processes] == [0] * count, text + "\n".join(outs)


def test_there_are_programs_to_run():
    pages = {page.id: page.values[0] for page in programs()}
    assert {"docs/resume.md", "docs/change-layout.md", "docs/from-1.6.md", "docs/quick-start.md"} <= set(pages)
    for document in DOCUMENTS:  # and none is passed over for a marker that nobody knows
        text = document.read_text(encoding="utf-8")
        assert len(re.findall(r"^<!-- (?:run|common)", text, re.MULTILINE)) == len(BLOCK.findall(text)) + len(PROGRAM.findall(text))


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
