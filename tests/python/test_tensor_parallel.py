"""Tensor parallelism through smp: the same numbers as one plain process, checkpoints of any layout, refusals."""
import json

import pytest
from smp_helpers import Ranks, make_models, run

_TRAIN = """
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

def load_split(family, **config):
    with smp.model_creation(tensor_parallelism=True):
        model = AutoModelForCausalLM.from_pretrained(os.path.join(MODELS, family))
    return smp.DistributedModel(model)

def part(ids):
    feeders, number = (smp.rdp_size(), smp.rdp_rank()) if smp.state.cfg.prescaled_batch else (smp.dp_size(), smp.dp_rank())
    rows = ids.chunk(feeders)[number]
    return rows if smp.pp_rank() == 0 else torch.empty(len(rows), 0)

def train(model, optimizer, begin, steps, rows=8):
    losses = []
    for step in range(begin, begin + steps):
        optimizer.zero_grad()
        loss = train_step(model, part(ids_of(step, rows))).reduce_mean()
        optimizer.clip_master_grads(0.5)
        optimizer.step()
        losses.append(mean_over_replicas(loss))
    return losses

def adamw(model):
    return smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def plain_losses(models, tmp_path_factory):
    """Six steps of transformers in one process."""
    done = {}

    def of(family):
        if family not in done:
            found = run(_TRAIN + f"""
model = plain("{family}")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
results["losses"] = []
for step in range(6):
    optimizer.zero_grad()
    ids = ids_of(step)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    results["losses"].append(float(loss))
""", 1, models, tmp_path_factory.mktemp(family))
            done[family] = found[0]["losses"]
        return done[family]

    return of


LONG = pytest.mark.long
LAYOUTS = [("gpt2", 1, 2, 2, "memory", False), ("gpt2", 2, 2, 4, "speed", True),
           pytest.param("llama", 1, 2, 4, "speed", False, marks=LONG),
           pytest.param("llama", 1, 4, 4, "memory", True, marks=LONG),
           pytest.param("untied", 1, 2, 2, "memory", True, marks=LONG)]


@pytest.mark.parametrize("family, pp, tp, ranks, optimize, prescaled", LAYOUTS)
def test_losses_are_those_of_one_process(models, plain_losses, tmp_path, family, pp, tp, ranks, optimize, prescaled):
    found = run(_TRAIN + f"""
start({pp}, 2, tensor_parallel_degree={tp}, optimize="{optimize}", prescaled_batch={prescaled}, ddp=True)
model = load_split("{family}")
optimizer = adamw(model)
results["losses"] = train(model, optimizer, 0, 6)
results["held"] = sum(p.numel() for p in model.local_parameters())
""", ranks, models, tmp_path)
    for rank in found:
        assert rank["losses"] == pytest.approx(plain_losses(family), rel=2e-4)
    assert len({rank["held"] for rank in found}) <= 2 * pp


def test_a_module_with_weights_of_its_own_is_cut(models, tmp_path):
    """Logits over the whole vocabulary, on every rank, from weights that were there before DistributedModel."""
    found = run(_TRAIN + """
start(1, 1, tensor_parallel_degree=2, prescaled_batch=True, ddp=True)
reference = plain("gpt2").eval()
with smp.tensor_parallelism():
    model = type(reference)(reference.config)
model.load_state_dict(reference.state_dict())
model = smp.DistributedModel(model).eval()

@smp.step
def evaluate(model, ids):
    out = model(input_ids=ids)
    return out["logits"]

ids = ids_of(0)
with torch.no_grad():
    logits = evaluate(model, ids).concat()
    expected = reference(input_ids=ids).logits
results["shape"] = list(logits.shape)
results["difference"] = float((logits - expected).abs().max() / expected.abs().max())
""", 2, models, tmp_path)
    for rank in found:
        assert rank["shape"] == [8, 16, 112]
        assert rank["difference"] < 1e-5


@pytest.mark.parametrize("body, words", [
    ("load('gpt2')", ["tensor_parallel_degree", "model_creation(tensor_parallelism=True)"]),
    ("model = load_split('gpt2'); train_step(model, ids_of(RANK))", ["prescaled_batch", "tp rank 1", "rdp_rank()"]),
    ("model = load_split('gpt2'); train_step(model, ids_of(0, length=8 + RANK))", ["one shape", "[8, 8]", "[8, 9]"]),
])
def test_refusals(models, tmp_path, body, words):
    ended = Ranks(_TRAIN + f"""
start(1, 1, tensor_parallel_degree=2, prescaled_batch=True, ddp=True)
try:
    {body.replace("; ", chr(10) + "    ")}
except Error as error:
    results["error"] = [error.kind, str(error)]
""", 2, models, tmp_path).results()
    for rank in ended:
        for word in words:
            assert word in rank["error"][1], rank["error"]


def test_heads_that_cannot_be_dealt_out(models, tmp_path):
    found = run(_TRAIN + """
start(1, 1, tensor_parallel_degree=3, ddp=True)
results["error"] = refusal(load_split, "gpt2")
""", 3, models, tmp_path)
    for rank in found:
        kind, text = rank["error"]
        assert kind == "invalid_argument"
        for word in ("4 attention heads", "3 tensor-parallel ranks", "1, 2, 4", "pipeline stages"):
            assert word in text
    assert json.dumps(found)
