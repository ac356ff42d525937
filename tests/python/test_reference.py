"""The pages about the interface: the API reference is current, the migration page has every call, and the messages that troubleshooting
explains are the ones that are raised."""
from __future__ import annotations

import re
import runpy

import pytest

from parity.ranks import ROOT
from test_names import MODEL, OPTIMIZER, OUTPUT, TABLE

DOCS = ROOT / "docs"
OF_OTHERS = ("'NoneType' object has no attribute 'param_groups'", "Torch not compiled with CUDA enabled")


def test_the_api_reference_is_current_and_has_every_name():
    page = runpy.run_path(str(ROOT / "scripts" / "api_reference.py"))["page"]()
    assert (DOCS / "api.md").read_text(encoding="utf-8") == page, "run scripts/api_reference.py"
    for path, _ in TABLE:
        name = path.removesuffix(".__init__")
        if "._" not in name and name not in ("DistributedModel.zero_grad",):  # torch's own
            assert f"`{name}(" in page, name


def test_the_migration_page_has_every_call():
    text = (DOCS / "migration.md").read_text(encoding="utf-8")
    words = set(re.findall(r"`([\w.]+)`", text))
    shown = {word.rpartition(".")[2] for word in words}
    for name in [*(path.removesuffix(".__init__").rpartition(".")[2] for path, _ in TABLE), *MODEL, *OPTIMIZER, *OUTPUT]:
        if name in ("get_full_state_dict_from_sharded_data_parallel_checkpoint", "get_param_shapes", "get_buffer_names", "step", "GradScaler"):
            continue  # under the name of their module
        assert name in shown, name


def sources() -> str:
    files = [*(ROOT / "python" / "shardsmith" / "smp").rglob("*.py"), *(ROOT / "python" / "shardsmith").glob("*.py"), *(ROOT / "src").rglob("*.cc")]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    return re.sub(r'"\s*\n\s*f?"', "", text)  # literals that go on in the next line


def test_troubleshooting_explains_messages_that_there_are():
    code = sources()
    headings = re.findall(r"\*\*`(.+?)`\*\*", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"))
    assert len(headings) > 25
    for heading in headings:
        if heading in OF_OTHERS:
            continue
        pieces = [piece.strip(" ;,:'") for piece in heading.split("...")]
        for piece in pieces:
            assert len(piece) < 4 or piece in code, f"{heading!r}: nothing says {piece!r}"


@pytest.mark.parametrize("example", ["train_smp.py", "train_smp_1_6.py", "train_trainer.py"])
def test_every_example_is_on_a_page(example):
    assert any(example in page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md"))
