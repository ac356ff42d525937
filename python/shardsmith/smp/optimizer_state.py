"""`state_dict`, `local_state_dict` and `load_state_dict` of a DistributedOptimizer. State is known by the parameters'
names; positions are for torch, and for files of other tools.

    whole      {"state": {position: {key: value}}, "param_groups": [{..., "params": [positions], "param_names": [names]}],
                "masters": {name: tensor}, "loss_scaler": {...}}      the last two under bf16 and fp16
    one rank's the same of what its optimizer updates, and "_smp_is_partial", "_smp_names": [names by position]
    gathered   of sharded state: "state", "masters" and "_smp_names" are lists by reduced-data-parallel rank
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from shardsmith.errors import Error
from shardsmith.smp import gathering, whole
from shardsmith.smp.model_state import PARTIAL
from shardsmith.smp.precision import scaler_values
from shardsmith.smp.session import state

if TYPE_CHECKING:
    from shardsmith.smp.optimizer import DistributedOptimizer

NAMES = "_smp_names"


def _own_names(optimizer: DistributedOptimizer) -> list[str]:
    names = {id(p): name for name, p in state.model.optimized.items()}
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]


# This rank's.
def local(optimizer: DistributedOptimizer, gather_if_shard: bool) -> dict[str, Any]:
    model = state.model
    if model is None or not model.partitioned:
        raise Error("invalid_argument", "optimizer.local_state_dict: there is no partition before the first step")
    values = {**optimizer.optimizer.state_dict(), PARTIAL: state.mesh.mp_size > 1 or model.shards is not None,
              NAMES: _own_names(optimizer)}
    if model.masters is not None:
        values |= {"masters": {name: p.detach() for name, p in model.masters.items()}, "loss_scaler": scaler_values(optimizer.loss_scaler)}
    if model.shards is None or not gather_if_shard:
        return values
    keys = [key for key in ("state", "masters", NAMES) if key in values]
    collected = gathering.gather("rdp", "optimizer.local_state_dict()", lambda: [values[key] for key in keys])
    if collected is None:  # rank 0 of them saves
        return values | {key: [] for key in keys}
    return values | {key: [own[i] for own in collected] for i, key in enumerate(keys)}


# The whole.
def complete(optimizer: DistributedOptimizer) -> dict[str, Any]:
    """Of a model on one rank torch's own, with names; else brought together from all ranks that hold some of it."""
    model = state.model
    if model is None:
        return optimizer.optimizer.state_dict()
    if not model.partitioned:
        raise Error("invalid_argument", "optimizer.state_dict: there is no partition before the first step")
    skip, what = whole.stored_elsewhere(), "optimizer.state_dict()"

    def own() -> Any:
        tensors: list[tuple[str, str, list[whole.Part]]] = []
        plain: list[tuple[str, str, Any]] = []
        for name, param in model.optimized.items():
            if name in skip:
                continue
            parts = model.optimized_pieces(name)
            for key, value in optimizer.state.get(param, {}).items():
                if isinstance(value, torch.Tensor) and value.shape == param.shape and value.dim() > 0:
                    tensors.append((name, key, whole.parts_of(value, parts)))
                else:
                    plain.append((name, key, value.detach().clone() if isinstance(value, torch.Tensor) else value))
            if model.masters is not None:
                tensors.append((name, "", whole.parts_of(param, parts)))
        return tensors, plain

    kind = "mp" if model.shards is None else "world"
    states: dict[str, dict[str, Any]] = {}
    masters: dict[str, torch.Tensor] = {}
    parts: dict[tuple[str, str], list[whole.Part]] = {}
    for tensors, plain in gathering.allgather(kind, what, own):
        for name, key, brought in tensors:
            parts.setdefault((name, key), []).extend(brought)
        for name, key, value in plain:
            states.setdefault(name, {}).setdefault(key, value)
    for (name, key), brought in parts.items():
        tensor = whole.assemble(model, name, brought, what)
        if key:
            states.setdefault(name, {})[key] = tensor
        else:
            masters[name] = tensor
    result: dict[str, Any] = {"state": {}, "param_groups": []}
    for group, names in zip(optimizer.param_groups, optimizer.given_names()):
        first = sum(len(g["params"]) for g in result["param_groups"])
        result["param_groups"].append({**{k: v for k, v in group.items() if k not in ("params", "param_names")},
                                       "params": list(range(first, first + len(names))), "param_names": names})
        result["state"] |= {first + i: states[name] for i, name in enumerate(names) if name in states}
    if model.masters is not None:
        result |= {"masters": masters, "loss_scaler": scaler_values(optimizer.loss_scaler)}
    return result


# Loading.
def check(optimizer: DistributedOptimizer, values: Any) -> None:
    if not isinstance(values, Mapping) or not {"state", "param_groups"} <= set(values):
        raise Error("invalid_argument", "optimizer.load_state_dict takes a dict with 'state' and 'param_groups', as "
                                        "state_dict() and local_state_dict() give it")


def load(optimizer: DistributedOptimizer, values: Mapping[str, Any]) -> None:
    """Once the partition is there; options have been restored."""
    model = state.model
    own_states, masters = _by_name(optimizer, values)
    is_part = bool(values.get(PARTIAL, False))

    shapes = model.whole_shapes
    spread = state.mesh.mp_size > 1 or model.shards is not None
    on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)

    def part(name: str, param: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor | None:
        """This rank's part of what is like the parameter; None for anything else that may be."""
        expected = list(param.shape) if is_part else shapes[name]
        if list(tensor.shape) == expected:
            return tensor if is_part else model.rows(name, whole.own_part(model, name, tensor))
        row_or_column = tensor.dim() == len(expected) and all(n in (1, m) for n, m in zip(tensor.shape, expected))
        if tensor.numel() > 1 and (spread or not row_or_column):
            raise Error("corrupt", f"optimizer.load_state_dict: the state of {name} is {list(tensor.shape)}, this rank's part "
                                   f"of it is {expected}: another layout saved it; smp.save_checkpoint changes the layout",
                        state.rank)
        return None

    restored: dict[torch.Tensor, dict[str, Any]] = {}
    for name, param in model.optimized.items():
        if name not in own_states:
            continue
        entry = restored[param] = dict(own_states[name])
        for key, value in entry.items():
            if not isinstance(value, torch.Tensor):
                continue
            own = part(name, param, value) if value.dim() else None
            if own is not None:
                entry[key] = own.detach().to(param.device, param.dtype if own.is_floating_point() else own.dtype, copy=True)
            else:
                entry[key] = value.detach().to(param.device if on_device else "cpu", copy=True)
    if masters and model.masters is not None:
        with torch.no_grad():
            for name, master in model.masters.items():
                if name in masters and (own := part(name, master, masters[name])) is not None:
                    master.copy_(own)
        model.masters_changed()
    for group in optimizer.param_groups:
        for param in group["params"]:
            optimizer.state.pop(param, None)
            if param in restored:
                optimizer.state[param] = restored[param]


def _by_name(optimizer: DistributedOptimizer, values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    states, masters, names = values["state"], values.get("masters") or {}, values.get(NAMES)
    if isinstance(states, (list, tuple)):
        rdp = state.group_rank("rdp")
        if len(states) != state.mesh.rdp_size:
            raise Error("corrupt", f"optimizer.load_state_dict: the state is of {len(states)} reduced-data-parallel ranks, there "
                                   f"are {state.mesh.rdp_size}: use smp.save_checkpoint to change the layout", state.rank)
        states, masters, names = states[rdp], masters[rdp] if masters else {}, names[rdp] if names else None
    groups = values["param_groups"]
    positions = [position for group in groups for position in group["params"]]
    if names is not None:
        positions = list(range(len(names)))  # as torch counts what an optimizer has
    elif all(len(group.get("param_names", ())) == len(group["params"]) for group in groups):
        names = [name for group in groups for name in group["param_names"]]
    elif values.get(PARTIAL, False):
        names = _own_names(optimizer)
    else:
        names = [name for group in optimizer.given_names() for name in group]
    if len(names) != len(positions):
        raise Error("invalid_argument", f"optimizer.load_state_dict: the dict is of {len(positions)} parameters, this optimizer "
                                        f"has {len(names)}: build it as before", state.rank)
    by_position = dict(zip(positions, names))
    try:
        return {by_position[position]: entry for position, entry in states.items()}, masters
    except KeyError as error:
        raise Error("corrupt", f"optimizer.load_state_dict: the state has position {error}, which no parameter has",
                    state.rank) from None
