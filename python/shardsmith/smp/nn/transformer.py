"""`DistributedTransformerOutputLayer`, `DistributedTransformerLayer`, `DistributedTransformer` and
`DistributedTransformerLMHead`. Sizes are the whole's, whatever the tensor-parallel degree."""
from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardsmith.errors import Error
from shardsmith.smp.nn.attention import (Columns, DistributedAttentionLayer, FusedLayerNorm, check_probability, initial,
                                         normal_start, require_layernorm, residual_sum)
from shardsmith.smp.nn.base import DistributedModule, arguments_of, dropout_place, require_multiple, tensor_parallel_degree
from shardsmith.smp.nn.linear import DistributedEmbedding, DistributedLinear, entered
from shardsmith.smp.nn.switches import Switches, say_once, switches_of

_TANH = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
MASKED = -10000.0  # what a masked position's scores get


class DistributedTransformerOutputLayer(DistributedModule):
    """The feed-forward of a block: an optional layer norm, dense1, the activation, dense2, the residual sum, an optional
    layer norm. hidden [N, S, H] -> [N, S, H]. The intermediate features are split. activation: "gelu" (the exact one),
    "gelu_new" (by tanh), "relu" or "silu"."""

    def __init__(self, hidden_size: int = 1024, intermediate_size: int = 4096, hidden_dropout_prob: float = 0.1,
                 activation: str = "gelu", layernorm_epsilon: float = 1e-5, initializer_range: float = 0.02,
                 use_normal_initialization: bool = False, pre_layernorm: bool = False, post_layernorm: bool = True,
                 fp32_residual_addition: bool = False, **switches: Any):
        super().__init__()
        where = "DistributedTransformerOutputLayer"
        require_layernorm(where, pre_layernorm, post_layernorm)
        require_multiple(where, intermediate_size, "intermediate_size")
        check_probability(where, hidden_dropout_prob=hidden_dropout_prob)
        if activation not in ("gelu", "relu", "silu", *_TANH):
            raise Error("invalid_argument", f"{where}: activation '{activation}'; there are gelu, {', '.join(_TANH)}, relu and silu")
        self.switches: Switches = switches_of(where, {"fp32_residual_addition": fp32_residual_addition, **switches})
        self.hidden_dropout_prob = hidden_dropout_prob
        # The fused kernel is of the tanh form, as it was in the library that this interface comes from.
        fuses = bool(self.switches.fused_bias_gelu)
        self.activation = "gelu_new" if activation == "gelu" and fuses else activation
        if fuses and activation not in ("gelu", *_TANH):
            say_once(f"fused_bias_gelu changes nothing: the activation is {activation}")
        self.fuses = fuses
        self.dense1 = Columns(hidden_size, intermediate_size, initial(initializer_range, use_normal_initialization))
        self.dense2 = DistributedLinear(intermediate_size, hidden_size)
        normal_start(self.dense2, initializer_range, use_normal_initialization)
        self.pre_layernorm = FusedLayerNorm(hidden_size, eps=layernorm_epsilon) if pre_layernorm else None
        self.layernorm = FusedLayerNorm(hidden_size, eps=layernorm_epsilon) if post_layernorm else None

    @classmethod
    def can_be_split(cls, hidden_size: int = 1024, intermediate_size: int = 4096, *args: Any, **kwargs: Any) -> str:
        left = intermediate_size % tensor_parallel_degree()
        return f"intermediate_size {intermediate_size} is no multiple of the degree" if left else ""

    def forward(self, inputs: Any) -> torch.Tensor:
        from shardsmith import _engine

        hidden = inputs[0] if isinstance(inputs, (tuple, list)) else inputs
        x = hidden if self.pre_layernorm is None else self.pre_layernorm(hidden)
        x = entered(x.to(self.dense1.weight.dtype))
        h = _engine.linear_activation(x, self.dense1.weight, self.dense1.bias, self.activation, self.fuses)
        y = residual_sum(self, self.dense2, h, hidden, self.hidden_dropout_prob)
        return y if self.layernorm is None else self.layernorm(y)


class DistributedTransformerLayer(DistributedModule):
    """One block: attention, with add_cross_attention attention to other states, feed-forward.

    (hidden [N, S, H], mask) or (hidden, cross_states [N, T, H], mask, cross_mask), as a tuple or as arguments -> a tuple of
    the same, hidden replaced, so that blocks stand in an nn.Sequential. Masks are added to the scores: [N, 1, 1, S] and
    [N, 1, 1, T], or None."""

    def __init__(self, num_attention_heads: int = 32, attention_head_size: int = 32, hidden_size: int = 1024,
                 intermediate_size: int = 4096, attention_dropout_prob: float = 0.1, hidden_dropout_prob: float = 0.1,
                 activation: str = "gelu", layernorm_epsilon: float = 1e-5, initializer_range: float = 0.02,
                 use_normal_initialization: bool = False, causal_mask_size: int | None = None,
                 add_cross_attention: bool = False, pre_layernorm: bool = False, post_layernorm: bool = True,
                 use_alibi: bool = False, alibi_bias_max: float = 8, **switches: Any):
        super().__init__()
        switches_of("DistributedTransformerLayer", switches)
        shared = dict(hidden_dropout_prob=hidden_dropout_prob, layernorm_epsilon=layernorm_epsilon,
                      initializer_range=initializer_range, use_normal_initialization=use_normal_initialization,
                      pre_layernorm=pre_layernorm, post_layernorm=post_layernorm, **switches)
        heads = dict(num_attention_heads=num_attention_heads, attention_head_size=attention_head_size,
                     hidden_size=hidden_size, attention_dropout_prob=attention_dropout_prob)
        self.attention = DistributedAttentionLayer(**heads, causal_mask_size=causal_mask_size, use_alibi=use_alibi,
                                                   alibi_bias_max=alibi_bias_max, **shared)
        self.cross_attention = DistributedAttentionLayer(**heads, cross_attention=True, **shared) if add_cross_attention else None
        self.output = DistributedTransformerOutputLayer(hidden_size=hidden_size, intermediate_size=intermediate_size,
                                                        activation=activation, **shared)

    @classmethod
    def can_be_split(cls, num_attention_heads: int = 32, attention_head_size: int = 32, hidden_size: int = 1024,
                     intermediate_size: int = 4096, *args: Any, **kwargs: Any) -> str:
        return (DistributedAttentionLayer.can_be_split(num_attention_heads)
                or DistributedTransformerOutputLayer.can_be_split(hidden_size, intermediate_size))

    def forward(self, inputs: Any, *more: Any) -> tuple[Any, ...]:
        arguments = arguments_of(inputs, more)
        if self.cross_attention is None:
            hidden, mask = (*arguments, None)[:2]
            return self.output(self.attention((hidden, mask))), mask
        if len(arguments) != 4:
            raise Error("invalid_argument", "DistributedTransformerLayer with cross attention takes (hidden, cross_states, mask, "
                                            f"cross_mask), not {len(arguments)} arguments")
        hidden, cross_states, mask, cross_mask = arguments
        hidden = self.attention((hidden, mask))
        hidden = self.cross_attention((hidden, cross_states, cross_mask))
        return self.output(hidden), cross_states, mask, cross_mask


class DistributedTransformer(DistributedModule):
    """num_layers blocks in the nn.Sequential `seq_layers`. Takes and gives what one block does. Where both layer norms are
    on there is one at the input of the stack and one at its output as well."""

    def __init__(self, num_layers: int = 12, num_attention_heads: int = 32, attention_head_size: int = 32,
                 hidden_size: int = 1024, intermediate_size: int = 4096, attention_dropout_prob: float = 0.1,
                 hidden_dropout_prob: float = 0.1, activation: str = "gelu", layernorm_epsilon: float = 1e-5,
                 initializer_range: float = 0.02, use_normal_initialization: bool = False,
                 causal_mask_size: int | None = None, add_cross_attention: bool = False, pre_layernorm: bool = False,
                 post_layernorm: bool = True, use_alibi: bool = False, alibi_bias_max: float = 8, **switches: Any):
        super().__init__()
        if num_layers < 1:
            raise Error("invalid_argument", f"DistributedTransformer: num_layers is {num_layers}, expected at least 1")
        known = switches_of("DistributedTransformer", switches)
        both = pre_layernorm and post_layernorm
        self.pre_layernorm = FusedLayerNorm(hidden_size, eps=layernorm_epsilon) if both else None
        self.seq_layers = nn.Sequential(*(
            DistributedTransformerLayer(
                num_attention_heads, attention_head_size, hidden_size, intermediate_size, attention_dropout_prob,
                hidden_dropout_prob, activation, layernorm_epsilon, initializer_range, use_normal_initialization,
                causal_mask_size, add_cross_attention, pre_layernorm, post_layernorm, use_alibi, alibi_bias_max,
                **{**switches, "layer_idx": known.with_layer(index).layer_idx})
            for index in range(num_layers)))
        self.layernorm = FusedLayerNorm(hidden_size, eps=layernorm_epsilon) if both else None

    @classmethod
    def can_be_split(cls, num_layers: int = 12, *args: Any, **kwargs: Any) -> str:
        return DistributedTransformerLayer.can_be_split(*args, **kwargs)

    def forward(self, inputs: Any, *more: Any) -> tuple[Any, ...]:
        hidden, *rest = (*inputs, *more) if isinstance(inputs, (tuple, list)) else (inputs, *more)
        if self.pre_layernorm is not None:
            hidden = self.pre_layernorm(hidden)
        hidden, *rest = self.seq_layers((hidden, *rest))
        return (hidden if self.layernorm is None else self.layernorm(hidden), *rest)


class DistributedTransformerLMHead(DistributedModule):
    """Embeddings, the stack, and the head of a language model, whose matrix is the word embedding's.

    Takes the tuple (input_ids, attention_mask, token_type_ids, position_ids, labels), with cross attention (input_ids,
    attention_mask, token_type_ids, position_ids, cross_states, cross_mask, labels), as a tuple or as arguments; all but
    input_ids [N, S] may be None. In attention_mask [N, S] and cross_mask [N, T] 1 means masked. Gives logits [N, S, V]; with
    labels [N, S] (loss, logits): where causal_mask_size is given position t predicts label t + 1, otherwise its own; -100
    counts nowhere. Without add_lm_head the hidden states [N, S, H].

    With distribute_embedding the word embedding is split along H, and the head with it; otherwise it is whole on every
    rank."""

    def __init__(self, num_layers: int = 12, num_attention_heads: int = 32, attention_head_size: int = 32,
                 hidden_size: int = 1024, intermediate_size: int = 4096, vocab_size: int = 30522, num_positions: int = 1024,
                 attention_dropout_prob: float = 0.1, hidden_dropout_prob: float = 0.1, activation: str = "gelu",
                 layernorm_epsilon: float = 1e-5, num_token_types: int = 0, causal_mask_size: int | None = None,
                 add_cross_attention: bool = False, add_lm_head: bool = True, initializer_range: float = 0.02,
                 use_normal_initialization: bool = False, pre_layernorm: bool = False, post_layernorm: bool = True,
                 use_alibi: bool = False, alibi_bias_max: float = 8, **switches: Any):
        super().__init__()
        known = switches_of("DistributedTransformerLMHead", switches)
        require_layernorm("DistributedTransformerLMHead", pre_layernorm, post_layernorm)
        self.hidden_dropout_prob, self.num_positions = hidden_dropout_prob, num_positions
        self.vocab_size, self.causal_mask_size, self.add_cross_attention = vocab_size, causal_mask_size, add_cross_attention

        def embedding(rows: int) -> nn.Embedding:
            made = nn.Embedding(rows, hidden_size)
            if not made.weight.is_meta:
                nn.init.normal_(made.weight, 0, initializer_range)
            return made

        self.is_split = bool(known.distribute_embedding)
        self.word_embedding: nn.Module = (
            DistributedEmbedding(vocab_size, hidden_size, initializer_range=initializer_range) if self.is_split
            else embedding(vocab_size))
        self.position_embedding = embedding(num_positions) if num_positions > 0 else None
        self.token_type_embedding = embedding(num_token_types) if num_token_types > 0 else None
        self.transformer = DistributedTransformer(
            num_layers, num_attention_heads, attention_head_size, hidden_size, intermediate_size, attention_dropout_prob,
            hidden_dropout_prob, activation, layernorm_epsilon, initializer_range, use_normal_initialization,
            causal_mask_size, add_cross_attention, pre_layernorm, post_layernorm, use_alibi, alibi_bias_max, **switches)
        ends = pre_layernorm and not post_layernorm  # otherwise the last block's own is the last
        self.layernorm = FusedLayerNorm(hidden_size, eps=layernorm_epsilon) if ends else None
        self.lm_head: nn.Module | None = None
        if add_lm_head:
            self.lm_head = (DistributedLinear(hidden_size, vocab_size, bias=False) if self.is_split
                            else nn.Linear(hidden_size, vocab_size, bias=False))
            self.lm_head.weight = self.word_embedding.weight

    @classmethod
    def can_be_split(cls, num_layers: int = 12, *args: Any, **kwargs: Any) -> str:
        return DistributedTransformerLayer.can_be_split(*args[:4], **{
            key: value for key, value in kwargs.items() if key in (
                "num_attention_heads", "attention_head_size", "hidden_size", "intermediate_size")})

    def forward(self, inputs: Any, *more: Any) -> Any:
        count = 7 if self.add_cross_attention else 5
        arguments = arguments_of(inputs, more)
        if len(arguments) > count:
            raise Error("invalid_argument", f"DistributedTransformerLMHead takes {count} inputs, not {len(arguments)}")
        ids, mask, types, positions, *rest = (*arguments, *[None] * (count - len(arguments)))
        cross_states, cross_mask = rest[:2] if self.add_cross_attention else (None, None)
        labels = rest[-1]
        hidden = self._embed(ids, types, positions)
        own_mask = _added(mask, hidden.dtype)
        if self.add_cross_attention:
            hidden = self.transformer((hidden, cross_states, own_mask, _added(cross_mask, hidden.dtype)))[0]
        else:
            hidden = self.transformer((hidden, own_mask))[0]
        if self.layernorm is not None:
            hidden = self.layernorm(hidden)
        hidden = hidden.to(self.word_embedding.weight.dtype)
        if self.lm_head is None:
            return hidden
        logits = self.lm_head(hidden)
        return logits if labels is None else (self._loss(hidden, logits, labels), logits)

    def _embed(self, ids: torch.Tensor, types: torch.Tensor | None, positions: torch.Tensor | None) -> torch.Tensor:
        from shardsmith import _engine

        x = self.word_embedding(ids)
        if self.position_embedding is not None:
            if ids.shape[1] > self.num_positions:
                raise Error("invalid_argument", f"DistributedTransformerLMHead: input_ids have {ids.shape[1]} positions, the model "
                                                f"has {self.num_positions}")
            x = x + (self.position_embedding.weight[:ids.shape[1]] if positions is None else self.position_embedding(positions))
        if self.token_type_embedding is not None:
            x = x + (self.token_type_embedding.weight[0] if types is None else self.token_type_embedding(types))
        return _engine.dropout(x, self.hidden_dropout_prob, 4 * self._place, dropout_place(self))

    def _loss(self, hidden: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        from shardsmith import _engine

        shifted = self.causal_mask_size is not None
        if not self.is_split:
            return _engine.lm_loss(hidden, self.word_embedding.weight, labels, shifted=shifted)
        if shifted:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return nn.functional.cross_entropy(logits.reshape(-1, self.vocab_size).float(), labels.reshape(-1))


def _added(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """[N, S], 1 = masked -> [N, 1, 1, S], to be added to scores."""
    return None if mask is None else mask[:, None, None, :].to(dtype) * MASKED
