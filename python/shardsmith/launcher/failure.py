"""How a rank says to its launcher why it ended: a small file, as its streams may be cut or mixed."""
from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass

from shardsmith.errors import Error

FOLDER = "SHARDSMITH_FAILURES"  # environment: the folder of these files


@dataclass
class Failure:
    rank: int
    kind: str
    text: str
    time: float

    @property
    def consequence(self) -> bool:
        """Of another rank's failure."""
        return self.kind in ("peer", "timeout")


def report(rank: int, error: BaseException) -> bool:
    """Leaves the error for the launcher. False where there is none."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return False
    kind = error.kind if isinstance(error, Error) else "bug"
    text = str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}"
    path = os.path.join(folder, f"{rank}.json")
    try:
        with open(path + ".tmp", "w", encoding="utf-8") as file:
            json.dump({"rank": rank, "kind": kind, "text": text, "time": time.time()}, file)
        os.rename(path + ".tmp", path)
    except OSError:
        return False
    return True


def read(folder: str) -> list[Failure]:
    failures = []
    for name in sorted(os.listdir(folder)):
        if name.endswith(".json"):
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                failures.append(Failure(**json.load(file)))
    return sorted(failures, key=lambda failure: failure.time)
