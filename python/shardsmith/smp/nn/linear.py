"""`DistributedLinear` and `DistributedEmbedding`."""
from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from shardsmith.smp.nn.base import DistributedModule, ranks, require_multiple, tensor_parallel_degree



def as_linear(fan_in: int) -> Any:
    """How nn.Linear begins: weight and bias uniform within 1 / sqrt(fan_in)."""
    bound = 1 / math.sqrt(fan_in) if fan_in else 0.0
    return lambda tensor: tensor.uniform_(-bound, bound)


class DistributedLinear(DistributedModule):
    """y = x W^T + b, W [out_features, in_features] split over the input features: each rank multiplies its own, and the
    products are summed. x [..., in_features] -> [..., out_features], whole on every rank. The bias is whole."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        require_multiple("DistributedLinear", in_features, "in_features")
        self.make_parameter("weight", [out_features, in_features], as_linear(in_features), axis=1)
        if bias:
            self.make_parameter("bias", [out_features], as_linear(in_features))
        else:
            self.register_parameter("bias", None)

    @classmethod
    def can_be_split(cls, in_features: int, *args: Any, **kwargs: Any) -> str:
        return "" if in_features % tensor_parallel_degree() == 0 else f"in_features {in_features} is no multiple of the degree"

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return row_parallel(input, self.weight, self.bias, is_split=False)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def row_parallel(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, is_split: bool = True) -> torch.Tensor:
    """The product whose input features are split: x [..., in / degree], or whole and cut here; summed over the ranks."""
    from shardsmith import _engine

    group = ranks()
    if group.size == 1:
        return _engine.linear(x, weight, bias)
    rows = x.reshape(1, -1, x.shape[-1])
    if not is_split:
        rows = group.enter(rows)  # the input's gradient is the ranks' sum
        own = weight.shape[1]
        rows = rows.narrow(-1, group.rank * own, own)
    y = group.leave(_engine.linear(rows.contiguous(), weight))
    y = y.view(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias


def entered(x: torch.Tensor) -> torch.Tensor:
    """x, whose gradient is summed over the ranks."""
    group = ranks()
    return x if group.size == 1 else group.enter(x.reshape(1, -1, x.shape[-1])).view(x.shape)


class DistributedEmbedding(DistributedModule):
    """nn.Embedding [num_embeddings, embedding_dim] split over the embedding axis: each rank looks its columns up, and all
    are brought together. ids [...] -> [..., embedding_dim]. With _skip_allgather a rank's own columns are given back."""

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None,
                 max_norm: float | None = None, norm_type: float = 2.0, scale_grad_by_freq: bool = False,
                 sparse: bool = False, _weight: torch.Tensor | None = None, initializer_range: float = 0.02,
                 _skip_allgather: bool = False, _skip_scatter_and_merge: bool = False):
        from shardsmith.errors import Error

        super().__init__()
        for name, value in (("max_norm", max_norm), ("scale_grad_by_freq", scale_grad_by_freq), ("sparse", sparse)):
            if value:
                raise Error("unsupported", f"DistributedEmbedding({name}={value!r}): a rank has some of the columns only")
        require_multiple("DistributedEmbedding", embedding_dim, "embedding_dim")
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise Error("invalid_argument", f"DistributedEmbedding: padding_idx {padding_idx} is no row of {num_embeddings}")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.norm_type = norm_type
        self._skip_allgather = _skip_allgather

        def initialize(tensor: torch.Tensor) -> None:
            if _weight is not None:
                tensor.copy_(_weight)
                return
            tensor.normal_(0, initializer_range)
            if self.padding_idx is not None:
                tensor[self.padding_idx].zero_()

        self.make_parameter("weight", [num_embeddings, embedding_dim], initialize, axis=1)

    @classmethod
    def can_be_split(cls, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None,
                     max_norm: float | None = None, norm_type: float = 2.0, scale_grad_by_freq: bool = False,
                     sparse: bool = False, *args: Any, **kwargs: Any) -> str:
        if max_norm or scale_grad_by_freq or sparse:
            return "max_norm, scale_grad_by_freq and sparse need whole rows"
        return "" if embedding_dim % tensor_parallel_degree() == 0 else f"embedding_dim {embedding_dim} is no multiple of the degree"

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        own = nn.functional.embedding(input, self.weight, self.padding_idx)
        return own if self._skip_allgather else ranks().gather_columns(own, self.embedding_dim)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"
