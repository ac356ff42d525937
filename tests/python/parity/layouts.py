"""Degrees, and what else of the configuration may change how a step is computed but not what comes out."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

PLACEMENTS = ("cluster", "TPD", "DTP", "spread", "PDT", "PTD", "TDP")


@dataclass(frozen=True)
class Layout:
    pp: int = 1
    tp: int = 1
    rdp: int = 1
    checkpointing: str = ""  # strategy of smp.set_activation_checkpointing for the model's layers
    shard: bool = False  # shard_optimizer_state
    optimize: str = "memory"
    prescaled: bool = True
    placement: str = "cluster"
    precision: str = ""  # "bf16", "fp16"; else float32
    batches: int = 0  # microbatches; 0: as many as go well

    @property
    def ranks(self) -> int:
        return self.pp * self.tp * self.rdp

    @property
    def feeders(self) -> int:
        """Ranks of a stage that bring samples of their own."""
        return self.rdp if self.prescaled else self.rdp * self.tp

    def microbatches(self, rows: int) -> int:
        """Two of what each feeder has of the global batch, or three, or all at once, unless told."""
        if self.batches:
            return self.batches
        assert rows % self.feeders == 0, f"{rows} rows for {self.feeders}"
        each = rows // self.feeders
        return next((count for count in (2, 3) if each % count == 0), 1)

    def slices(self, rows: int) -> int:
        """Parts of the global batch that have a loss of their own."""
        return self.feeders * self.microbatches(rows)

    def config(self, rows: int) -> dict[str, Any]:
        return {"pipeline_parallel_degree": self.pp, "tensor_parallel_degree": self.tp, "ddp": self.ranks > self.pp,
                "microbatches": self.microbatches(rows), "placement_strategy": self.placement, "optimize": self.optimize,
                "prescaled_batch": self.prescaled, "shard_optimizer_state": self.shard,
                **({self.precision: True} if self.precision else {})}

    def __str__(self) -> str:
        words = [f"pp{self.pp}", f"tp{self.tp}", f"rdp{self.rdp}", self.checkpointing, "sharded" if self.shard else "",
                 self.optimize if self.tp > 1 else "", "" if self.prescaled else "own-batches",
                 self.placement if self.placement != "cluster" else "", self.precision]
        return "-".join(filter(None, words))

    asdict = asdict


def degrees(products: tuple[int, ...], tp: tuple[int, ...], pp: tuple[int, ...] = tuple(range(1, 10)),
            rdp: tuple[int, ...] = tuple(range(1, 10))) -> list[tuple[int, int, int]]:
    """All (pp, tp, rdp) of these products."""
    return [(p, t, product // p // t) for product in products for p in pp for t in tp
            if product % (p * t) == 0 and product // p // t in rdp]


def plain(which: list[tuple[int, int, int]]) -> list[Layout]:
    return [Layout(*each) for each in which]


def _varied(which: list[tuple[int, int, int]], rows: int) -> Iterator[Layout]:
    for number, (pp, tp, rdp) in enumerate(which):
        own = tp > 1 and number % 2 == 0 and rows % (tp * rdp) == 0
        yield Layout(pp, tp, rdp, checkpointing=("each", "group_2", "contiguous")[number % 3], shard=rdp > 1,
                     optimize="speed" if tp > 1 and (number // 2) % 2 == 0 else "memory", prescaled=not own,
                     placement=PLACEMENTS[number % len(PLACEMENTS)])


def varied(which: list[tuple[int, int, int]], rows: int) -> list[Layout]:
    """Each with checkpointing, and sharded where there are replicas; the rest goes round."""
    return list(_varied(which, rows))
