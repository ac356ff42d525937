"""numpy's values as plain ones: numbers as tensors, all other fixed-size kinds by their bytes, objects one by one."""
from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

_NUMBERS = "biufc"
_BY_BYTES = "USMmV"  # texts, bytes, dates, and structures of those and of numbers


def is_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.generic, numpy.ndarray, numpy.dtype))


def describe(value: Any, encode: Callable[[Any, str], Any]) -> dict[str, Any] | None:
    """The fields of a tagged value; None for what this doesn't know. `encode(item, place)` is for items, tensors among them
    are made here."""
    import numpy

    if isinstance(value, numpy.dtype):
        return None if value.hasobject else {"kind": "numpy_dtype", "descr": _descr(value)}
    if isinstance(value, numpy.generic):
        if value.dtype.kind in _NUMBERS and value.dtype.isnative and _torch_knows(value.dtype):
            return {"kind": "numpy_scalar", "dtype": value.dtype.name, "value": encode(value.item(), "")}
        if value.dtype.hasobject:
            return None
        return {"kind": "numpy_bytes", "descr": _descr(value.dtype), "shape": None, "data": numpy.asarray(value).tobytes()}
    if type(value) not in (numpy.ndarray, numpy.memmap, numpy.recarray):  # a mask, say, must not be lost
        if isinstance(value, numpy.ma.MaskedArray):
            return {"kind": "numpy_masked", "data": encode(numpy.asarray(value.data), ".data"),
                    "mask": encode(numpy.ma.getmaskarray(value), ".mask")}
        return None
    if value.dtype.kind in _NUMBERS and value.dtype.isnative and _torch_knows(value.dtype):
        return {"kind": "numpy_array", "tensor": encode(torch.from_numpy(numpy.array(value, subok=False)), "")}
    if value.dtype == object:
        items = [encode(item, f"[{i}]") for i, item in enumerate(value.ravel().tolist())]
        return {"kind": "numpy_objects", "shape": list(value.shape), "items": items}
    if value.dtype.hasobject or value.dtype.kind not in _BY_BYTES + _NUMBERS:
        return None
    return {"kind": "numpy_bytes", "descr": _descr(value.dtype), "shape": list(value.shape),
            "data": numpy.ascontiguousarray(value).tobytes()}


def _torch_knows(dtype: Any) -> bool:
    import numpy

    try:
        torch.from_numpy(numpy.empty(1, dtype))
    except TypeError:
        return False
    return True


def _descr(dtype: Any) -> Any:
    import numpy

    return numpy.lib.format.dtype_to_descr(dtype)


def _dtype(descr: Any) -> Any:
    import numpy

    def tupled(value: Any) -> Any:
        return [tuple(tupled(item) if isinstance(item, list) and i == 1 else tuple(item) if isinstance(item, list) else item
                      for i, item in enumerate(field)) for field in value] if isinstance(value, list) else value

    dtype = numpy.lib.format.descr_to_dtype(tupled(descr))
    if dtype.hasobject:
        raise ValueError("a numpy type with objects in it")
    return dtype


def rebuild(value: dict[str, Any], kind: str, back: Callable[[Any], Any]) -> Any:
    """Of a tagged value. Raises ValueError and the like for one that makes no sense."""
    import numpy

    if kind == "numpy_dtype":
        return _dtype(value["descr"])
    if kind == "numpy_scalar":
        dtype = numpy.dtype(str(value["dtype"]))
        if dtype.kind not in _NUMBERS:
            raise ValueError(f"numpy type {dtype}")
        return dtype.type(back(value["value"]))
    if kind == "numpy_array":
        return back(value["tensor"]).numpy()
    if kind == "numpy_masked":
        return numpy.ma.MaskedArray(back(value["data"]), back(value["mask"]))
    if kind == "numpy_objects":
        shape, items = [int(n) for n in value["shape"]], value["items"]
        result = numpy.empty(len(items), dtype=object)
        for i, item in enumerate(items):
            result[i] = back(item)
        return result.reshape(shape)
    dtype = _dtype(value["descr"])
    array = numpy.frombuffer(bytearray(value["data"]), dtype=dtype) if dtype.itemsize else numpy.empty(
        1 if value["shape"] is None else value["shape"], dtype)
    return array[0] if value["shape"] is None else array.reshape(value["shape"])
