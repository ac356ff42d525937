"""Between Hugging Face shaped tensors in memory and our logical tensors in a checkpoint: pieces, wants and leaves."""
from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any

import torch

from shardsmith.errors import Error


def torch_word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def piece_view(tensor: torch.Tensor, shape: list[int], permutation: list[int], offset: list[int], run: int = 0,
               step: int = 0) -> torch.Tensor:
    """The logical tensor as a view: its dimension d is the tensor's dimension permutation[d], beginning at `offset`.
    Where its rows come in runs (_core.Model.pieces), the view is [runs, run, ...]: reshaped to `shape` it is the
    logical tensor, as a copy."""
    strides = [tensor.stride(d) for d in permutation]
    start = tensor.storage_offset() + sum(o * s for o, s in zip(offset, tensor.stride()))
    sizes = list(shape)
    if run:
        sizes[:1] = [shape[0] // run, run]
        strides[:1] = [step * strides[0], strides[0]]
    return tensor.detach().as_strided(sizes, strides, start)


def pieces_of(model: Any, hf_name: str, tensor: torch.Tensor) -> Iterator[tuple[str, list[int], torch.Tensor]]:
    """(logical name, logical shape, view) of each piece of a local tensor."""
    for name, shape, *place in model.pieces(hf_name):
        yield name, list(shape), piece_view(tensor, shape, *place)


def want(name: str, view: torch.Tensor) -> tuple[Any, ...]:
    """A whole tensor of an Index, into the memory of a view on CPU."""
    storage = view.untyped_storage()
    begin = view.storage_offset() * view.element_size()
    shape = list(view.shape)
    return (name, torch_word(view.dtype), shape, [0] * len(shape), shape, storage.data_ptr() + begin,
            storage.nbytes() - begin, list(view.stride()))


class Staging:
    """Reads into tensors on any device: those on CPU directly, others by way of a copy, like those
    whose rows don't lie together."""

    def __init__(self) -> None:
        self.wants: list[tuple[Any, ...]] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, name: str, view: torch.Tensor, shape: list[int] | None = None) -> None:
        """`shape`: that of the tensor called `name`, where the view's dimensions are more."""
        shape = list(view.shape) if shape is None else shape
        if view.device.type != "cpu" or list(view.shape) != shape:
            copy = torch.empty(shape, dtype=view.dtype)
            self._copies.append((view, copy.view(view.shape)))
            view = copy
        self.wants.append(want(name, view))

    def read(self, index: Any, **options: Any) -> dict[str, Any]:
        report = index.read(self.wants, **options)
        with torch.no_grad():
            for target, copy in self._copies:
                target.copy_(copy)
        return report


def make_leaf(tensor: torch.Tensor, keep: list[torch.Tensor], name: str = "") -> Any:
    """The tensor as something that is saved. `keep` holds what must stay alive until then."""
    from shardsmith import _core

    if tensor.layout != torch.strided:
        raise Error("unsupported", f"{name or 'a tensor'}: {tensor.layout} tensors can't be saved")
    value = tensor.detach().cpu()
    keep.append(value)
    storage = value.untyped_storage()
    shape = list(value.shape)
    options = {"name": name, "global_shape": shape, "box_offset": [0] * len(shape)} if name else {}
    return _core.Leaf(torch_word(value.dtype), storage.data_ptr(), storage.nbytes(), value.storage_offset(), shape,
                      list(value.stride()), tensor.requires_grad and tensor.is_leaf, **options)


def resolve_hf(names: set[str], hf_name: str, tied: list[str]) -> str:
    """The spelling of a Hugging Face name in a file: with or without the base model's prefix, or a tied name."""
    candidates = [hf_name, hf_name.partition(".")[2]]
    candidates += [f"{prefix}{name}" for prefix in ("module.", "_orig_mod.") for name in list(candidates)]
    for name in candidates + tied:
        if name and name in names:
            return name
    raise Error("corrupt", f"tensor {hf_name} is missing")


def initialize(hf_name: str, tensor: torch.Tensor, seed: int, config: dict[str, Any]) -> None:
    """Initial weights as transformers' families have them; a function of (seed, name, index), so that every layout
    begins with the same."""
    with torch.no_grad():
        if hf_name.endswith(".bias"):
            tensor.zero_()
            return
        if tensor.dim() == 1:  # norms
            tensor.fill_(1)
            return
        deviation = config.get("initializer_range", 0.02)
        if config["model_type"] == "gpt2" and hf_name.endswith("c_proj.weight"):
            deviation /= math.sqrt(2 * config["n_layer"])
        digest = hashlib.sha256(f"{seed}/{hf_name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        if tensor.device.type == "cpu":
            tensor.normal_(0, deviation, generator=generator)
        else:
            tensor.copy_(torch.empty(tensor.shape, dtype=tensor.dtype).normal_(0, deviation, generator=generator))
