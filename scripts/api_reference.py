"""Writes docs/api.md from the signatures and docstrings of the smp interface; --check says whether it is current."""
from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api.md"
sys.path.insert(0, str(ROOT / "python"))

GROUPS = [kind for kind in ("pp", "tp", "rdp", "dp", "mp")]
SECTIONS: list[tuple[str, list[str]]] = [
    ("Start", ["init", "is_initialized", "is_tracing", "num_microbatches"]),
    ("Ranks and groups", ["rank", "size", "local_rank", "local_size", *(f"{k}_rank" for k in GROUPS), *(f"{k}_size" for k in GROUPS),
                          *(f"get_{k}_group" for k in GROUPS), *(f"get_{k}_process_group" for k in GROUPS), "get_world_process_group"]),
    ("Communication", ["broadcast", "send", "recv_from", "allgather", "barrier", "dp_barrier", "mp_barrier"]),
    ("Building a model", ["model_creation", "tensor_parallelism", "set_tensor_parallelism", "delay_param_initialization", "partition",
                          "set_partition", "set_activation_checkpointing", "patches.checkpoint.checkpoint",
                          "patches.checkpoint.checkpoint_sequential"]),
    ("DistributedModel", ["DistributedModel"]),
    ("Step", ["step", "StepOutput"]),
    ("DistributedOptimizer", ["DistributedOptimizer", "amp.GradScaler"]),
    ("Checkpoints", ["save_checkpoint", "wait_for_checkpoint", "resume_from_checkpoint", "save", "load",
                     "sharded_data_parallel_checkpoint.get_full_state_dict_from_sharded_data_parallel_checkpoint",
                     "sharded_data_parallel_checkpoint.get_param_shapes", "sharded_data_parallel_checkpoint.get_buffer_names"]),
    ("Layers", ["tp_register", "tp_register_with_module", *(f"nn.{name}" for name in (
        "DistributedModule", "DistributedLinear", "DistributedEmbedding", "DistributedAttentionLayer",
        "DistributedTransformerOutputLayer", "DistributedTransformerLayer", "DistributedTransformer",
        "DistributedTransformerLMHead", "FusedLayerNorm", "FlashAttentionLayer")), "nn.FlashAttentionLayer.forward",
        *(f"nn.huggingface.{family}.{name}_{family}" for family in (
            "gpt2", "gptneox", "bert", "llama", "mistral", "qwen2", "gptj", "gptneo", "roberta")
          for name in ("translate_hf_state_dict_to_smdistributed", "translate_state_dict_to_hf")),
        "nn.huggingface.gpt2.get_hf_gpt2_transformer_layer_hooks"]),
    ("Optimizers", ["optimizers.FusedLAMB", "optimizers.FusedNovoGrad"]),
    ("Helpers", ["utils.get_distribution_axis", "utils.rmsg", "hvd_average_grads"]),
]
# Of the classes: what is for scripts.
MEMBERS = {
    "DistributedModel": [
        "backward", "get_module", "train", "eval", "to", "cuda", "cpu", "join", "named_parameters", "named_buffers", "local_parameters",
        "local_named_parameters", "local_buffers", "local_named_buffers", "local_modules", "local_named_modules", "distributed_modules",
        "is_distributed_parameter", "is_distributed_buffer", "is_scaled_batch_parameter", "is_scaled_batch_buffer",
        "default_reducer_named_parameters", "scaled_batch_reducer_named_parameters", "virtual_named_parameters",
        "register_post_partition_hook", "register_post_step_hook", "register_comm_hook", "state_dict", "local_state_dict", "load_state_dict"],
    "StepOutput": ["reduce_mean", "reduce_sum", "concat", "stack", "detach"],
    "DistributedOptimizer": ["step", "zero_grad", "add_param_group", "clip_master_grads", "state_dict", "local_state_dict", "load_state_dict",
                             "orig_state_dict", "param_name_to_index"],
}


def signature(value: Any) -> str:
    text = str(inspect.signature(value))
    text = re.sub(r"typing\.|collections\.abc\.|shardsmith\.smp\.\w+\.", "", text).replace("'", "")
    return re.sub(r"\(self(, )?", "(", text, count=1)


def entry(name: str, value: Any, level: str) -> list[str]:
    doc = inspect.cleandoc(value.__doc__) if value.__doc__ else ""
    return [f"{level} `{name}{signature(value)}`", "", *([doc, ""] if doc else [])]


def page() -> str:
    from shardsmith import smp

    lines = ["# API reference", "", "Of `smdistributed.modelparallel.torch`, which is `shardsmith.smp`: made from its docstrings by "
             "`scripts/api_reference.py`.", ""]
    for title, names in SECTIONS:
        lines += [f"## {title}", ""]
        for name in names:
            value: Any = smp
            for part in name.split("."):
                value = getattr(value, part)
            lines += entry(name, value, "###")
            for member in MEMBERS.get(name, []):
                lines += entry(f"{name}.{member}", getattr(value, member), "####")
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    text = page()
    if "--check" in sys.argv[1:]:
        if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text:
            return 0
        print(f"{PAGE} is not current: run scripts/api_reference.py", file=sys.stderr)
        return 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
