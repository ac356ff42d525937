"""Scripts in the documentation's style, for each kind of checkpoint and each way of fine-tuning: killed once and resumed, their losses
are plain PyTorch's. Under torchrun and mpiexec."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from parity import ranks
from test_script import FREQUENCY, KILL_AT, PATIENCE, STEPS, Torchrun, make_model, make_text, read_losses, train_and_kill

EXAMPLES = ranks.ROOT / "examples"
ROWS = 8  # of the whole batch, as plain_training.py has it


class Mpiexec(Torchrun):
    """Open MPI's, with more processes than cores and, in a container, as root."""

    def command(self, words: tuple[str, ...]) -> list[str]:
        return ["mpiexec", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(self.count), sys.executable, *words]


PP, TP, BOTH = ["--pipeline_parallel_degree", 2, "--microbatches", 4], ["--tensor_parallel_degree", 2], [
    "--pipeline_parallel_degree", 2, "--microbatches", 2, "--tensor_parallel_degree", 2]
SWITCHES = ["--attention_in_fp32", 0, "--fused_softmax", 1, "--activation_checkpointing", 1]

# script, its arguments on both runs, how it goes on, what plain_training.py does
PARTIAL = ("train_smp.py", [], ["--load_partial", 1], ["adamw"])
FULL = ("train_smp.py", ["--save_full", 1, "--optimizer", "sgd"], ["--load_full", 1], ["sgd"])
OLD_PARTIAL = ("train_smp_1_6.py", [], ["--load", 1], ["adamw", "1.6"])
OLD_FULL = ("train_smp_1_6.py", ["--partial", 0, "--optimizer", "sgd"], ["--load", 1], ["sgd", "1.6"])
FROM_CONFIG, FROM_PRETRAINED, DELAYED = ["--fine_tune", 0], ["--fine_tune", 1], ["--fine_tune", 1, "--delayed_param", 1]


def case(style, layout, count, *more, launcher=Torchrun, long=True, id):
    return pytest.param(style, layout, count, list(more), launcher, id=id, marks=[pytest.mark.long] if long else [])


@pytest.mark.parametrize("style, layout, count, more, launcher", [
    case(OLD_PARTIAL, TP, 2, launcher=Mpiexec, id="1.6-partial-tp-mpiexec"),
    case(OLD_PARTIAL, PP, 2, id="1.6-partial-pp"),
    case(OLD_PARTIAL, BOTH, 4, id="1.6-partial-both"),
    case(OLD_FULL, PP, 2, id="1.6-full-pp"),
    case(OLD_FULL, TP, 2, id="1.6-full-tp"),
    case(OLD_FULL, BOTH, 4, id="1.6-full-both"),
    case(PARTIAL, TP, 2, *DELAYED, *SWITCHES, id="partial-tp-delayed"),
    case(PARTIAL, PP, 2, *DELAYED, launcher=Mpiexec, long=False, id="partial-pp-delayed-mpiexec"),
    case(PARTIAL, BOTH, 4, *FROM_PRETRAINED, id="partial-both-from-pretrained"),
    case(PARTIAL, BOTH, 4, *DELAYED, "--prescaled_batch", 1, "--optimize", "speed", id="partial-both-delayed-prescaled"),
    case(PARTIAL, PP, 4, *FROM_PRETRAINED, "--shard_optimizer_state", 1, "--microbatches", 2, id="partial-pp-sharded"),
    case(FULL, PP, 2, *FROM_PRETRAINED, id="full-pp-from-pretrained"),
    case(FULL, TP, 2, *FROM_PRETRAINED, id="full-tp-from-pretrained"),
    case(FULL, BOTH, 4, *DELAYED, id="full-both-delayed"),
    case(FULL, TP, 2, *FROM_CONFIG, id="full-tp-from-config"),
])
def test_it_is_killed_resumes_and_computes_what_plain_pytorch_does(tmp_path, style, layout, count, more, launcher):
    script, always, go_on, plain_words = style
    is_tuned = "--fine_tune" in more and more[more.index("--fine_tune") + 1] == 1
    model = make_model("gpt2", tmp_path / "model", weights=is_tuned)
    text = make_text(tmp_path / "text")
    tp = 2 if "--tensor_parallel_degree" in layout else 1
    feeders = count // 2 if layout is not TP else count
    if "--prescaled_batch" in more:
        feeders //= tp
    words = list(map(str, [EXAMPLES / script, "--model_dir", model, "--data", text, "--checkpoint_dir", tmp_path / "checkpoints",
                           "--max_steps", STEPS, "--checkpoint_freq", FREQUENCY, "--train_batch_size", ROWS // feeders, *layout, *always,
                           *more]))
    plain = [sys.executable, str(Path(__file__).with_name("plain_training.py")), str(model), str(text), str(int(is_tuned)),
             str(STEPS), str(tmp_path / "plain"), *plain_words]
    subprocess.run(plain, env=ranks.environment(), check=True, timeout=PATIENCE)
    expected = read_losses(tmp_path / "plain")

    before, after = tmp_path / "before", tmp_path / "after"
    train_and_kill(tmp_path / "log1", [*words, "--losses", str(before)], before, launcher, count)
    first = read_losses(before)
    assert KILL_AT <= max(first) < 2 * FREQUENCY, "killed too late to tell"
    if "--delayed_param" in more:
        words[words.index("--fine_tune") + 1] = "0"  # nothing is fetched but from the checkpoint
    run = launcher(tmp_path / "log2", *words, "--losses", str(after), *map(str, go_on), count=count)
    code, said = run.wait()
    assert code == 0, said[-3000:]
    assert f"resumed at step {FREQUENCY}" in said
    second = read_losses(after)
    assert sorted(second) == list(range(FREQUENCY + 1, STEPS + 1))
    assert [first[step] for step in sorted(first)] == pytest.approx([expected[step] for step in sorted(first)], rel=1e-4)
    assert [second[step] for step in sorted(second)] == pytest.approx([expected[step] for step in sorted(second)], rel=1e-4)


@pytest.mark.long
def test_the_engine_alone_gives_the_losses_that_scripts_are_compared_with(tmp_path):
    model, text = make_model("gpt2", tmp_path / "model", weights=True), make_text(tmp_path / "text")
    program = [sys.executable, str(Path(__file__).with_name("plain_training.py")), str(model), str(text), "1", str(STEPS)]
    for name, more in {"plain": [], "engine": ["adamw", "engine"]}.items():
        subprocess.run([*program, str(tmp_path / name), *more], env=ranks.environment(), check=True, timeout=PATIENCE)
    plain, engine = read_losses(tmp_path / "plain"), read_losses(tmp_path / "engine")
    assert len(plain) == STEPS and list(engine.values()) == pytest.approx(list(plain.values()), rel=1e-4)


class TestLaunchers:
    """What is read of the environment; no processes."""

    def test_torchrun_counts_first(self):
        from shardsmith.smp import launch

        found = launch.place({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0",
                              "OMPI_COMM_WORLD_SIZE": "9"})
        assert found == (3, 4, 1, 2, True)
        assert launch.place({}) is None

    @pytest.mark.parametrize("variables", [
        {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
    ])
    def test_mpi_on_two_hosts(self, variables):
        from shardsmith.errors import Error
        from shardsmith.smp import launch

        found = launch.place(variables)
        assert found == (3, 4, 1, 2, False)
        with pytest.raises(Error, match="MASTER_ADDR must name rank 0's host"):
            launch.init_method(found, environment=variables)
        known = {**variables, "MASTER_ADDR": "one", "MASTER_PORT": "1234"}
        assert launch.init_method(found, environment=known) == "tcp://one:1234"
        assert launch.init_method(found, 99, known) == "tcp://one:99"

    def test_jobs_on_one_host_meet_at_ports_of_their_own(self):
        from shardsmith.smp import launch

        here = launch.Place(0, 2, 0, 2, False)
        methods = {launch.init_method(here, environment={"PMIX_NAMESPACE": job}) for job in ("a", "b", "a")}
        assert len(methods) == 2 and all(method.startswith("tcp://127.0.0.1:") for method in methods)

    def test_nonsense_is_named(self):
        from shardsmith.errors import Error
        from shardsmith.smp import launch

        with pytest.raises(Error, match="OMPI_COMM_WORLD_RANK must be a whole number, not 'x'"):
            launch.place({"OMPI_COMM_WORLD_RANK": "x", "OMPI_COMM_WORLD_SIZE": "2"})
