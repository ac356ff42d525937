"""`FusedLayerNorm`, `FlashAttentionLayer` and `DistributedAttentionLayer`."""
from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from shardsmith.errors import Error
from shardsmith.smp.nn import base
from shardsmith.smp.nn.base import DistributedModule, arguments_of, dropout_place, require_multiple, share
from shardsmith.smp.nn.linear import DistributedLinear, as_linear, entered, row_parallel
from shardsmith.smp.nn.switches import Switches, switches_of, uses_flash


class FusedLayerNorm(nn.LayerNorm):
    """nn.LayerNorm whose forward and backward are a pass over memory each (the engine's kernel). x [..., H] of any
    floating dtype -> the weight's dtype; statistics in float32 at least."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        from shardsmith import _engine

        weight, bias = self.weight, self.bias
        if weight is None:
            return nn.functional.layer_norm(input, self.normalized_shape, None, None, self.eps)
        if input.dtype == weight.dtype:
            return _engine.layer_norm(input, weight, bias, self.eps)
        wide = torch.promote_types(input.dtype, weight.dtype)  # a float32 residual stream with narrow weights
        normed = _engine.layer_norm(input.to(wide), weight.to(wide), None if bias is None else bias.to(wide), self.eps)
        return normed.to(weight.dtype)


def check_probability(where: str, **given: float) -> None:
    for name, value in given.items():
        if not 0 <= value < 1:
            raise Error("invalid_argument", f"{where}: {name} is {value}, expected 0 <= p < 1")


class FlashAttentionLayer(nn.Module):
    """Attention over all that is given, without weights. qkv [B, S, 3, heads, d]; attn_mask [B, 1, 1, S], added to the
    scores, or None -> [B, heads, S, d]. The scale is 1 / (sqrt(d) (layer_idx + 1)), its parts as they are switched on,
    unless `scale` is given. triton_flash_attention is accepted: there is one kernel."""

    def __init__(self, attention_dropout_prob: float = 0.1, attention_head_size: int | None = None,
                 scale_attention_scores: bool = True, scale_attn_by_layer_idx: bool = False, layer_idx: int | None = None,
                 scale: float | None = None, triton_flash_attention: bool = False, use_alibi: bool = False):
        super().__init__()
        check_probability("FlashAttentionLayer", attention_dropout_prob=attention_dropout_prob)
        if scale_attn_by_layer_idx and layer_idx is None and scale is None:
            raise Error("invalid_argument", "FlashAttentionLayer: scale_attn_by_layer_idx needs layer_idx")
        self.attention_dropout_prob, self.attention_head_size = attention_dropout_prob, attention_head_size
        self.scale_attention_scores = scale_attention_scores
        self.divisor = layer_idx + 1 if scale_attn_by_layer_idx and layer_idx is not None else 1
        self.scale, self.use_alibi = scale, use_alibi
        self._place = next(base._places)

    def forward(self, qkv: torch.Tensor, attn_mask: torch.Tensor | None = None, causal: bool = False) -> torch.Tensor:
        from shardsmith import _engine

        if qkv.dim() != 5 or qkv.shape[2] != 3:
            raise Error("invalid_argument", f"FlashAttentionLayer: qkv must be [B, S, 3, heads, d], not {list(qkv.shape)}")
        heads, size = qkv.shape[3:]
        if self.attention_head_size not in (None, size):
            raise Error("invalid_argument", f"FlashAttentionLayer: qkv has heads of {size}, attention_head_size is "
                                            f"{self.attention_head_size}")
        scale = self.scale
        if scale is None:
            scale = (1 / math.sqrt(size) if self.scale_attention_scores else 1.0) / self.divisor
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        slopes = _engine.alibi_slopes(heads, 8.0, 0, heads).to(qkv.device) if self.use_alibi else None
        return _engine.attention(q, k, v, attn_mask, causal=causal, scale=scale, slopes=slopes,
                                 dropout=self.attention_dropout_prob, site=4 * self._place, place=dropout_place(self))


class DistributedAttentionLayer(DistributedModule):
    """Self-attention, or with cross_attention attention to other states, and what is around it: an optional layer norm
    before, the residual sum, an optional layer norm after. Heads are split over the ranks.

    (hidden [N, S, H], mask) or (hidden, cross_states [N, T, H], mask), as a tuple or as arguments -> [N, S, H]. A mask is
    added to the scores and broadcasts to [N, heads, S, T]; None: nothing. With causal_mask_size a position sees itself
    and those before it, and S may be no more than that."""

    def __init__(self, num_attention_heads: int = 32, attention_head_size: int = 32, hidden_size: int = 1024,
                 attention_dropout_prob: float = 0.1, hidden_dropout_prob: float = 0.1, layernorm_epsilon: float = 1e-5,
                 initializer_range: float = 0.02, use_normal_initialization: bool = False, cross_attention: bool = False,
                 causal_mask_size: int | None = None, pre_layernorm: bool = False, post_layernorm: bool = True,
                 use_alibi: bool = False, alibi_bias_max: float = 8, **switches: Any):
        super().__init__()
        require_layernorm("DistributedAttentionLayer", pre_layernorm, post_layernorm)
        require_multiple("DistributedAttentionLayer", num_attention_heads, "num_attention_heads")
        check_probability("DistributedAttentionLayer", attention_dropout_prob=attention_dropout_prob,
                          hidden_dropout_prob=hidden_dropout_prob)
        self.switches: Switches = switches_of("DistributedAttentionLayer", switches)
        self.num_attention_heads, self.attention_head_size = num_attention_heads, attention_head_size
        self.hidden_size, self.causal_mask_size, self.cross_attention = hidden_size, causal_mask_size, cross_attention
        self.attention_dropout_prob, self.hidden_dropout_prob = attention_dropout_prob, hidden_dropout_prob
        self.use_alibi, self.alibi_bias_max = use_alibi, float(alibi_bias_max)
        self.first_head, self.own_heads = share(num_attention_heads)
        width = num_attention_heads * attention_head_size
        start = initial(initializer_range, use_normal_initialization)
        self.query = Columns(hidden_size, width, start)
        self.key = Columns(hidden_size, width, start)
        self.value = Columns(hidden_size, width, start)
        self.dense = DistributedLinear(width, hidden_size)
        normal_start(self.dense, initializer_range, use_normal_initialization)
        self.pre_layernorm = FusedLayerNorm(hidden_size, eps=layernorm_epsilon) if pre_layernorm else None
        self.layernorm = FusedLayerNorm(hidden_size, eps=layernorm_epsilon) if post_layernorm else None

    @classmethod
    def can_be_split(cls, num_attention_heads: int = 32, *args: Any, **kwargs: Any) -> str:
        left = num_attention_heads % base.tensor_parallel_degree()
        return f"{num_attention_heads} attention heads are no multiple of the degree" if left else ""

    def _scale(self) -> tuple[float, int]:
        """What scores are multiplied by, and the layer's number for query_key_layer_scaling."""
        s = self.switches
        scale = 1.0 if s.scale_attention_scores is False else 1 / math.sqrt(self.attention_head_size)
        number = 1 + (s.layer_idx or 0)
        return scale / (number if s.scale_attn_by_layer_idx else 1), number if s.query_key_layer_scaling else 0

    def forward(self, inputs: Any, *more: Any) -> torch.Tensor:
        from shardsmith import _engine

        hidden, *rest = arguments_of(inputs, more)
        cross = rest.pop(0) if self.cross_attention else None
        mask = rest.pop(0) if rest else None
        batch, length = hidden.shape[:2]
        if self.causal_mask_size is not None and length > self.causal_mask_size:
            raise Error("invalid_argument", f"DistributedAttentionLayer: the sequence has {length} positions, causal_mask_size "
                                            f"is {self.causal_mask_size}")
        x = hidden if self.pre_layernorm is None else self.pre_layernorm(hidden)
        x = entered(x.to(self.dense.weight.dtype))
        source = x if cross is None else entered(cross.to(x.dtype))

        def split(y: torch.Tensor) -> torch.Tensor:
            return y.view(batch, y.shape[1], self.own_heads, self.attention_head_size).transpose(1, 2)

        q, k, v = split(self.query(x)), split(self.key(source)), split(self.value(source))
        if mask is not None and mask.dim() == 4 and mask.shape[1] == self.num_attention_heads > self.own_heads:
            mask = mask.narrow(1, self.first_head, self.own_heads)
        slopes = None
        if self.use_alibi:
            slopes = _engine.alibi_slopes(self.num_attention_heads, self.alibi_bias_max, self.first_head, self.own_heads)
            slopes = slopes.to(x.device)
        scale, layer = self._scale()
        switches = self.switches
        y = _engine.attention(q, k, v, mask, causal=self.causal_mask_size is not None, scale=scale, slopes=slopes,
                              dropout=self.attention_dropout_prob, site=4 * self._place, first_head=self.first_head,
                              place=dropout_place(self), flash=uses_flash(switches, self.attention_head_size),
                              fused_softmax=switches.fused_softmax is not False,
                              in_fp32=bool(switches.attention_in_fp32), query_key_layer=layer)
        y = y.transpose(1, 2).reshape(batch, length, self.own_heads * self.attention_head_size)
        y = residual_sum(self, self.dense, y, hidden, self.hidden_dropout_prob)
        return y if self.layernorm is None else self.layernorm(y)


class Columns(DistributedModule):
    """A linear layer whose output features are split: x [..., in], the same on all ranks and entered -> [..., out / degree]."""

    def __init__(self, in_features: int, out_features: int, initialize: Any = None, bias: bool = True):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        start = initialize or as_linear(in_features)
        self.make_parameter("weight", [out_features, in_features], start, axis=0)
        if bias:
            self.make_parameter("bias", [out_features], torch.Tensor.zero_ if initialize else start, axis=0)
        else:
            self.register_parameter("bias", None)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        from shardsmith import _engine

        return _engine.linear(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def require_layernorm(where: str, pre: bool, post: bool) -> None:
    if not (pre or post):
        raise Error("invalid_argument", f"{where}: one of pre_layernorm and post_layernorm must be True")


def initial(deviation: float, normal: bool) -> Any:
    """How a weight begins: normal, with a bias of zeros, or None, as nn.Linear's."""
    return (lambda tensor: tensor.normal_(0, deviation)) if normal else None


def normal_start(linear: DistributedLinear, deviation: float, normal: bool) -> None:
    """The same for a row-parallel layer that is there: the whole is drawn, and this rank's part kept."""
    if not normal or linear.weight.is_meta:
        return
    with torch.no_grad():
        whole = torch.empty(linear.out_features, linear.in_features, dtype=linear.weight.dtype).normal_(0, deviation)
        begin, count = share(linear.in_features)
        linear.weight.copy_(whole.narrow(1, begin, count))
        linear.bias.zero_()


def residual_sum(layer: Any, linear: DistributedLinear, x: torch.Tensor, residual: torch.Tensor, p: float) -> torch.Tensor:
    """residual + dropout(linear(x)), where x has this rank's features; in float32 with fp32_residual_addition."""
    from shardsmith import _engine

    switches, place, site = layer.switches, dropout_place(layer), 4 * layer._place + 1
    # Whose bias is added here, in the type or the pass that is asked for.
    bias = linear.bias if switches.fp32_residual_addition or switches.fused_dropout else None
    y = row_parallel(x, linear.weight, linear.bias if bias is None else None)
    if switches.fp32_residual_addition:
        y = y.to(torch.promote_types(y.dtype, torch.float32))
        bias = None if bias is None else bias.to(y.dtype)
    residual = residual.to(y.dtype)
    if switches.fused_dropout:
        return _engine.dropout_add(y, bias, residual, p, site, place)
    return residual + _engine.dropout(y if bias is None else y + bias, p, site, place)


