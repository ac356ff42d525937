"""`smp.save` and `smp.load`, the calls of 1.6 to 1.9: one object a rank, without a word to the other ranks."""
from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import torch

from shardsmith.errors import Error
from shardsmith.smp.durable import sync
from shardsmith.smp.session import logger, state
from shardsmith.smp.values import Encoder
from shardsmith.smp.values_read import read_values


def _path(f: Any, what: str) -> str:
    if not isinstance(f, (str, os.PathLike)):
        raise Error("invalid_argument", f"{what} takes the name of a file, not {type(f).__name__}")
    return os.fspath(f)


def _names(path: str) -> tuple[str, str, str]:
    """Of this rank's part: with all its coordinates, with those of its slice, and as before 1.6."""
    pp, tp, rdp = state.mesh.coordinates(state.rank)
    return f"{path}_{pp}_{tp}_{rdp}", f"{path}_{pp}_{tp}", f"{path}_{state.group_rank('mp')}"


def _say_unused(pickle_module: Any, more: Any = None) -> None:
    if (pickle_module is not None or more) and not state.said_pickle:
        state.said_pickle = True
        logger.warning("smp.save and smp.load: pickle_module and the like are accepted and not used: files are read as data, and "
                       "nothing in them is executed")


def save(obj: Any, f: Any, partial: bool = True, pickle_module: Any = None, pickle_protocol: int = 2, v3: bool = False) -> None:
    """Writes `{f}_{pp_rank}_{tp_rank}`; with v3, on every rank, `{f}_{pp_rank}_{tp_rank}_{rdp_rank}`; not partial: f. The file
    is there whole or not at all, and torch.load(weights_only=True) reads it."""
    from shardsmith import _core

    state.require()
    path = _path(f, "smp.save")
    _say_unused(pickle_module)
    every, slice_only, _ = _names(path)
    target = path if not partial else every if v3 else slice_only
    folder = os.path.dirname(os.path.abspath(target))
    temporary = os.path.join(folder, f".{os.path.basename(target)}.tmp-{os.getpid()}-{state.rank}")
    keep: list[torch.Tensor] = []
    tree = Encoder(keep, ordered=False).encode(obj, os.path.basename(target))
    try:
        os.makedirs(folder, exist_ok=True)
        _core.write_values(temporary, tree)
        os.replace(temporary, target)
        if partial:
            _remove_other_form(path, v3)
        sync(folder)
    except OSError as error:
        raise Error("io", f"{error.filename or target}: {error.strerror}", state.rank) from None
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)
    del keep


def _remove_other_form(path: str, v3: bool) -> None:
    """What this rank's slice was saved as before in the other form, which load would find first."""
    every, slice_only, _ = _names(path)
    if state.group_rank("rdp") != 0:
        return
    if v3:
        stale = [slice_only]
    else:
        folder, base = os.path.split(os.path.abspath(slice_only))
        form = re.compile(re.escape(base) + r"_\d+")
        stale = [os.path.join(folder, name) for name in os.listdir(folder) if form.fullmatch(name)]
    for name in stale:
        try:
            os.remove(name)
        except FileNotFoundError:
            pass


def load(f: Any, map_location: Any = None, pickle_module: Any = None, partial: bool = True, back_compat: bool = False,
         **pickle_load_args: Any) -> Any:
    """What smp.save wrote for this rank, in either form; with back_compat also a file of before 1.6, `{f}_{mp_rank}`."""
    state.require()
    path = _path(f, "smp.load")
    _say_unused(pickle_module, {key: value for key, value in pickle_load_args.items() if key not in ("weights_only", "mmap")})
    every, slice_only, old = _names(path)
    candidates = [path] if not partial else [every, slice_only, old] if back_compat else [every, slice_only]
    found = next((name for name in candidates if os.path.isfile(name)), None)
    if found is None:
        raise Error("not_found", _what_is_there(path, candidates), state.rank)
    value = read_values(found)
    target = _device(map_location)
    return value if target is None else _moved(value, target)


def _what_is_there(path: str, candidates: list[str]) -> str:
    text = f"{candidates[0]}: there is no such file" if len(candidates) == 1 else (
        f"there is neither {' nor '.join(candidates)}, which is where rank {state.rank}'s part would be")
    folder, base = os.path.split(os.path.abspath(path))
    others = sorted(name for name in os.listdir(folder) if re.fullmatch(re.escape(base) + r"(_\d+)*", name)) if (
        os.path.isdir(folder)) else []
    if not others:
        return text
    hint = " (partial=False reads it)" if base in others else ": saved by another layout, or of before 1.6 (back_compat=True)"
    return f"{text}; there are {', '.join(others[:6])}{', ...' if len(others) > 6 else ''}{hint}"


def _device(map_location: Any) -> torch.device | None:
    """Files hold what the CPU has; what the script says of "cpu" is where tensors go."""
    if map_location is None:
        return None
    if isinstance(map_location, dict):
        map_location = map_location.get("cpu", "cpu")
    if callable(map_location):
        storage = map_location(torch.UntypedStorage(0), "cpu")
        return None if storage is None else torch.device(storage.device)
    try:
        return torch.device(map_location)
    except (RuntimeError, TypeError):
        raise Error("invalid_argument", f"smp.load: map_location is {map_location!r}, which is no device") from None


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    move: Callable[[Any], Any] = lambda item: _moved(item, device)  # noqa: E731
    if type(value) is dict:
        return {key: move(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(move, value))
    return value
