"""Fine-tunes SmolLM2-135M on two pipeline stages; does it again, is killed, resumes; compares; exports; compares.

Leaves everything in out/demo, the results in out/demo/summary.json.
"""
from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from shardsmith.demo.compare import differences
from shardsmith.demo.model import make_model
from shardsmith.errors import Error

STEPS, SAVE_STEPS, KILL_AFTER = 40, 10, 25
LENGTH, BATCH, EVALUATION = 256, 4, 8


def program() -> str:
    beside = Path(sys.executable).with_name("shardsmith")
    found = str(beside) if beside.exists() else shutil.which("shardsmith")
    if not found:
        raise Error("not_found", "the program shardsmith is not there: run `make build`")
    return found


class Demo:
    def __init__(self, out: Path):
        self.out = out
        self.model = out / "model"
        self.text = out / "topics.txt"
        self.begin = time.monotonic()

    def say(self, text: str) -> None:
        print(f"\n== {text}  [{time.monotonic() - self.begin:.0f} s]", flush=True)

    def command(self, folder: Path, *more: str) -> list[str]:
        return [program(), "finetune", "--model", str(self.model), "--data", str(self.text), "--output-dir", str(folder),
                "--nproc-per-node", "2", "--pipeline-parallel-degree", "2", "--threads", "1",
                "--per-device-train-batch-size", str(BATCH), "--max-seq-length", str(LENGTH), "--max-steps", str(STEPS),
                "--learning-rate", "2e-4", "--save-steps", str(SAVE_STEPS), "--save-total-limit", "2",
                "--eval-max-sequences", str(EVALUATION), "--logging-steps", "5", *more]

    def train(self, folder: Path, *more: str) -> None:
        command = self.command(folder, *more)
        print("$ " + " ".join(["shardsmith", *command[1:]]), flush=True)
        if code := subprocess.run(command).returncode:
            raise Error("io", f"the training ended with exit code {code}")

    def train_and_kill(self, folder: Path) -> None:
        process = subprocess.Popen(self.command(folder), start_new_session=True)
        try:
            while process.poll() is None and last_step(folder) < KILL_AFTER:
                time.sleep(0.1)
            if process.poll() is not None:
                raise Error("io", f"the training ended before step {KILL_AFTER}, with exit code {process.returncode}")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def write_text(self) -> None:
        from pydoc_data.topics import topics

        self.text.write_text("\n\n".join(topics[name] for name in sorted(topics)), encoding="utf-8")

    def loss_in_transformers(self, folder: Path) -> float:
        import torch
        import transformers
        from transformers import AutoModelForCausalLM

        from shardsmith.finetune import data

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        config = json.loads((folder / "config.json").read_text())
        tokens = data.tokenize(str(folder), [str(self.text)], "text", config)
        sequences = data.pack(tokens, LENGTH, 0.05, EVALUATION, [str(self.text)])
        losses = []
        with torch.no_grad():
            for row in sequences.tokens[sequences.training:]:
                ids = torch.from_numpy(row).long()[None]
                losses.append(float(model(input_ids=ids, labels=ids).loss))
        return sum(losses) / len(losses)

    def run(self) -> None:
        uninterrupted, resumed, export = self.out / "uninterrupted", self.out / "resumed", self.out / "export"
        for folder in (uninterrupted, resumed, export):
            shutil.rmtree(folder, ignore_errors=True)
        self.out.mkdir(parents=True, exist_ok=True)
        self.say("SmolLM2-135M becomes a Hugging Face folder")
        make_model(Path(".cache"), self.model)
        self.write_text()
        print(f"model {self.model}, text {self.text} ({self.text.stat().st_size:,} bytes)")
        self.begin_work = time.monotonic()

        self.say(f"fine-tuning on 2 pipeline stages, {STEPS} steps")
        self.train(uninterrupted)
        before, after = evaluations(uninterrupted)

        self.say(f"the same again, killed with SIGKILL after step {KILL_AFTER}")
        self.train_and_kill(resumed)
        print(f"killed at step {last_step(resumed)}")
        subprocess.run([program(), "ls", str(resumed)], check=True)

        self.say("and resumed")
        self.train(resumed, "--resume-from-checkpoint", "auto")

        self.say("comparing the checkpoints, bit for bit")
        checkpoint = f"step{STEPS}_partial"
        found, compared = differences(uninterrupted / checkpoint, resumed / checkpoint)
        if found:
            raise Error("mismatch", f"{len(found)} differences: {found[0]}")
        print(f"equal: {compared} tensors, optimizer state and training state included")

        self.say("exporting for transformers")
        subprocess.run([program(), "export", str(resumed / checkpoint), "-o", str(export)], check=True)
        in_transformers = self.loss_in_transformers(export)
        print(f"evaluation loss: {before:.4f} before, {after:.4f} after, {in_transformers:.4f} by transformers on the export")
        if abs(in_transformers - after) > 1e-4 * after:
            raise Error("mismatch", f"transformers computes {in_transformers} on the export, training said {after}")
        seconds = time.monotonic() - self.begin
        summary = {
            "eval_loss_before": before, "eval_loss_after": after, "eval_loss_transformers": in_transformers,
            "seconds": round(seconds, 1), "seconds_without_model": round(time.monotonic() - self.begin_work, 1),
            "checkpoint_uninterrupted": str(uninterrupted / checkpoint), "checkpoint_resumed": str(resumed / checkpoint),
            "export": str(export), "model": str(self.model),
        }
        (self.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        self.say(f"done; {self.out / 'summary.json'}")


def metrics(folder: Path) -> list[dict]:
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    # A line that is being written just now has no end yet.
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def last_step(folder: Path) -> int:
    return max((entry["step"] for entry in metrics(folder)), default=0)


def evaluations(folder: Path) -> tuple[float, float]:
    found = {entry["eval"]: entry["eval_loss"] for entry in metrics(folder) if "eval" in entry}
    return found["before"], found["after"]


def main() -> int:
    try:
        Demo(Path("out/demo")).run()
        return 0
    except Error as error:
        print(f"demo: error: {error}", file=sys.stderr)
        return error.exit_code
    except subprocess.CalledProcessError as error:
        print(f"demo: error: `{' '.join(map(str, error.cmd))}` ended with exit code {error.returncode}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
