"""User content as plain values and tensors, and back. Nothing is pickled: what can't be told becomes inert."""
from __future__ import annotations

import argparse
import datetime
import enum
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardsmith.smp.session import logger
from shardsmith.smp.slices import make_leaf

TAG = "__shardsmith__"


class Inert:
    """Stands for an object whose class is not rebuilt. It tells the class's name and what was known of it."""

    def __init__(self, class_name: str, state: Any = None):
        self.class_name = class_name
        self.state = state

    def __repr__(self) -> str:
        return f"<inert stand-in for {self.class_name}>"


def _class_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


class Encoder:
    """`keep` holds the tensors that must stay alive until they are written."""

    def __init__(self, keep: list[torch.Tensor], warn: Callable[[str], None] = logger.warning):
        self.keep = keep
        self.warn = warn
        self._above: set[int] = set()

    def encode(self, value: Any, path: str = "user_content") -> Any:
        if value is None or type(value) in (bool, float, str, bytes):
            return value
        if type(value) is int:
            return value
        if isinstance(value, torch.Tensor):
            return make_leaf(value, self.keep)
        if id(value) in self._above:
            return self._inert(value, path, "it contains itself")
        self._above.add(id(value))
        try:
            return self._encode(value, path)
        finally:
            self._above.discard(id(value))

    def _tagged(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {TAG: kind, **fields}

    def _encode(self, value: Any, path: str) -> Any:
        numpy = sys.modules.get("numpy")
        if isinstance(value, enum.Enum):
            return self._inert(value, path, "an enum", state=self.encode(value.value, path))
        if isinstance(value, torch.Size):
            return self._tagged("size", items=list(value))
        if isinstance(value, (torch.dtype, torch.device)):
            return self._tagged(type(value).__name__, name=str(value).removeprefix("torch."))
        if numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in "biufc":
            return self._tagged("numpy_scalar", dtype=value.dtype.name, value=self.encode(value.item(), path))
        if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
            return self._tagged("numpy_array", tensor=self.encode(torch.from_numpy(numpy.array(value)), path))
        if isinstance(value, (bool, int, float, str, bytes)):  # subclasses of these, numpy's among them
            plain = next(kind for kind in (bool, int, float, str, bytes) if isinstance(value, kind))
            return plain(value)
        if isinstance(value, complex):
            return self._tagged("complex", real=value.real, imag=value.imag)
        if isinstance(value, bytearray):
            return self._tagged("bytearray", data=bytes(value))
        if isinstance(value, argparse.Namespace):
            return self._tagged("namespace", values=self._items(vars(value), path))
        if isinstance(value, pathlib.PurePath):
            return self._tagged("path", path=str(value))
        if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
            return self._tagged(type(value).__name__, iso=value.isoformat())
        if isinstance(value, datetime.timedelta):
            return self._tagged("timedelta", days=value.days, seconds=value.seconds, microseconds=value.microseconds)
        if self._is_hf_config(value):
            return self._tagged("hf_config", class_name=type(value).__name__,
                                values=self.encode(value.to_dict(), f"{path}.to_dict()"))
        if isinstance(value, Inert):
            return self._tagged("inert", class_name=value.class_name, state=self.encode(value.state, path))
        if isinstance(value, Mapping):
            return self._mapping(value, path)
        if isinstance(value, (list, tuple)):
            items = [self.encode(item, f"{path}[{i}]") for i, item in enumerate(value)]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, (set, frozenset)):
            ordered = sorted(value, key=repr)
            return self._tagged("set", items=[self.encode(item, f"{path}{{{i}}}") for i, item in enumerate(ordered)])
        return self._inert(value, path, "its class is not known here")

    def _mapping(self, value: Mapping[Any, Any], path: str) -> Any:
        plain_keys = all(type(key) is str for key in value) and TAG not in value
        if plain_keys:
            return self._items(value, path)
        # Other keys, or our own tag among them: as pairs, so that nothing is taken for something else.
        pairs = [(self.encode(key, f"{path} key"), self.encode(item, f"{path}[{key!r}]")) for key, item in value.items()]
        return self._tagged("pairs", items=pairs)

    def _items(self, value: Mapping[str, Any], path: str) -> dict[str, Any]:
        return {str(key): self.encode(item, f"{path}[{key!r}]") for key, item in value.items()}

    @staticmethod
    def _is_hf_config(value: Any) -> bool:
        names = {cls.__name__ for cls in type(value).__mro__}
        return bool(names & {"PreTrainedConfig", "PretrainedConfig"}) and hasattr(value, "to_dict")

    def _inert(self, value: Any, path: str, why: str, state: Any = None) -> Any:
        self.warn(f"{path}: {_class_name(value)} is kept as an inert stand-in ({why})")
        return self._tagged("inert", class_name=_class_name(value), state=state)


def decode(value: Any, tensor: Callable[[Any], torch.Tensor]) -> Any:
    """Plain values back into what they stood for. `tensor` gives the tensor of a TensorName."""
    from shardsmith import _core

    def back(value: Any) -> Any:
        if isinstance(value, _core.TensorName):
            return tensor(value)
        if isinstance(value, _core.Opaque):
            return Inert(value.class_name, [back(item) for item in value.state])
        if isinstance(value, dict):
            if isinstance(value.get(TAG), str):
                return _untag(value, back)
            return {key: back(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(back(item) for item in value)
        return value

    return back(value)


def _untag(value: dict[str, Any], back: Callable[[Any], Any]) -> Any:
    kind = value[TAG]
    if kind == "size":
        return torch.Size(value["items"])
    if kind == "dtype":
        return getattr(torch, value["name"])
    if kind == "device":
        return torch.device(value["name"])
    if kind == "complex":
        return complex(value["real"], value["imag"])
    if kind == "bytearray":
        return bytearray(value["data"])
    if kind == "numpy_scalar":
        import numpy

        return numpy.dtype(value["dtype"]).type(back(value["value"]))
    if kind == "numpy_array":
        return back(value["tensor"]).numpy()
    if kind == "namespace":
        return argparse.Namespace(**back(value["values"]))
    if kind == "path":
        return pathlib.Path(value["path"])
    if kind in ("datetime", "date", "time"):
        return getattr(datetime, kind).fromisoformat(value["iso"])
    if kind == "timedelta":
        return datetime.timedelta(value["days"], value["seconds"], value["microseconds"])
    if kind == "set":
        return {back(item) for item in value["items"]}
    if kind == "pairs":
        return {back(key): back(item) for key, item in value["items"]}
    if kind == "hf_config":
        return _hf_config(value["class_name"], back(value["values"]))
    if kind == "inert":
        return Inert(value["class_name"], back(value["state"]))
    return {key: back(item) for key, item in value.items()}


def _hf_config(class_name: str, values: dict[str, Any]) -> Any:
    import transformers

    cls = getattr(transformers, class_name, None)
    if isinstance(cls, type) and issubclass(cls, transformers.PretrainedConfig):
        return cls.from_dict(values)
    logger.warning("user_content: transformers has no %s: its values come back as an inert stand-in", class_name)
    return Inert(f"transformers.{class_name}", values)


