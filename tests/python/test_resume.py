"""smp.resume_from_checkpoint: what is found, what is read of it whatever wrote it, what is told, what is refused."""
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardsmith import _core
from shardsmith.errors import Error
from smp_helpers import make_models, run
from test_cli import PROGRAM


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


# Several sessions in one process, as a start of one costs more than all that is tested here.
HEAD = """
from transformers import AutoConfig, AutoModelForCausalLM
from shardsmith.smp.session import state
import logging

class Lines(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
said = []
logging.getLogger("shardsmith.smp").addHandler(Lines())
logging.getLogger("shardsmith.smp").setLevel(logging.INFO)

def groups_of(module):
    parameters = list(module.parameters())
    return [{"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1}, {"params": [p for p in parameters if p.dim() < 2]}]

def session(family, pp=WORLD, microbatches=2, optimizer=True, delayed=True, seed=5, **config):
    state.reset()
    start(pp, microbatches, delayed_parameter_initialization=delayed, **config)
    torch.manual_seed(seed)
    with smp.model_creation(tensor_parallelism=config.get("tensor_parallel_degree", 1) > 1):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(os.path.join(MODELS, family)))
    model = smp.DistributedModel(model)
    if not optimizer:
        return model
    return model, smp.DistributedOptimizer(torch.optim.AdamW(groups_of(model.get_module()), lr=1e-2))

def steps(model, optimizer, begin, count):
    losses = []
    for step in range(begin, begin + count):
        optimizer.zero_grad()
        losses.append(mean_over_replicas(train_step(model, mine(ids_of(step))).reduce_mean()))
        optimizer.step()
    return losses

def plain_steps(module, optimizer, begin, count):
    losses = []
    for step in range(begin, begin + count):
        optimizer.zero_grad()
        loss = module(input_ids=ids_of(step), labels=ids_of(step)).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses

def told():
    report = state.load_report
    return {name: getattr(report, name) for name in report.__dataclass_fields__} | {"line": str(report)}

def same(model, reference):
    reference = dict(reference.named_parameters())
    return all(p.equal(reference[name]) for name, p in model.local_named_parameters())
"""


@pytest.mark.parametrize("family, pp", [("gpt2", 2), pytest.param("llama", 1, marks=pytest.mark.long)])
def test_what_other_tools_wrote_goes_on(models, tmp_path, family, pp):
    """Weights and, where they are there, moments: the next losses are those of the plain training that wrote them."""
    found = run(HEAD + f"""
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from safetensors.torch import save_model
family = "{family}"
start({pp}, 2)
module = plain(family)
optimizer = torch.optim.AdamW(groups_of(module), lr=1e-2)
results["before"] = plain_steps(module, optimizer, 0, 2)
if RANK == 0:
    sd, osd = module.state_dict(), optimizer.state_dict()
    module.save_pretrained(FOLDER + "/hf")
    torch.save(sd, FOLDER + "/plain.pt")
    torch.save({{"_orig_mod.module." + name: value for name, value in sd.items()}}, FOLDER + "/wrapped.pt")
    torch.save({{name.removeprefix("transformer.").removeprefix("model."): value for name, value in sd.items()}}, FOLDER + "/bare.pt")
    torch.save({{"model": sd, "optimizer": osd, "epoch": 3, "when": torch.tensor([1.5])}}, FOLDER + "/training.pt")
    torch.save({{"model_state_dict": sd, "optimizer_state_dict": osd}}, FOLDER + "/words.pt")
    save_model(module, FOLDER + "/weights.safetensors")
    dcp.save(sd, checkpoint_id=FOLDER + "/dcp", no_dist=True)
    named = get_optimizer_state_dict(module, optimizer)
    dcp.save({{"model": sd, "optimizer": named, "epoch": 4}}, checkpoint_id=FOLDER + "/dcp-optimizer", no_dist=True)
    dcp.save({{"app": {{"model": sd, "optim": named}}}}, checkpoint_id=FOLDER + "/dcp-app", no_dist=True)
smp.barrier()
reference = {{name: p.detach().clone() for name, p in module.named_parameters()}}
results["plain"] = plain_steps(module, optimizer, 2, 2)
results["weights"], results["losses"], results["told"], results["content"] = {{}}, {{}}, {{}}, {{}}
for name in ("hf", "plain.pt", "wrapped.pt", "bare.pt", "training.pt", "words.pt", "weights.safetensors", "dcp", "dcp-optimizer", "dcp-app"):
    model, optimizer = session(family, {pp})
    content = smp.resume_from_checkpoint(FOLDER, tag=name, partial=False)
    results["content"][name] = {{k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in content.items()}}
    results["told"][name] = told()
    model.train()
    model.partition()
    results["weights"][name] = all(p.equal(reference[n]) for n, p in model.local_named_parameters())
    results["losses"][name] = steps(model, optimizer, 2, 2)
    # The same thing as a path.
    model = session(family, {pp}, optimizer=False)
    smp.resume_from_checkpoint(FOLDER + "/" + name, load_optimizer=False)
    model.partition()
    results["weights"][name] &= all(p.equal(reference[n]) for n, p in model.local_named_parameters())
results["seconds"] = time.monotonic()
""", pp, models, tmp_path)
    with_optimizer = ("training.pt", "words.pt", "dcp-optimizer", "dcp-app")
    for rank in found:
        assert all(rank["weights"].values()), rank["weights"]
        for name, losses in rank["losses"].items():
            if name in with_optimizer:
                assert losses == pytest.approx(rank["plain"], rel=2e-5), name
                assert rank["told"][name]["optimizer"] == "restored"
            else:
                assert losses[0] == pytest.approx(rank["plain"][0], rel=2e-5)
                assert losses[1] != pytest.approx(rank["plain"][1], rel=2e-4), "without moments it goes on otherwise"
                assert rank["told"][name]["optimizer"] == "not there"
        assert rank["content"]["training.pt"] == {"epoch": 3, "when": [1.5]}
        assert rank["content"]["dcp-optimizer"] == {"epoch": 4} and rank["content"]["hf"] == {}
        formats = {name: told["format"] for name, told in rank["told"].items()}
        assert formats["hf"] == "hf" and formats["dcp"] == "dcp" and formats["plain.pt"] == "pt"
        assert formats["weights.safetensors"] == "safetensors"
        prefix = {"gpt2": "transformer.wte.weight", "llama": "model.embed_tokens.weight"}[family]
        assert ["_orig_mod.module." + prefix, prefix] in rank["told"]["wrapped.pt"]["renamed"]
        assert rank["told"]["plain.pt"]["renamed"] == [] and rank["told"]["plain.pt"]["tied"] == ["lm_head.weight = " + prefix]
        assert "tensors restored" in rank["told"]["hf"]["line"]
    assert found[0]["told"] == found[-1]["told"], "the report is the same on every rank"


def test_strictness(models, tmp_path):
    found = run(HEAD + """
start(2, 2)
reference = plain("gpt2")
sd = dict(reference.state_dict())
if RANK == 0:
    torch.save({n: v for n, v in sd.items() if ".h.1." not in n and n != "transformer.ln_f.bias"}, FOLDER + "/few.pt")
    torch.save(sd | {"adapter.weight": torch.ones(3)}, FOLDER + "/more.pt")
    torch.save({"x." + n: v for n, v in sd.items()}, FOLDER + "/strange.pt")
    torch.save({n: v.half() if ".h.0." in n else v for n, v in sd.items()}, FOLDER + "/narrow.pt")
    torch.save(sd | {"transformer.wpe.weight": torch.ones(65, 32)}, FOLDER + "/shape.pt")
smp.barrier()
results["refused"], results["told"], results["right"] = {}, {}, {}
for name in ("few", "more", "strange", "shape"):
    model = session("gpt2", optimizer=False)
    results["refused"][name] = refusal(smp.resume_from_checkpoint, FOLDER, tag=name + ".pt", partial=False)
    results["refused"][name + " not strict"] = refusal(smp.resume_from_checkpoint, FOLDER, tag=name + ".pt", partial=False, strict=False)
    results["told"][name] = told() if state.load_report else None
    if state.pending is not None:
        model.partition()
        initial = session("gpt2", optimizer=False)
        initial.partition()
        initial = dict(initial.local_named_parameters())
        missing = set(results["told"][name]["missing"])
        results["right"][name] = all(p.equal(initial[n] if n in missing else sd[n]) for n, p in model.local_named_parameters())
# A model with values of its own keeps them where nothing is in the file.
state.reset()
start(2, 2)
torch.manual_seed(3)
own = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODELS + "/gpt2"))
before = {n: p.detach().clone() for n, p in own.named_parameters()}
model = smp.DistributedModel(own)
smp.resume_from_checkpoint(FOLDER, tag="few.pt", partial=False, strict=False)
model.partition()
missing = set(state.load_report.missing)
results["kept"] = all(p.equal(before[n] if n in missing else sd[n]) for n, p in model.local_named_parameters())
model = session("gpt2", optimizer=False, bf16=True)
smp.resume_from_checkpoint(FOLDER, tag="narrow.pt", partial=False)
results["told"]["wider"] = told()
state.reset()
start(2, 2)
model = smp.DistributedModel(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODELS + "/gpt2"), dtype=torch.float16))
said.clear()
smp.resume_from_checkpoint(FOLDER, tag="narrow.pt", partial=False)
results["told"]["narrower"] = told()
results["said"] = list(said)
""", 2, models, tmp_path)
    for rank in found:
        refused, told = rank["refused"], rank["told"]
        assert refused["few"][0] == "corrupt" and "13 of the model's" in refused["few"][1] and "strict=False" in refused["few"][1]
        assert refused["more"][0] == "corrupt" and "adapter.weight" in refused["more"][1]
        for name in ("strange", "strange not strict"):
            assert refused[name][0] == "corrupt" and "none of the model's" in refused[name][1] and "x.transformer" in refused[name][1]
        for name in ("shape", "shape not strict"):
            assert refused[name][0] == "corrupt" and "transformer.wpe.weight" in refused[name][1] and "[65, 32]" in refused[name][1]
        assert refused["few not strict"] is None and refused["more not strict"] is None
        assert len(told["few"]["missing"]) == 13 and "transformer.ln_f.bias" in told["few"]["missing"]
        assert "13 missing (transformer.h.1." in told["few"]["line"]
        assert told["more"]["unexpected"] == ["adapter.weight"] and "1 unexpected (adapter.weight)" in told["more"]["line"]
        assert rank["right"] == {"few": True, "more": True} and rank["kept"]
        assert told["wider"]["cast"][0] == "transformer.h.0.ln_1.weight: float16 -> float32"
        assert all("float32 -> float16" in line for line in told["narrower"]["cast"]) and len(told["narrower"]["cast"]) > 20
        assert told["narrower"]["padded"] == []
    assert any("narrower type" in line for line in found[0]["said"]), "a lossy cast is a warning"
    assert sum("tensors restored" in line for line in found[0]["said"]) == 1
    assert not any("tensors restored" in line for line in found[1]["said"]), "rank 0 speaks"


def test_a_dict_is_translated_by_the_scripts_function(models, tmp_path):
    found = run(HEAD + """
start(2, 2)
reference = plain("llama")
def names(sd):
    return {"net/" + n.replace("model.", "m~"): v for n, v in sd.items() if n != "lm_head.weight"}
def back(sd):
    return {n.removeprefix("net/").replace("m~", "model."): v for n, v in sd.items()}
if RANK == 0:
    torch.save(names(reference.state_dict()), FOLDER + "/other.pt")
    torch.save({"model": names(reference.state_dict()), "step": 3}, FOLDER + "/nested.pt")
smp.barrier()
results["right"] = []
for name in ("other.pt", "nested.pt"):
    model = session("llama", optimizer=False)
    results["content"] = smp.resume_from_checkpoint(FOLDER, tag=name, partial=False, translate_function=back)
    model.partition()
    results["right"].append(same(model, reference))
    results["format"] = state.load_report.format
model = session("llama", optimizer=False)
results["raises"] = refusal(smp.resume_from_checkpoint, FOLDER, "other.pt", False, translate_function=lambda sd: sd["nothing"])
results["none"] = refusal(smp.resume_from_checkpoint, FOLDER, "other.pt", False, translate_function=lambda sd: None)
results["part"] = refusal(smp.resume_from_checkpoint, FOLDER, "other.pt", False, translate_function=lambda sd: dict(list(back(sd).items())[2:]))
results["shape"] = refusal(smp.resume_from_checkpoint, FOLDER, "other.pt", False, translate_function=lambda sd: back(sd) | {"model.norm.weight": torch.ones(5)})
""", 2, models, tmp_path)
    for rank in found:
        assert rank["right"] == [True, True] and rank["format"] == "memory"
        assert rank["raises"][0] == "invalid_argument" and "KeyError" in rank["raises"][1]
        assert "NoneType" in rank["none"][1] and rank["part"][0] == "corrupt" and "missing" in rank["part"][1]
        assert rank["shape"][0] == "corrupt" and "model.norm.weight" in rank["shape"][1]


def test_what_is_resumed_from(models, tmp_path):
    """Tags in every form, `newest` of either kind, paths that are checkpoints themselves."""
    run(HEAD + """
model, optimizer = session("gpt2", 1)
steps(model, optimizer, 0, 1)
smp.save_checkpoint(FOLDER + "/out", "a", model=model, optimizer=optimizer, user_content={"tag": "a"})
steps(model, optimizer, 1, 1)
smp.save_checkpoint(FOLDER + "/out", "b", model=model, user_content={"tag": "b"})
steps(model, optimizer, 2, 1)
smp.save_checkpoint(FOLDER + "/out", "model.bin", model=model, optimizer=optimizer)
torch.save(model.get_module().state_dict(), FOLDER + "/out/fullmodel.pt")
model.get_module().save_pretrained(FOLDER + "/trainer")
os.symlink(FOLDER + "/out/a_partial", FOLDER + "/latest")
os.makedirs(FOLDER + "/empty")
""", 1, models, tmp_path)
    out = tmp_path / "out"
    (out / "c_partial").mkdir()  # a save that did not finish
    shutil.copytree(out, tmp_path / "full")
    (tmp_path / "full" / "newest").write_text("fullmodel.pt\n")
    shutil.copytree(out, tmp_path / "gone")
    (tmp_path / "gone" / "newest").write_text("z_partial\n")
    shutil.copytree(out, tmp_path / "tagged")
    (tmp_path / "tagged" / "newest").write_text("a")
    shutil.copytree(tmp_path / "trainer", tmp_path / "bare")
    (tmp_path / "bare" / "config.json").unlink()
    cases = {
        "newest": ("out", {}, "model.bin_partial"), "tag": ("out", {"tag": "a"}, "a_partial"),
        "folder": ("out", {"tag": "b_partial"}, "b_partial"), "dots": ("out", {"tag": "model.bin"}, "model.bin_partial"),
        "asked as full": ("out", {"tag": "a_partial", "partial": False}, "a_partial"),
        "full": ("out", {"tag": "fullmodel.pt", "partial": False}, "fullmodel.pt"),
        "full by name": ("out", {"tag": "fullmodel.pt"}, "fullmodel.pt"),
        "newest is full": ("full", {}, "model.bin_partial"), "newest full": ("full", {"partial": False}, "fullmodel.pt"),
        "dangling": ("gone", {}, "model.bin_partial"), "newest is a tag": ("tagged", {}, "a_partial"),
        "itself": ("out/a_partial", {}, "a_partial"), "itself, slash": ("out/a_partial/", {}, "a_partial"),
        "link": ("latest", {}, "a_partial"), "model": ("trainer", {}, "trainer"),
        "trainer": ("trainer", {"tag": "pytorch_model.bin", "partial": False}, "trainer"),
        "bare": ("bare", {"tag": "pytorch_model.bin", "partial": False}, "model.safetensors"),
        "file": ("out/fullmodel.pt", {}, "fullmodel.pt"),
    }
    refused = {
        "no such tag": ("out", {"tag": "z"}, "not_found", "there are a_partial, b_partial"),
        "not finished": ("out", {"tag": "c"}, "corrupt", "c_partial"),
        "weights are no step": ("trainer", {"tag": "step9"}, "not_found", "step9"),
        "none": ("empty", {}, "corrupt", "no complete checkpoint"),
        "none full": ("out", {"partial": False}, "corrupt", "partial=True"),
        "nothing": ("nowhere", {}, "not_found", "nowhere"), "slash": ("out", {"tag": "a/b"}, "invalid_argument", "'/'"),
        "file and tag": ("out/fullmodel.pt", {"tag": "x"}, "invalid_argument", "is a file"),
        "translated": ("out", {"tag": "a", "translate_function": None}, "", ""),
    }
    body = HEAD + f"""
cases, refused = json.loads({json.dumps(json.dumps([cases, refused]))})
results["found"], results["refused"], results["content"], results["over"] = {{}}, {{}}, {{}}, {{}}
model, optimizer = session("gpt2", 1)
class Writing:
    def wait(self):
        results["waited"] = results.get("waited", 0) + 1
state.saving = Writing()
smp.resume_from_checkpoint(FOLDER + "/out")
state.saving = None
for name, (path, arguments, _) in cases.items():
    results["content"][name] = smp.resume_from_checkpoint(FOLDER + "/" + path, **arguments)
    results["found"][name] = state.load_report.source
    results["over"][name] = state.load_report.passed_over
for name, (path, arguments, *_) in refused.items():
    results["refused"][name] = refusal(smp.resume_from_checkpoint, FOLDER + "/" + path, **arguments)
results["translated"] = refusal(smp.resume_from_checkpoint, FOLDER + "/out", "a", translate_function=lambda sd: sd)
"""
    (found,) = run(body, 1, models, tmp_path)
    for name, (_, _, expected) in cases.items():
        assert found["found"][name].rstrip("/").rpartition("/")[2] == expected, name
    assert found["waited"] == 1, "for a save in the background"
    assert found["content"]["tag"] == {"tag": "a"} and found["content"]["folder"] == {"tag": "b"}
    assert found["content"]["dots"] == {} and found["content"]["full"] == {}
    assert "full checkpoint" in found["over"]["newest is full"][0] and "z_partial" in found["over"]["dangling"][0]
    assert found["over"]["newest"] == [] or "c_partial" not in found["over"]["newest"][0]
    for name, (_, _, kind, text) in refused.items():
        if kind:
            assert found["refused"][name] and found["refused"][name][0] == kind, (name, found["refused"][name])
            assert text in found["refused"][name][1], found["refused"][name]
    assert found["translated"][0] == "invalid_argument" and "partial" in found["translated"][1]


def test_state_by_position_goes_to_the_same_optimizer_only(models, tmp_path):
    (found,) = run(HEAD + """
model, optimizer = session("gpt2", 1)
module = plain("gpt2")
one = torch.optim.AdamW(module.parameters(), lr=1e-2)
plain_steps(module, one, 0, 1)
torch.save({"model": module.state_dict(), "optimizer": one.state_dict()}, FOLDER + "/one.pt")
named = torch.optim.AdamW(list(module.named_parameters()), lr=1e-2)
named.load_state_dict(one.state_dict())
torch.save({"model": module.state_dict(), "optimizer": named.state_dict()}, FOLDER + "/named.pt")
few = torch.optim.AdamW(list(module.parameters())[:5], lr=1e-2)
plain_steps(module, few, 0, 1)
torch.save({"model": module.state_dict(), "optimizer": few.state_dict()}, FOLDER + "/few.pt")
results["order"] = refusal(smp.resume_from_checkpoint, FOLDER, "one.pt", False)
results["few"] = refusal(smp.resume_from_checkpoint, FOLDER, "few.pt", False)
state.reset(); start(1, 1)
model = smp.DistributedModel(plain("gpt2"))
optimizer = smp.DistributedOptimizer(torch.optim.AdamW(list(model.parameters()), lr=1))
smp.resume_from_checkpoint(FOLDER, "named.pt", False)
results["lr"] = optimizer.param_groups[0]["lr"]
results["same"] = all(torch.equal(optimizer.state[p]["exp_avg"], one.state[q]["exp_avg"])
                      for p, q in zip(model.parameters(), module.parameters()))
smp.resume_from_checkpoint(FOLDER, "few.pt", False, load_optimizer=False)
results["not asked"] = state.load_report.optimizer
smp.resume_from_checkpoint(FOLDER, "few.pt", False, load_optimizer_states=False)
results["old word"] = state.load_report.optimizer
""", 1, models, tmp_path)
    assert found["order"][0] == "invalid_argument" and "built otherwise" in found["order"][1], "two groups, where one was saved"
    assert found["few"][0] == "invalid_argument" and "of 5 parameters" in found["few"][1]
    assert found["lr"] == 1e-2 and found["same"] and found["not asked"] == found["old word"] == "not asked for"


def test_ranks_that_ask_for_different_things(models, tmp_path):
    found = run(HEAD + """
start(2, 2)
model = load("gpt2")
os.makedirs(FOLDER + "/x", exist_ok=True)
torch.save(plain("gpt2").state_dict(), FOLDER + f"/x/{RANK}.pt")
smp.barrier()
results["tags"] = refusal(smp.resume_from_checkpoint, FOLDER + "/x", f"{RANK}.pt", False)
results["load_optimizer"] = refusal(smp.resume_from_checkpoint, FOLDER + "/x", "0.pt", False, load_optimizer=RANK == 0)
results["strict"] = refusal(smp.resume_from_checkpoint, FOLDER + "/x", "0.pt", False, strict=RANK == 1)
results["content"] = smp.resume_from_checkpoint(FOLDER + "/x", "0.pt", False)
""", 2, models, tmp_path)
    for rank in found:
        assert rank["tags"][0] == "invalid_argument" and "rank 1" in rank["tags"][1] and "0.pt" in rank["tags"][1]
        for word in ("load_optimizer", "strict"):
            kind, text = rank[word]
            assert kind == "invalid_argument" and f"{word} is" in text and "on rank 1" in text
        assert rank["content"] == {}, "and together they go on"


def test_a_rank_that_does_not_resume_is_named_in_time(models, tmp_path):
    found = run(HEAD + """
start(2, 2, peer_timeout=8)
model = load("gpt2")
if RANK == 0:
    torch.save(plain("gpt2").state_dict(), FOLDER + "/x.pt")
smp.barrier()
on_rank_0_alone(lambda: results.update(alone=refusal(smp.resume_from_checkpoint, FOLDER, "x.pt", False)))
finish()
os._exit(0)
""", 2, models, tmp_path)
    assert found[0]["alone"][0] == "timeout" and "rank 1" in found[0]["alone"][1] and found[0]["seconds"] < 16


def test_full_checkpoints_go_on(models, tmp_path):
    """With their optimizer and user content, under Hugging Face's names or ours, the newest by its step; as a whole or not."""
    run(HEAD + """
model, optimizer = session("gpt2", 2)
for tag in ("one", "two"):
    steps(model, optimizer, int(tag == "two"), 1)
    smp.save_checkpoint(FOLDER + "/out", tag, model=model, optimizer=optimizer, user_content={"tag": tag, "t": torch.ones(2)})
results["losses"] = steps(model, optimizer, 2, 2)
""", 2, models, tmp_path)
    losses = json.loads((tmp_path / "results_0.json").read_text())["losses"]
    (tmp_path / "full").mkdir()
    for source, target, names in (("two", "b.pt", "hf"), ("one", "a.pt", "hf"), ("two", "ours.pt", "logical")):
        folder = tmp_path / ("full" if names == "hf" else "")
        done = subprocess.run([PROGRAM, "convert", tmp_path / f"out/{source}_partial", folder / target, "--to", "full", "--names", names],
                              capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    body = HEAD + """
results["found"] = {}
for path, tag in ((FOLDER + "/../full", None), (FOLDER + "/../ours.pt", None), (FOLDER + "/../full", "b.pt"), (FOLDER + "/../full", "a.pt")):
    model, optimizer = session("gpt2", PP)
    content = smp.resume_from_checkpoint(path, tag, partial=False)
    results["found"][f"{os.path.basename(path)} {tag}"] = [content["tag"], content["t"].tolist(), told(), optimizer.param_groups[0]["lr"],
                                                           steps(model, optimizer, 2, 2)]
os.remove(FOLDER + "/../full/user_content_b.pt") if RANK == 0 else None
smp.barrier()
model, optimizer = session("gpt2", PP)
results["incomplete"] = refusal(smp.resume_from_checkpoint, FOLDER + "/../full", "b.pt", False)
results["fallback"] = smp.resume_from_checkpoint(FOLDER + "/../full", partial=False)["tag"]
results["over"] = state.load_report.passed_over
"""
    for rank in run(body.replace("PP", "2"), 2, models, tmp_path / "resume"):
        for name, (tag, t, told, lr, rest) in rank["found"].items():
            old = name == "full a.pt"
            assert tag == ("one" if old else "two") and t == [1, 1] and lr == 1e-2
            assert told["format"] == "full" and told["optimizer"] == "restored" and told["step"] == (1 if old else 2), name
            assert (rest == pytest.approx(losses, rel=1e-5)) != old, name
        assert rank["incomplete"][0] == "corrupt" and "user_content_b.pt" in rank["incomplete"][1]
        assert rank["fallback"] == "one" and "b.pt" in rank["over"][0]


def test_hostile_files_are_an_error_of_ours(tmp_path):
    """Each is refused, or read as what it says; none ends the process, and none is taken for another thing."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "hostile"))
    import make

    make.write(tmp_path)
    config = {"model_type": "gpt2", "n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 16, "n_positions": 8}
    model = _core.Model(json.dumps(config))
    kinds = {}
    for file in sorted(tmp_path.iterdir()):
        try:
            index, told = _core.open_for_resume(str(file), model, [])
            assert told["missing"] and not any(name.startswith("model/") for name in index.names())
        except Error as error:
            kinds[file.name] = error.kind
            assert "\n" not in str(error)
    assert len(kinds) > 40 and set(kinds.values()) <= {"corrupt", "unsupported", "invalid_argument", "not_found"}


def test_names_that_are_no_text_are_spelled_out(tmp_path):
    import struct

    header = b'{"\xff\xfe":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    config = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 16, "n_positions": 8}
    with pytest.raises(Error) as refused:
        _core.open_for_resume(str(tmp_path / "x.safetensors"), _core.Model(json.dumps(config)), [])
    assert refused.value.kind == "corrupt"
    # As Python 2 pickled a byte string.
    pickle = b"\x80\x02}q\x00X\x02\x00\x00\x00\xff\xfeq\x01K\x01s."
    import zipfile

    with zipfile.ZipFile(tmp_path / "x.pt", "w") as file:
        file.writestr("x/data.pkl", pickle)
        file.writestr("x/version", "3")
    assert _core.read_pt(str(tmp_path / "x.pt")).values == {"\\xff\\xfe": 1}


def test_nonsense_beside_a_model_is_an_error_of_ours(tmp_path):
    import torch

    config = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 16, "n_positions": 8}
    model = _core.Model(json.dumps(config))
    weights = {name: torch.zeros(shape) for name, shape, *_ in model.tensors}
    names = list(weights)
    good = {"state": {0: {"exp_avg": torch.zeros(16, 8), "step": 1}}, "param_groups": [{"lr": 1, "params": list(range(len(names)))}]}
    for number, (optimizer, words) in enumerate([
            ({"state": {}, "param_groups": 5}, "param_groups"), ({"state": 5, "param_groups": []}, "param_groups"),
            (good | {"param_groups": [{"lr": 1}]}, "params"), (good | {"param_groups": [5]}, "params"),
            (good | {"param_groups": [{"params": [0] * len(names)}]}, "each once"),
            (good | {"param_groups": [{"params": list(range(3))}]}, "of 3 parameters"),
            (good | {"state": {99: {}}}, "99"), (good | {"state": {"x": 5, 0: {}}}, "'state' by parameter|no group has"),
            ({"state": {"transformer.wte.weight": 5}, "param_groups": [{"params": ["transformer.wte.weight"]}]}, None),
            (good | {"state": {0: {"exp_avg": torch.zeros(8, 16)}}}, "built otherwise"), (good, None), ("text", None), (None, None)]):
        path = tmp_path / f"{number}.pt"
        torch.save({"model": weights, "optimizer": optimizer}, path)
        try:
            index, _ = _core.open_for_resume(str(path), model, names)
            assert words is None, optimizer
            assert all(index.names().count("model/" + name) == 1 for name in ("word_embedding.weight", "layernorm.bias"))
        except Error as error:
            assert words is not None and re.search(words, str(error)) and str(path) in str(error), (optimizer, str(error))
