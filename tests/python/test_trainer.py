"""transformers' own Trainer (examples/train_trainer.py) over two ranks: its losses are a plain Trainer's, it evaluates, saves and
resumes; the switch that makes it run without a GPU works in whichever order the packages are imported."""
from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from parity import ranks
from test_script import make_model, make_text

SCRIPT = ranks.ROOT / "examples" / "train_trainer.py"
STEPS, SAVE = 6, 3
PATIENCE = 240.0
LAYOUTS = {
    "pp": {"partitions": 2, "microbatches": 2},
    "tp": {"partitions": 1, "tensor_parallel_degree": 2, "ddp": True},
    "tp-prescaled": {"partitions": 1, "tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": True},
    "dp-sharded": {"partitions": 1, "ddp": True, "shard_optimizer_state": True},
}


def ask_for(monkeypatch, parameters: dict) -> None:
    """As the launcher of such jobs does."""
    monkeypatch.setenv("SM_HP_MP_PARAMETERS", json.dumps(parameters))
    monkeypatch.setenv("SM_FRAMEWORK_PARAMS", json.dumps({"sagemaker_mpi_enabled": True}))
    monkeypatch.setenv("SHARDSMITH_TRAINER", "1")


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trainer")
    make_model("gpt2", folder / "model", weights=False)
    make_text(folder / "text")
    return folder


def words(material: Path, output: Path, *more: object) -> list[str]:
    return [sys.executable, *map(str, [SCRIPT, "--model_dir", material / "model", "--data", material / "text", "--output_dir", output,
                                       "--max_steps", STEPS, "--save_steps", SAVE, *more])]


@pytest.fixture(scope="module")
def plain(material):
    """The log of a plain Trainer's run, by the arguments that count."""
    known: dict[tuple, list[dict]] = {}

    def run(*more: object) -> list[dict]:
        if more not in known:
            output = material / f"plain{len(known)}"
            done = subprocess.run(words(material, output, *more), env=ranks.environment(), capture_output=True, text=True,
                                  timeout=PATIENCE)
            assert done.returncode == 0, done.stderr[-3000:]
            known[more] = log_of(output)
        return known[more]

    return run


def log_of(output: Path) -> list[dict]:
    return json.loads((output / "result.json").read_text())["log"]


def split(material: Path, output: Path, *more: object) -> list[dict]:
    with ranks.Ranks(words(material, output, *more), 2, output.with_name(f"{output.name}-logs")) as running:
        running.succeed(PATIENCE)
    return log_of(output)


def same_losses(found: list[dict], expected: list[dict], keys=("loss", "eval_loss", "grad_norm")) -> None:
    assert len(found) == len(expected)
    compared = 0
    for ours, theirs in zip(found, expected):
        assert ours["step"] == theirs["step"]
        for key in keys:
            if key in theirs:
                assert ours[key] == pytest.approx(theirs[key], rel=1e-4), (key, ours, theirs)
                compared += 1
    assert compared >= 2 * STEPS


@pytest.mark.parametrize("layout, more", [
    pytest.param("pp", ["--max_grad_norm", 0], id="pp-default-optimizer"),
    pytest.param("tp", ["--max_grad_norm", 0, "--own_optimizer", 1], id="tp-own-optimizer", marks=pytest.mark.long),
    pytest.param("pp", ["--max_grad_norm", 0, "--own_optimizer", 1], id="pp-own-optimizer", marks=pytest.mark.long),
    pytest.param("tp", ["--max_grad_norm", 0], id="tp-default-optimizer", marks=pytest.mark.long),
    pytest.param("pp", ["--gradient_accumulation", 2], id="pp-clipped-accumulated", marks=pytest.mark.long),
    pytest.param("tp", ["--gradient_accumulation", 2], id="tp-clipped-accumulated", marks=pytest.mark.long),
    pytest.param("tp-prescaled", ["--max_grad_norm", 0], id="tp-prescaled", marks=pytest.mark.long),
    pytest.param("dp-sharded", ["--own_optimizer", 1], id="dp-sharded", marks=pytest.mark.long),
])
def test_it_trains_evaluates_saves_and_resumes_as_a_plain_trainer_does(material, plain, tmp_path, monkeypatch, layout, more):
    expected = plain(*more)
    ask_for(monkeypatch, LAYOUTS[layout])
    output = tmp_path / "out"
    same_losses(split(material, output, *more), expected)

    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(output)  # what it saved is a model of transformers'
    assert whole.transformer.h[3].mlp.c_fc.weight.shape == (64, 256)

    # Resumed in the middle it does the same steps again.
    shutil.rmtree(output / f"checkpoint-{STEPS}")
    (output / "result.json").unlink()
    same_losses(split(material, output, *more, "--resume"), expected)


PROGRAM = """
import sys
{imports}
import torch
arguments = TrainingArguments(sys.argv[1], report_to="none")
assert arguments.device == torch.device("cpu") and arguments.n_gpu == 0, arguments.device
assert Trainer._wrap_model.__wrapped__ is not None
assert arguments.world_size == 1 and smp.is_initialized()
"""


@pytest.mark.parametrize("imports", [
    "import smdistributed.modelparallel.torch as smp\nfrom transformers import Trainer, TrainingArguments",
    pytest.param("from transformers import TrainingArguments, Trainer\nimport smdistributed.modelparallel.torch as smp",
                 marks=pytest.mark.long),
    pytest.param("from transformers import Trainer, TrainingArguments\nimport smdistributed.modelparallel.torch as smp",
                 marks=pytest.mark.long),
])
def test_the_switch_works_in_any_order_of_imports(tmp_path, monkeypatch, imports):
    ask_for(monkeypatch, {"partitions": 1})
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(imports=imports), str(tmp_path)], env=ranks.environment(),
                          capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-3000:]
