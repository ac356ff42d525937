"""One rank of `shardsmith finetune`: a client of the smp calls, and of nothing below them."""
from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import random
import resource
import signal
import sys
import time
from typing import Any

from shardsmith.errors import Error
from shardsmith.finetune import data, plan, resume
from shardsmith.finetune.config import FinetuneConfig
from shardsmith.finetune.progress import Progress
from shardsmith.launcher import failure
from shardsmith.launcher.orphan import die_with_launcher

_SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143}


class Stop:
    """A signal sets a flag; ranks agree at the end of a step."""

    def __init__(self) -> None:
        self.code = 0
        for number, code in _SIGNALS.items():
            signal.signal(number, lambda *_, code=code: setattr(self, "code", self.code or code))


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Run:
    def __init__(self, config: FinetuneConfig, stop: Stop):
        import torch

        import shardsmith.smp as smp

        self.config, self.stop, self.torch, self.smp = config, stop, torch, smp
        self.rank = int(os.environ.get("RANK", "0"))
        self.plan = plan.make_plan(config, int(os.environ.get("WORLD_SIZE", "1")))
        if config.threads:
            torch.set_num_threads(config.threads)
        smp.init({
            "pipeline_parallel_degree": config.pipeline_parallel_degree, "microbatches": self.plan.microbatches,
            "pipeline": config.pipeline, "active_microbatches": config.active_microbatches,
            "tensor_parallel_degree": config.tensor_parallel_degree, "ddp": self.plan.replicas * self.plan.slices > 1,
            "prescaled_batch": True,  # the tensor-parallel ranks of a replica work on its batch together
            "bf16": config.bf16, "fp16": config.fp16, "nan_loss": "skip" if config.nan_loss == "skip" else "ignore",
            "shard_optimizer_state": config.shard_optimizer_state, "peer_timeout": config.peer_timeout,
        })
        self.step_number = 0
        self.consumed = 0
        self.device = smp.state.device

    # Data. Only the first stage's batches count: the others have none.
    def load_data(self) -> None:
        smp = self.smp
        self.sequences: data.Sequences | None = None
        told: Any = None
        if self.rank == 0:
            try:
                self.sequences = self._read_data()
                told = (self.sequences.training, self.sequences.evaluation, self.sequences.digest)
            except Error as error:
                smp.broadcast((error.kind, str(error))) if smp.size() > 1 else None
                raise
        if smp.size() > 1:
            if self.rank == 0:
                smp.broadcast(told)
            else:
                told = smp.recv_from(0)
                if len(told) == 2:
                    raise Error("peer", f"rank 0: {told[1]}", self.rank)
        self.training, self.evaluation, self.digest = told
        self._share_tokens()
        self.order = data.Order(self.training, self.config.seed)

    def _read_data(self) -> data.Sequences:
        config = self.config
        tokens = data.tokenize(config.model, config.data, config.text_field, json.loads(self.plan.config_json))
        return data.pack(tokens, self.plan.sequence, config.eval_fraction, config.eval_max_sequences, config.data)

    def _share_tokens(self) -> None:
        """To the other ranks of the first stage."""
        smp, torch = self.smp, self.torch
        if smp.pp_rank() == 0 and smp.dp_size() > 1:
            if self.rank == 0:
                smp.broadcast(torch.from_numpy(self.sequences.tokens), smp.DP_GROUP)
            else:
                tokens = smp.recv_from(0, smp.DP_RANK).numpy()
                self.sequences = data.Sequences(tokens, self.evaluation, self.digest)

    def rows(self, numbers: list[int]) -> Any:
        """[B, S]; on later stages a placeholder that nobody looks at."""
        if self.sequences is None:
            return self.torch.empty(0, 0, dtype=self.torch.int64)
        return self.torch.from_numpy(self.sequences.tokens[numbers]).to(self.torch.int64)

    # Model.
    def build(self) -> None:
        import numpy
        from transformers import AutoModelForCausalLM

        torch, smp, config = self.torch, self.smp, self.config
        for seed in (torch.manual_seed, random.seed, numpy.random.seed):
            seed(config.seed)
        with smp.model_creation(tensor_parallelism=self.plan.slices > 1, dtype=torch.float32):
            model = AutoModelForCausalLM.from_pretrained(config.model)
        accumulation = self.plan.accumulation
        self.model = smp.DistributedModel(model, backward_passes_per_step=accumulation)
        self.model.train()
        if config.activation_checkpointing != "none":
            smp.set_activation_checkpointing(self._layers(), strategy=config.activation_checkpointing)
        decayed = [p for p in model.parameters() if p.dim() >= 2]
        others = [p for p in model.parameters() if p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.adam_beta1, config.adam_beta2),
                                      eps=config.adam_epsilon, fused=True)
        self.optimizer = smp.DistributedOptimizer(
            optimizer, static_loss_scale=config.loss_scale or None, dynamic_loss_scale=config.loss_scale == 0,
            dynamic_loss_args={"init_scale": 65536.0})

        @smp.step
        def train_step(model: Any, input_ids: Any) -> Any:
            loss = model(input_ids=input_ids, labels=input_ids).loss
            model.backward(loss / accumulation if accumulation > 1 else loss)
            return loss

        @smp.step
        def evaluation_step(model: Any, input_ids: Any, labels: Any) -> Any:
            return model(input_ids=input_ids, labels=labels).loss

        self.train_step, self.evaluation_step = train_step, evaluation_step

    def _layers(self) -> Any:
        """The list of the model's layers."""
        count = self.model.get_module().config.num_hidden_layers
        lists = [m for m in self.model.get_module().modules() if isinstance(m, self.torch.nn.ModuleList) and len(m) == count]
        return lists[0]

    # Going on.
    def resume(self) -> list[str]:
        config = self.config
        choice = resume.choose(config.resume_from_checkpoint, config.output_dir) if self.rank == 0 else None
        if self.smp.size() > 1:
            choice = self.smp.allgather(choice)[0]
        if choice.path is None:
            return []
        content = self.smp.resume_from_checkpoint(choice.path, tag=choice.tag, partial=True)
        if not isinstance(content, dict) or "step" not in content:
            raise Error("invalid_argument", f"{choice.path}: checkpoint {choice.tag} was not written by shardsmith finetune")
        self.step_number = int(content["step"])
        told = "model, optimizer, schedule, random state"
        if content["digest"] == self.digest and content["seed"] == config.seed:
            self.consumed = int(content["consumed"])
            return [f"resumed {choice.tag} of {choice.path} at step {self.step_number}: {told}, data position"]
        return [f"resumed {choice.tag} of {choice.path} at step {self.step_number}: {told}; not restored: the data position "
                "(other text, length or seed: the order begins anew)"]

    def save(self) -> None:
        self.smp.save_checkpoint(
            self.config.output_dir, f"step{self.step_number}", partial=True, model=self.model, optimizer=self.optimizer,
            user_content={"step": self.step_number, "consumed": self.consumed, "seed": self.config.seed,
                          "digest": self.digest, "epoch": self.consumed / self.training,
                          "config": self.config.model_dump(by_alias=True)},
            num_kept_partial_checkpoints=self.config.save_total_limit)

    # Evaluation: the mean over sequences, whatever the batch.
    def evaluate(self) -> float:
        torch, smp = self.torch, self.smp
        batch = self.config.per_device_eval_batch_size or self.plan.batch
        count, replicas = self.plan.microbatches, self.plan.replicas
        each = batch // count
        total = 0.0
        was_training = self.model.training
        self.model.eval()
        with torch.no_grad():
            for begin in range(0, self.evaluation, batch * replicas):
                mine = begin + smp.rdp_rank() * batch
                numbers = [min(mine + i, self.evaluation - 1) for i in range(batch)]
                real = [mine + i < self.evaluation for i in range(batch)]
                ids = self.rows([self.training + number for number in numbers])
                labels = ids.clone()
                weights = [sum(real[mb * each:(mb + 1) * each]) for mb in range(count)]
                for row in range(batch):
                    # Beyond the end: no part in the mean. A microbatch of nothing else is computed and not counted.
                    if not real[row] and weights[row // each] and len(labels):
                        labels[row] = -100
                losses = self.evaluation_step(self.model, ids, labels).outputs
                total += sum(float(loss) * weight for loss, weight in zip(losses, weights))
        self.model.train(was_training)
        if replicas > 1:
            total = sum(smp.allgather(total, smp.RDP_GROUP))
        return total / self.evaluation

    # Training.
    def total_steps(self) -> int:
        if self.config.max_steps is not None:
            return self.config.max_steps
        return max(1, math.ceil(self.config.num_train_epochs * self.training / self.plan.global_batch))

    def update(self, total: int) -> float:
        """One optimizer update. Returns the loss of this replica's part."""
        from shardsmith import _core

        config, smp = self.config, self.smp
        warmup = config.warmup_steps or math.ceil(config.warmup_ratio * total)
        factor = _core.schedule_factor(config.lr_scheduler_type, self.step_number, warmup, total)
        self.learning_rate = config.learning_rate * factor
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate
        losses = []
        for part in range(self.plan.accumulation):
            begin = data.batch_positions(self.consumed, part, smp.rdp_rank(), self.plan.replicas, self.plan.batch)
            ids = self.rows(self.order.take(begin, self.plan.batch))
            losses += self.train_step(self.model, ids).stack().tolist()
        self._loss_of_all(losses)
        if config.max_grad_norm > 0:
            self.norm = float(self.optimizer.clip_master_grads(config.max_grad_norm))
            if not math.isfinite(self.norm) and config.nan_loss == "stop":
                raise Error("io", f"step {self.step_number + 1}: the gradient's norm is {self.norm}; the last checkpoint "
                                  "holds the state before; try a lower learning rate")
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step_number += 1
        self.consumed += self.plan.global_batch
        return self.loss

    def _loss_of_all(self, losses: list[float]) -> None:
        """Loss over replicas, largest memory and stop signals: one exchange a step, before the update."""
        bad = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), -1)
        told = (sum(losses) / len(losses), peak_bytes(), self.stop.code, bad)
        if self.smp.size() > 1:
            state = self.smp.state
            answers = [json.loads(a) for a in state.exchange(json.dumps(told).encode())]
        else:
            answers = [told]
        self.loss = sum(a[0] for a in answers) / len(answers)
        self.peak = max(a[1] for a in answers)
        self.stop_agreed = max(a[2] for a in answers)
        bad = max(a[3] for a in answers)
        if bad >= 0 and self.config.nan_loss == "stop":
            raise Error("io", f"step {self.step_number + 1}, microbatch {bad}: the loss is {self.loss}; the last checkpoint "
                              "holds the state before; try a lower learning rate, or --nan-loss skip")

    def train(self) -> int:
        config = self.config
        total = self.total_steps()
        self.progress = Progress(config.output_dir, total, self.rank == 0, config.json_output, config.quiet)
        progress = self.progress
        progress.notice("\n".join(plan.lines(self.plan)))
        progress.notice(f"{self.training} sequences of {self.plan.sequence} tokens for training, {self.evaluation} for "
                        f"evaluation; {total} steps")
        for line in self.resumed:
            progress.notice(line)
        if self.step_number >= total:
            progress.notice(f"nothing to do: step {self.step_number} of {total} is done")
            return 0
        if not self.resumed:
            self._report_evaluation("before")
        first = saved = self.step_number
        progress.start_clock()
        while self.step_number < total:
            begin = time.monotonic()
            loss = self.update(total)
            seconds = time.monotonic() - begin
            progress.step({"step": self.step_number, "loss": loss, "learning_rate": self.learning_rate,
                           "tokens_per_second": self.plan.global_batch * self.plan.sequence / seconds,
                           "seconds": seconds, "epoch": self.consumed / self.training, "peak_bytes": self.peak},
                          first, self.step_number % config.logging_steps == 0 or self.step_number == total)
            due = config.save_steps and self.step_number % config.save_steps == 0
            if due or self.stop_agreed or self.step_number == total:
                self.save()
                saved = self.step_number
                progress.event({"step": self.step_number, "saved": f"step{self.step_number}_partial"})
            if self.stop_agreed:
                progress.notice(f"stopped at step {self.step_number}; checkpoint step{saved}_partial is written")
                return self.stop_agreed
            if config.eval_steps and self.step_number % config.eval_steps == 0 and self.step_number < total:
                self._report_evaluation("during")
        self._report_evaluation("after")
        progress.notice(f"checkpoint {os.path.join(config.output_dir, f'step{saved}_partial')} is written")
        return 0

    def _report_evaluation(self, when: str) -> None:
        loss = self.evaluate()
        self.progress.event({"step": self.step_number, "eval": when, "eval_loss": loss})
        self.progress.notice(f"evaluation {when} training: loss {loss:.4f}" if when != "during" else
                             f"evaluation at step {self.step_number}: loss {loss:.4f}")

    def all(self) -> int:
        self.load_data()
        self.build()
        self.resumed = self.resume()
        try:
            return self.train()
        finally:
            if hasattr(self, "progress"):
                self.progress.close()


def run_rank(config: FinetuneConfig) -> int:
    """Everything of one rank, its exit code included."""
    stop = Stop()
    rank = int(os.environ.get("RANK", "0"))
    logging.basicConfig(level=logging.WARNING, format="shardsmith: %(message)s", stream=sys.stderr)
    try:
        code = Run(config, stop).all()
        _leave_group()
        return code
    except Exception as error:
        if os.environ.get("SHARDSMITH_DEBUG") == "1":
            import traceback

            traceback.print_exc()
        with contextlib.suppress(Exception):
            from shardsmith.smp.session import is_communication_error, state

            if not is_communication_error(error):
                state.fail(error)
        if not failure.report(rank, error):
            text = str(error) if isinstance(error, Error) else f"internal error: {type(error).__name__}: {error}"
            print(f"shardsmith: error: rank {rank}: {' '.join(text.split())}", file=sys.stderr, flush=True)
        code = error.exit_code if isinstance(error, Error) else 1
        sys.stdout.flush()
        # Threads may wait in collectives that will never end.
        os._exit(code)


def _leave_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> int:
    die_with_launcher()
    with open(sys.argv[1], encoding="utf-8") as file:
        config = FinetuneConfig.model_validate(json.load(file))
    return run_rank(config)


if __name__ == "__main__":
    sys.exit(main())
