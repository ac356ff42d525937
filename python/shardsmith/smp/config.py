"""The configuration of `smp.init`: every key, its default, where it comes from. Imports no torch."""
from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardsmith.errors import Error
from shardsmith.words import did_you_mean

ENVIRONMENT = "SM_HP_MP_PARAMETERS"


@dataclass(frozen=True)
class Key:
    default: Any
    kind: type = bool  # bool, int, float, str or object (anything)
    supported: tuple[Any, ...] | None = None  # in this version; None: every value
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] | None = None


_OFF = (False,)
KEYS: dict[str, Key] = {
    "pipeline_parallel_degree": Key(1, int, minimum=1),
    "tensor_parallel_degree": Key(1, int, minimum=1),
    "sharded_data_parallel_degree": Key(1, int, supported=(1,), minimum=1),
    "microbatches": Key(1, int, minimum=1),
    "active_microbatches": Key(None, int, minimum=1),  # degree + 2, at most microbatches
    "pipeline": Key("interleaved", str, supported=("interleaved", "simple"),
                    choices=("interleaved", "simple", "_only_forward")),
    "placement_strategy": Key("cluster", str),
    "optimize": Key("memory", str, choices=("memory", "speed")),
    "memory_weight": Key(0.8, float, minimum=0, maximum=1),
    "auto_partition": Key(True),
    "default_partition": Key(None, int, minimum=0),
    "ddp": Key(False),
    "ddp_dist_backend": Key("auto", str, choices=("auto", "nccl", "gloo", "mpi")),
    "ddp_port": Key(None, int, minimum=0),
    "fp16": Key(False),
    "bf16": Key(False),
    "fp16_params": Key(False),  # an old name of fp16
    "nan_loss": Key("ignore", str, choices=("ignore", "skip", "stop")),
    "shard_optimizer_state": Key(False),
    "prescaled_batch": Key(False),
    "skip_tracing": Key(False),
    "deterministic_server": Key(False),
    "offload_activations": Key(False, supported=_OFF),
    "activation_loading_horizon": Key(4, int, minimum=0),
    "delayed_parameter_initialization": Key(False),
    "static_mode": Key(False),
    "fast_mode": Key(False),
    "checkpoint_attentions": Key(False, supported=_OFF),
    "sdp_reduce_bucket_size": Key(500_000_000, int, minimum=1),
    "sdp_param_persistence_threshold": Key(1_000_000, int, minimum=0),
    "sdp_max_live_parameters": Key(1_000_000_000, int, minimum=0),
    "sdp_hierarchical_allgather": Key(True),
    "sdp_gradient_clipping": Key(1.0, float, minimum=0),
    "tensor_parallel_seed": Key(0, int),
    "peer_timeout": Key(300.0, float, minimum=0.001),
    "contiguous": Key(True),
    "horovod": Key(False, supported=_OFF),
    "load_partition": Key(False),
    "partition_file": Key(None, str),  # where the decision is written, or read from with load_partition
    "_match_weights": Key(False),
    "_fp32_grad_accumulation": Key(False),
    "use_times": Key(False),
}
# Other spellings of a key.
SYNONYMS = {"partitions": "pipeline_parallel_degree", "_prescaled_batch": "prescaled_batch"}

# What turns an unsupported value into something that works.
_INSTEAD = {
    "horovod": "use ddp",
}


class Config:
    """Resolved values as attributes (`smp.state.cfg.microbatches`)."""

    def __init__(self, values: Mapping[str, Any]):
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        if name in SYNONYMS:
            return getattr(self, SYNONYMS[name])
        raise AttributeError(f"smp.state.cfg has no key '{name}'{did_you_mean(name, KEYS)}")

    def items(self) -> list[tuple[str, Any]]:
        return list(self.__dict__.items())


def _convert(name: str, key: Key, value: Any, source: str) -> Any:
    def refuse(expected: str) -> Error:
        return Error("invalid_argument", f"{source}: '{name}' must be {expected}, not {value!r}")

    if value is None:
        if key.default is None or name == "default_partition":
            return None
        raise refuse(f"of type {key.kind.__name__}")
    if key.kind is bool:
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if isinstance(value, bool) or value in (0, 1):
            return bool(value)
        raise refuse("true or false")
    if key.kind in (int, float):
        if isinstance(value, bool):
            raise refuse("a number")
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise refuse("a number") from None
        if key.kind is int:
            if number != int(number):
                raise refuse("a whole number")
            number = int(value) if not isinstance(value, str) else int(number)
        if (key.minimum is not None and number < key.minimum) or (key.maximum is not None and number > key.maximum):
            above = f"at least {key.minimum:g}"
            raise refuse(above if key.maximum is None else f"{above} and at most {key.maximum:g}")
        return number
    if key.kind is str and not isinstance(value, str):
        raise refuse("a string")
    if key.choices is not None and value not in key.choices:
        raise refuse("one of " + ", ".join(key.choices))
    return value


def _named(given: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The given values under their keys' own names."""
    result: dict[str, Any] = {}
    for name, value in given.items():
        own = SYNONYMS.get(name, name)
        if own not in KEYS:
            raise Error("invalid_argument", f"{source}: unknown key '{name}'{did_you_mean(str(name), [*KEYS, *SYNONYMS])}")
        value = _convert(name, KEYS[own], value, source)
        if own in result and result[own] != value:
            raise Error("invalid_argument", f"{source}: '{name}' is another name of '{own}', and they differ: "
                                            f"{value!r} and {result[own]!r}")
        result[own] = value
    return result


def from_environment() -> dict[str, Any]:
    text = os.environ.get(ENVIRONMENT, "").strip()
    if not text:
        return {}
    try:
        values = json.loads(text)
    except ValueError as error:
        raise Error("invalid_argument", f"{ENVIRONMENT} is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise Error("invalid_argument", f"{ENVIRONMENT} must be a JSON object, not {type(values).__name__}")
    return values


def resolve(given: Mapping[str, Any] | None) -> Config:
    """The script's dict, over which the environment wins, with defaults filled in and checked."""
    if given is not None and not isinstance(given, Mapping):
        raise Error("invalid_argument", f"smp.init: the configuration must be a dict, not {type(given).__name__}")
    values = {name: key.default for name, key in KEYS.items()}
    given = _named(given or {}, "smp.init") | _named(from_environment(), ENVIRONMENT)
    values |= given
    for name, key in KEYS.items():
        if key.supported is not None and values[name] not in key.supported:
            instead = _INSTEAD.get(name)
            raise Error("unsupported", f"'{name}': {values[name]!r} is not there in this version"
                                       + (f"; {instead}" if instead else ""))
    placement = {"cluster": "DPT", "spread": "TPD"}.get(values["placement_strategy"], values["placement_strategy"])
    if sorted(placement) != ["D", "P", "T"]:
        raise Error("invalid_argument", "'placement_strategy' must be cluster, spread or a permutation of the letters "
                                        f"D, P, T, not {values['placement_strategy']!r}")
    if values["ddp_port"] is not None and not values["ddp"]:
        raise Error("invalid_argument", "'ddp_port' needs 'ddp': True")
    values["fp16"] = values["fp16"] or values["fp16_params"]
    if values["fp16"] and values["bf16"]:
        raise Error("invalid_argument", "'fp16' and 'bf16' are both true: parameters have one dtype")
    degree = values["pipeline_parallel_degree"]
    if values["default_partition"] is not None and values["default_partition"] >= degree:
        raise Error("invalid_argument", f"'default_partition' must be less than 'pipeline_parallel_degree' ({degree}), "
                                        f"not {values['default_partition']}")
    if not values["auto_partition"] and values["default_partition"] is None:
        raise Error("invalid_argument", "'auto_partition': False needs 'default_partition': the stage of what no "
                                        "smp.partition or smp.set_partition places")
    if values["load_partition"] and not values["partition_file"]:
        raise Error("invalid_argument", "'load_partition' needs 'partition_file'")
    active = values["active_microbatches"]
    values["active_microbatches"] = min(degree + 2 if active is None else active, values["microbatches"])
    return Config(values)
