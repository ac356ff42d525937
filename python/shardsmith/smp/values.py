"""User content as plain values and tensors. Nothing is pickled: what can't be told becomes inert, with a warning.

What a plain file doesn't have (a path, a date, a numpy scalar, ...) is a dict with TAG, as values_read.py turns it back.
"""
from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import pathlib
import sys
import types
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardsmith.errors import Error
from shardsmith.smp import values_numpy
from shardsmith.smp.session import logger
from shardsmith.smp.values_tensors import Memory

TAG = "__shardsmith_kind__"
_DEEPEST = 45  # levels of a script's own; a file holds three for each
FACTORIES = {kind.__name__: kind for kind in (list, dict, set, tuple, int, float, str, bool, collections.OrderedDict)}


class Inert:
    """Stands for an object whose class is not rebuilt. It tells the class's name and what was known of it; fields of a
    dataclass are attributes."""

    def __init__(self, class_name: str, state: Any = None):
        self.class_name = class_name
        self.state = state

    def __getattr__(self, name: str) -> Any:
        fields = self.__dict__.get("state")
        if isinstance(fields, dict) and name in fields and not name.startswith("__"):
            return fields[name]
        raise AttributeError(f"the inert stand-in for {self.__dict__.get('class_name')} has no {name}")

    def __repr__(self) -> str:
        return f"<inert stand-in for {self.class_name}>"


class Record(tuple):
    """Stands for a named tuple: a tuple whose items have names."""

    _fields: tuple[str, ...] = ()

    def __new__(cls, fields: Any, items: Any) -> Record:
        self = super().__new__(cls, items)
        self._fields = tuple(fields)
        return self

    def __getattr__(self, name: str) -> Any:
        if name in self._fields:
            return self[self._fields.index(name)]
        raise AttributeError(name)


def _class_name(value: Any) -> str:
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)):
        return f"{getattr(value, '__module__', None)}.{value.__qualname__}"
    return f"{type(value).__module__}.{type(value).__qualname__}"


class Encoder:
    """`keep` holds the tensors that must stay alive until they are written. With `ordered` False an OrderedDict is written
    as a dict, which other tools understand."""

    def __init__(self, keep: list[torch.Tensor], warn: Callable[[str], None] = logger.warning, ordered: bool = True):
        self.warn = warn
        self.ordered = ordered
        self._above: set[int] = set()
        self._memory = Memory(keep)

    def encode(self, value: Any, path: str = "user_content") -> Any:
        # First all tensors are seen, so that those in one memory go on sharing it, and no more of it is written.
        warn, self.warn = self.warn, lambda text: None
        self._value(value, path)
        self.warn = warn
        self._memory.settle()
        return self._value(value, path)

    def _value(self, value: Any, path: str) -> Any:
        if value is None or type(value) in (bool, float, int, bytes):
            return value
        if type(value) is str:
            return self._text(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, Inert) and value.state is None:
            return self._tagged("inert", class_name=value.class_name, state=None)
        if id(value) in self._above:
            return self._inert(value, path, "it contains itself")
        if len(self._above) >= _DEEPEST:
            return self._inert(value, path, f"it is nested deeper than {_DEEPEST} levels")
        self._above.add(id(value))
        try:
            return self._object(value, path)
        finally:
            self._above.discard(id(value))

    @staticmethod
    def _tagged(kind: str, **fields: Any) -> dict[str, Any]:
        return {TAG: kind, **fields}

    def _text(self, value: str) -> Any:
        try:
            value.encode()
        except UnicodeEncodeError:
            return self._tagged("text", data=value.encode("utf-8", "surrogatepass"))
        return value

    def _tensor(self, value: torch.Tensor, path: str) -> Any:
        if type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            return self._inert(value, path, "a tensor of a class of its own")
        try:
            if value.layout == torch.sparse_coo:
                value = value.detach().coalesce()
                return self._tagged("sparse_coo", indices=self._memory.fresh(value.indices()), size=list(value.shape),
                                    values=self._memory.fresh(value.values()))
            return self._memory.leaf(value)
        except (Error, RuntimeError, NotImplementedError) as error:
            return self._inert(value, path, str(error).strip().splitlines()[0],
                               state={"shape": list(value.shape), "dtype": str(value.dtype), "layout": str(value.layout)})

    def _object(self, value: Any, path: str) -> Any:
        if isinstance(value, enum.Enum):
            return self._inert(value, path, "an enum", state=self._value(value.value, path))
        if values_numpy.is_numpy(value):
            return self._numpy(value, path)
        if isinstance(value, torch.Size):
            return self._tagged("size", items=list(value))
        if isinstance(value, (torch.dtype, torch.device)):
            return self._tagged(type(value).__name__, name=str(value).removeprefix("torch."))
        if isinstance(value, str):  # subclasses of these
            return self._text(str(value))
        for plain in (bool, int, float, bytes):
            if isinstance(value, plain):
                return plain(value)
        if (simple := self._simple(value)) is not None:
            return simple
        if isinstance(value, argparse.Namespace):
            return self._tagged("namespace", values=self._mapping(vars(value), path))
        if (config := self._hf_config(value, path)) is not None:
            return config
        if isinstance(value, (Inert, Record)):
            if isinstance(value, Record):
                return self._record(value, path)
            return self._tagged("inert", class_name=value.class_name, state=self._value(value.state, path))
        if isinstance(value, Mapping):
            return self._special_mapping(value, path)
        if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
            return self._sequence(value, path)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}
            return self._inert(value, path, "a dataclass; its fields are there", state=self._mapping(fields, path))
        return self._inert(value, path, "its class is not known here")

    def _simple(self, value: Any) -> Any:
        """Values that a few words tell."""
        if isinstance(value, complex):
            return self._tagged("complex", real=value.real, imag=value.imag)
        if isinstance(value, bytearray):
            return self._tagged("bytearray", data=bytes(value))
        if isinstance(value, pathlib.PurePath):
            return self._tagged("path", path=self._text(str(value)))
        if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
            kind = next(k for k in ("datetime", "date", "time") if isinstance(value, getattr(datetime, k)))
            return self._tagged(kind, iso=value.isoformat())
        if isinstance(value, datetime.timedelta):
            return self._tagged("timedelta", days=value.days, seconds=value.seconds, microseconds=value.microseconds)
        if isinstance(value, decimal.Decimal):
            return self._tagged("decimal", text=str(value))
        if isinstance(value, uuid.UUID):
            return self._tagged("uuid", text=str(value))
        if isinstance(value, range):
            return self._tagged("range", bounds=[value.start, value.stop, value.step])
        return None

    def _numpy(self, value: Any, path: str) -> Any:
        def encode(item: Any, place: str) -> Any:
            return self._memory.fresh(item) if isinstance(item, torch.Tensor) else self._value(item, f"{path}{place}")

        fields = values_numpy.describe(value, encode)
        if fields is None:
            return self._inert(value, path, "no kind of numpy's that is known here")
        return self._tagged(**fields)

    def _sequence(self, value: Any, path: str) -> Any:
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return self._record(value, path)
        if isinstance(value, (set, frozenset)):
            items = sorted(value, key=repr)
        else:
            items = list(value)
        items = [self._value(item, f"{path}[{i}]") for i, item in enumerate(items)]
        if isinstance(value, (list, tuple)):
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, collections.deque):
            return self._tagged("deque", items=items, maxlen=value.maxlen)
        return self._tagged("set" if isinstance(value, set) else "frozenset", items=items)

    def _record(self, value: Any, path: str) -> Any:
        items = [self._value(item, f"{path}.{name}") for name, item in zip(value._fields, value)]
        return self._tagged("record", fields=[str(name) for name in value._fields], items=items)

    def _special_mapping(self, value: Mapping[Any, Any], path: str) -> Any:
        values = self._mapping(value, path)
        if isinstance(value, collections.defaultdict):
            factory = value.default_factory
            known = None if factory is None else next((n for n, kind in FACTORIES.items() if kind is factory), None)
            if factory is not None and known is None:
                self.warn(f"{path}: the factory {_class_name(factory)} of this defaultdict is not kept")
            return self._tagged("defaultdict", factory=known, values=values)
        if isinstance(value, collections.Counter):
            return self._tagged("counter", values=values)
        if isinstance(value, collections.OrderedDict) and self.ordered:
            return self._tagged("ordered_dict", values=values)
        return values

    def _mapping(self, value: Mapping[Any, Any], path: str) -> Any:
        if all(type(key) is str and key.isprintable() for key in value) and TAG not in value:
            return {key: self._value(item, f"{path}[{key!r}]") for key, item in value.items()}
        # Other keys, or our own tag among them: as pairs, so that nothing is taken for something else.
        pairs = [(self._value(key, f"{path} key"), self._value(item, f"{path}[{key!r}]")) for key, item in value.items()]
        return self._tagged("pairs", items=pairs)

    def _hf_config(self, value: Any, path: str) -> Any:
        bases = {cls.__name__ for cls in type(value).__mro__ if cls.__module__.startswith("transformers.")}
        if not bases & {"PreTrainedConfig", "PretrainedConfig", "GenerationConfig"} or "transformers" not in sys.modules:
            return None
        try:
            values = value.to_dict()
        except Exception as error:  # whatever a class of a script's own raises
            return self._inert(value, path, f"its to_dict() raised {type(error).__name__}")
        name = type(value).__name__
        if getattr(sys.modules["transformers"], name, None) is not type(value):
            return self._inert(value, path, "a configuration of a class of its own; its values are there",
                               state=self._value(values, f"{path}.to_dict()"))
        return self._tagged("hf_config", class_name=name, values=self._value(values, f"{path}.to_dict()"))

    def _inert(self, value: Any, path: str, why: str, state: Any = None) -> Any:
        self.warn(f"{path}: {_class_name(value)} is kept as an inert stand-in ({why})")
        return self._tagged("inert", class_name=_class_name(value), state=state)
