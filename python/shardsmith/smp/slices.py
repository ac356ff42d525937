"""Between Hugging Face shaped tensors in memory and our logical tensors in a checkpoint: pieces, wants and leaves."""
from __future__ import annotations

import functools
import hashlib
import math
import operator
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from shardsmith.errors import Error


@functools.cache
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


class Piece(NamedTuple):
    """This rank's part of a logical tensor, as a part of a Hugging Face shaped tensor."""

    name: str
    shape: list[int]
    permutation: list[int]  # its dimension d is the tensor's dimension permutation[d]
    offset: list[int]  # in the tensor
    run: int  # rows that lie together; 0: all
    step: int  # from the beginning of a run to that of the next
    whole: list[int]  # the logical tensor's shape
    box: list[int]  # where this rank's part begins in it
    copies: int  # neighbouring tensor-parallel ranks that hold the same part

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """In the tensor's memory; [runs, run, ...] where its rows don't lie together."""
        return piece_view(tensor, self.shape, self.permutation, self.offset, self.run, self.step)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """The logical tensor, where need be a copy."""
        return self.view(tensor).reshape(self.shape)

    def is_stored_by(self, tp_rank: int) -> bool:
        """What several tensor-parallel ranks hold, the first of them stores."""
        return tp_rank % self.copies == 0

    def of_whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of the logical tensor."""
        for dimension, (begin, length) in enumerate(zip(self.box, self.shape)):
            tensor = tensor.narrow(dimension, begin, length)
        return tensor


def pieces(model: Any, hf_name: str) -> list[Piece]:
    return [Piece(*values) for values in model.pieces(hf_name)]


def cut(whole_model: Any, model: Any, hf_name: str, whole: torch.Tensor, own: torch.Tensor) -> None:
    """This rank's part of a whole Hugging Face tensor into its own."""
    for of_whole, of_own in zip(pieces(whole_model, hf_name), pieces(model, hf_name)):
        target = of_own.view(own)
        target.copy_(of_own.of_whole(of_whole.read(whole)).reshape(target.shape))


class Memory(NamedTuple):
    """Of a tensor on CPU: what its pieces are described from, by arithmetic instead of a view each."""

    dtype: str
    element: int  # bytes
    address: int  # of the storage
    size: int  # of the storage, bytes
    offset: int  # elements
    strides: tuple[int, ...]

    @staticmethod
    def of(tensor: torch.Tensor) -> Memory:
        storage = tensor.untyped_storage()
        return Memory(torch_word(tensor.dtype), tensor.element_size(), storage.data_ptr(), storage.nbytes(),
                      tensor.storage_offset(), tensor.stride())

    def begin(self, piece: Piece) -> int:
        """Where a piece begins in the storage, in elements."""
        return self.offset + sum(map(operator.mul, piece.offset, self.strides))

    def strides_of(self, piece: Piece) -> list[int]:
        """Of one whose rows lie together."""
        return [self.strides[d] for d in piece.permutation]


def described(tensors: Mapping[str, torch.Tensor]) -> list[tuple[Any, ...]]:
    """Parameters on CPU as _core takes them, each with its own memory instead of its storage's where it lies together."""
    def one(name: str, tensor: torch.Tensor) -> tuple[Any, ...]:
        if tensor.is_contiguous():
            return name, torch_word(tensor.dtype), tensor.data_ptr(), tensor.nbytes, 0, tensor.stride()
        memory = Memory.of(tensor)
        return name, memory.dtype, memory.address, memory.size, memory.offset, memory.strides

    return [one(name, tensor) for name, tensor in tensors.items()]


def want(name: str, view: torch.Tensor, whole: list[int] | None = None, box: list[int] | None = None) -> tuple[Any, ...]:
    """A tensor of an Index, or the part of it that begins at `box`, into the memory of a view on CPU."""
    memory = Memory.of(view)
    begin = memory.offset * memory.element
    shape = list(view.shape)
    return (name, memory.dtype, shape if whole is None else whole, [0] * len(shape) if box is None else box, shape,
            memory.address + begin, memory.size - begin, memory.strides)


class StoredNames(NamedTuple):
    """Under which a checkpoint has the pieces of parameters."""

    patterns: list[str]  # in which {} stands for the logical name: of several the first that the checkpoint has
    known: Collection[str] | None = None  # all names of the checkpoint; None: whatever lacks is an error

    def of(self, logical: str) -> str | None:
        """None where it is missing."""
        names = [pattern.replace("{}", logical) for pattern in self.patterns]
        return names[-1] if self.known is None else next((name for name in names if name in self.known), None)

    def of_pieces(self, parts: list[Piece]) -> list[tuple[str, Piece]]:
        """Those that are there. The others are missing, which is said elsewhere."""
        named = ((self.of(piece.name), piece) for piece in parts)
        return [(name, piece) for name, piece in named if name is not None]


class Parameters(NamedTuple):
    """To be read, all pieces of them."""

    model: Any  # _core.Model
    tensors: Mapping[str, torch.Tensor]
    names: StoredNames

    def parts(self) -> Iterator[tuple[torch.Tensor, list[tuple[str, Piece]]]]:
        """Of each its pieces that are there, with their names in the checkpoint."""
        for hf_name, tensor in self.tensors.items():
            yield tensor, self.names.of_pieces(pieces(self.model, hf_name))


class Staging:
    """Reads into tensors on any device: those on CPU directly, others by way of a copy, like those
    whose rows don't lie together."""

    def __init__(self) -> None:
        self.wants: list[tuple[Any, ...]] = []
        self._parameters: list[Parameters] = []
        self._targets: list[tuple[str, torch.Tensor, Piece | None]] = []  # a piece's tensor is the whole one
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._reading: Any = None

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """All of tensor `name`."""
        self._targets.append((name, tensor, None))
        self.wants.append(want(name, self._staged(tensor, list(tensor.shape))))

    def add_pieces(self, tensor: torch.Tensor, named: list[tuple[str, Piece]]) -> None:
        """A tensor's pieces, each with the name that it has in the checkpoint."""
        memory = Memory.of(tensor) if tensor.device.type == "cpu" else None
        for name, piece in named:
            self._targets.append((name, tensor, piece))
            if memory is None or piece.run:
                copy = self._staged(piece.view(tensor), piece.shape)
                self.wants.append(want(name, copy, piece.whole, piece.box))
                continue
            begin = memory.begin(piece) * memory.element
            self.wants.append((name, memory.dtype, piece.whole, piece.box, piece.shape, memory.address + begin,
                               memory.size - begin, memory.strides_of(piece)))

    def add_parameters(self, model: Any, tensors: Mapping[str, torch.Tensor], names: StoredNames) -> None:
        """All pieces of them. Those that need no copy are described to _core a tensor at a time."""
        plain, others = _apart(model, tensors)
        self._parameters.append(Parameters(model, plain, names))
        for tensor, named in Parameters(model, others, names).parts():
            self.add_pieces(tensor, named)

    def _staged(self, view: torch.Tensor, shape: list[int]) -> torch.Tensor:
        """Itself, or what is copied there once it has been read."""
        if view.device.type == "cpu" and list(view.shape) == shape:
            return view
        copy = torch.empty(shape, dtype=view.dtype)
        self._copies.append((view, copy.view(view.shape)))
        return copy

    def read(self, index: Any, where: str = "") -> None:
        """What this rank reads for itself alone."""
        if hasattr(index, "copy"):  # of tensors in memory: StateIndex
            for name, tensor, piece in self._targets:
                index.copy(name, tensor if piece is None else piece.view(tensor), piece)
            for parameters in self._parameters:
                for tensor, named in parameters.parts():
                    for name, piece in named:
                        index.copy(name, piece.view(tensor), piece)
            return
        self._planned(index, where).run()
        self._copy()

    def prepare(self, index: Any, where: str) -> bytes:
        """What to tell the ranks that read at the same time."""
        if hasattr(index, "copy"):
            self._reading = None
            return b""
        self._reading = self._planned(index, where)
        return self._reading.announcement()

    def _planned(self, index: Any, where: str) -> Any:
        parameters = [(p.model, described(p.tensors), p.names.patterns, p.names.known is not None) for p in self._parameters]
        return index.prepare(self.wants, where, parameters)

    def read_prepared(self, index: Any, announcements: list[bytes], rank: int) -> None:
        if self._reading is None:
            self.read(index)
            return
        self._reading.run(announcements, rank)
        self._copy()

    def _copy(self) -> None:
        with torch.no_grad():
            for target, copy in self._copies:
                target.copy_(copy)


def make_leaf(tensor: torch.Tensor, keep: list[torch.Tensor], name: str = "", piece: Piece | None = None) -> Any:
    """The tensor as something that is saved: all of tensor `name` of the checkpoint, or a piece of it. `keep` holds what
    must stay alive until then."""
    from shardsmith import _core

    if tensor.layout != torch.strided:
        raise Error("unsupported", f"{name or 'a tensor'}: {tensor.layout} tensors can't be saved")
    value = tensor.detach().cpu()
    keep.append(value)
    storage = value.untyped_storage()
    shape = list(value.shape)
    options: dict[str, Any] = {}
    if name:
        options = {"name": name, "global_shape": piece.whole if piece else shape,
                   "box_offset": piece.box if piece else [0] * len(shape)}
    return _core.Leaf(torch_word(value.dtype), storage.data_ptr(), storage.nbytes(), value.storage_offset(), shape,
                      list(value.stride()), tensor.requires_grad and tensor.is_leaf, **options)


def _apart(model: Any, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Those whose pieces are described by arithmetic, and the others."""
    in_runs = set(model.in_runs)
    plain = {name: tensor for name, tensor in tensors.items()
             if name not in in_runs and tensor.is_cpu and tensor.layout == torch.strided}
    return plain, {name: tensor for name, tensor in tensors.items() if name not in plain} if len(plain) < len(tensors) else {}


def parameter_leaves(model: Any, tensors: Mapping[str, torch.Tensor], rank: int, keep: list[torch.Tensor], name: str) -> Any:
    """By logical name the leaves of all pieces that tensor-parallel rank `rank` stores of parameters, for a value tree; `name`:
    under which the checkpoint has them, with a {} where the logical name stands."""
    from shardsmith import _core

    plain, others = _apart(model, tensors)
    keep += plain.values()
    leaves = _core.Leaves(model, described(plain), rank, name)
    for hf_name, tensor in others.items():
        for piece_name, leaf in piece_leaves(tensor, pieces(model, hf_name), rank, keep, name).items():
            leaves.add(piece_name, leaf)
    return leaves


def piece_leaves(tensor: torch.Tensor, parts: list[Piece], rank: int, keep: list[torch.Tensor], name: str) -> dict[str, Any]:
    """By logical name the leaves of the pieces that tensor-parallel rank `rank` stores; `name`: under which the checkpoint
    has them, with a {} where the logical name stands."""
    from shardsmith import _core

    memory = None
    if tensor.device.type == "cpu" and tensor.layout == torch.strided:
        keep.append(tensor)
        memory = Memory.of(tensor)
    return {piece.name: make_leaf(piece.read(tensor), keep, name.format(piece.name), piece) if memory is None or piece.run else
            _core.Leaf(memory.dtype, memory.address, memory.size, memory.begin(piece), piece.shape, memory.strides_of(piece),
                       False, name.format(piece.name), piece.whole, piece.box)
            for piece in parts if piece.is_stored_by(rank)}


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
