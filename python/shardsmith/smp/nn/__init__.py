"""`smp.nn`: layers that are split over the tensor-parallel ranks, usable on their own and inside of a DistributedModel."""
from __future__ import annotations

from shardsmith.smp.nn import huggingface
from shardsmith.smp.nn.attention import DistributedAttentionLayer, FlashAttentionLayer, FusedLayerNorm
from shardsmith.smp.nn.base import DistributedModule
from shardsmith.smp.nn.linear import DistributedEmbedding, DistributedLinear
from shardsmith.smp.nn.transformer import (DistributedTransformer, DistributedTransformerLayer, DistributedTransformerLMHead,
                                           DistributedTransformerOutputLayer)

__all__ = [
    "DistributedAttentionLayer", "DistributedEmbedding", "DistributedLinear", "DistributedModule", "DistributedTransformer",
    "DistributedTransformerLMHead", "DistributedTransformerLayer", "DistributedTransformerOutputLayer",
    "FlashAttentionLayer", "FusedLayerNorm", "huggingface",
]
