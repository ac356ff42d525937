"""The session: configuration, mesh, groups, and what a script makes of them. One a process, in `state`."""
from __future__ import annotations

import contextlib
import datetime
import enum
import json
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from shardsmith import heap
from shardsmith.errors import Error
from shardsmith.smp import launch
from shardsmith.smp.config import Config, resolve
from shardsmith.smp.objects import Objects

if TYPE_CHECKING:
    from shardsmith.smp.background import Saving
    from shardsmith.smp.model import DistributedModel
    from shardsmith.smp.optimizer import DistributedOptimizer
    from shardsmith.smp.report import LoadReport

logger = logging.getLogger("shardsmith.smp")


class CommGroup(enum.Enum):
    WORLD = "world"
    PP_GROUP = "pp"
    TP_GROUP = "tp"
    RDP_GROUP = "rdp"
    DP_GROUP = "dp"
    MP_GROUP = "mp"


class RankType(enum.Enum):
    WORLD_RANK = "world"
    PP_RANK = "pp"
    TP_RANK = "tp"
    RDP_RANK = "rdp"
    DP_RANK = "dp"
    MP_RANK = "mp"


class ModuleManager:
    """What clients read of it: pairs (smp_to_hf, hf_to_smp) of the replaced families. Nothing is replaced as yet."""

    def __init__(self) -> None:
        self.translate_functions: list[Any] = []


class Session:
    """Threads: of the main thread, except `model` and its like, which a step's threads read."""

    def __init__(self) -> None:
        self.number = 0  # of this session in its process: each has keys of its own in the store
        self.reset()

    def reset(self) -> None:
        self.number += 1
        self.initialized = False
        self.cfg: Config | None = None
        self.module_manager = ModuleManager()
        self.rank = 0
        self.size = 1
        self.local_rank = 0
        self.local_size = 1
        self.mesh: Any = None
        self.device = torch.device("cpu")
        self.members: dict[str, list[int]] = {}
        self.groups: dict[str, dist.ProcessGroup | None] = {}
        self.peers: Any = None
        self.store: dist.Store | None = None
        self.rounds: dict[str, int] = {}  # of gathering.py, by kind of group
        self.objects: Objects | None = None
        self.saving: Saving | None = None  # background.py
        self.model: DistributedModel | None = None
        self.optimizer: DistributedOptimizer | None = None
        self.pending: Any = None  # a checkpoint to read when the partition is made
        self.pending_optimizer: Any = None  # likewise, for the optimizer's state
        self.load_report: LoadReport | None = None  # what became of the checkpoint that was resumed from last
        self.optimizer_steps = 0  # updates made, over all runs
        self.said_auto_partition = False
        self.said_state_dict = False
        self.said_pickle = False
        self.said_none = False
        self.has_failed = False
        self.step_calls = 0  # calls of step functions, over all runs: dropout masks depend on it
        self.call = ""  # the function of ours that this rank is in, where all ranks must be in the same

    def require(self) -> Session:
        if not self.initialized:
            raise Error("invalid_argument", "smp.init() has not been called: it comes first in a script")
        return self

    # Ranks and groups by a kind of CommGroup / RankType: "world", "pp", ...
    def group_members(self, kind: str) -> list[int]:
        return self.require().members[kind]

    def group_rank(self, kind: str) -> int:
        return self.group_members(kind).index(self.rank)

    def process_group(self, kind: str) -> dist.ProcessGroup | None:
        return self.require().groups[kind]

    @property
    def stage(self) -> int:
        return self.group_rank("pp")

    @property
    def stages(self) -> int:
        return len(self.group_members("pp"))

    @property
    def limits(self) -> Limits:
        return limits_of(self.cfg.peer_timeout if self.cfg is not None else 24.0)

    # One rank's failure is everybody's.
    def peer_error(self, text: str) -> Error:
        """After a communication error: the error that names the rank at fault."""
        if self.peers is None:
            return Error("peer", text, self.rank)
        limits = self.limits
        said = bounded(lambda: self.peers.explain(text, limits.explain), limits.explain + limits.store)
        return Error("peer", said or f"{STORE_SILENT} (rank {self.rank} was {text})", self.rank)

    def fail(self, error: BaseException) -> None:
        """Says to the others that this rank has failed by itself; the first failure counts."""
        if self.peers is not None and self.size > 1 and not self.has_failed:
            self.has_failed = True
            said = str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}"
            bounded(lambda: self.peers.fail(said), self.limits.store)

    def exchange(self, message: bytes, seconds: float | None = None) -> list[bytes]:
        """Every rank's message on every rank."""
        if self.size == 1:
            return [message]
        limits = self.limits
        seconds = limits.communication if seconds is None else seconds
        sent = self.call.encode() + b"\0" + message
        answers = [answer.partition(b"\0") for answer in bounded_exchange(self.peers, sent, seconds, limits, self.store, "world")]
        for rank, (call, _, _) in enumerate(answers):
            if call != answers[0][0]:
                words = [name.decode() or "goes on" for name in (call, answers[0][0])]
                raise Error("invalid_argument", f"rank {rank} {words[0]} where rank 0 {words[1]}: every rank must call the same "
                                                "functions in the same order", rank)
        return [answer for _, _, answer in answers]

    def settle(self) -> None:
        """Nobody leaves, and takes the store along, before all know what they have just told each other; or five seconds."""
        with contextlib.suppress(Error):
            bounded_exchange(self.peers, self.call.encode() + b"\0", 5.0, self.limits)

    @contextlib.contextmanager
    def calling(self, name: str) -> Iterator[None]:
        """Ranks that meet in different calls are named."""
        outer, self.call = self.call, f"calls {name}"
        try:
            yield
        finally:
            self.call = outer

    def together(self, function: Any) -> Any:
        """Runs something that may fail on some ranks only: any failure is raised on all, with the same words. Returns the
        result."""
        result, failure, text = None, None, b""
        try:
            result = function()
        except Exception as error:
            failure = error
            said = str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}"
            at = error.rank if isinstance(error, Error) else -1
            text = json.dumps([getattr(error, "kind", "io"), said, at]).encode()
        answers = self.exchange(text)
        if not any(answers):
            return result
        self.settle()
        if failure is not None and all(answer == text for answer in answers):
            raise failure  # no rank more than another
        rank = next(rank for rank, answer in enumerate(answers) if answer)
        kind, said, at = json.loads(answers[rank])
        raise (Error(kind, said, at) if at >= 0 else Error(kind, f"rank {rank}: {said}", rank)) from failure


class Limits(NamedTuple):
    """How `peer_timeout` is spent, in seconds, so that all of it together is no more: `communication` waits for another
    rank; then `explain` is for finding out who is at fault; `store` is for a store whose host is stopped, not dead, and
    which would let its clients wait for ever."""

    communication: float
    explain: float
    store: float


def limits_of(peer_timeout: float) -> Limits:
    asking = min(12.0, peer_timeout / 4)
    return Limits(peer_timeout - asking, asking * 3 / 4, asking / 4)


STORE_GONE = "the store that connects the ranks does not answer: rank 0, or the launcher, is gone"
STORE_SILENT = "rank 0, or the launcher, has stalled: the store that connects the ranks does not answer"


def bounded_exchange(peers: Any, message: bytes, seconds: float, limits: Limits, store: dist.Store | None = None,
                     name: str = "") -> list[bytes]:
    """As StorePeers.exchange, and an error where the store itself says nothing. With `store`: whoever comes when another rank
    has given up waiting, among the peers of that name, gets that rank's error."""
    given_up = f"given_up/{name}"

    def told() -> Error:
        kind, text, rank = json.loads(store.get(given_up))
        return Error(kind, text, rank)

    def meet() -> list[bytes]:
        try:
            answers = peers.exchange(message, seconds)
        except Error as error:
            if error.kind != "timeout" or store is None:
                raise
            failed = f"shardsmith/world/failed/{error.rank}"  # as StorePeers.fail tells it
            if store.check([failed]):
                raise Error("peer", f"rank {error.rank} failed: {store.get(failed).decode()}", error.rank) from None
            store.compare_set(given_up, "", json.dumps([error.kind, str(error), error.rank]))
            raise told() from None
        if store is not None and store.check([given_up]):
            raise told()
        return answers

    try:
        answers = bounded(meet, seconds + limits.store)
    except RuntimeError as error:  # the store went in between
        if isinstance(error, Error):
            raise
        raise Error("peer", STORE_GONE, 0) from None
    if answers is None:
        raise Error("timeout", STORE_SILENT, 0)
    return answers


def bounded(function: Callable[[], Any], seconds: float) -> Any:
    """What the function returns or raises; None if it has not returned in time, and then its thread is left behind."""
    done: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def call() -> None:
        try:
            done.put((function(), None))
        except BaseException as error:
            done.put((None, error))

    threading.Thread(target=call, name="store", daemon=True).start()
    try:
        result, error = done.get(timeout=seconds)
    except queue.Empty:
        return None
    if error is not None:
        raise error
    return result


def is_communication_error(error: BaseException) -> bool:
    """Whether another rank, and not this one, is to blame for what was raised here."""
    if isinstance(error, Error):
        return error.kind in ("peer", "timeout")
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError)):
        return True
    text = str(error)
    words = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Timed out waiting",
             "Application timeout", "Broken pipe")
    return isinstance(error, RuntimeError) and any(word in text for word in words)


state = Session()


def _backend(cfg: Config) -> str:
    if cfg.ddp_dist_backend != "auto":
        return cfg.ddp_dist_backend
    return "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


def _make_default_group(cfg: Config, place: launch.Place | None) -> None:
    if dist.is_initialized():
        return
    timeout = datetime.timedelta(seconds=limits_of(cfg.peer_timeout).communication)
    backend = _backend(cfg)
    if backend == "nccl":
        backend = "cpu:gloo,cuda:nccl"
    where = "" if place is None or place.is_torchrun else launch.init_method(place, cfg.ddp_port)
    try:
        if place is None:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        elif place.is_torchrun:
            if cfg.ddp_port is not None:
                os.environ["MASTER_PORT"] = str(cfg.ddp_port)
            dist.init_process_group(backend, timeout=timeout)
        else:
            dist.init_process_group(backend, where, rank=place.rank, world_size=place.size, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        said = f" at {where} (MASTER_PORT chooses another port)" if where else ""
        raise Error("peer", f"the process group could not be made{said}: {str(error).splitlines()[0]}") from error


def _check_torch() -> None:
    from shardsmith.pins import TORCH

    found = torch.__version__.split("+")[0]
    if found.rsplit(".", 1)[0] != TORCH.rsplit(".", 1)[0]:
        raise Error("invalid_argument", f"built for torch {TORCH}, found {found}: install torch=={TORCH}")


def init(config: Mapping[str, Any] | None = None) -> None:
    """The first call of a script, on every rank with the same configuration; a second call is ignored with a warning. Makes
    torch.distributed's default process group where there is none, by what torchrun or mpiexec put into the environment.

    `config`: keys and values, over which the JSON in SM_HP_MP_PARAMETERS wins. An unknown key, a wrong value, and degrees that
    do not fit the number of ranks are errors that name what would do."""
    if state.initialized:
        logger.warning("smp.init: called again, ignored: the first call's configuration holds")
        return
    from shardsmith import _core, _engine

    cfg = resolve(config)
    heap.set_up(torch.get_num_threads())
    place = launch.place()
    _make_default_group(cfg, place)
    state.rank, state.size = dist.get_rank(), dist.get_world_size()
    state.local_rank, state.local_size = (state.rank, state.size) if place is None else (place.local_rank, place.local_size)
    store = dist.PrefixStore(f"shardsmith/{state.number}", dist.distributed_c10d._get_default_store())
    peers = _engine.StorePeers(store, state.rank, state.size, "world")
    _compare_configurations(cfg, peers)
    mesh = _core.Mesh(state.size, cfg.pipeline_parallel_degree, cfg.tensor_parallel_degree, cfg.placement_strategy)
    if mesh.rdp_size > 1 and not cfg.ddp:
        raise Error("invalid_argument",
                    f"{state.size} ranks make {mesh.rdp_size} replicas of {mesh.pp_size} stages, and data parallelism "
                    f"needs 'ddp': True; or start {mesh.mp_size} ranks")
    state.cfg, state.mesh = cfg, mesh
    # By the group's own backend: what the user's launcher made may differ from our choice.
    if torch.cuda.is_available() and "nccl" in str(dist.get_backend_config()):
        torch.cuda.set_device(state.local_rank % torch.cuda.device_count())
        state.device = torch.device("cuda", torch.cuda.current_device())
    _make_groups()
    state.initialized = True
    state.store, state.peers = store, peers
    state.objects = Objects(state, state.groups["objects"])
    _tell_what_ends_the_script()
    pp, tp, rdp = mesh.coordinates(state.rank)
    logger.info("[%d] process groups are ready: pp rank %d of %d, tp rank %d of %d, rdp rank %d of %d, dp rank %d of %d",
                state.rank, pp, mesh.pp_size, tp, mesh.tp_size, rdp, mesh.rdp_size, state.group_rank("dp"), mesh.dp_size)
    if state.rank == 0:
        logger.info("configuration: %s", ", ".join(f"{name}={value!r}" for name, value in cfg.items()))


def _compare_configurations(cfg: Config, peers: Any) -> None:
    """Before groups are made: ranks that make other ones would wait for each other."""
    if state.size == 1:
        return
    limits = limits_of(cfg.peer_timeout)
    answers = bounded_exchange(peers, json.dumps(cfg.items(), default=repr).encode(), limits.communication, limits)
    first = dict(json.loads(answers[0]))
    if any(answer != answers[0] for answer in answers):
        # Nobody leaves, and takes the store along, before all have read the answers.
        with contextlib.suppress(Error):
            bounded_exchange(peers, b"", 5.0, limits)
    for rank, answer in enumerate(answers):
        for name, value in json.loads(answer):
            if value != first[name]:
                raise Error("invalid_argument", f"smp.init: '{name}' is {value!r} on rank {rank} and {first[name]!r} on rank 0: "
                                                "the configuration must be the same on every rank", rank)


def _tell_what_ends_the_script() -> None:
    """An exception that nobody catches is the other ranks' error too, wherever in the script it was thrown."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        before(kind, error, trace)
        if isinstance(error, Exception) and not (isinstance(error, Error) and error.kind in ("peer", "timeout")):
            state.fail(error)

    sys.excepthook = hook


def _make_groups() -> None:
    """All ranks make all groups in the same order, as torch demands."""
    timeout = datetime.timedelta(seconds=state.limits.communication)
    state.members["world"], state.groups["world"] = list(range(state.size)), dist.group.WORLD
    made: dict[tuple[int, ...], dist.ProcessGroup] = {tuple(range(state.size)): dist.group.WORLD}
    for kind in ("pp", "tp", "rdp", "dp", "mp"):
        for members in map(tuple, state.mesh.groups(kind)):
            # Groups of one never talk, but scripts may pass them to torch.distributed.
            if members not in made:
                made[members] = dist.new_group(list(members), timeout=timeout)
            if state.rank in members:
                state.members[kind], state.groups[kind] = list(members), made[members]
    # Engine and script must not share a group: two same-shaped collectives in another order give wrong sums.
    for kind in ("pp", "rdp", "tp"):
        state.groups[f"engine_{kind}"] = None
        for members in map(tuple, state.mesh.groups(kind)):
            if len(members) > 1:
                group = dist.new_group(list(members), timeout=timeout)
                if state.rank in members:
                    state.groups[f"engine_{kind}"] = group
    state.groups["objects"] = dist.new_group(list(range(state.size)), timeout=timeout, backend="gloo")


def is_initialized() -> bool:
    """Whether smp.init has been called."""
    return state.initialized


def is_tracing() -> bool:
    """Never: models are not traced here."""
    return False


def num_microbatches() -> int:
    """Into how many a step's batch is split."""
    return state.require().cfg.microbatches
