"""Which modules of a model are split over the tensor-parallel ranks, and by what they are replaced.

Modules that are built inside of smp.tensor_parallelism or smp.model_creation know it (the innermost context counts), and
the arguments that they were built with. smp.DistributedModel replaces, in place, the outermost of them that have a
distributed counterpart; one that shares its weights, or whose sizes don't divide, is left alone, which is said once."""
from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from shardsmith.errors import Error
from shardsmith.smp.session import logger, state

TENSOR_PARALLEL_MARK = "_shardsmith_tensor_parallel"  # on a module: whether it is to be split
CONFIG_MARK = "_shardsmith_switches"  # and with which switches
_ARGUMENTS = "_shardsmith_arguments"  # (args, kwargs) that it was built with

Hook = Callable[..., Any]


class Registration(NamedTuple):
    distributed: type[nn.Module]
    init_hook: Hook | None = None
    forward_hook: Hook | None = None
    return_hook: Hook | None = None


_registered: dict[type, Registration] = {}
_recording: set[type] = set()
_contexts: list[tuple[bool, dict[str, Any]]] = []


def tp_register_with_module(module_cls: type[nn.Module], dist_module: type[nn.Module], init_hook: Hook | None = None,
                            forward_hook: Hook | None = None, return_hook: Hook | None = None) -> None:
    """`dist_module` is to take the place of every `module_cls` that is marked for tensor parallelism. init_hook and
    forward_hook have the signatures of module_cls.__init__ and forward without self, and give (args, kwargs) for
    dist_module's; an init_hook that gives None leaves the module alone. return_hook maps dist_module's result to what
    module_cls would have given. Before smp.DistributedModel; the model may exist."""
    for what, cls in (("module_cls", module_cls), ("dist_module", dist_module)):
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise Error("invalid_argument", f"smp.tp_register_with_module: {what} must be a class of torch.nn.Module, not {cls!r}")
    for name, hook in (("init_hook", init_hook), ("forward_hook", forward_hook), ("return_hook", return_hook)):
        if hook is not None and not callable(hook):
            raise Error("invalid_argument", f"smp.tp_register_with_module: {name} must be a function, not {type(hook).__name__}")
    if state.model is not None:
        raise Error("invalid_argument", "smp.tp_register_with_module: it comes before smp.DistributedModel, which replaces modules")
    _registered[module_cls] = Registration(dist_module, init_hook, forward_hook, return_hook)
    _record(module_cls)


def tp_register(dist_module: type[nn.Module], init_hook: Hook | None = None, forward_hook: Hook | None = None,
                return_hook: Hook | None = None) -> Callable[[type], type]:
    """The same as a decorator of the class that is to be replaced."""

    def register(module_cls: type) -> type:
        tp_register_with_module(module_cls, dist_module, init_hook, forward_hook, return_hook)
        return module_cls

    return register


def _defaults() -> dict[type, Registration]:
    from shardsmith.smp.nn import DistributedEmbedding, DistributedLinear

    return {nn.Linear: Registration(DistributedLinear, _linear_arguments), nn.Embedding: Registration(DistributedEmbedding)}


def _linear_arguments(in_features: int, out_features: int, bias: bool = True, device: Any = None, dtype: Any = None) -> Any:
    return (in_features, out_features), {"bias": bias}


def _record(cls: type) -> None:
    """From now on the class's objects know their arguments, in a context or not."""
    if cls in _recording:
        return
    _recording.add(cls)
    plain = cls.__init__

    @functools.wraps(plain)
    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        if type(self) is cls:
            self.__dict__[_ARGUMENTS] = args, kwargs

    cls.__init__ = __init__  # type: ignore[misc]


@contextmanager
def context(enabled: bool, config: dict[str, Any]) -> Iterator[None]:
    """Modules made inside are marked: of nested contexts by the innermost."""
    outer = nn.Module.__init__

    @functools.wraps(outer)
    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        outer(self, *args, **kwargs)
        enabled, config = _contexts[-1]
        self.__dict__[TENSOR_PARALLEL_MARK] = enabled
        self.__dict__[CONFIG_MARK] = config
        if enabled and _ARGUMENTS not in self.__dict__ and (given := _arguments_of(self)) is not None:
            self.__dict__[_ARGUMENTS] = given

    nn.Module.__init__ = __init__  # type: ignore[method-assign]
    _contexts.append((enabled, dict(config)))
    try:
        yield
    finally:
        _contexts.pop()
        nn.Module.__init__ = outer  # type: ignore[method-assign]


def _arguments_of(module: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """What the outermost __init__ that is running for the module was called with, at this moment its local variables."""
    frame, found = sys._getframe(2), None
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__init__" and code.co_argcount and frame.f_locals.get(code.co_varnames[0]) is module:
            found = frame
        frame = frame.f_back
    if found is None:
        return None
    values, args, kwargs = found.f_locals, [], {}
    for parameter in list(inspect.signature(type(module).__init__).parameters.values())[1:]:
        if parameter.name not in values:
            return None
        value = values[parameter.name]
        if parameter.kind is parameter.VAR_POSITIONAL:
            args += value
        elif parameter.kind is parameter.VAR_KEYWORD:
            kwargs |= value
        elif parameter.kind is parameter.KEYWORD_ONLY:
            kwargs[parameter.name] = value
        else:
            args.append(value)
    return tuple(args), kwargs


def mark(module: nn.Module, enabled: bool, config: dict[str, Any]) -> None:
    """A module that exists, and all inside of it."""
    for part in module.modules():
        part.__dict__[TENSOR_PARALLEL_MARK] = bool(enabled)
        part.__dict__[CONFIG_MARK] = dict(config)


def is_marked(module: nn.Module) -> bool:
    return bool(module.__dict__.get(TENSOR_PARALLEL_MARK, False))


def switches(module: nn.Module) -> dict[str, Any]:
    return module.__dict__.get(CONFIG_MARK, {})


def engine_switches(module: nn.Module) -> dict[str, float]:
    """Those that say how the engine computes a model of its families. (distribute_embedding: its embeddings are always
    split over the tensor-parallel ranks. zero_init is of sharded data parallelism.)"""
    given = {name: value for name, value in switches(module).items()
             if name not in ("distribute_embedding", "zero_init") and value is not None}
    if given.get("query_key_layer_scaling") or given.get("attention_in_fp32"):
        given["flash_attention"] = False
    return {name: float(value) for name, value in given.items()}


def has_inner_marks(module: nn.Module) -> bool:
    """Whether parts of a model are to be split, and not the whole."""
    return not is_marked(module) and any(is_marked(part) for part in module.modules())


def replace(root: nn.Module) -> nn.Module:
    """What is to be split is, in place; returns the root, which may be replaced itself."""
    if not any(is_marked(part) for part in root.modules()):
        return root
    return _Replacing(root).run()


class _Replacing:
    def __init__(self, root: nn.Module):
        self.root = root
        self.known = {**_defaults(), **_registered}
        self.made: list[str] = []
        owners: dict[int, int] = {}
        for _, param in root.named_parameters(remove_duplicate=False):
            owners[id(param)] = owners.get(id(param), 0) + 1
        self.shared = {key for key, count in owners.items() if count > 1}

    def run(self) -> nn.Module:
        root = self._of(self.root, "")
        if root is None:
            self._inside(self.root, "")
            root = self.root
        root.train(self.root.training)
        if self.made and state.rank == 0:
            logger.info("distributed modules: %s", ", ".join(self.made))
        return root

    def _inside(self, parent: nn.Module, path: str) -> None:
        from shardsmith.smp.nn import DistributedModule

        for name, child in list(parent._modules.items()):
            if child is None or isinstance(child, DistributedModule):
                continue
            where = f"{path}.{name}" if path else name
            made = self._of(child, where)
            if made is None:
                self._inside(child, where)
            else:
                parent._modules[name] = made

    def _of(self, module: nn.Module, path: str) -> nn.Module | None:
        """The distributed module in its place, or None."""
        registration = self.known.get(type(module))
        if registration is None or not is_marked(module):
            return None
        config = switches(module)
        if type(module) is nn.Embedding and type(module) not in _registered and config.get("distribute_embedding") is False:
            return None
        label = f"{path or 'the model'} ({type(module).__name__})"
        if any(id(param) in self.shared for param in module.parameters()):
            return self._leave(f"{label} shares its weights with another module")
        given = module.__dict__.get(_ARGUMENTS) or _known_arguments(module)
        if given is None:
            return self._leave(f"{label} was built before it was registered, outside of smp.tensor_parallelism: its arguments "
                               "are not known")
        args, kwargs = given
        if registration.init_hook is not None:
            answer = registration.init_hook(*args, **kwargs)
            if answer is None:
                return self._leave(f"{label}: its init_hook says that it can't be")
            args, kwargs = _checked(answer, f"the init_hook of {type(module).__name__}")
        kwargs = {**kwargs, **_taken(registration.distributed, config)}
        can = getattr(registration.distributed, "can_be_split", None)
        try:
            if can is not None and (why := can(*args, **kwargs)):
                return self._leave(f"{label}: {why}")
            made = registration.distributed(*args, **kwargs)
        except TypeError as error:
            raise Error("invalid_argument", f"{label}: {registration.distributed.__name__} can't be built: {error}") from None
        _copy_weights(module, made)
        if registration.forward_hook is not None or registration.return_hook is not None:
            _hook(made, registration, type(module).__name__)
        made.train(module.training)
        self.made.append(path or type(module).__name__)
        return made

    def _leave(self, why: str) -> None:
        from shardsmith.smp.nn.switches import say_once

        say_once(f"[{state.rank}] not split over the tensor-parallel ranks: {why}")


def _known_arguments(module: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Of torch's own modules, which say what they are."""
    if type(module) is nn.Linear:
        return (module.in_features, module.out_features), {"bias": module.bias is not None}
    if type(module) is nn.Embedding:
        names = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
        return (module.num_embeddings, module.embedding_dim), {name: getattr(module, name) for name in names}
    return None


def _checked(answer: Any, what: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], (tuple, list)) and isinstance(answer[1], dict)):
        raise Error("invalid_argument", f"{what} must return (args, kwargs), a tuple and a dict, not {answer!r:.80}")
    return tuple(answer[0]), answer[1]


def _taken(cls: type[nn.Module], config: dict[str, Any]) -> dict[str, Any]:
    """Of a context's switches those that the class has a keyword for; they override what the init_hook derived."""
    parameters = inspect.signature(cls.__init__).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values()) and cls.__module__.startswith("shardsmith.")
    return {key: value for key, value in config.items() if key in parameters or takes_all}


def _copy_weights(module: nn.Module, made: nn.Module) -> None:
    """Of torch's own modules, whose parameters mean the same: what the module holds, this rank's part of it."""
    from shardsmith.smp.nn.base import DistributedModule, share

    if type(module) not in (nn.Linear, nn.Embedding) or not isinstance(made, DistributedModule):
        return
    with torch.no_grad():
        for name, param in module._parameters.items():
            own = made._parameters.get(name)
            if param is None or own is None or param.is_meta:
                continue
            axis = made.split_axis_of(name)
            part = param if axis is None else param.narrow(axis, *share(param.shape[axis]))
            if part.shape == own.shape:
                own.data = part.detach().clone()
                own.requires_grad_(param.requires_grad)


def _hook(made: nn.Module, registration: Registration, name: str) -> None:
    """The original's interface around the distributed module's."""
    plain = made.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if registration.forward_hook is not None:
            args, kwargs = _checked(registration.forward_hook(*args, **kwargs), f"the forward_hook of {name}")
        result = plain(*args, **kwargs)
        return result if registration.return_hook is None else registration.return_hook(result)

    made.__dict__["_orig_forward"] = plain
    made.__dict__["forward"] = forward
