"""Manual partitions, decisions in files, and the schedules' options, with stages as processes."""
import json

import pytest

from shardsmith import _core
from shardsmith.errors import Error
from smp_helpers import make_models, run


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


TRAIN = """
def train(model, steps=2):
    model.train()
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-2))
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(mean_over_replicas(train_step(model, mine(ids_of(step))).reduce_mean()))
        optimizer.step()
    return losses

def expected(family, steps=2):
    other = plain(family)
    optimizer = torch.optim.SGD(other.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = other(input_ids=ids_of(step), labels=ids_of(step)).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses
def layers(model):
    names = [name for name, _ in model.local_named_parameters()]
    return sorted({int(part) for name in names for part in name.split(".") if part.isdigit()})
"""


def test_layers_go_where_the_script_puts_them(models, tmp_path):
    body = TRAIN + """
start(2, 4, auto_partition=False, default_partition=0)
model = load("gpt2")
blocks = model.get_module().transformer.h
results["range"] = refusal(smp.set_partition, blocks[0], 2)
results["number"] = refusal(smp.set_partition, blocks[0], True)
results["module"] = refusal(smp.set_partition, "h.0", 1)
smp.set_partition(model.get_module().transformer.h[3], 0)
smp.set_partition(blocks, 1)          # the innermost counts, whatever the order
smp.set_partition(blocks[0], 0)
smp.set_partition(blocks[3], 1)       # of one module the last
results["losses"] = train(model)
results["layers"] = layers(model)
results["late"] = refusal(smp.set_partition, blocks[0], 1)
smp.save_checkpoint(FOLDER + "/saved", "one", model=model)
if RANK == 0:
    results["plain"] = expected("gpt2")
"""
    both = run(body, 2, models, tmp_path)
    assert both[0]["layers"] == [0] and both[1]["layers"] == [1, 2, 3]
    assert both[0]["losses"] == pytest.approx(both[0]["plain"], rel=1e-5)
    assert both[0]["losses"] == both[1]["losses"]
    for rank in both:
        assert rank["range"][0] == "invalid_argument" and "0 to 1" in rank["range"][1]
        assert "no pipeline stage" in rank["number"][1] and "str" in rank["module"][1]
        assert rank["late"][0] == "invalid_argument" and "has been made" in rank["late"][1]
    assert json.loads((tmp_path / "saved/one_partial/manifest.json").read_text())["partition"] == [0, 1, 4]


def test_a_checkpoints_partition_is_fixed(models, tmp_path):
    save = TRAIN + """
start(2, 2, auto_partition=False, default_partition=1)
model = load("gpt2")
smp.set_partition(model.get_module().transformer.h[0], 0)
results["losses"] = train(model, 3)
"""
    whole = run(save, 2, models, tmp_path / "whole")
    first = save.replace("train(model, 3)", "train(model, 1)") + """
smp.save_checkpoint(FOLDER + "/../saved", "one", model=model)
"""
    run(first, 2, models, tmp_path / "first")
    resume = TRAIN + """
start(2, 2, auto_partition=False, default_partition=0)
model = load("gpt2")
model.train()
smp.set_partition(model.get_module().transformer.h[3], 1)
smp.resume_from_checkpoint(FOLDER + "/../saved", load_optimizer=False)
results["refused"] = refusal(smp.set_partition, model.get_module().transformer.h[2], 1)
optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-2))
results["losses"] = []
for step in (1, 2):
    optimizer.zero_grad()
    results["losses"].append(mean_over_replicas(train_step(model, mine(ids_of(step))).reduce_mean()))
    optimizer.step()
results["layers"] = layers(model)
"""
    both = run(resume, 2, models, tmp_path / "resumed")
    assert both[0]["layers"] == [0] and both[1]["layers"] == [1, 2, 3]
    assert both[0]["losses"] == whole[0]["losses"][1:]
    assert both[0]["refused"][0] == "invalid_argument"
    assert "after resuming" in both[0]["refused"][1] and "one_partial" in both[0]["refused"][1]


def test_another_degree_asks_for_another_partition(models, tmp_path):
    """The decision holds for its own degree, with auto_partition too; another one is made anew, and the script may say it."""
    save = TRAIN + """
start(2, 2, auto_partition=False, default_partition=1)
model = load("gpt2")
smp.set_partition(model.get_module().transformer.h[0], 0)
results["losses"] = train(model, 1)
smp.save_checkpoint(FOLDER + "/../saved", "one", model=model)
results["losses"] += train(model, 1)
"""
    whole = run(save, 2, models, tmp_path / "first")
    resume = """
start({pp}, 2, {config})
model = load("gpt2")
smp.resume_from_checkpoint(FOLDER + "/../saved", load_optimizer=False)
results["refused"] = refusal(smp.set_partition, model.get_module().transformer.h[3], {stage})
results["losses"] = train(model, 1)
results["layers"] = layers(model)
results["line"] = str(smp.state.load_report)
"""
    (one,) = run(TRAIN + resume.format(pp=1, config="", stage=0), 1, models, tmp_path / "one")
    assert one["refused"] is None and one["layers"] == [0, 1, 2, 3]
    both = run(TRAIN + resume.format(pp=2, config="", stage=1), 2, models, tmp_path / "two")
    assert [rank["layers"] for rank in both] == [[0], [1, 2, 3]], "the checkpoint's, though auto_partition would halve it"
    for rank in both:
        assert rank["refused"][0] == "invalid_argument" and "is fixed" in rank["refused"][1]
    config = "auto_partition=False, default_partition=0"
    three = resume.replace("results[\"refused\"]", "smp.set_partition(model.get_module().transformer.h[2], 1)\nresults[\"refused\"]")
    three = run(TRAIN + three.format(pp=3, config=config, stage=2), 3, models, tmp_path / "three")
    assert [rank["layers"] for rank in three] == [[0, 1], [2], [3]]
    for rank in (one, *both, *three):
        assert rank["losses"] == pytest.approx(whole[0]["losses"][1:], rel=1e-5)


def test_modules_go_to_the_context_that_they_are_made_in(models, tmp_path):
    body = TRAIN + """
import copy
from torch import nn
start(2, 2, auto_partition=False, default_partition=0)
from shardsmith.smp import placing
original = nn.Module.__init__
with smp.partition(0):
    outer = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with smp.partition(1):
        inner = nn.Linear(2, 2)
    after = nn.Linear(2, 2)
outside = nn.Linear(2, 2)
whole = nn.ModuleDict({"outer": outer, "inner": inner, "after": after, "outside": outside})
results["made"] = placing.wishes_of(whole)
results["copied"] = placing.wishes_of(copy.deepcopy(whole))
smp.set_partition(whole, 1)
results["set"] = placing.wishes_of(whole)
try:
    with smp.partition(1):
        raise KeyError
except KeyError:
    pass
results["restored"] = nn.Module.__init__ is original
results["range"] = refusal(lambda: smp.partition(2).__enter__())

# A whole model made in one context but for some blocks.
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.gpt2 import modeling_gpt2
plain_block = modeling_gpt2.GPT2Block
class Block(plain_block):
    def __init__(self, config, layer_idx=None):
        with smp.partition(0 if layer_idx < 3 else 1):
            super().__init__(config, layer_idx=layer_idx)
modeling_gpt2.GPT2Block = Block
model = GPT2LMHeadModel.from_pretrained(os.path.join(MODELS, "gpt2"), dtype=torch.float32)
modeling_gpt2.GPT2Block = plain_block
model = smp.DistributedModel(model)
results["losses"] = train(model)
results["layers"] = layers(model)
if RANK == 0:
    results["plain"] = expected("gpt2")
"""
    both = run(body, 2, models, tmp_path)
    made = {"outer": 0, "outer.0": 0, "outer.1": 0, "inner": 1, "after": 0}
    assert both[0]["made"] == made and both[0]["copied"] == made
    assert both[0]["set"] == {"": 1}, "what is set later holds for what contexts said inside"
    assert both[0]["restored"] and "0 to 1" in both[0]["range"][1]
    assert both[0]["layers"] == [0, 1, 2] and both[1]["layers"] == [3]
    assert both[0]["losses"] == pytest.approx(both[0]["plain"], rel=1e-5)


def test_what_cannot_be_is_said_on_every_rank(models, tmp_path):
    body = """
start(2, 2, auto_partition=False, default_partition=0)
model = load("gpt2")
root = model.get_module()
h = root.transformer.h
results["refused"] = []
begin = time.monotonic()
for wishes in ([(h[1], 1)], [], [(h[3].mlp, 1)], [(h[3], 1), (root.lm_head, 0)], [(h[2 + RANK], 1), (h[3], 1)]):
    for module in root.modules():
        module.__dict__.pop("_smp_partition", None)
    for module, stage in wishes:
        smp.set_partition(module, stage)
    results["refused"].append(refusal(train_step, model, ids_of(0)))
results["seconds"] = time.monotonic() - begin
"""
    texts = ["layer 2 (transformer.h.2", "stage 1 of 2 gets no layer", "layer 3 is torn apart",
             "lm_head.weight is put on stage 0", "rank 1 asks for the partition [0, 3, 4], rank 0 for [0, 2, 4]"]
    for rank in run(body, 2, models, tmp_path):
        assert [kind for kind, _ in rank["refused"]] == ["invalid_argument"] * len(texts)
        for (_, said), text in zip(rank["refused"], texts):
            assert text in said
        assert rank["seconds"] < 30


def test_a_decision_is_written_and_read_again(models, tmp_path):
    file = tmp_path / "decision.json"
    write = TRAIN + f"""
start(2, 2, partition_file={str(file)!r}, auto_partition=False, default_partition=0)
model = load("gpt2")
smp.set_partition(model.get_module().transformer.h[3], 1)
results["losses"] = train(model)
"""
    written = run(write, 2, models, tmp_path / "write")
    assert json.loads(file.read_text()) == {"layers": 4, "stages": 2, "partition": [0, 3, 4]}
    read = TRAIN + f"""
start(2, 2, partition_file={str(file)!r}, load_partition=True)
model = load("gpt2")
smp.set_partition(model.get_module().transformer.h[0], 0)  # ignored: auto_partition
results["losses"] = train(model)
results["layers"] = layers(model)
"""
    again = run(read, 2, models, tmp_path / "read")
    assert again[1]["layers"] == [3] and again[0]["losses"] == written[0]["losses"]
    file.write_text('{"layers": 4, "stages": 2, "partition": [0, 0, 4]}')
    refused = read.replace("train(model)", "refusal(train, model)").replace("] = layers(model)", "] = []")
    for rank in run(refused, 2, models, tmp_path / "refused"):
        assert rank["losses"][0] == "corrupt" and str(file) in rank["losses"][1]
    file.unlink()
    for rank in run(refused, 2, models, tmp_path / "missing"):
        assert rank["losses"][0] == "not_found" and "load_partition" in rank["losses"][1]


@pytest.mark.parametrize("pipeline, active", [
    ("simple", None), pytest.param("simple", 1, marks=pytest.mark.long),
    pytest.param("interleaved", 1, marks=pytest.mark.long)])
def test_schedules_train_the_same(models, tmp_path, pipeline, active):
    body = TRAIN + f"""
start(2, 8, pipeline={pipeline!r}, active_microbatches={active})
results["losses"] = train(load("gpt2"))
if RANK == 0:
    results["plain"] = expected("gpt2")
"""
    both = run(body, 2, models, tmp_path)
    assert both[0]["losses"] == both[1]["losses"]
    assert both[0]["losses"] == pytest.approx(both[0]["plain"], rel=1e-5)


def test_all_groups_of_a_mesh():
    mesh = _core.Mesh(8, 2, 2)
    for kind in ("pp", "tp", "rdp", "dp", "mp"):
        groups = mesh.groups(kind)
        assert sorted(rank for group in groups for rank in group) == list(range(8))
        assert all(getattr(mesh, f"{kind}_group")(rank) == group for group in groups for rank in group)
    with pytest.raises(Error):
        mesh.groups("world")
