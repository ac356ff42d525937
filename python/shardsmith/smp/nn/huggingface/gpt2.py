"""GPT-2: transformers' names to ours and back."""
from __future__ import annotations

from typing import Any

import torch

from shardsmith.smp.nn.huggingface import translation


def translate_hf_state_dict_to_smdistributed_gpt2(state_dict: dict[str, Any], max_seq_len: int | None = None) -> dict[str, Any]:
    """A whole state dict of transformers' names as one of ours. It is emptied. max_seq_len is accepted: no buffer depends on it."""
    return translation.to_smdistributed("gpt2", translation.gpt2_config, state_dict)


def translate_state_dict_to_hf_gpt2(state_dict: dict[str, Any], max_seq_len: int | None = None) -> dict[str, Any]:
    """Back."""
    return translation.to_hf("gpt2", translation.gpt2_config, state_dict)


translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gpt2  # its older name


def get_hf_gpt2_transformer_layer_hooks() -> tuple[Any, Any, Any]:
    """(init, forward, return) hooks that put a DistributedTransformerLayer in the place of transformers' GPT2Block, for
    smp.tp_register_with_module. A GPT-2 that is marked as a whole needs none of this."""
    return _init_hook, _forward_hook, _return_hook


def _init_hook(config: Any, layer_idx: int | None = None) -> Any:
    if config.add_cross_attention or config.reorder_and_upcast_attn:
        return None
    return (), {
        "num_attention_heads": config.n_head, "attention_head_size": config.n_embd // config.n_head,
        "hidden_size": config.n_embd, "intermediate_size": config.n_inner or 4 * config.n_embd,
        "attention_dropout_prob": config.attn_pdrop, "hidden_dropout_prob": config.resid_pdrop,
        "activation": config.activation_function, "layernorm_epsilon": config.layer_norm_epsilon,
        "initializer_range": config.initializer_range, "use_normal_initialization": True,
        "causal_mask_size": config.n_positions, "pre_layernorm": True, "post_layernorm": False,
        "scale_attention_scores": config.scale_attn_weights,
        "scale_attn_by_layer_idx": config.scale_attn_by_inverse_layer_idx, "layer_idx": layer_idx,
    }


def _forward_hook(hidden_states: Any, past_key_values: Any = None, attention_mask: Any = None,
                  encoder_hidden_states: Any = None, encoder_attention_mask: Any = None, use_cache: Any = False,
                  **kwargs: Any) -> Any:
    return ((hidden_states, _as_added(attention_mask, hidden_states.dtype)),), {}


def _as_added(mask: Any, dtype: Any) -> Any:
    """transformers gives a bool mask, True = seen, or one that is added already."""
    from shardsmith.smp.nn.transformer import MASKED

    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, MASKED)


def _return_hook(output: Any) -> Any:
    return output[0]
