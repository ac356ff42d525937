"""What checkpoints hold of an optimizer, and how it comes back: by logical names, never by position."""
from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from shardsmith.errors import Error
from shardsmith.smp import precision, weights
from shardsmith.smp.precision import MASTER
from shardsmith.smp.session import logger, state
from shardsmith.smp.slices import Piece, Staging, make_leaf, piece_leaves, pieces, torch_word
from shardsmith.smp.weights import STATE

if TYPE_CHECKING:
    from shardsmith.smp.optimizer import DistributedOptimizer


def saved_tree(optimizer: DistributedOptimizer, keep: list[torch.Tensor], skip: set[str]) -> dict[str, Any]:
    """What optimizer_{pp}_{tp}.pt (..._{rdp}.pt of shards) holds. `skip`: Hugging Face names that another stage stores."""
    model = state.model
    hf_names = {id(p): name for name, p in model.optimized.items()}
    states: dict[str, dict[str, Any]] = {}
    groups = []
    for group in optimizer.optimizer.param_groups:
        names = []
        for param in group["params"]:
            hf_name = hf_names[id(param)]
            parts = model.optimized_pieces(hf_name)
            names += [piece.name for piece in parts]
            if hf_name in skip or param not in optimizer.optimizer.state:
                continue
            for piece in parts:
                states[piece.name] = {}
            for key, value in optimizer.optimizer.state[param].items():
                _save_entry(states, parts, param, key, value, keep)
        options = {key: _plain_option(value) for key, value in group.items() if key != "params"}
        groups.append({**options, "params": names})
    return {"class": type(optimizer.optimizer).__name__, "state": states, "param_groups": groups}


def _save_entry(states: dict[str, dict[str, Any]], parts: list[Piece], param: torch.Tensor, key: str, value: Any,
                keep: list[torch.Tensor]) -> None:
    shaped = isinstance(value, torch.Tensor) and value.shape == param.shape and value.dim() > 0
    rank = state.group_rank("tp")
    if shaped:
        for name, leaf in piece_leaves(value, parts, rank, keep, f"{STATE}{{}}/{key}").items():
            states[name][key] = leaf
        return
    for piece in parts:
        if not isinstance(value, torch.Tensor):
            states[piece.name][key] = value
        elif piece.is_stored_by(rank) and not any(piece.box):  # a counter, wherever a part of it is
            states[piece.name][key] = make_leaf(value, keep, f"{STATE}{piece.name}/{key}")


def saved_masters(optimizer: DistributedOptimizer, keep: list[torch.Tensor], skip: set[str]) -> dict[str, Any] | None:
    """What fp16_states_{pp}_{tp}.pt (..._{rdp}.pt of shards) holds; None where there are no masters."""
    if state.model.masters is None:
        return None
    states: dict[str, dict[str, Any]] = {}
    rank = state.group_rank("tp")
    for hf_name, master in state.model.masters.items():
        if hf_name in skip:
            continue
        leaves = piece_leaves(master, state.model.optimized_pieces(hf_name), rank, keep, f"{STATE}{{}}/{MASTER}")
        states |= {name: {MASTER: leaf} for name, leaf in leaves.items()}
    scaler = precision.scaler_values(optimizer.loss_scaler)
    return {"dtype": torch_word(precision.narrow_dtype()), "loss_scaler": scaler, "state": states}


def read_options(optimizer: DistributedOptimizer, pending: weights.Pending) -> None:
    """Learning rate and the like, as soon as a checkpoint is asked for: scripts go on to write their own."""
    files, masters = _files(pending)
    pending.options_done = True
    if state.cfg.fp16 and masters and masters[0].get("dtype") == "float16":
        precision.restore_scaler(optimizer.loss_scaler, masters[0]["loss_scaler"])
    if not files:
        logger.warning("%s has no optimizer state: it begins anew", pending.where)
        return
    saved = files[min(state.stage, len(files) - 1)]
    if saved.get("class", type(optimizer.optimizer).__name__) != type(optimizer.optimizer).__name__:
        raise Error("invalid_argument", f"{pending.where} holds the state of {saved['class']}, this optimizer is "
                                        f"{type(optimizer.optimizer).__name__}: use load_optimizer=False to begin anew")
    restore_options(optimizer, saved["param_groups"], pending.where)


def prepare_state(optimizer: DistributedOptimizer, pending: weights.Pending) -> weights.Reading | None:
    """What is to be read, once the partition is there; also where the state does not exist yet."""
    index = pending.index
    files, _ = _files(pending)
    if not files:
        return None
    plain: dict[str, dict[str, Any]] = {}
    for file in files:
        plain |= file["state"]
    keys: dict[str, list[str]] = {}
    for name in index.names():
        if name.startswith(STATE):
            logical, _, key = name.removeprefix(STATE).rpartition("/")
            if key == MASTER:  # read with the weights
                continue
            keys.setdefault(logical, []).append(key)
    _refuse_half_states(pending, files, keys)
    hf_names = {id(p): name for name, p in state.model.optimized.items()}
    staging = Staging()
    for group in optimizer.optimizer.param_groups:
        for param in group["params"]:
            _restore_param(optimizer, param, hf_names[id(param)], index, keys, plain, staging, pending.where)
    return staging, index, pending.where


def _restore_param(optimizer: DistributedOptimizer, param: torch.Tensor, hf_name: str, index: Any, keys: dict[str, list[str]],
                   plain: dict[str, dict[str, Any]], staging: Staging, where: str) -> None:
    from shardsmith import _core

    parts = state.model.optimized_pieces(hf_name)
    first, shape = parts[0].name, parts[0].whole
    restored: dict[str, Any] = {}
    known = optimizer.optimizer.state.get(param, {})
    for key in keys.get(first, []):
        for piece in parts:
            if key not in keys.get(piece.name, []):
                raise Error("corrupt", f"{where}: optimizer state {piece.name}/{key} is missing")
        name = f"{STATE}{first}/{key}"
        dtype = getattr(torch, index.dtype(name))
        if list(index.shape(name)) == list(shape) and shape:
            restored[key] = _like(param, dtype, known.get(key))
            staging.add_pieces(restored[key], [(f"{STATE}{piece.name}/{key}", piece) for piece in parts])
        else:
            # Step counters stay on the CPU unless the optimizer is of the kinds that keep them with the parameter.
            on_device = any(g.get("fused") or g.get("capturable") for g in optimizer.optimizer.param_groups)
            device = param.device if on_device else torch.device("cpu")
            restored[key] = torch.empty(index.shape(name), dtype=dtype, device=device)
            staging.add(name, restored[key])
    for key, value in plain.get(first, {}).items():
        if key not in restored and not isinstance(value, _core.TensorName):
            restored[key] = value
    # The old state's order of keys doesn't matter: it is a dict by name.
    optimizer.optimizer.state.pop(param, None)
    if restored:
        optimizer.optimizer.state[param] = restored


def _like(param: torch.Tensor, dtype: torch.dtype, known: Any) -> torch.Tensor:
    """Memory for an entry of the parameter's shape: what stands there already, where it fits."""
    if isinstance(known, torch.Tensor) and (known.shape, known.stride(), known.dtype, known.device) == \
            (param.shape, param.stride(), dtype, param.device):
        return known
    return torch.empty_like(param, dtype=dtype, memory_format=torch.preserve_format).detach()


def restore_options(optimizer: DistributedOptimizer, saved: list[dict[str, Any]], where: str) -> None:
    groups = optimizer.optimizer.param_groups
    if len(saved) != len(groups):
        raise Error("invalid_argument", f"{where} has {len(saved)} parameter groups, this optimizer {len(groups)}")
    for group, options in zip(groups, saved):
        for key, value in options.items():
            if key in ("params", "param_names"):
                continue
            if isinstance(group.get(key), torch.Tensor) and not isinstance(value, torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = copy.deepcopy(value)


def _files(pending: weights.Pending) -> tuple[list[Any], list[Any]]:
    """Values of the checkpoint's optimizer files, and of its files of masters. Either kind may stand in one file."""
    files = pending.optimizer_files
    return [file for file in files if "param_groups" in file], [file for file in files if "loss_scaler" in file]


def _refuse_half_states(pending: weights.Pending, files: list[Any], keys: dict[str, list[str]]) -> None:
    """A parameter that was never updated has no state; one that has must have all that others of its group have."""
    model = state.model
    shapes = {piece.name: list(piece.whole) for name in model.whole_shapes for piece in pieces(model._whole, name)}
    for number in range(max(len(file["param_groups"]) for file in files)):
        members = dict.fromkeys(name for file in files if number < len(file["param_groups"])
                                for name in file["param_groups"][number]["params"])
        # Of a scalar parameter a counter looks like a moment.
        shaped = {name: {key for key in keys.get(name, ()) if shapes.get(name)
                         and pending.index.shape(f"{STATE}{name}/{key}") == shapes[name]} for name in members}
        every = set().union(*shaped.values())
        for name, own in shaped.items():
            if own and own != every:
                raise Error("corrupt", f"{pending.where}: the optimizer's state of {name} has {', '.join(sorted(own))} but not "
                                       f"{', '.join(sorted(every - own))}")


def _plain_option(value: Any) -> Any:
    """lr may be a tensor; its value is what counts."""
    if isinstance(value, torch.Tensor):
        return value.item()
    if isinstance(value, (list, tuple)):
        return type(value)(_plain_option(item) for item in value)
    return value
