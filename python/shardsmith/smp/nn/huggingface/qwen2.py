"""Qwen2: transformers' names to ours and back."""
from __future__ import annotations

from typing import Any

from shardsmith.smp.nn.huggingface import translation


def translate_hf_state_dict_to_smdistributed_qwen2(state_dict: dict[str, Any], max_seq_len: int | None = None) -> dict[str, Any]:
    """A whole state dict of transformers' names as one of ours. It is emptied. max_seq_len is accepted: no buffer depends on it."""
    return translation.to_smdistributed("qwen2", translation.llama_config("qwen2"), state_dict)


def translate_state_dict_to_hf_qwen2(state_dict: dict[str, Any], max_seq_len: int | None = None) -> dict[str, Any]:
    """Back."""
    return translation.to_hf("qwen2", translation.llama_config("qwen2"), state_dict)
