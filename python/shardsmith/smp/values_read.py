"""Plain values and tensors of a file back into what they stood for. Nothing in a file is executed."""
from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import pathlib
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardsmith.errors import Error
from shardsmith.smp import values_numpy
from shardsmith.smp.session import logger
from shardsmith.smp.slices import Staging
from shardsmith.smp.values import FACTORIES, TAG, Inert, Record
from shardsmith.smp.values_tensors import Places


def read_values(file: str) -> Any:
    """A file of plain values and tensors, tensors read."""
    from shardsmith import _core

    index = _core.read_pt(file)
    return values_of(index, index.values, file)


def values_of(index: Any, value: Any, where: str) -> Any:
    """Plain values of an index with the tensors among them, read; those that shared memory share it."""
    names: list[str] = []
    _each_tensor(value, names)
    places, staging = Places(index, names), Staging()
    for name, tensor in places.items():
        staging.add(name, tensor)
    # numpy's arrays share their tensors' memory; everything else is made of what has been read.
    if staging.wants:
        staging.read(index, where=where)
    return decode(value, lambda name: places[name.name], where)


def _each_tensor(value: Any, names: list[str]) -> None:
    from shardsmith import _core

    if isinstance(value, _core.TensorName):
        names.append(value.name)
    elif isinstance(value, dict):
        for key, item in value.items():
            _each_tensor(key, names)
            _each_tensor(item, names)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            _each_tensor(item, names)
    elif isinstance(value, _core.Opaque):
        _each_tensor(value.state, names)


Rebuild = Callable[[dict[str, Any], Callable[[Any], Any]], Any]  # (tagged value, what rebuilds the values in it)


def decode(value: Any, tensor: Callable[[Any], torch.Tensor], where: str = "", kinds: Mapping[str, Rebuild] | None = None) -> Any:
    """`tensor` gives the tensor of a TensorName. `kinds`: those that the caller knows besides."""
    from shardsmith import _core

    def back(value: Any) -> Any:
        if isinstance(value, _core.TensorName):
            return tensor(value)
        if isinstance(value, _core.Opaque):
            return Inert(value.class_name, [back(item) for item in value.state])
        if isinstance(value, dict):
            if isinstance(value.get(TAG), str):
                return _untag(value, back, where, kinds or {})
            return {key: back(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(back(item) for item in value)
        return value

    return back(value)


def _untag(value: dict[str, Any], back: Callable[[Any], Any], where: str, more: Mapping[str, Rebuild]) -> Any:
    kind = value[TAG]
    rebuild = _KINDS.get(kind) or more.get(kind)
    try:
        if rebuild is not None:
            return rebuild(value, back)
        if kind.startswith("numpy_"):
            return values_numpy.rebuild(value, kind, back)
    except Error:
        raise
    except Exception as error:
        raise Error("corrupt", f"{where or 'user content'}: a value of kind '{kind}' makes no sense: "
                               f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from None
    return {key: back(item) for key, item in value.items()}  # of a later version


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return dtype


def _config(class_name: str, values: dict[str, Any]) -> Any:
    import transformers

    cls = getattr(transformers, class_name, None)
    bases = (transformers.PretrainedConfig, transformers.GenerationConfig)
    if isinstance(cls, type) and issubclass(cls, bases):
        try:
            return cls.from_dict(values)
        except Exception as error:  # its values may be of another version
            logger.warning("user_content: transformers' %s refuses its values (%s): an inert stand-in has them", class_name,
                           error)
    else:
        logger.warning("user_content: transformers has no %s: its values come back as an inert stand-in", class_name)
    return Inert(f"transformers.{class_name}", values)


def _items(value: dict[str, Any], back: Callable[[Any], Any]) -> list[Any]:
    return [back(item) for item in value["items"]]


_KINDS: dict[str, Rebuild] = {
    "size": lambda value, back: torch.Size(value["items"]),
    "dtype": lambda value, back: _dtype(value["name"]),
    "device": lambda value, back: torch.device(value["name"]),
    "sparse_coo": lambda value, back: torch.sparse_coo_tensor(back(value["indices"]), back(value["values"]), value["size"],
                                                              is_coalesced=True, check_invariants=True),
    "text": lambda value, back: value["data"].decode("utf-8", "surrogatepass"),
    "complex": lambda value, back: complex(value["real"], value["imag"]),
    "bytearray": lambda value, back: bytearray(value["data"]),
    "path": lambda value, back: pathlib.Path(back(value["path"])),
    "datetime": lambda value, back: datetime.datetime.fromisoformat(value["iso"]),
    "date": lambda value, back: datetime.date.fromisoformat(value["iso"]),
    "time": lambda value, back: datetime.time.fromisoformat(value["iso"]),
    "timedelta": lambda value, back: datetime.timedelta(value["days"], value["seconds"], value["microseconds"]),
    "decimal": lambda value, back: decimal.Decimal(value["text"]),
    "uuid": lambda value, back: uuid.UUID(value["text"]),
    "range": lambda value, back: range(*value["bounds"]),
    "namespace": lambda value, back: argparse.Namespace(**back(value["values"])),
    "set": lambda value, back: set(_items(value, back)),
    "frozenset": lambda value, back: frozenset(_items(value, back)),
    "deque": lambda value, back: collections.deque(_items(value, back), value["maxlen"]),
    "record": lambda value, back: Record(value["fields"], _items(value, back)),
    "pairs": lambda value, back: {back(key): back(item) for key, item in value["items"]},
    "ordered_dict": lambda value, back: collections.OrderedDict(back(value["values"])),
    "defaultdict": lambda value, back: collections.defaultdict(FACTORIES.get(value["factory"]), back(value["values"])),
    "counter": lambda value, back: collections.Counter(back(value["values"])),
    "hf_config": lambda value, back: _config(value["class_name"], back(value["values"])),
    "inert": lambda value, back: Inert(value["class_name"], back(value["state"])),
}
