"""What the switches of smp.model_creation, smp.tensor_parallelism and of the layers' own keywords say."""
from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from shardsmith.errors import Error
from shardsmith.smp.session import logger
from shardsmith.words import did_you_mean

FLASH_HEAD_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True)
class Switches:
    """None: not said, the layer's own default. The function that a layer computes depends on `use_alibi` and the scale
    keywords alone; all others choose kernels and precisions, or what is split."""

    attention_in_fp32: bool | None = None  # scores, softmax and weighted sum in float32
    query_key_layer_scaling: bool | None = None  # scores over the layer's number, and times it again in float32
    fp32_residual_addition: bool | None = None  # the residual stream is kept in float32
    fused_softmax: bool | None = None  # scale, mask and softmax in one pass; on
    fused_dropout: bool | None = None  # bias, dropout and residual in one pass; off
    fused_bias_gelu: bool | None = None  # bias and tanh-GELU in one pass with the product; off
    flash_attention: bool | None = None  # torch's fused attention; on
    distribute_embedding: bool | None = None  # embeddings are split too; off
    use_alibi: bool | None = None
    alibi_bias_max: float | None = None
    scale_attention_scores: bool | None = None  # by 1 / sqrt(head size); on
    scale_attn_by_layer_idx: bool | None = None  # by 1 / (layer's number from 1) too
    layer_idx: int | None = None  # from 0
    zero_init: bool | None = None  # of sharded data parallelism

    def with_layer(self, index: int) -> Switches:
        return self if self.layer_idx is not None else replace(self, layer_idx=index)


_NAMES = tuple(field.name for field in fields(Switches))
_said: set[str] = set()


def say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        logger.warning("%s", text)


def switches_of(where: str, given: dict[str, Any]) -> Switches:
    """Throws Error("invalid_argument") for a keyword that nobody knows."""
    for name in given:
        if name not in _NAMES:
            raise Error("invalid_argument", f"{where}: unknown keyword '{name}'{did_you_mean(name, _NAMES)}")
    return Switches(**given)


def uses_flash(switches: Switches, head_size: int) -> bool:
    """Whether the fused attention is to be used: not where another switch needs the scores."""
    if switches.flash_attention is False or switches.query_key_layer_scaling or switches.attention_in_fp32:
        if switches.flash_attention and switches.query_key_layer_scaling:
            say_once("flash_attention is off: query_key_layer_scaling needs the scores")
        return False
    if head_size not in FLASH_HEAD_SIZES:
        if switches.flash_attention:
            say_once(f"flash_attention is off: the head size is {head_size}, and it is there for "
                     f"{', '.join(map(str, FLASH_HEAD_SIZES))}")
        return False
    return True
