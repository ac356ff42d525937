"""A whole state dict in memory as an index, so that it is read into slices like a checkpoint on disk."""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from shardsmith.errors import Error
from shardsmith.smp.slices import Piece, pieces

if TYPE_CHECKING:
    from shardsmith.smp.model import DistributedModel

_WRAPPERS = ("module.", "_orig_mod.")


def without_wrappers(name: str) -> str:
    while (cut := next((name.removeprefix(w) for w in _WRAPPERS if name.startswith(w)), None)) is not None:
        name = cut
    return name


class Names:
    """Which of a dict's names are which of the model's, as src/family/family.h has it for files."""

    def __init__(self, model: Any, given: Iterable[str]):
        prefix, suffixes = model.prefix, tuple(model.ignored_suffixes)

        def bare(name: str) -> str:
            return without_wrappers(name).removeprefix(prefix)

        left: dict[str, str] = {}
        for name in given:
            if bare(name) in left:
                raise Error("corrupt", f"the state dict's {left[bare(name)]} and {name} are the same tensor of the model")
            left[bare(name)] = name
        self.found: dict[str, str] = {}  # the model's name -> the dict's
        others: dict[str, list[str]] = {}
        for alias, hf_name in model.aliases.items():
            others.setdefault(hf_name, []).append(alias)
        for hf_name, _, _, also_last in model.tensors:
            for name in [hf_name, *(model.tied_names if also_last else ()), *others.get(hf_name, ())]:
                there = left.pop(bare(name), None)
                if there is not None:
                    self.found.setdefault(hf_name, there)
        tied = {bare(name) for name in model.tied_names}
        self.unexpected = [name for key, name in left.items()
                           if key not in tied and not (suffixes and without_wrappers(name).endswith(suffixes))]

    @property
    def renamed(self) -> list[tuple[str, str]]:
        return [(there, own) for own, there in self.found.items() if there != own]


class StateIndex:
    """Of whole tensors, under Hugging Face's names or ours. The tensors are the caller's and stay as they are."""

    format = "memory"

    def __init__(self, model: DistributedModel, tensors: Mapping[str, Any]):
        tensors = {name: value for name, value in tensors.items() if isinstance(value, torch.Tensor)}
        logical = {name for names in model._whole.piece_names.values() for name in names}
        self._tensors: dict[str, torch.Tensor] = {}
        self._parts: dict[str, tuple[torch.Tensor, Piece]] = {}
        self.told: dict[str, Any] = {"format": self.format, "unexpected": [], "renamed": []}
        if sum(name in logical for name in tensors) > sum(n in tensors for n in model.whole_shapes):
            self._tensors = tensors
            return
        names = Names(model._whole, tensors)
        self.told.update(unexpected=names.unexpected, renamed=names.renamed)
        for hf_name, shape in model.whole_shapes.items():
            if hf_name not in names.found:
                continue
            tensor = tensors[names.found[hf_name]]
            if list(tensor.shape) != shape:
                raise Error("corrupt", f"the state dict's {names.found[hf_name]} has shape {list(tensor.shape)}, the model's "
                                       f"is {shape}")
            for piece in pieces(model._whole, hf_name):
                self._parts[piece.name] = tensor, piece

    def value(self, key: str) -> None:
        """There are tensors only."""

    def names(self) -> list[str]:
        return [*self._tensors, *self._parts]

    def _get(self, name: str) -> torch.Tensor:
        if name in self._tensors:
            return self._tensors[name]
        tensor, piece = self._parts[name]
        return piece.read(tensor.detach())

    def shape(self, name: str) -> list[int]:
        return list(self._get(name).shape) if name in self._tensors else list(self._parts[name][1].shape)

    def dtype(self, name: str) -> str:
        tensor = self._tensors[name] if name in self._tensors else self._parts[name][0]
        return str(tensor.dtype).removeprefix("torch.")

    def copy(self, name: str, target: torch.Tensor, piece: Piece | None) -> None:
        """The tensor, or this rank's part of it, into a view of the caller's memory."""
        source = self._get(name)
        if list(source.shape) != (list(piece.whole) if piece else list(target.shape)):
            raise Error("corrupt", f"the state dict's {name} has shape {list(source.shape)}, the model's is "
                                   f"{list(piece.whole) if piece else list(target.shape)}")
        if piece is not None:
            source = piece.of_whole(source)
        with torch.no_grad():
            target.copy_(source.reshape(target.shape))
