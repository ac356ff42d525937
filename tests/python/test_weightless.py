"""Weightless parameters: objects with names, identities and shapes, and no weights before the partition."""
import pytest

from smp_helpers import make_models, run


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


BEFORE = """
from transformers import AutoModelForCausalLM, AutoConfig
def build(family, **kwargs):
    with smp.model_creation(**kwargs):
        return AutoModelForCausalLM.from_pretrained(os.path.join(MODELS, family))
"""


def test_shapes_names_ties_and_buffers_are_right(models, tmp_path):
    (found,) = run(BEFORE + """
start()
for family in ("gpt2", "llama", "untied"):
    model, other = build(family), plain(family)
    assert [(n, p.shape, p.numel(), p.requires_grad, p.dtype) for n, p in model.named_parameters()] == [
        (n, p.shape, p.numel(), p.requires_grad, p.dtype) for n, p in other.named_parameters()]
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tied == (family != "untied"), family
    for (n, b), (m, c) in zip(model.named_buffers(), other.named_buffers(), strict=True):
        assert n == m and torch.equal(b, c), n
    assert not any(p.is_meta for p in model.parameters())
assert build("gpt2", dtype=torch.bfloat16).dtype == torch.bfloat16 and torch.get_default_dtype() == torch.float32
with smp.model_creation():
    from transformers import GPT2LMHeadModel, LlamaForCausalLM
    a = GPT2LMHeadModel.from_pretrained(MODELS + "/gpt2")
assert type(a) is GPT2LMHeadModel
# Outside of the context everything is as before.
b = AutoModelForCausalLM.from_pretrained(MODELS + "/gpt2")
assert all(torch.equal(p, q) for p, q in zip(b.parameters(), plain("gpt2").parameters()))
""", 1, models, tmp_path)


def test_saving_and_copying_raise_until_the_weights_are_there(models, tmp_path):
    (found,) = run(BEFORE + """
import copy, io, pickle
start()
model = build("gpt2")
p = model.transformer.wte.weight
results["refused"] = [refusal(f) for f in (
    model.state_dict, model.transformer.state_dict, lambda: copy.deepcopy(model), lambda: copy.copy(model.transformer),
    lambda: torch.save(model, io.BytesIO()), lambda: pickle.dumps(model), lambda: model.save_pretrained(FOLDER + "/x"),
    lambda: copy.deepcopy(p), lambda: torch.save(p, io.BytesIO()))]
wrapped = smp.DistributedModel(model)
other = plain("gpt2")
assert model.transformer.wte.weight is p
assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))
copied = copy.deepcopy(model)
torch.save(model.state_dict(), io.BytesIO())
""", 1, models, tmp_path)
    assert all(refused and refused[0] == "unsupported" for refused in found["refused"]), found["refused"]


OPTIMIZERS = """
start(2, 2)
from transformers import AutoModelForCausalLM
name, options = {name!r}, {options!r}
with smp.model_creation():
    model = AutoModelForCausalLM.from_pretrained(MODELS + "/gpt2")
identities = [id(p) for p in model.parameters()]
calls = []
for p in model.parameters():
    p.register_post_accumulate_grad_hook(lambda p: calls.append(tuple(p.shape)))
# Before the wrapper, as scripts may.
optimizer = getattr(torch.optim, name)(model.parameters(), **options)
model = smp.DistributedModel(model)
optimizer = smp.DistributedOptimizer(optimizer)
before = len(optimizer.param_groups[0]["params"])
losses = []
for step in range(3):
    optimizer.zero_grad()
    losses.append(train_step(model, mine(ids_of(step))).reduce_mean().item())
    optimizer.step()
assert [id(p) for p in model.parameters()] == identities
local = {{id(p) for p in model.local_parameters()}}
assert {{id(p) for p in optimizer.param_groups[0]["params"]}} == local and len(local) < before
assert {{id(p) for p in optimizer.state}} <= local
assert all((p.numel() > 0) == (id(p) in local) for p in model.parameters())
assert len(calls) >= 3 * len(local)
results["losses"] = losses
if RANK == 0:
    other = plain("gpt2")
    optimizer = getattr(torch.optim, name)(other.parameters(), **options)
    results["plain"] = []
    for step in range(3):
        optimizer.zero_grad()
        loss = other(input_ids=ids_of(step), labels=ids_of(step)).loss
        loss.backward()
        optimizer.step()
        results["plain"].append(loss.item())
"""

# Every optimizer of torch that takes dense gradients and no closure; foreach and fused where it has them.
FOREACH = ["SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "ASGD", "Rprop"]
CASES = [(name, {"lr": 1e-3, "foreach": foreach}) for name in FOREACH for foreach in (False, True)]
CASES += [(name, {"lr": 1e-3, "fused": True}) for name in ("SGD", "Adam", "AdamW", "Adagrad")]
CASES += [("Adafactor", {"lr": 1e-3})]


def test_every_optimizer_trains_it_on_two_stages(models, tmp_path):
    """All in one pair of processes: each case gets a session of its own."""
    body = "import traceback\nfrom shardsmith.smp.session import state\nCASES = " + repr(CASES) + """
import transformers
all_losses = {}
for number, (name, options) in enumerate(CASES):
    results = {}
    exec(BODY.replace("{name!r}", repr(name)).replace("{options!r}", repr(options)).replace("{{", "{").replace("}}", "}"), globals())
    all_losses[f"{name} {options}"] = results
    state.model = state.optimizer = None
    smp.barrier()
results = all_losses
"""
    body = "BODY = " + repr(OPTIMIZERS.replace("start(2, 2)\n", "")) + "\nstart(2, 2)\n" + body
    found = run(body, 2, models, tmp_path)
    assert len(found[0]) == len(CASES)
    for case, r in found[0].items():
        assert r["losses"] == pytest.approx(r["plain"], rel=1e-4), case
        assert found[1][case]["losses"] == r["losses"], case


def test_writing_before_the_partition_is_told(models, tmp_path):
    (found,) = run(BEFORE + """
import logging
lines = []
class Keep(logging.Handler):
    def emit(self, record): lines.append(record.getMessage())
logging.getLogger("shardsmith.smp").addHandler(Keep())
start()
model = build("llama")
with torch.no_grad():
    model.model.norm.weight.fill_(3)
model.init_weights()
model.to("cpu")
smp.DistributedModel(model)
results["lines"] = lines
assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain("llama").parameters()))
""", 1, models, tmp_path)
    assert any("before the partition are replaced" in line for line in found["lines"])


INITIAL = """
from transformers import AutoConfig, AutoModelForCausalLM
start({pp}, 2, delayed_parameter_initialization={delayed})
torch.manual_seed(5)
with smp.model_creation():
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODELS + "/gpt2"))
drawn = torch.rand(1).item()
model = smp.DistributedModel(model)
model.train()
results["loss"] = train_step(model, mine(ids_of(0))).reduce_mean().item()
torch.manual_seed(5)
other = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODELS + "/gpt2"))
results["plain"] = other(input_ids=ids_of(0), labels=ids_of(0)).loss.item()
results["std"] = {{n: [p.mean().item(), p.std().item()] for n, p in model.local_named_parameters()}}
"""


def test_initial_weights_are_those_of_transformers(models, tmp_path):
    for pp in (1, 2):
        found = run(INITIAL.format(pp=pp, delayed=False), pp, models, tmp_path)
        assert found[0]["loss"] == pytest.approx(found[0]["plain"], rel=1e-5)


def test_delayed_initial_weights_are_the_same_in_every_layout(models, tmp_path):
    one = run(INITIAL.format(pp=1, delayed=True), 1, models, tmp_path)
    two = run(INITIAL.format(pp=2, delayed=True), 2, models, tmp_path)
    assert two[0]["loss"] == pytest.approx(one[0]["loss"], rel=1e-6)
    spread = one[0]["std"]
    assert spread["transformer.wte.weight"][1] == pytest.approx(0.02, rel=0.1)
    assert spread["transformer.h.0.mlp.c_proj.weight"][1] == pytest.approx(0.02 / 8 ** 0.5, rel=0.1)
    assert spread["transformer.ln_f.weight"] == [1, 0] and spread["transformer.ln_f.bias"] == [0, 0]
    both = two[0]["std"] | two[1]["std"]
    assert both == spread
