"""Text to sequences: documents, tokens, packing, order. Imports no torch."""
from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardsmith.errors import Error

if TYPE_CHECKING:
    import numpy


def documents(path: str, field: str) -> Iterator[str]:
    """A text file is one document, a .jsonl file one a line."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            if not path.endswith((".jsonl", ".ndjson")):
                yield file.read().removeprefix("\ufeff").replace("\r\n", "\n")
                return
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _field(path, number, line, field)
    except UnicodeDecodeError as error:
        raise Error("invalid_argument", f"{path}: not UTF-8 (byte {error.start} of a block: {error.reason})") from None
    except OSError as error:
        kind = "not_found" if isinstance(error, (FileNotFoundError, IsADirectoryError)) else "io"
        raise Error(kind, f"{path}: {error.strerror}") from None


def _field(path: str, number: int, line: str, field: str) -> str:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise Error("invalid_argument", f"{path}:{number}: no JSON: {error}") from None
    if not isinstance(entry, dict) or not isinstance(entry.get(field), str):
        found = ", ".join(entry) if isinstance(entry, dict) else type(entry).__name__
        raise Error("invalid_argument", f"{path}:{number}: no text field '{field}' (found: {found}); "
                                        "--text-field names another")
    return entry[field]


def check_files(paths: list[str]) -> None:
    """What can be told without reading them."""
    for path in paths:
        if not os.path.exists(path):
            raise Error("not_found", f"{path}: no such file")
        if os.path.isdir(path):
            raise Error("invalid_argument", f"{path} is a folder: --data takes text files and .jsonl files")
        if os.path.getsize(path) == 0:
            raise Error("invalid_argument", f"{path} is empty")


def end_of_text(model: str, config: dict[str, Any]) -> int | None:
    """The token between documents."""
    value = config.get("eos_token_id")
    if value is None:
        path = os.path.join(model, "generation_config.json")
        if os.path.isfile(path):
            with open(path, encoding="utf-8") as file:
                value = json.load(file).get("eos_token_id")
    return value[0] if isinstance(value, list) and value else value if isinstance(value, int) else None


@dataclass
class Sequences:
    """tokens: [count, length]; the last `evaluation` of them are for evaluation."""

    tokens: numpy.ndarray
    evaluation: int
    digest: str  # of the training part

    @property
    def training(self) -> int:
        return len(self.tokens) - self.evaluation


def tokenize(model: str, paths: list[str], field: str, config: dict[str, Any]) -> numpy.ndarray:
    import numpy
    from tokenizers import Tokenizer

    path = os.path.join(model, "tokenizer.json")
    if not os.path.isfile(path):
        raise Error("not_found", f"{model} has no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:  # the library raises Exception itself
        raise Error("corrupt", f"{path}: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    end = end_of_text(model, config)
    parts = []
    for file in paths:
        found = False
        for text in documents(file, field):
            if not text.strip():
                continue
            found = True
            ids = numpy.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=numpy.int32)
            parts.append(ids if end is None else numpy.append(ids, numpy.int32(end)))
        if not found:
            raise Error("invalid_argument", f"{file} holds no text")
    tokens = numpy.concatenate(parts)
    vocabulary = config.get("vocab_size")
    if isinstance(vocabulary, int) and tokens.size and int(tokens.max()) >= vocabulary:
        raise Error("invalid_argument", f"{path} gives token {int(tokens.max())}, the model knows {vocabulary} tokens")
    return tokens


def pack(tokens: numpy.ndarray, length: int, fraction: float, most: int | None, files: list[str]) -> Sequences:
    count = len(tokens) // length
    if count < 2:
        what = "one sequence for training and one for evaluation"
        raise Error("invalid_argument", f"{', '.join(files)}: {len(tokens)} tokens are too few for {what} of {length} "
                                        "tokens; give more text or a smaller --max-seq-length")
    packed = tokens[:count * length].reshape(count, length)
    evaluation = min(max(1, round(count * fraction)), count - 1)
    if most is not None:
        evaluation = min(evaluation, most)
    digest = hashlib.sha256(packed[:count - evaluation].tobytes()).hexdigest()[:16]
    return Sequences(packed, evaluation, digest)


class Order:
    """The one global order: in each epoch a permutation by (seed, epoch). A position is a number of samples consumed."""

    def __init__(self, count: int, seed: int):
        self.count = count
        self.seed = seed
        self._epoch = -1
        self._permutation: Any = None

    def __getitem__(self, position: int) -> int:
        import numpy

        epoch, index = divmod(position, self.count)
        if epoch != self._epoch:
            generator = numpy.random.Generator(numpy.random.PCG64([self.seed, epoch]))
            self._permutation, self._epoch = generator.permutation(self.count), epoch
        return int(self._permutation[index])

    def take(self, position: int, count: int) -> list[int]:
        return [self[position + i] for i in range(count)]


def batch_positions(consumed: int, accumulation: int, replica: int, replicas: int, batch: int) -> int:
    """Where a replica's batch begins. All samples of one update are consecutive in the global order."""
    return consumed + (accumulation * replicas + replica) * batch
