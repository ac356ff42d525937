"""`shardsmith finetune` as a program: a run, its resumption, signals, and what it says to mistakes."""
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from shardsmith.demo.compare import differences
from smp_helpers import environment, free_port, make_models

TEXT = "".join(chr(97 + (i * i + i // 7) % 26) + (" " if i % 5 == 0 else "") for i in range(2600))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = make_models(tmp_path_factory.mktemp("models"))
    (folder / "notes.txt").write_text(TEXT)
    (folder / "lines.jsonl").write_text("".join(json.dumps({"text": TEXT[i:i + 90]}) + "\n" for i in range(0, 900, 90)))
    return folder


def command(models, out, *more, family="llama", data="notes.txt"):
    return [sys.executable, "-m", "shardsmith.finetune.main", "--model", str(models / family), "--data", str(models / data),
            "--output-dir", str(out), "--max-seq-length", "32", "--per-device-train-batch-size", "4",
            "--learning-rate", "5e-3", "--threads", "1", *map(str, more)]


TWO_STAGES = ("--nproc-per-node", 2, "--pipeline-parallel-degree", 2)


def finetune(models, out, *more, timeout=300, env=None, **kwargs):
    return subprocess.run(command(models, out, *more, **kwargs), env=environment(**(env or {})), capture_output=True,
                          text=True, timeout=timeout)


def metrics(out):
    path = Path(out) / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def wait_for_step(process, out, step, timeout=120):
    deadline = time.monotonic() + timeout
    while not any(entry["step"] >= step and "loss" in entry for entry in metrics(out)):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


def refused(result, code, *parts):
    assert result.returncode == code, result.stdout + result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("shardsmith: error: ") and "Traceback" not in result.stderr, result.stderr
    for part in parts:
        assert part in last, last


def test_a_run_learns_and_leaves_what_it_says(models, tmp_path):
    result = finetune(models, tmp_path / "out", *TWO_STAGES, "--max-steps", 12, "--save-steps", 5, "--eval-steps", 5,
                      "--save-total-limit", 2, "--warmup-steps", 2, "--weight-decay", 0.1)
    assert result.returncode == 0, result.stderr
    found = metrics(tmp_path / "out")
    steps = [entry for entry in found if "loss" in entry]
    evaluations = {(entry["eval"], entry["step"]): entry["eval_loss"] for entry in found if "eval" in entry}
    assert [entry["step"] for entry in steps] == list(range(1, 13))
    assert list(evaluations) == [("before", 0), ("during", 5), ("during", 10), ("after", 12)]
    assert evaluations["after", 12] < evaluations["before", 0] - 0.3
    assert [round(entry["learning_rate"], 6) for entry in steps[:3]] == [0.0, 0.0025, 0.005]
    assert steps[-1]["learning_rate"] < 5e-4 and all(entry["peak_bytes"] > 1e8 for entry in steps)
    names = sorted(path.name for path in (tmp_path / "out").iterdir() if not path.name.startswith("."))
    assert names == ["finetune.yaml", "hf", "metrics.jsonl", "newest", "step10_partial", "step12_partial"]
    assert "global batch 4 = 4 per device x 1 accumulation x 1 data parallel, split into 4 microbatches" in result.stdout
    assert "step 12/12  loss " in result.stdout and "ETA" in result.stdout and "tokens/s" in result.stdout
    groups = torch.load(tmp_path / "out/step12_partial/optimizer_0_0.pt", weights_only=True)["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert all("layernorm" in name or name.endswith("bias") for name in groups[1]["params"])


@pytest.mark.parametrize("ranks, stages, slices, accumulation", [
    (2, 1, 1, 1), (2, 2, 1, 2), pytest.param(4, 1, 2, 1, marks=pytest.mark.long)])
def test_every_layout_gives_the_same_losses(models, tmp_path, ranks, stages, slices, accumulation):
    def losses(folder, batch, *more):
        arguments = [*more, "--max-steps", 4, "--per-device-train-batch-size", batch, "--save-steps", 0, "--json"]
        result = finetune(models, tmp_path / folder, *arguments, data="lines.jsonl")
        assert result.returncode == 0, result.stderr
        told = [json.loads(line) for line in result.stdout.splitlines()]
        return [e["loss"] for e in told if "loss" in e] + [e["eval_loss"] for e in told if "eval_loss" in e]

    alone = losses("alone", 4)
    batch = 4 // (ranks // stages // slices) // accumulation
    found = losses("split", batch, "--nproc-per-node", ranks, "--pipeline-parallel-degree", stages,
                   "--tensor-parallel-degree", slices, "--gradient-accumulation-steps", accumulation,
                   "--activation-checkpointing", "each", *(["--shard-optimizer-state"] if ranks == 4 else []))
    assert found == pytest.approx(alone, rel=1e-4)


def test_killed_and_resumed_gives_the_same_bits(models, tmp_path):
    arguments = (*TWO_STAGES, "--max-steps", 9, "--save-steps", 3)
    assert finetune(models, tmp_path / "whole", *arguments).returncode == 0
    process = subprocess.Popen(command(models, tmp_path / "killed", *arguments), env=environment(), start_new_session=True,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for_step(process, tmp_path / "killed", 4)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    again = finetune(models, tmp_path / "killed", *arguments, "--resume-from-checkpoint", "auto")
    assert again.returncode == 0, again.stderr
    assert "resumed step" in again.stdout and "data position" in again.stdout
    found, compared = differences(tmp_path / "whole" / "step9_partial", tmp_path / "killed" / "step9_partial")
    assert found == [] and compared > 100
    done = finetune(models, tmp_path / "killed", *arguments, "--resume-from-checkpoint", "true")
    assert done.returncode == 0 and "nothing to do" in done.stdout


def test_another_number_of_replicas_goes_on_where_the_data_was(models, tmp_path):
    """Over the end of an epoch, too: lines.jsonl makes 28 sequences, of which 26 are trained on."""
    def losses(folder, steps, batch, *more):
        arguments = ["--max-steps", steps, "--per-device-train-batch-size", batch, "--lr-scheduler-type", "constant",
                     "--save-steps", 0, "--json", *more]
        result = finetune(models, tmp_path / folder, *arguments, data="lines.jsonl")
        assert result.returncode == 0, result.stderr
        told = [json.loads(line) for line in result.stdout.splitlines()]
        return {entry["step"]: entry["loss"] for entry in told if "loss" in entry}

    whole = losses("whole", 9, 4)
    first = losses("parts", 3, 2, "--nproc-per-node", 2)
    second = losses("parts", 6, 4, "--resume-from-checkpoint", "true")
    third = losses("parts", 9, 2, "--nproc-per-node", 2, "--resume-from-checkpoint", "true", "--shard-optimizer-state")
    assert first | second | third == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_first(models, tmp_path, number, code):
    process = subprocess.Popen(command(models, tmp_path / "out", *TWO_STAGES, "--max-steps", 100000, "--save-steps", 0),
                               env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_step(process, tmp_path / "out", 2)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    saved = [entry["saved"] for entry in metrics(tmp_path / "out") if "saved" in entry]
    assert len(saved) == 1 and (tmp_path / "out" / saved[0] / "manifest.json").exists() and "stopped at step" in out


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_stalls_is_named(models, tmp_path, number):
    process = subprocess.Popen(
        command(models, tmp_path / "out", *TWO_STAGES, "--max-steps", 100000, "--save-steps", 0, "--peer-timeout", 8),
        env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_for_step(process, tmp_path / "out", 2)
    with open(f"/proc/{process.pid}/task/{process.pid}/children") as file:
        children = [int(word) for word in file.read().split()]
    ranks = {}
    for pid in children:
        with open(f"/proc/{pid}/environ") as file:
            ranks.update({entry: pid for entry in file.read().split("\0") if entry.startswith("RANK=")})
    os.kill(ranks["RANK=1"], number)
    begin = time.monotonic()
    err = process.communicate(timeout=90)[1]
    assert process.returncode == 1 and time.monotonic() - begin < 60
    last = err.strip().splitlines()[-1]
    assert last.startswith("shardsmith: error: ") and "rank 1" in last, err
    assert ("SIGKILL" in last) == (number == signal.SIGKILL)


def test_a_dry_run_is_quick_and_needs_no_weights(models, tmp_path):
    (tmp_path / "m").mkdir()
    shutil.copy(models / "llama" / "config.json", tmp_path / "m")
    arguments = [*TWO_STAGES, "--dry-run", "--model", tmp_path / "m"]
    code = ("import sys; from shardsmith.finetune.main import main; code = main(sys.argv[1:]);"
            "assert 'torch' not in sys.modules; sys.exit(code)")
    words = [sys.executable, "-c", code, *command(models, tmp_path / "out", *arguments)[3:]]
    best = 60.0
    for _ in range(5):
        begin = time.monotonic()
        result = subprocess.run(words, env=environment(), capture_output=True, text=True)
        best = min(best, time.monotonic() - begin)
        assert result.returncode == 0, result.stderr
    assert best < 1.0
    assert "stage 1: layers" in result.stdout and "a checkpoint: " in result.stdout and not (tmp_path / "out").exists()
    told = json.loads(subprocess.run([*words, "--json"], env=environment(), capture_output=True, text=True).stdout)
    assert sum(stage["parameters"] for stage in told["stages"]) == told["parameters"] + 112 * 32  # the tied embedding twice
    assert told["checkpoint_bytes"] == told["parameters"] * 12


def test_mistakes_before_anything_starts(models, tmp_path):
    out = tmp_path / "out"
    refused(finetune(models, out, "--learning-rat", 1), 2, "did you mean 'learning_rate'")
    refused(finetune(models, out, "--model", tmp_path / "none"), 2, "none: no such folder")
    refused(finetune(models, out, "--nproc-per-node", 3, "--pipeline-parallel-degree", 2), 2, "does not divide the 3 processes")
    refused(finetune(models, out, "--nproc-per-node", 8, "--pipeline-parallel-degree", 8), 2, "above the model's 5 layers")
    refused(finetune(models, out, *TWO_STAGES, "--microbatches", 3), 2, "2 or 4 microbatches")
    refused(finetune(models, out, "--tensor-parallel-degree", 2), 2, "tensor_parallel_degree 2", "2 processes would do")
    refused(finetune(models, out, "--nproc-per-node", 3, "--tensor-parallel-degree", 3), 2, "4 attention heads", "1, 2, 4")
    refused(finetune(models, out, "--max-seq-length", 65), 2, "64 positions")
    refused(finetune(models, out, "--resume-from-checkpoint", "true"), 5, "no complete checkpoint")
    refused(finetune(models, out, "--resume-from-checkpoint", "step9"), 2, "resume step9")
    refused(finetune(models, out, data="missing.txt"), 2, "missing.txt: no such file")
    (models / "empty.txt").touch()
    refused(finetune(models, out, data="empty.txt"), 2, "empty.txt is empty")
    folder = tmp_path / "strange"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "strange"}')
    refused(finetune(models, out, "--model", folder), 2, "strange", "gpt2", "llama")
    (folder / "config.json").write_text("{")
    refused(finetune(models, out, "--model", folder), 5, "config.json")
    assert not out.exists()


def test_mistakes_that_a_rank_finds(models, tmp_path):
    out = tmp_path / "out"
    (models / "bytes.txt").write_bytes(b"abc \xff\xfe" * 100)
    refused(finetune(models, out, *TWO_STAGES, data="bytes.txt"), 2, "bytes.txt: not UTF-8")
    (models / "short.txt").write_text("a b c")
    refused(finetune(models, out, data="short.txt"), 2, "too few")
    broken = tmp_path / "broken"
    shutil.copytree(models / "llama", broken)
    whole = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(whole[:len(whole) // 2])
    refused(finetune(models, out, *TWO_STAGES, "--model", broken, "--max-steps", 1), 5, "model.safetensors")


def test_another_models_folder_is_refused(models, tmp_path):
    assert finetune(models, tmp_path / "out", "--max-steps", 1).returncode == 0
    refused(finetune(models, tmp_path / "out", "--max-steps", 1, family="gpt2"), 2, str(tmp_path / "out"))


def test_under_torchrun_it_is_a_rank(models, tmp_path):
    words = command(models, tmp_path / "out", "--pipeline-parallel-degree", 2, "--max-steps", 2, "--bf16")
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()), *words[1:]]
    result = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "out" / "step2_partial" / "manifest.json").exists()


def test_a_number_that_is_none_ends_the_run(models, tmp_path):
    refused(finetune(models, tmp_path / "out", "--learning-rate", "1e38", "--max-steps", 5, "--max-grad-norm", 0), 1, "step ")
