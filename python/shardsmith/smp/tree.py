"""Nested values: taken apart into leaves and a picklable specification, and put together again.

Lists, tuples (named ones too), dicts, sets and mappings like transformers' ModelOutput or BatchEncoding are nodes and
keep their type; everything else is a leaf.
"""
from __future__ import annotations

import copy
from collections import UserDict
from typing import Any

LEAF = ("leaf",)
Spec = tuple


def flatten(value: Any) -> tuple[list[Any], Spec]:
    leaves: list[Any] = []
    return leaves, _flatten(value, leaves)


def _flatten(value: Any, leaves: list[Any]) -> Spec:
    if isinstance(value, (dict, UserDict)):
        # A mapping with more to it than its entries is rebuilt from a shallow copy of itself, where there is one.
        return ("map", type(value), [(key, _flatten(item, leaves)) for key, item in value.items()])
    if isinstance(value, (list, tuple, set, frozenset)) and not _is_size(value):
        items = [_flatten(item, leaves) for item in value]
        return ("items", type(value), items)
    leaves.append(value)
    return LEAF


def _is_size(value: Any) -> bool:
    return type(value).__module__ == "torch"  # torch.Size, a plain value


def unflatten(spec: Spec, leaves: list[Any], like: Any = None) -> Any:
    """`like`: a value of the same structure whose mappings carry the attributes that their entries don't tell."""
    iterator = iter(leaves)
    result = _unflatten(spec, iterator, like)
    rest = sum(1 for _ in iterator)
    assert rest == 0, f"{rest} leaves too many"
    return result


def _unflatten(spec: Spec, leaves: Any, like: Any) -> Any:
    if spec == LEAF:
        return next(leaves)
    kind, cls, items = spec
    if kind == "map":
        same = like is not None and type(like) is cls
        entries = {key: _unflatten(item, leaves, like[key] if same and key in like else None) for key, item in items}
        return _mapping(cls, entries, like if same else None)
    likes = list(like) if like is not None and type(like) is cls and len(like) == len(items) else [None] * len(items)
    values = [_unflatten(item, leaves, other) for item, other in zip(items, likes)]
    return cls(*values) if hasattr(cls, "_fields") else cls(values)


def _mapping(cls: type, entries: dict[Any, Any], like: Any) -> Any:
    if cls is dict:
        return entries
    if like is not None:
        result = copy.copy(like)
        if isinstance(result, UserDict):
            result.data = dict(entries)
            return result
        for key, value in entries.items():
            result[key] = value
        return result
    try:
        return cls(entries)
    except TypeError:  # transformers' outputs are dataclasses
        return cls(**entries)
