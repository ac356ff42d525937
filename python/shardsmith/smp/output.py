"""What `model(...)` returns: attribute, key and [0] access as transformers' outputs have; logits when they are read."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

# Attributes of transformers' outputs that are there or None.
_OPTIONAL = ("loss", "logits", "last_hidden_state", "pooler_output", "past_key_values", "hidden_states", "attentions",
             "cross_attentions")


class ModelOutput(dict):
    """The entries that are there (`loss`, where labels were given), then those that are computed when they are read
    (`logits`; of a model without a head `last_hidden_state` and `pooler_output`)."""

    def __init__(self, entries: dict[str, Any] | None = None,
                 fetch: Mapping[str, Callable[[], torch.Tensor]] | None = None):
        super().__init__(entries or {})
        self.__dict__["_fetch"] = dict(fetch or {})

    def _names(self) -> list[str]:
        return [name for name in dict.keys(self) if name not in self._fetch] + list(self._fetch)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, (int, slice)):
            names = self._names()[key]
            return self[names] if isinstance(names, str) else tuple(self[name] for name in names)
        if key in self._fetch and not dict.__contains__(self, key):
            dict.__setitem__(self, key, self._fetch[key]())
        return dict.__getitem__(self, key)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in self or name in _OPTIONAL:
            return self.get(name)
        raise AttributeError(f"the model's output has no '{name}'; it has {', '.join(self._names())}")

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default

    def __contains__(self, key: object) -> bool:
        return key in self._names()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def keys(self) -> list[str]:  # type: ignore[override]
        return self._names()

    def values(self) -> list[Any]:  # type: ignore[override]
        return [self[name] for name in self._names()]

    def items(self) -> list[tuple[str, Any]]:  # type: ignore[override]
        return [(name, self[name]) for name in self._names()]

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(self.values())

    # Copies share what fetches the logits.
    def __copy__(self) -> ModelOutput:
        return ModelOutput({name: dict.__getitem__(self, name) for name in dict.keys(self)}, self._fetch)

    def __reduce__(self) -> Any:
        return ModelOutput, (dict(self.items()),)
