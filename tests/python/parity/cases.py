"""What is trained: a model, its batches and rates. Written as files that reference.py and rank.py read."""
from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from parity import models

ROWS = 8  # of the global batch
MICROBATCHES = 2  # per replica
IGNORED = -100


@dataclass(frozen=True)
class Case:
    name: str
    folder: str
    overrides: dict[str, Any]  # of the configuration: no dropout
    text: bool  # real text, or random tokens
    length: int
    steps: int
    sgd_rate: float
    adamw_rate: float

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({"batches": batches(self), "padded": padded(self)}, folder / "data.pt")
        (folder / "case.json").write_text(json.dumps(asdict(self)))


def read(folder: Path) -> tuple[Case, dict[str, Any]]:
    case = Case(**json.loads((folder / "case.json").read_text()))
    return case, torch.load(folder / "data.pt")


def smollm2(steps: int, length: int = 64) -> Case:
    return Case("smollm2", str(models.smollm2()), {}, True, length, steps, sgd_rate=5e-3, adamw_rate=1e-4)


def microformer(steps: int, length: int = 64) -> Case:
    overrides = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    return Case("microformer", str(models.microformer()), overrides, False, length, steps, sgd_rate=1e-3,
                adamw_rate=1e-4)


def batches(case: Case) -> torch.Tensor:
    """[steps, ROWS, length]"""
    count = case.steps * ROWS * case.length
    if case.text:
        tokens = torch.tensor(_text_tokens(case.folder, count))
    else:
        vocabulary = json.loads(Path(case.folder, "config.json").read_text())["vocab_size"]
        tokens = torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(20))
    return tokens.view(case.steps, ROWS, case.length)


def _text_tokens(folder: str, count: int) -> list[int]:
    from pydoc_data.topics import topics
    from tokenizers import Tokenizer

    text = "\n\n".join(topics[name] for name in sorted(topics))
    tokens = Tokenizer.from_file(str(Path(folder, "tokenizer.json"))).encode(text[:count * 8]).ids
    assert len(tokens) >= count
    return tokens[:count]


def padded(case: Case) -> dict[str, torch.Tensor]:
    """One batch of rows of different lengths, padded on the right, and in one row on the left too; labels don't count on
    padding and on the beginning of some rows (a prompt). Microbatches so differ in how many labels count."""
    ids = batches(case)[0].clone()
    mask = torch.ones_like(ids)
    labels = ids.clone()
    for row in range(ROWS):
        mask[row, case.length - row * case.length // 10:] = 0
        labels[row, :3 * (row % 3)] = IGNORED
    mask[1, :4] = 0
    ids[mask == 0] = 0
    labels[mask == 0] = IGNORED
    labels[1, 4] = IGNORED  # would be predicted from padding, of which eager and sdpa make different things
    assert (labels[:, 1:] != IGNORED).any(1).all()  # a mean over none is no number
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}
