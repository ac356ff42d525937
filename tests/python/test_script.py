"""A script as those for the old library are written (examples/train_smp.py), under torchrun: its losses, its death and its
resumption; what happens when one of its ranks dies or stalls; what it hears of what is not there yet."""
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from parity import ranks

SCRIPT = ranks.ROOT / "examples" / "train_smp.py"
STEPS, FREQUENCY, KILL_AT = 24, 10, 12  # far from the next save
PATIENCE = 240.0


def make_model(family: str, folder: Path, weights: bool) -> Path:
    """A small model of the family, saved by transformers; or only its configuration."""
    import torch
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

    if family == "gpt2":
        config = GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=4, n_head=4, attn_pdrop=0.0, embd_pdrop=0.0,
                            resid_pdrop=0.0, bos_token_id=0, eos_token_id=0)
    else:
        config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=176, num_hidden_layers=4,
                             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
                             tie_word_embeddings=False, bos_token_id=0, eos_token_id=0)
    if weights:
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    else:
        config.save_pretrained(folder)
    return folder


def read_losses(path: Path) -> dict[int, float]:
    if not path.exists():
        return {}
    lines = path.read_text().split("\n")[:-1]  # one that is being written has no end yet
    return {int(step): float(loss) for step, loss in map(str.split, lines)}


def make_text(path: Path) -> Path:
    """Its bytes are the tokens."""
    from pydoc_data.topics import topics

    path.write_bytes("\n\n".join(topics[name] for name in sorted(topics)).encode()[:50_000])
    return path


def arguments(model: Path, fine_tune: bool, folder: Path, losses: Path, *more: object) -> list[str]:
    return list(map(str, [
        SCRIPT, "--model_dir", model, "--data", folder / "text", "--checkpoint_dir", folder / "checkpoints",
        "--fine_tune", int(fine_tune), "--losses", losses, "--pipeline_parallel_degree", 2,
        "--microbatches", 4, "--checkpoint_freq", FREQUENCY, *more]))


class Torchrun:
    def __init__(self, log: Path, *words: str, count: int = 2):
        self.log, self.count = log, count
        with open(log, "wb") as file:
            self.process = subprocess.Popen(self.command(words), env=ranks.environment(), stdin=subprocess.DEVNULL, stdout=file,
                                            stderr=file, start_new_session=True)

    def command(self, words: tuple[str, ...]) -> list[str]:
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.count), *words]

    def children(self) -> list[int]:
        path = Path(f"/proc/{self.process.pid}/task")
        return [int(pid) for task in path.iterdir() for pid in (task / "children").read_text().split()]

    def kill_ranks(self) -> None:
        pids = self.children()
        assert len(pids) == self.count
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def wait(self) -> tuple[int, str]:
        try:
            code = self.process.wait(PATIENCE)
        finally:
            self.end()
        return code, self.log.read_text(errors="replace")

    def end(self) -> None:
        if self.process.poll() is None:
            for pid in self.children():
                os.kill(pid, signal.SIGKILL)
            self.process.kill()
            self.process.wait()


def train_and_kill(log: Path, words: list[str], losses: Path, launcher: type[Torchrun] = Torchrun, count: int = 2) -> None:
    run = launcher(log, *words, count=count)
    try:
        deadline = time.monotonic() + PATIENCE
        while len(read_losses(losses)) < KILL_AT and run.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        assert run.process.poll() is None and len(read_losses(losses)) >= KILL_AT, log.read_text(errors="replace")[-3000:]
        run.kill_ranks()
        assert run.wait()[0] != 0
    finally:
        run.end()


@pytest.mark.parametrize("family, fine_tune", [
    pytest.param("gpt2", False, id="gpt2-from-config"),
    pytest.param("llama", True, id="llama-from-pretrained"),
    pytest.param("gpt2", True, id="gpt2-from-pretrained", marks=pytest.mark.long),
    pytest.param("llama", False, id="llama-from-config", marks=pytest.mark.long),
])
def test_the_script_trains_dies_resumes_and_computes_what_plain_pytorch_does(tmp_path, family, fine_tune):
    model = make_model(family, tmp_path / "model", weights=fine_tune)
    text = make_text(tmp_path / "text")
    checkpoints = tmp_path / "checkpoints"
    plain = subprocess.Popen([sys.executable, str(Path(__file__).with_name("plain_training.py")), str(model),
                              str(text), str(int(fine_tune)), str(STEPS), str(tmp_path / "plain")], env=ranks.environment())
    before, after = tmp_path / "before", tmp_path / "after"
    try:
        train_and_kill(tmp_path / "log1", arguments(model, fine_tune, tmp_path, before, "--max_steps", STEPS), before)
        first = read_losses(before)
        assert KILL_AT <= max(first) < 2 * FREQUENCY, "killed too late to tell"
        assert (checkpoints / "newest").read_text().strip() == f"total_steps{FREQUENCY}_partial"

        run = Torchrun(tmp_path / "log2", *arguments(model, fine_tune, tmp_path, after, "--max_steps", STEPS,
                                                     "--load_partial", 1))
        code, said = run.wait()
        assert code == 0, said[-3000:]
        assert f"resumed at step {FREQUENCY}" in said
        assert plain.wait(PATIENCE) == 0
    finally:
        plain.kill()
        plain.wait()
    second = read_losses(after)
    assert sorted(second) == list(range(FREQUENCY + 1, STEPS + 1))
    again = sorted(first.keys() & second.keys())
    assert again and all(first[step] == second[step] for step in again), "resumed, but not exactly"
    expected = read_losses(tmp_path / "plain")
    assert len(expected) == STEPS
    for step, loss in expected.items():
        for found in (run_losses[step] for run_losses in (first, second) if step in run_losses):
            assert found == pytest.approx(loss, rel=1e-4), f"step {step}"
    assert expected[STEPS] < 0.9 * expected[1], "little was trained, so little was compared"
    kept = sorted(path.name for path in checkpoints.iterdir() if path.name.endswith("_partial"))
    assert kept == [f"total_steps{step}_partial" for step in (10, 20, STEPS)]


PEER_TIMEOUT = 6.0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "stalls"])
@pytest.mark.parametrize("culprit", [0, 1])
def test_when_one_rank_dies_or_stalls_the_other_ends_in_time_and_names_it(tmp_path, monkeypatch, culprit, number):
    model = make_model("gpt2", tmp_path / "model", weights=True)
    make_text(tmp_path / "text")
    losses = tmp_path / "losses"
    monkeypatch.setenv("SM_HP_MP_PARAMETERS", json.dumps({"peer_timeout": PEER_TIMEOUT}))
    words = arguments(model, True, tmp_path, losses, "--max_steps", 1_000_000)
    words[words.index("--checkpoint_freq") + 1] = "1000000"
    with ranks.Ranks([sys.executable, *words], 2, tmp_path) as running:
        deadline = time.monotonic() + PATIENCE
        while len(read_losses(losses)) < 3 and time.monotonic() < deadline:
            assert all(child.poll() is None for child in running.children), running.text(0)[-3000:] + running.text(1)[-3000:]
            time.sleep(0.01)
        assert len(read_losses(losses)) >= 3
        os.kill(running.children[culprit].pid, number)
        begin = time.monotonic()
        other = running.children[1 - culprit]
        # A death is noticed at once, a stall within the time-out, who it was included; then the process ends, which takes a busy machine seconds.
        limit = PEER_TIMEOUT + 14
        try:
            code = other.wait(limit)
        except subprocess.TimeoutExpired:
            pytest.fail(f"rank {1 - culprit} goes on after {limit} s:\n{running.text(1 - culprit)[-3000:]}")
        text = running.text(1 - culprit)
        print(f"{time.monotonic() - begin:.1f} s")
    assert code not in (0, None) and code > 0, text[-3000:]
    last = [line for line in text.splitlines() if "Error" in line][-1]
    assert f"rank {culprit}" in last and f"rank {1 - culprit} has died" not in last, text[-3000:]


@pytest.mark.parametrize("key, value", [
    ("sharded_data_parallel_degree", 2), ("horovod", True),
    ("offload_activations", True)])
def test_configuration_that_is_not_there_yet_is_refused(key, value):
    from shardsmith.errors import Error
    from shardsmith.smp.config import resolve

    with pytest.raises(Error, match=f"'{key}'.*not there in this version") as refused:
        resolve({key: value, "ddp": True, "default_partition": 0})
    assert refused.value.kind == "unsupported"
