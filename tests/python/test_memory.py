"""While a model loads, a rank needs its own slices and little more."""
import pytest

from parity import models
from smp_helpers import run

MIB = 1 << 20
ALLOWED = 100 * MIB

LOAD = """
import resource
from shardsmith import _core, _engine
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama
import torch.distributed
class Peak:
    # VmHWM, which unlike getrusage's peak does not begin with the parent's.
    def __call__(self):
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
peak = Peak()
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
results["imports"] = peak()
if {load}:
    start(2, 2)
    with smp.model_creation():
        model = AutoModelForCausalLM.from_pretrained(MODELS)
    model = smp.DistributedModel(model)
    model.partition()
    results["slices"] = sum(p.numel() * p.element_size() for p in model.local_parameters())
    results["peak"] = peak()
    expected = {{name: t for name, t in plain(".").named_parameters()}}
    results["equal"] = all(torch.equal(p, expected[n]) for n, p in model.local_named_parameters())
"""


@pytest.fixture(scope="module")
def model():
    return models.smollm2()


def test_loading_takes_the_own_slices_and_little_more(model, tmp_path):
    (imports,) = run(LOAD.format(load=False), 1, model, tmp_path, fresh=True)
    for rank in run(LOAD.format(load=True), 2, model, tmp_path, fresh=True):
        more = rank["peak"] - imports["imports"]
        print(f"slices {rank['slices'] / MIB:.0f} MiB, peak {more / MIB:.0f} MiB above imports")
        assert rank["equal"] and rank["slices"] > 250 * MIB
        assert more <= rank["slices"] + ALLOWED
