"""Mistral: transformers' names to ours and back."""
from __future__ import annotations

from typing import Any

from shardsmith.smp.nn.huggingface import translation


def translate_hf_state_dict_to_smdistributed_mistral(state_dict: dict[str, Any], max_seq_len: int | None = None) -> dict[str, Any]:
    """A whole state dict of transformers' names as one of ours. It is emptied. max_seq_len is accepted: no buffer depends on it."""
    return translation.to_smdistributed("mistral", translation.llama_config("mistral"), state_dict)


def translate_state_dict_to_hf_mistral(state_dict: dict[str, Any], max_seq_len: int | None = None) -> dict[str, Any]:
    """Back."""
    return translation.to_hf("mistral", translation.llama_config("mistral"), state_dict)
