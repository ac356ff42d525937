"""Python objects from rank to rank, as message.py packs them. `send` returns when the other rank has received."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardsmith.errors import Error

if TYPE_CHECKING:
    from shardsmith.smp.message import Message
    from shardsmith.smp.session import Session

# Messages of one kind between two ranks arrive in the order in which they were sent.
TAG_OBJECT, TAG_RECEIVED, TAG_GATHER = 0x5510, 0x5511, 0x5512


def bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


class Objects:
    """Point to point over a group of CPU tensors that spans the world. Of the main thread."""

    def __init__(self, session: Session, group: dist.ProcessGroup):
        self.session = session
        self.group = group
        self._said_pickled = False

    def _call(self, what: str, function: Any, tensor: torch.Tensor, other: int, tag: int) -> None:
        """`what` this rank is doing, as the error says that names the rank at fault."""
        try:
            function(tensor, other, group=self.group, tag=tag)
        except RuntimeError as error:
            text = str(error).strip().splitlines()
            late = text and "imed out" in text[0]  # gloo's words about its own buffers say nothing more
            raise self.session.peer_error(what if late else f"{what}: {text[0] if text else type(error).__name__}") from error

    def _pack(self, value: Any) -> Message:
        from shardsmith.smp.message import pack

        return pack(value, self._tell_pickled)

    def _tell_pickled(self, class_name: str) -> None:
        if not self._said_pickled:
            self._said_pickled = True
            from shardsmith.smp.session import logger

            logger.warning("[%d] an object of %s is pickled for the other ranks of this job (said once); plain data and tensors are "
                           "not", self.session.rank, class_name)

    def _unpack(self, message: Message) -> Any:
        from shardsmith.smp.message import unpack

        return unpack(message, self.session.device)

    def _send(self, message: Message, dest: int, tag: int, what: str) -> None:
        parts = [torch.tensor([len(message.data)], dtype=torch.int64), bytes_tensor(message.data)]
        parts += [tensor.reshape(-1).view(torch.uint8) for tensor in message.tensors]
        for part in parts:
            if part.numel():
                self._call(what, dist.send, part, dest, tag)

    def _receive(self, source: int, tag: int, what: str) -> Message:
        from shardsmith.smp.message import Message, empty_tensors

        size = torch.empty(1, dtype=torch.int64)
        self._call(what, dist.recv, size, source, tag)
        data = torch.empty(int(size), dtype=torch.uint8)
        self._call(what, dist.recv, data, source, tag)
        message = Message(tensor_bytes(data), empty_tensors(tensor_bytes(data)))
        for tensor in message.tensors:
            if tensor.numel():
                self._call(what, dist.recv, tensor.reshape(-1).view(torch.uint8), source, tag)
        return message

    def send(self, value: Any, dests: list[int], name: str) -> None:
        """To global ranks; returns when all have received. `name`: of the script's call."""
        message = self._pack(value)
        for dest in dests:
            self._send(message, dest, TAG_OBJECT, f"in {name}, for which rank {dest} has to call smp.recv_from")
        for dest in dests:
            self._call(f"in {name}, which rank {dest} has not received", dist.recv, torch.empty(1, dtype=torch.uint8), dest,
                       TAG_RECEIVED)

    def receive(self, source: int) -> Any:
        what = f"in smp.recv_from, for which rank {source} has to call smp.broadcast or smp.send"
        message = self._receive(source, TAG_OBJECT, what)
        self._call(what, dist.send, torch.zeros(1, dtype=torch.uint8), source, TAG_RECEIVED)
        return self._unpack(message)

    def gather(self, value: Any, members: list[int], rank: int) -> list[Any] | None:
        """On the first member, in the members' order."""
        messages = self._gather(value, members, rank)
        return None if messages is None else [value, *map(self._unpack, messages)]

    def _gather(self, value: Any, members: list[int], rank: int) -> list[Message] | None:
        """Of the other members, on the first."""
        if rank != members[0]:
            self._send(self._pack(value), members[0], TAG_GATHER, f"gathering on rank {members[0]}")
            return None
        return [self._receive(member, TAG_GATHER, f"gathering from rank {member}") for member in members[1:]]

    def allgather(self, value: Any, members: list[int], rank: int) -> list[Any]:
        """In the members' order. The first member collects and hands out."""
        if rank not in members:
            raise Error("invalid_argument", f"rank {rank} is no member of the group {members}", rank)
        if len(members) == 1:
            return [value]
        first = members[0]
        messages = self._gather(value, members, rank)
        if messages is None:
            received = [self._receive(first, TAG_GATHER, f"gathering from rank {first}") for _ in members[1:]]
            own = members.index(rank)
            values = list(map(self._unpack, received))
            return [*values[:own], value, *values[own:]]
        messages = [self._pack(value), *messages]
        for number, member in enumerate(members[1:], 1):
            for other, message in enumerate(messages):
                if other != number:
                    self._send(message, member, TAG_GATHER, f"handing to rank {member} what was gathered")
        return [value, *map(self._unpack, messages[1:])]
