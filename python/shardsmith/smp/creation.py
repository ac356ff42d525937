"""`smp.model_creation`: around the construction of a model."""
from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from shardsmith.errors import Error
from shardsmith.smp import registering, weightless
from shardsmith.smp.session import logger, state
from shardsmith.words import did_you_mean

# Keywords of tensor-parallel modules that scripts give also where there is no tensor parallelism.
_TENSOR_PARALLEL_KEYWORDS = (
    "zero_init", "distribute_embedding", "use_alibi", "attention_in_fp32", "fp32_residual_addition",
    "query_key_layer_scaling", "fused_softmax", "fused_dropout", "fused_bias_gelu", "flash_attention", "alibi_bias_max",
)
# What from_pretrained takes about finding and opening files, which a folder on disk makes needless.
_FILE_KEYWORDS = (
    "cache_dir", "force_download", "local_files_only", "token", "revision", "use_safetensors", "low_cpu_mem_usage",
    "ignore_mismatched_sizes", "weights_only", "proxies", "resume_download",
)


def _check_keywords(where: str, config: dict[str, Any]) -> None:
    for name in config:
        if name not in _TENSOR_PARALLEL_KEYWORDS:
            raise Error("invalid_argument", f"{where}: unknown keyword '{name}'{did_you_mean(name, _TENSOR_PARALLEL_KEYWORDS)}")


@contextmanager
def model_creation(tensor_parallelism: bool = False, dtype: torch.dtype | None = None,
                   **tensor_parallel_config: Any) -> Iterator[None]:
    """Inside, from_pretrained(folder) builds a model whose weights each rank reads at the partition, its own only;
    with `delayed_parameter_initialization` in the configuration from_config likewise. dtype None: torch's default."""
    cfg = state.require().cfg
    _check_keywords("model_creation", tensor_parallel_config)
    with ExitStack() as stack:
        before = torch.get_default_dtype()
        if dtype is not None:
            torch.set_default_dtype(dtype)
            stack.callback(torch.set_default_dtype, before)
        _patch(stack, dtype, cfg.delayed_parameter_initialization)
        stack.enter_context(registering.context(bool(tensor_parallelism), tensor_parallel_config))
        yield


@contextmanager
def tensor_parallelism(enabled: bool = True, **config: Any) -> Iterator[None]:
    """What is made inside is split over the tensor-parallel ranks by smp.DistributedModel: a transformers model of a known
    family as a whole, of other modules the outermost that have a distributed counterpart (smp.tp_register). Of nested
    contexts the innermost counts."""
    state.require()
    _check_keywords("tensor_parallelism", config)
    with registering.context(bool(enabled), config):
        yield


def set_tensor_parallelism(module: Any, enabled: bool = True, **config: Any) -> None:
    """The same for a model that exists, or a part of one."""
    state.require()
    _check_keywords("set_tensor_parallelism", config)
    if not isinstance(module, torch.nn.Module):
        raise Error("invalid_argument", f"smp.set_tensor_parallelism takes a torch.nn.Module, not {type(module).__name__}")
    if state.model is not None:
        raise Error("invalid_argument", "smp.set_tensor_parallelism: it comes before smp.DistributedModel, which splits the model")
    registering.mark(module, enabled, config)


def require_tensor_parallelism(module: Any) -> None:
    if not registering.is_marked(module):
        raise Error("unsupported", "tensor_parallel_degree is above 1, but this model was not made for it: build it inside "
                                   "smp.model_creation(tensor_parallelism=True), or call smp.set_tensor_parallelism(model)")


@contextmanager
def delay_param_initialization(enabled: bool = True) -> Iterator[None]:
    """Models made inside by from_config get their initial weights at the partition."""
    state.require()
    with ExitStack() as stack:
        _patch(stack, None, enabled)
        yield


def _patch(stack: ExitStack, dtype: torch.dtype | None, delayed: bool) -> None:
    from transformers import PreTrainedModel
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

    plain_from_config = PreTrainedModel._from_config.__func__

    def from_pretrained(cls: type, folder: Any, *args: Any, **kwargs: Any) -> Any:
        return _from_pretrained(cls, plain_from_config, dtype, folder, *args, **kwargs)

    def from_config(cls: type, config: Any, **kwargs: Any) -> Any:
        kwargs = _with_dtype(kwargs, dtype)
        if not delayed:
            return plain_from_config(cls, config, **kwargs)
        return _weightless(weightless.Source(None, initial=True), plain_from_config, cls, config, kwargs)

    # transformers gives each Auto class a from_pretrained of its own.
    for cls in (PreTrainedModel, _BaseAutoModelClass, *_subclasses(_BaseAutoModelClass)):
        if "from_pretrained" in cls.__dict__:
            stack.enter_context(mock.patch.object(cls, "from_pretrained", classmethod(from_pretrained)))
    stack.enter_context(mock.patch.object(PreTrainedModel, "_from_config", classmethod(from_config)))


def _subclasses(cls: type) -> list[type]:
    return [each for direct in cls.__subclasses__() for each in (direct, *_subclasses(direct))]


def _with_dtype(kwargs: dict[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    if dtype is not None and kwargs.get("dtype") is None and kwargs.get("torch_dtype") is None:
        return {**kwargs, "dtype": dtype}
    return kwargs


def _weightless(source: weightless.Source, plain_from_config: Any, cls: type, config: Any,
                kwargs: dict[str, Any]) -> Any:
    with weightless.parameters_on_meta():
        model = plain_from_config(cls, config, **kwargs)
    weightless.give_memory(model, source)
    return model


def _from_pretrained(cls: type, plain_from_config: Any, dtype: torch.dtype | None, folder: Any, *args: Any,
                     **kwargs: Any) -> Any:
    from transformers import AutoConfig

    path = os.fspath(folder)
    if not os.path.isdir(path):
        raise Error("not_found", f"{path}: no such folder; inside smp.model_creation a model comes from a folder with "
                                 "config.json and safetensors or .bin files, each rank reading its own slices")
    if not os.path.isfile(os.path.join(path, "config.json")):
        raise Error("not_found", f"{path} has no config.json")
    if args:
        raise Error("unsupported", "from_pretrained inside smp.model_creation takes keywords after the folder")
    for name in _FILE_KEYWORDS:
        kwargs.pop(name, None)
    for name in ("device_map", "quantization_config", "state_dict"):
        if kwargs.pop(name, None) is not None:
            raise Error("unsupported", f"from_pretrained({name}=...) inside smp.model_creation")
    kwargs.pop("_from_auto", None)
    asked = kwargs.pop("dtype", None) or kwargs.pop("torch_dtype", None) or dtype or torch.get_default_dtype()
    build = {name: kwargs.pop(name) for name in ("attn_implementation", "trust_remote_code") if name in kwargs}
    config = kwargs.pop("config", None)
    if config is None:
        config, unknown = AutoConfig.from_pretrained(path, return_unused_kwargs=True, **kwargs)
        if unknown:
            raise Error("invalid_argument", f"from_pretrained: unknown keyword '{next(iter(unknown))}'")
    elif kwargs:
        raise Error("invalid_argument", f"from_pretrained: unknown keyword '{next(iter(kwargs))}'")
    if asked == "auto":
        asked = config.dtype or torch.get_default_dtype()
    build["dtype"] = asked
    source = weightless.Source(os.path.abspath(path))
    if hasattr(cls, "_model_mapping"):  # an Auto class finds the class by the configuration
        with weightless.parameters_on_meta(), mock.patch.object(
                _pretrained_model(), "_from_config", classmethod(plain_from_config)):
            model = cls.from_config(config, **build)
        weightless.give_memory(model, source)
    else:
        build.pop("trust_remote_code", None)
        model = _weightless(source, plain_from_config, cls, config, build)
    model.config._name_or_path = path
    if os.path.isfile(os.path.join(path, "generation_config.json")) and getattr(model, "generation_config", None):
        from transformers import GenerationConfig

        try:
            model.generation_config = GenerationConfig.from_pretrained(path)
        except (OSError, ValueError) as error:
            logger.warning("%s: generation_config.json was passed over: %s", path, error)
    model.eval()  # as from_pretrained leaves it
    return model


def _pretrained_model() -> type:
    from transformers import PreTrainedModel

    return PreTrainedModel
