"""Python objects as messages between the ranks of a job.

Plain data, tensors and what `user_content` takes become plain values that say of what kind they are (values.py), and come
back as what they were. Any other object is pickled: between the ranks of one job only, never from a file.
"""
from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import io
import pathlib
import pickle
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from shardsmith.errors import Error
from shardsmith.smp import values, values_numpy
from shardsmith.smp.values_read import decode

# Classes whose own objects, not those of a subclass, come back as they were.
_EXACT = frozenset({
    list, tuple, dict, set, frozenset, collections.OrderedDict, collections.defaultdict, collections.Counter,
    collections.deque, torch.Size, torch.dtype, torch.device, complex, bytearray, type(pathlib.Path()), datetime.datetime,
    datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID, range, argparse.Namespace, values.Inert,
    values.Record,
})


class Message(NamedTuple):
    """What travels: bytes that hold plain values only, and the tensors that they refer to, strided and on the CPU."""

    data: bytes
    tensors: list[torch.Tensor]


class _Packer(values.Encoder):
    def __init__(self) -> None:
        super().__init__([], warn=lambda text: None)
        self.tensors: list[torch.Tensor] = []
        self.pickled: list[str] = []  # classes

    def _add(self, value: torch.Tensor) -> dict[str, Any]:
        if value.is_meta:
            raise Error("invalid_argument", f"a tensor of shape {list(value.shape)} on the meta device has no values to send")
        self.tensors.append(value.detach())
        return self._tagged("tensor", number=len(self.tensors) - 1, on_cpu=value.device.type == "cpu",
                            is_parameter=isinstance(value, torch.nn.Parameter), is_trained=value.requires_grad)

    def _tensor(self, value: torch.Tensor, path: str) -> Any:
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            return self._inert(value, path, "")
        if value.layout == torch.strided and not value.is_quantized:
            return self._add(value)
        if value.layout == torch.sparse_coo:
            value = value.detach().coalesce()
            return self._tagged("sparse_coo", indices=self._add(value.indices()), size=list(value.shape),
                                values=self._add(value.values()))
        return self._inert(value, path, "")

    def _object(self, value: Any, path: str) -> Any:
        if values_numpy.is_numpy(value):
            return self._numpy(value, path)
        if type(value) in _EXACT and not self._loses(value):
            return super()._object(value, path)
        return self._hf_config(value, path) or self._inert(value, path, "")

    @staticmethod
    def _loses(value: Any) -> bool:
        if isinstance(value, (datetime.datetime, datetime.time)):
            return value.tzinfo is not None and type(value.tzinfo) is not datetime.timezone
        return isinstance(value, collections.defaultdict) and value.default_factory not in (None, *values.FACTORIES.values())

    def _numpy(self, value: Any, path: str) -> Any:
        fields = values_numpy.describe(value, lambda item, place: self._value(item, path))
        return self._inert(value, path, "") if fields is None else self._tagged(**fields)

    def _inert(self, value: Any, path: str, why: str, state: Any = None) -> Any:
        try:
            data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # whatever the object's own reducer raises
            reason = str(error).strip().splitlines()
            raise Error("invalid_argument", f"an object of {type(value).__module__}.{type(value).__qualname__} can't be sent: "
                                            f"{reason[0] if reason else type(error).__name__}") from None
        self.pickled.append(f"{type(value).__module__}.{type(value).__qualname__}")
        return self._tagged("pickled", data=data)


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise Error("corrupt", f"a message from another rank names {module}.{name}, where plain values were expected")


def pack(value: Any, tell: Callable[[str], None]) -> Message:
    """`tell` gets the name of the first class that has to be pickled, if there is one."""
    packer = _Packer()
    tree = packer._value(value, "")
    if packer.pickled:
        tell(packer.pickled[0])
    tensors = [tensor.cpu().resolve_conj().resolve_neg().contiguous() for tensor in packer.tensors]
    shapes = [(list(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for tensor in tensors]
    return Message(pickle.dumps((tree, shapes), protocol=pickle.HIGHEST_PROTOCOL), tensors)


def empty_tensors(data: bytes) -> list[torch.Tensor]:
    """To receive a message's tensors into."""
    return [torch.empty(shape, dtype=getattr(torch, name)) for shape, name in _plain(data)[1]]


def unpack(message: Message, device: torch.device) -> Any:
    """`device`: of this rank, for tensors that the sender had on its own."""
    def tensor(tagged: dict[str, Any], back: Any) -> torch.Tensor:
        found = message.tensors[tagged["number"]]
        found = found if tagged["on_cpu"] else found.to(device)
        return torch.nn.Parameter(found, requires_grad=tagged["is_trained"]) if tagged["is_parameter"] else found

    kinds = {"tensor": tensor, "pickled": lambda tagged, back: pickle.loads(tagged["data"])}
    return decode(_plain(message.data)[0], lambda name: name, "a message from another rank", kinds)


def _plain(data: bytes) -> Any:
    return _PlainUnpickler(io.BytesIO(data)).load()
