"""What is on the disk to stay."""
from __future__ import annotations

import os


def sync(path: str) -> None:
    """A file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
