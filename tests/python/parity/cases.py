"""What is trained: a model, its batches and rates. Written as files that reference.py and rank.py read."""
from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from parity import models

IGNORED = -100


@dataclass(frozen=True)
class Case:
    name: str
    folder: str
    overrides: dict[str, Any]  # of the configuration
    text: bool  # real text, or random tokens
    rows: int  # of the global batch
    length: int
    steps: int
    sgd_rate: float
    adamw_rate: float  # 0: SGD only
    bare: bool = False  # a model without a head, whose outputs are judged, and their projection trained

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        data = {"batches": batches(self), "padded": padded(self)}
        if self.bare:
            width = json.loads(Path(self.folder, "config.json").read_text())["hidden_size"]
            data["projection"] = torch.randn(self.length + 1, width, generator=torch.Generator().manual_seed(21))
        torch.save(data, folder / "data.pt")
        (folder / "case.json").write_text(json.dumps(asdict(self)))


def read(folder: Path) -> tuple[Case, dict[str, Any]]:
    case = Case(**json.loads((folder / "case.json").read_text()))
    return case, torch.load(folder / "data.pt")


def smollm2(steps: int, rows: int = 8, length: int = 16, layers: int = 30) -> Case:
    """The first layers of it: 30 are all."""
    overrides = {} if layers == 30 else {"num_hidden_layers": layers}
    return Case("smollm2", str(models.smollm2()), overrides, True, rows, length, steps, sgd_rate=5e-3, adamw_rate=1e-4)


def microformer(steps: int, length: int = 32, dropout: bool = False) -> Case:
    overrides = {} if dropout else {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    return Case("microformer", str(models.microformer()), overrides, False, 8, length, steps, sgd_rate=1e-3,
                adamw_rate=1e-4)


def minilm(steps: int, length: int = 24) -> Case:
    overrides = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return Case("minilm", str(models.minilm()), overrides, True, 8, length, steps, sgd_rate=1e-2, adamw_rate=0.0,
                bare=True)


def projected(case: Case, output: Any, mask: torch.Tensor,
              projection: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of a bare model: a number that depends on everything it computes, and what it computes (at padding: zeros)."""
    mask = mask.unsqueeze(-1)
    hidden, pooled = output["last_hidden_state"] * mask, output["pooler_output"]
    projection = projection.to(hidden.dtype)
    loss = (hidden * projection[:-1]).sum() / mask.numel() + (pooled * projection[-1]).sum() / len(pooled)
    return loss, hidden.detach(), pooled.detach()


def batches(case: Case) -> torch.Tensor:
    """[steps, rows, length]"""
    count = case.steps * case.rows * case.length
    if case.text:
        tokens = torch.tensor(_text_tokens(case.folder, count))
    else:
        vocabulary = json.loads(Path(case.folder, "config.json").read_text())["vocab_size"]
        tokens = torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(20))
    return tokens.view(case.steps, case.rows, case.length)


def _text_tokens(folder: str, count: int) -> list[int]:
    from pydoc_data.topics import topics
    from tokenizers import Tokenizer

    text = "\n\n".join(topics[name] for name in sorted(topics))
    tokenizer = Tokenizer.from_file(str(Path(folder, "tokenizer.json")))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokens = tokenizer.encode(text[:count * 8]).ids
    assert len(tokens) >= count
    return tokens[:count]


def padded(case: Case) -> dict[str, torch.Tensor]:
    """One batch of rows of different lengths, padded on the right, and in one row on the left too; labels don't count on
    padding and on the beginning of some rows (a prompt). Microbatches so differ in how many labels count."""
    ids = batches(case)[0].clone()
    mask = torch.ones_like(ids)
    labels = ids.clone()
    for row in range(case.rows):
        mask[row, case.length - row % 8 * case.length // 10:] = 0
        labels[row, :row % 3 * case.length // 10] = IGNORED
    mask[1, :4] = 0
    ids[mask == 0] = 0
    labels[mask == 0] = IGNORED
    labels[1, 4] = IGNORED  # would be predicted from padding, of which eager and sdpa make different things
    assert (labels[:, 1:] != IGNORED).any(1).all()  # a mean over none is no number
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}
