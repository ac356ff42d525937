"""The one error type, as in C++ (src/base/error.h)."""
from __future__ import annotations

# The blueprint's exit codes by kind; the C++ program uses the same table.
EXIT_CODES = {
    "invalid_argument": 2,
    "not_found": 2,
    "unsupported": 2,
    "corrupt": 5,
    "mismatch": 4,
    "io": 1,
    "no_space": 3,
    "timeout": 1,
    "peer": 1,
    "interrupted": 130,
}


class Error(RuntimeError):
    """Something a person can act on. `kind` is one of EXIT_CODES, `rank` the global rank it happened on (-1: none)."""

    def __init__(self, kind: str, message: str, rank: int = -1):
        super().__init__(message)
        self.kind = kind
        self.rank = rank

    @property
    def exit_code(self) -> int:
        return EXIT_CODES.get(self.kind, 1)
