"""What examples/train_smp.py does, without any of its library: PyTorch and transformers in one process.

    python plain_training.py MODEL_DIR TEXT FINE_TUNE STEPS LOSSES [adamw|sgd] [1.6|engine]

1.6: what examples/train_smp_1_6.py does, with one group of parameters, a constant rate and no clipping.
engine: losses and gradients are the C++ engine's, called without the interface that scripts use.
"""
from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

SEED, BATCH, LENGTH, RATE = 12345, 8, 64, 1e-3  # the script's defaults
NO_DECAY = ("bias", "norm.weight", "layernorm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight")


def by_transformers(model: torch.nn.Module) -> Callable[[int, torch.Tensor], torch.Tensor]:
    def compute(step: int, rows: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        return loss

    return compute


def by_engine(model: torch.nn.Module, config: PreTrainedConfig) -> Callable[[int, torch.Tensor], torch.Tensor]:
    from shardsmith import _engine

    values = {**config.to_dict(), "architectures": [type(model).__name__]}
    stage = _engine.Stage(json.dumps(values, default=str), [0, config.num_hidden_layers], 0, dict(model.named_parameters()))

    def compute(step: int, rows: torch.Tensor) -> torch.Tensor:
        stage.begin_step(step, 1, True, True, 0, len(rows))
        loss = stage.forward(0, {"input_ids": rows, "labels": rows})["loss"]
        stage.backward(0, loss, 1.0)
        stage.finish_microbatch(0)
        stage.finish_step(True)
        return loss

    return compute


def main() -> None:
    folder, data, fine_tune, steps, target = sys.argv[1], sys.argv[2], sys.argv[3] == "1", int(sys.argv[4]), sys.argv[5]
    name, is_old = (sys.argv[6:7] or ["adamw"])[0], "1.6" in sys.argv[7:]
    torch.manual_seed(SEED)
    config = AutoConfig.from_pretrained(folder)
    if fine_tune:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.train()
    with open(data, "rb") as file:
        text = torch.tensor(list(file.read()))
    decayed = [p for name, p in model.named_parameters() if not name.endswith(NO_DECAY)]
    others = [p for name, p in model.named_parameters() if name.endswith(NO_DECAY)]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[name](model.parameters() if is_old else groups, lr=RATE)
    compute = by_engine(model, config) if "engine" in sys.argv[7:] else by_transformers(model)
    with open(target, "w") as file:
        for step in range(steps):
            for group in [] if is_old else optimizer.param_groups:
                group["lr"] = RATE * max(0.1, 1 - step / 100)
            generator = torch.Generator().manual_seed(SEED * 1_000_003 + step)
            begins = torch.randint(0, len(text) - LENGTH, (BATCH,), generator=generator)
            rows = torch.stack([text[begin:begin + LENGTH] for begin in begins])
            optimizer.zero_grad()
            loss = compute(step, rows)
            if not is_old:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            file.write(f"{step + 1} {loss.item()!r}\n")


if __name__ == "__main__":
    main()
