"""`smp.nn.huggingface`: names of transformers' state dicts to ours and back, family by family."""
from shardsmith.smp.nn.huggingface import bert, gpt2, gptj, gptneo, gptneox, llama, mistral, qwen2, roberta

__all__ = ["bert", "gpt2", "gptj", "gptneo", "gptneox", "llama", "mistral", "qwen2", "roberta"]
