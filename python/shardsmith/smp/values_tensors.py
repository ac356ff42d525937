"""Memory of the tensors among values: those that share some go on sharing it, and of a large storage only what they
cover is written."""
from __future__ import annotations

from typing import Any

import torch

from shardsmith.errors import Error
from shardsmith.smp.slices import make_leaf, torch_word

_ALIGNMENT = 16  # bytes; the largest element


def span(offset: int, shape: list[int], strides: list[int], size: int) -> tuple[int, int]:
    """Bytes [begin, end) of a storage that a view covers."""
    if 0 in shape:
        return offset * size, offset * size
    last = offset + sum((n - 1) * s for n, s in zip(shape, strides))
    return offset * size, (last + 1) * size


def overlapping(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans that touch in common bytes as one each, in order."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if joined and begin < joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        elif begin < end:
            joined.append((begin, end))
    return joined


class Memory:
    """For saving. All tensors are shown to leaf() once, then settle() is called, then leaf() gives their leaves."""

    def __init__(self, keep: list[torch.Tensor]):
        self._keep = keep
        self._spans: dict[tuple[str, int], list[tuple[int, int]]] = {}
        self._sources: dict[tuple[str, int], torch.Tensor] = {}
        self._settled = False
        self._joined: dict[tuple[str, int], list[tuple[int, int]]] = {}
        self._made: dict[tuple[str, int, int], torch.Tensor] = {}

    def leaf(self, tensor: torch.Tensor) -> Any:
        requires_grad = tensor.requires_grad and tensor.is_leaf
        for odd, word in ((tensor.is_quantized, "quantized"), (tensor.is_meta, "meta"), (tensor.is_nested, "nested"),
                          (tensor.layout != torch.strided, str(tensor.layout))):
            if odd:
                raise Error("unsupported", f"a {word} tensor can't be saved")
        value = tensor.detach().resolve_conj().resolve_neg()
        if value.numel() == 0 or value.data_ptr() != tensor.data_ptr():
            value = value.requires_grad_() if requires_grad else value
            return make_leaf(value, self._keep) if self._settled else None
        key = str(value.device), value.untyped_storage().data_ptr()
        begin, end = span(value.storage_offset(), list(value.shape), list(value.stride()), value.element_size())
        if not self._settled:
            torch_word(value.dtype)
            self._spans.setdefault(key, []).append((begin, end))
            self._sources[key] = value
            return None
        low, high = next((low, high) for low, high in self._joined[key] if low <= begin and end <= high)
        alone = sum(low <= b and e <= high for b, e in self._spans[key]) == 1
        if alone and 2 * value.numel() * value.element_size() < high - low:
            return make_leaf(value.contiguous().requires_grad_(requires_grad), self._keep)
        from shardsmith import _core

        low -= low % _ALIGNMENT
        self._keep.append(value)  # torch counts the changes of its memory here
        memory = self._bytes(key, low, high)
        return _core.Leaf(torch_word(value.dtype), memory.data_ptr(), memory.numel(), (begin - low) // value.element_size(),
                          list(value.shape), list(value.stride()), requires_grad)

    def fresh(self, tensor: torch.Tensor) -> Any:
        """Of a tensor that was made for this and shares nothing."""
        return make_leaf(tensor, self._keep) if self._settled else None

    def settle(self) -> None:
        self._joined = {key: overlapping(spans) for key, spans in self._spans.items()}
        self._settled = True

    def _bytes(self, key: tuple[str, int], low: int, high: int) -> torch.Tensor:
        made = self._made.get((*key, low))
        if made is None:
            source = self._sources[key]
            storage = source.untyped_storage()
            high = min(storage.nbytes(), high + -high % _ALIGNMENT)
            view = torch.empty(0, dtype=torch.uint8, device=source.device).set_(storage, low, (high - low,), (1,))
            # On the CPU a part of a storage is a copy, so that what is written is that part.
            made = view.cpu() if (low, high) == (0, storage.nbytes()) else view.cpu().clone()
            self._keep.append(made)
            self._made[(*key, low)] = made
        return made


class Places:
    """For reading: memory for tensors of an index, shared where their bytes in the file are."""

    def __init__(self, index: Any, names: list[str]):
        self._made: dict[str, torch.Tensor] = {}
        by_file: dict[int, list[tuple[int, int, int, str, list[int]]]] = {}
        for name in dict.fromkeys(names):
            dtype = getattr(torch, index.dtype(name))
            shape, place = list(index.shape(name)), index.place(name)
            begin = end = 0
            if place is not None:
                begin, end = span(0, shape, place[2], dtype.itemsize)
            if begin == end:
                self._made[name] = torch.empty(shape, dtype=dtype)
            else:
                by_file.setdefault(place[0], []).append((place[1], place[1] + end, dtype.itemsize, name, list(place[2])))
        for entries in by_file.values():
            joined = overlapping([(begin, end) for begin, end, *_ in entries])
            for low, high in joined:
                inside = [entry for entry in entries if low <= entry[0] and entry[1] <= high]
                self._share(index, inside, low - low % _ALIGNMENT, high)

    def _share(self, index: Any, entries: list[tuple[int, int, int, str, list[int]]], low: int, high: int) -> None:
        alone = len(entries) == 1
        memory = None if alone else torch.empty(high - low, dtype=torch.uint8).untyped_storage()
        for begin, _, size, name, strides in entries:
            shape, dtype = list(index.shape(name)), getattr(torch, index.dtype(name))
            if alone or (begin - low) % size:  # nobody that we write for shares memory across elements
                self._made[name] = torch.empty(shape, dtype=dtype)
            else:
                self._made[name] = torch.empty(0, dtype=dtype).set_(memory, (begin - low) // size, shape, strides)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._made[name]

    def items(self) -> list[tuple[str, torch.Tensor]]:
        return list(self._made.items())
