"""Trains a causal language model with transformers' own Trainer.

    python examples/train_trainer.py --model_dir MODEL_DIR --data TEXT --output_dir out

in one process, as any Trainer script; and split over two pipeline stages, without a change:

    export SM_FRAMEWORK_PARAMS='{"sagemaker_mpi_enabled": true}' SHARDSMITH_TRAINER=1
    export SM_HP_MP_PARAMETERS='{"partitions": 2, "microbatches": 2}'
    torchrun --nproc-per-node 2 examples/train_trainer.py --model_dir MODEL_DIR --data TEXT --output_dir out

For tensor parallelism: {"partitions": 1, "tensor_parallel_degree": 2, "ddp": true}. Started again with --resume it goes on
from the newest checkpoint in the output folder. The data is a text file whose bytes are the tokens.
"""
import argparse
import contextlib
import functools
import json
import os

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.utils import is_sagemaker_mp_enabled

if is_sagemaker_mp_enabled():
    import smdistributed.modelparallel.torch as smp
else:
    smp = None


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model_dir", required=True, help="Hugging Face folder")
    parser.add_argument("--data", required=True, help="text file; its bytes are the tokens")
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--fine_tune", type=int, default=0, help="1: from the folder's weights, 0: from random ones")
    parser.add_argument("--max_context_width", type=int, default=64)
    parser.add_argument("--train_batch_size", type=int, default=8)
    parser.add_argument("--gradient_accumulation", type=int, default=1)
    parser.add_argument("--max_steps", type=int, default=20)
    parser.add_argument("--save_steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--own_optimizer", type=int, default=0, help="1: the script gives the Trainer an optimizer")
    parser.add_argument("--resume", action="store_true", help="from the newest checkpoint in the output folder")
    parser.add_argument("--seed", type=int, default=12345)
    return parser.parse_args()


class Blocks(torch.utils.data.Dataset):
    """A text in blocks of equal length."""

    def __init__(self, path, length, vocab_size, begin, end):
        with open(path, "rb") as file:
            text = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).long() % vocab_size
        text = text[int(begin * len(text)):int(end * len(text))]
        self.blocks = text[:len(text) // length * length].reshape(-1, length)
        # Nothing predicts a block's first token. The Trainer divides its loss by all labels that are not -100.
        self.labels = self.blocks.clone()
        self.labels[:, 0] = -100

    def __len__(self):
        return len(self.blocks)

    def __getitem__(self, index):
        return {"input_ids": self.blocks[index], "labels": self.labels[index]}


def main():
    args = parse_args()
    set_seed(args.seed)
    config = AutoConfig.from_pretrained(args.model_dir)
    split = smp is not None and smp.tp_size() > 1
    with smp.model_creation(tensor_parallelism=True) if split else contextlib.nullcontext():
        if args.fine_tune > 0:
            model = AutoModelForCausalLM.from_pretrained(args.model_dir)
        else:
            model = AutoModelForCausalLM.from_config(config)

    optimizer = None
    if args.own_optimizer > 0:
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        if smp is not None:
            optimizer = smp.DistributedOptimizer(optimizer)

    data = functools.partial(Blocks, args.data, args.max_context_width, config.vocab_size)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=args.output_dir,
            max_steps=args.max_steps,
            per_device_train_batch_size=args.train_batch_size,
            per_device_eval_batch_size=args.train_batch_size,
            gradient_accumulation_steps=args.gradient_accumulation,
            learning_rate=args.lr,
            max_grad_norm=args.max_grad_norm,
            logging_steps=1,
            logging_first_step=True,
            eval_strategy="steps",
            eval_steps=args.save_steps,
            save_steps=args.save_steps,
            dataloader_drop_last=True,
            report_to="none",
            disable_tqdm=True,
            seed=args.seed,
        ),
        train_dataset=data(0.0, 0.9),
        eval_dataset=data(0.9, 1.0),
        optimizers=(optimizer, None),
    )
    trainer.train(resume_from_checkpoint=args.resume or None)
    scores = trainer.evaluate()
    trainer.save_model()
    if trainer.is_world_process_zero():
        with open(os.path.join(args.output_dir, "result.json"), "w") as file:
            json.dump({"log": trainer.state.log_history, "eval_loss": scores["eval_loss"]}, file, indent=1)
    if smp is not None:
        smp.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
