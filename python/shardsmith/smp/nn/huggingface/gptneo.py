"""GPT-Neo, which this version does not have: its names are there, and refuse."""
from __future__ import annotations

from typing import Any

from shardsmith.smp.nn.huggingface import translation


def translate_hf_state_dict_to_smdistributed_gptneo(state_dict: dict[str, Any], max_seq_len: int | None = None) -> dict[str, Any]:
    """Raises Error("unsupported")."""
    translation.later("GPT-Neo")


def translate_state_dict_to_hf_gptneo(state_dict: dict[str, Any], max_seq_len: int | None = None) -> dict[str, Any]:
    """Raises Error("unsupported")."""
    translation.later("GPT-Neo")


translate_hf_gptneo_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptneo  # its older name
