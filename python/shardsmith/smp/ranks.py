"""Ranks, groups and communication, under the names that scripts use."""
from __future__ import annotations

from typing import Any

import torch.distributed as dist

from shardsmith.errors import Error
from shardsmith.smp.session import CommGroup, RankType, state

WORLD = CommGroup.WORLD
PP_GROUP = CommGroup.PP_GROUP
TP_GROUP = CommGroup.TP_GROUP
RDP_GROUP = CommGroup.RDP_GROUP
DP_GROUP = CommGroup.DP_GROUP
MP_GROUP = CommGroup.MP_GROUP
WORLD_RANK = RankType.WORLD_RANK
PP_RANK = RankType.PP_RANK
TP_RANK = RankType.TP_RANK
RDP_RANK = RankType.RDP_RANK
DP_RANK = RankType.DP_RANK
MP_RANK = RankType.MP_RANK


def rank() -> int:
    """This process's number among all, from 0."""
    return state.require().rank


def size() -> int:
    """How many processes there are."""
    return state.require().size


def local_rank() -> int:
    """This process's number on its host, from 0."""
    return state.require().local_rank


def local_size() -> int:
    """How many processes this host has."""
    return state.require().local_size


def pp_rank() -> int:
    """The pipeline stage, from 0."""
    return state.group_rank("pp")


def tp_rank() -> int:
    """The number in the tensor-parallel group."""
    return state.group_rank("tp")


def rdp_rank() -> int:
    """The number among the ranks that hold the same slice (reduced data parallelism)."""
    return state.group_rank("rdp")


def dp_rank() -> int:
    """The number among all ranks of one stage: reduced data parallelism and tensor parallelism together."""
    return state.group_rank("dp")


def mp_rank() -> int:
    """The number in this replica of the model: stages and tensor-parallel ranks."""
    return state.group_rank("mp")


def pp_size() -> int:
    """Of this replica's stages."""
    return len(state.group_members("pp"))


def tp_size() -> int:
    """Of the tensor-parallel group."""
    return len(state.group_members("tp"))


def rdp_size() -> int:
    """Of the ranks that hold the same slice."""
    return len(state.group_members("rdp"))


def dp_size() -> int:
    """Of the ranks of this stage."""
    return len(state.group_members("dp"))


def mp_size() -> int:
    """Of this replica of the model."""
    return len(state.group_members("mp"))


def get_pp_group() -> list[int]:
    """Global ranks of this replica's stages, in its order."""
    return list(state.group_members("pp"))


def get_tp_group() -> list[int]:
    """Global ranks of the tensor-parallel group, in its order."""
    return list(state.group_members("tp"))


def get_rdp_group() -> list[int]:
    """Global ranks of the ranks that hold the same slice, in its order."""
    return list(state.group_members("rdp"))


def get_dp_group() -> list[int]:
    """Global ranks of the ranks of this stage, in its order."""
    return list(state.group_members("dp"))


def get_mp_group() -> list[int]:
    """Global ranks of this replica of the model, in its order."""
    return list(state.group_members("mp"))


def get_world_process_group() -> dist.ProcessGroup | None:
    """Of all ranks: torch.distributed's default group."""
    return state.process_group("world")


def get_pp_process_group() -> dist.ProcessGroup | None:
    """Of this replica's stages, for torch.distributed."""
    return state.process_group("pp")


def get_tp_process_group() -> dist.ProcessGroup | None:
    """Of the tensor-parallel group, for torch.distributed."""
    return state.process_group("tp")


def get_rdp_process_group() -> dist.ProcessGroup | None:
    """Of the ranks that hold the same slice, for torch.distributed."""
    return state.process_group("rdp")


def get_dp_process_group() -> dist.ProcessGroup | None:
    """Of the ranks of this stage, for torch.distributed."""
    return state.process_group("dp")


def get_mp_process_group() -> dist.ProcessGroup | None:
    """Of this replica of the model, for torch.distributed."""
    return state.process_group("mp")


def _kind(group: Any, cls: type) -> str:
    if not isinstance(group, cls):
        raise Error("invalid_argument", f"expected one of smp.{cls.__name__}, not {group!r}")
    return group.value


def _global_rank(index: int, rank_type: RankType) -> int:
    members = state.group_members(_kind(rank_type, RankType))
    if not 0 <= index < len(members):
        raise Error("invalid_argument", f"there is no {rank_type.value} rank {index}: the group has {len(members)} ranks")
    if members[index] == state.rank:
        raise Error("invalid_argument", f"{rank_type.value} rank {index} is this rank itself")
    return members[index]


def broadcast(obj: Any, group: CommGroup = CommGroup.WORLD) -> None:
    """Called by the sender only; the group's other members call `recv_from`. Returns when all have received; a member that
    does not is named after `peer_timeout` at the latest."""
    members = state.group_members(_kind(group, CommGroup))
    state.objects.send(obj, [member for member in members if member != state.rank], "smp.broadcast")


def send(obj: Any, dest_rank: int, rank_type: RankType = RankType.WORLD_RANK) -> None:
    """To the rank of this number in the group that the type names. Returns when it has received."""
    state.objects.send(obj, [_global_rank(dest_rank, rank_type)], "smp.send")


def recv_from(src_rank: int, rank_type: RankType = RankType.WORLD_RANK) -> Any:
    """The next object that this rank has sent or broadcast. Tensors are on the CPU where the sender had them there, else on
    this rank's device. Objects that are no plain data, tensors or `user_content` come pickled, from ranks of this job only."""
    return state.objects.receive(_global_rank(src_rank, rank_type))


def allgather(obj: Any, group: CommGroup = CommGroup.WORLD) -> list[Any]:
    """The objects of the group's members, in the group's order."""
    return state.objects.allgather(obj, state.group_members(_kind(group, CommGroup)), state.rank)


def barrier(group: CommGroup = CommGroup.WORLD) -> None:
    """Returns when all members have come; an error that names who has not, after `peer_timeout`."""
    kind = _kind(group, CommGroup)
    if kind == "world":
        with state.require().calling("barrier"):
            state.exchange(b"")
            if state.size > 1:
                state.settle()
    else:
        state.objects.allgather(None, state.group_members(kind), state.rank)


def dp_barrier() -> None:
    """Of the ranks of this stage."""
    barrier(CommGroup.DP_GROUP)


def mp_barrier() -> None:
    """Of this replica of the model."""
    barrier(CommGroup.MP_GROUP)
