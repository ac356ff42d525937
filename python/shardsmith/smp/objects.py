"""Python objects between ranks: pickled, their tensors as they are. `send` returns when the other rank has received."""
from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardsmith.errors import Error

if TYPE_CHECKING:
    from shardsmith.smp.session import Session

# Messages of one kind between two ranks arrive in the order in which they were sent.
TAG_OBJECT, TAG_RECEIVED, TAG_GATHER = 0x5510, 0x5511, 0x5512


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors = tensors

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            self.tensors.append(value)
            return len(self.tensors) - 1, isinstance(value, torch.nn.Parameter)
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]):
        super().__init__(file)
        self.tensors = tensors

    def persistent_load(self, pid: Any) -> Any:
        index, parameter = pid
        return torch.nn.Parameter(self.tensors[index]) if parameter else self.tensors[index]


def pack(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    tensors: list[torch.Tensor] = []
    buffer = io.BytesIO()
    _Pickler(buffer, tensors).dump(value)
    return buffer.getvalue(), tensors


def unpack(data: bytes, tensors: list[torch.Tensor]) -> Any:
    return _Unpickler(io.BytesIO(data), tensors).load()


def bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


class Objects:
    """Point to point over a group of CPU tensors that spans the world."""

    def __init__(self, session: Session, group: dist.ProcessGroup):
        self.session = session
        self.group = group

    def _call(self, what: str, other: int, function: Any, tensor: torch.Tensor, tag: int) -> None:
        try:
            function(tensor, other, group=self.group, tag=tag)
        except RuntimeError as error:
            raise self.session.peer_error(f"{what} rank {other}: {_first_line(error)}") from error

    def _send(self, value: Any, dest: int, tag: int) -> None:
        data, tensors = pack(value)
        header = pickle.dumps([(tuple(t.shape), t.dtype) for t in tensors])
        lengths = torch.tensor([len(header), len(data)], dtype=torch.int64)
        parts = [lengths, bytes_tensor(header), bytes_tensor(data)]
        parts += [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in tensors]
        for part in parts:
            if part.numel():
                self._call("sending to", dest, dist.send, part, tag)

    def _receive(self, source: int, tag: int) -> Any:
        def receive(count: int) -> torch.Tensor:
            part = torch.empty(count, dtype=torch.uint8)
            if count:
                self._call("receiving from", source, dist.recv, part, tag)
            return part

        header_size, data_size = receive(16).view(torch.int64).tolist()
        header = pickle.loads(tensor_bytes(receive(header_size)))
        data = tensor_bytes(receive(data_size))
        tensors = []
        for shape, dtype in header:
            result = torch.empty(shape, dtype=dtype)
            tensors.append(receive(result.numel() * result.element_size()).view(dtype).reshape(shape))
        return unpack(data, tensors)

    def send(self, value: Any, dests: list[int]) -> None:
        """To global ranks; returns when all have received."""
        for dest in dests:
            self._send(value, dest, TAG_OBJECT)
        for dest in dests:
            self._call("waiting for", dest, dist.recv, torch.empty(1, dtype=torch.uint8), TAG_RECEIVED)

    def receive(self, source: int) -> Any:
        value = self._receive(source, TAG_OBJECT)
        self._call("answering", source, dist.send, torch.zeros(1, dtype=torch.uint8), TAG_RECEIVED)
        return value

    def gather(self, value: Any, members: list[int], rank: int) -> list[Any] | None:
        """On the first member, in the members' order."""
        if rank != members[0]:
            self._send(value, members[0], TAG_GATHER)
            return None
        return [value] + [self._receive(member, TAG_GATHER) for member in members[1:]]

    def allgather(self, value: Any, members: list[int], rank: int) -> list[Any]:
        """In the members' order. The first member collects and hands out."""
        if rank not in members:
            raise Error("invalid_argument", f"rank {rank} is no member of the group {members}", rank)
        if len(members) == 1:
            return [value]
        first = members[0]
        values = self.gather(value, members, rank)
        if values is None:
            return self._receive(first, TAG_GATHER)
        for member in members[1:]:
            self._send(values, member, TAG_GATHER)
        return values


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
