"""One rank fails, as a process: all the others end within the time limit, with that rank's error."""
import json

import pytest

from smp_helpers import Ranks, make_models, run

# What rank 1, the last stage, meets in its second step.
FAULTS = {
    "forward": ("""
def fault():
    import shardsmith._engine as engine
    plain = engine.Stage.forward
    def forward(self, microbatch, inputs):
        if microbatch == 1:
            inputs = inputs | {"labels": torch.full_like(inputs["labels"], 10_000)}
        return plain(self, microbatch, inputs)
    engine.Stage.forward = forward
""", "rank 1 failed: ", "10000"),
    "backward": ("""
def fault():
    parameter = next(p for name, p in model.local_named_parameters() if "h.3" in name)
    def hook(gradient):
        raise ValueError("no gradient today")
    parameter.register_hook(hook)
""", "rank 1 failed: ", "no gradient today"),
    "optimizer": ("""
def fault():
    def hook(*_):
        raise ValueError("no update today")
    optimizer.optimizer.register_step_pre_hook(hook)
""", "rank 1 failed: ", "no update today"),
    "script": ("""
def fault():
    raise KeyError("no such column")
""", "rank 1 failed: ", "no such column"),
    "stall": ("""
def fault():
    os.kill(os.getpid(), signal.SIGSTOP)
""", "rank 1", "died or stalled"),
    "kill": ("""
def fault():
    os.kill(os.getpid(), signal.SIGKILL)
""", "rank 1", "died or stalled"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("fault", [
    fault if fault in ("forward", "script", "kill") else pytest.param(fault, marks=pytest.mark.long) for fault in FAULTS])
def test_a_faulty_rank_is_everybodys_error_in_time(models, tmp_path, fault):
    code, *texts = FAULTS[fault]
    ranks = Ranks(code + """
start(2, 2, peer_timeout=8)
model = load("gpt2")
optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-2))
train_step(model, ids_of(0))
optimizer.step()
smp.barrier()
begin = time.monotonic()
if RANK == 1:
    fault()
error = None
try:
    for step in range(1, 4):
        train_step(model, ids_of(step))
        optimizer.step()
except BaseException as caught:
    error = [type(caught).__name__, str(caught), time.monotonic() - begin]
results["error"] = error
finish()
os._exit(0 if error is None else 1)
""", 2, models, tmp_path)
    out = ranks.processes[0].communicate(timeout=120)[0]
    ranks.processes[1].kill()
    ranks.wait()
    assert (tmp_path / "results_0.json").exists(), out[-4000:]
    name, text, seconds = json.loads((tmp_path / "results_0.json").read_text())["error"]
    assert name == "Error" and seconds < 20
    for expected in texts:
        assert expected in text


def test_a_module_used_twice_is_named(models, tmp_path):
    (found,) = run("""
        from transformers import AutoModelForCausalLM
        start()
        model = AutoModelForCausalLM.from_pretrained(MODELS + "/gpt2")
        model.transformer.h[2] = model.transformer.h[1]
        results["twice"] = refusal(smp.DistributedModel, model)
    """, 1, models, tmp_path)
    kind, text = found["twice"]
    assert kind == "unsupported" and "transformer.h.2.ln_1.weight" in text and "is transformer.h.1.ln_1.weight again" in text
