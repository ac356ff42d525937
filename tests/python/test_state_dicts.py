"""save, load, state_dict, local_state_dict and load_state_dict, as scripts of 1.6 to 1.9 call them."""
import json
import re

import pytest
import torch

from smp_helpers import make_models, run
from test_resume import HEAD


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


TWO = HEAD + """
import hashlib
def adam(model):
    return smp.DistributedOptimizer(torch.optim.AdamW(groups_of(model.get_module()), lr=1e-2))

def digest(sd):
    result = hashlib.sha256()
    for name in sorted(sd):
        if isinstance(sd[name], torch.Tensor):
            result.update(name.encode() + sd[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return result.hexdigest()
"""

# (pp, tp, more configuration), ranks
LAYOUTS = [((2, 1, {}), 2), ((1, 2, {}), 2), ((1, 1, {}), 2), ((2, 2, {}), 4), ((1, 1, {"shard_optimizer_state": True}), 2),
           ((2, 1, {"shard_optimizer_state": True, "bf16": True}), 4), ((1, 2, {"fp16": True}), 2)]


def settings(layout):
    pp, tp, more = layout
    return f'pp={pp}, tensor_parallel_degree={tp}, ddp=True, **{more!r}'


@pytest.mark.parametrize("layout, ranks", [LAYOUTS[0], LAYOUTS[1], pytest.param(*LAYOUTS[3], marks=pytest.mark.long),
                                           LAYOUTS[5], pytest.param(*LAYOUTS[6], marks=pytest.mark.long)])
@pytest.mark.parametrize("family", ["gpt2", pytest.param("llama", marks=pytest.mark.long)])
def test_the_whole_is_what_one_process_would_have(models, tmp_path, layout, ranks, family):
    """Names, order, ties and values of the module's own state_dict; the optimizer's in torch's form, of the whole model."""
    found = run(TWO + f"""
model, optimizer = session("{family}", {settings(layout)})
steps(model, optimizer, 0, 2)
sd = model.state_dict()
osd = optimizer.state_dict()
one, other = (json.loads(text) for text in (json.dumps(digest(sd)), json.dumps(digest(sd))))
results["digests"] = smp.allgather(digest(sd), smp.WORLD)
plain_model = plain("{family}")
results["names"] = list(sd) == list(plain_model.state_dict())
results["tied"] = sd["lm_head.weight"].data_ptr() == next(iter(sd.values())).data_ptr()
plain_model.load_state_dict(sd)
local = dict(model.local_named_parameters())
reference = dict(plain_model.named_parameters())
if smp.tp_size() == 1:
    results["values"] = all(torch.equal(p.float(), reference[n]) for n, p in local.items())
torch_optimizer = torch.optim.AdamW(groups_of(plain_model), lr=1)
torch_optimizer.load_state_dict(osd)
results["lr"] = torch_optimizer.param_groups[0]["lr"]
results["count"] = [len(osd["state"]), len(list(plain_model.parameters()))]
results["shapes"] = all(torch_optimizer.state[p]["exp_avg"].shape == p.shape for p in plain_model.parameters())
if {layout[2]!r} == {{}}:
    rest = plain_steps(plain_model.train(), torch_optimizer, 2, 2)
    results["rest"] = rest
    results["ours"] = steps(model, optimizer, 2, 2)
to_rank0 = model.state_dict(gather_to_rank0=True)
results["rank0"] = [len(to_rank0), digest(to_rank0) == digest(model.state_dict())]
""", ranks, models, tmp_path)
    for number, rank in enumerate(found):
        assert len(set(rank["digests"])) == 1 and rank["names"] and rank["tied"] and rank["lr"] == 1e-2
        assert rank["count"][0] == rank["count"][1] and rank["shapes"] and rank.get("values", True)
        if "rest" in rank:
            assert rank["ours"] == pytest.approx(rank["rest"], rel=1e-4)
        assert rank["rank0"][0] > 0 and rank["rank0"][1] if number == 0 else rank["rank0"][0] == 0


@pytest.mark.parametrize("layout, ranks", LAYOUTS)
def test_saved_and_loaded_as_scripts_do(models, tmp_path, layout, ranks):
    """Files by their names, and the losses of an uninterrupted run, bit for bit."""
    save = TWO + f"""
model, optimizer = session("gpt2", {settings(layout)})
results["before"] = steps(model, optimizer, 0, 2)
sharded = smp.state.cfg.shard_optimizer_state
osd = optimizer.local_state_dict(gather_if_shard=True)
results["gathered"] = isinstance(osd["state"], list) and len(osd["state"])
every = optimizer.local_state_dict(gather_if_shard=False)
if sharded:
    smp.save(every, FOLDER + "/../every.pt", partial=True, v3=True)
if smp.rdp_rank() == 0:
    sd = model.local_state_dict()
    results["partial"] = sd["_smp_is_partial"]
    smp.save({{"model": sd, "optimizer": osd, "step": 2}}, FOLDER + "/../checkpoint.pt", partial=True)
sd = model.state_dict()
if smp.rank() == 0:
    smp.save(sd, FOLDER + "/../whole.pt", partial=False)
smp.barrier()
results["after"] = steps(model, optimizer, 2, 2)
"""
    saved = run(save, ranks, models, tmp_path / "save")
    pp, tp, more = layout
    names = {path.name for path in tmp_path.glob("*.pt*")}
    expected = {f"checkpoint.pt_{p}_{t}" for p in range(pp) for t in range(tp)} | {"whole.pt"}
    if "shard_optimizer_state" in more:
        expected |= {f"every.pt_{p}_{t}_{r}" for p in range(pp) for t in range(tp) for r in range(ranks // pp // tp)}
    assert names == expected
    assert torch.load(tmp_path / "checkpoint.pt_0_0", weights_only=True)["step"] == 2
    assert "transformer.wte.weight" in torch.load(tmp_path / "whole.pt", weights_only=True)
    assert {rank.get("partial", pp * tp > 1) for rank in saved} == {pp * tp > 1}
    resume = TWO + f"""
model, optimizer = session("gpt2", seed=99, {settings(layout)})
every = {"shard_optimizer_state" in more}
if HOW == "post step":
    def hook(model, optimizer):
        optimizer.load_state_dict(smp.load(FOLDER + ("/../every.pt" if every else "/../checkpoint.pt"), partial=True) if every else
                                  smp.load(FOLDER + "/../checkpoint.pt", partial=True)["optimizer"])
    model.register_post_step_hook(hook)
    results["keys"] = list(model.load_state_dict(smp.load(FOLDER + "/../whole.pt", partial=False)))
else:
    loaded = smp.load(FOLDER + "/../checkpoint.pt", partial=True, map_location=lambda storage, location: storage)
    same = HOW == "same"
    if HOW == "after":
        train_step(model, mine(ids_of(0)))
        state.step_calls = 0
    results["keys"] = list(model.load_state_dict(loaded["model"], same_partition_load=same))
    optimizer.load_state_dict(loaded["optimizer"])
    results["lr"] = optimizer.param_groups[0]["lr"]
state.step_calls = 2
results["after"] = steps(model, optimizer, 2, 2)
"""
    for how in ("merged", "same", "after", "post step"):
        found = run(resume.replace("HOW", repr(how)), ranks, models, tmp_path / how)
        for one, other in zip(saved, found):
            assert one["after"] == other["after"], how
            assert other["keys"] == [[], []]


def test_every_form_of_a_whole_dict_and_what_is_refused(models, tmp_path):
    found = run(TWO + """
model, optimizer = session("gpt2", 2)
reference = plain("gpt2")
sd = reference.state_dict()
from shardsmith.smp.slices import pieces
logical = {piece.name: piece.read(sd[name]) for name, *_ in model._whole.tensors for piece in pieces(model._whole, name)}
results["right"] = {}
for name, given in {"hf": dict(sd), "wrapped": {"module." + n: v for n, v in sd.items()}, "ours": {**logical, "_smp_is_partial": False},
                    "hf, marked": {**sd, "_smp_is_partial": False}, "no head": {n: v for n, v in sd.items() if n != "lm_head.weight"}}.items():
    model = session("gpt2", 2, optimizer=False)
    model.load_state_dict(given)
    model.partition()
    results["right"][name] = same(model, reference)
few = {n: v for n, v in sd.items() if n != "transformer.ln_f.bias"}
model = session("gpt2", 2, optimizer=False)
results["few"] = refusal(model.load_state_dict, few)
results["keys"] = list(model.load_state_dict(few | {"more": torch.ones(1)}, strict=False))
results["more"] = refusal(model.load_state_dict, dict(sd) | {"more": torch.ones(1)})
results["empty"] = refusal(model.load_state_dict, {})
results["early"] = [refusal(model.local_state_dict), refusal(model.state_dict)]
model.partition()
part = model.local_state_dict()
results["other partition"] = refusal(model.load_state_dict, {n: v for n, v in list(part.items())[2:]}, True, True)
results["shape"] = refusal(model.load_state_dict, part | {next(iter(part)): torch.ones(3)}, True, True)
""", 2, models, tmp_path)
    for rank in found:
        assert rank["right"] == dict.fromkeys(rank["right"], True)
        assert rank["few"][0] == "corrupt" and "transformer.ln_f.bias" in rank["few"][1] and "missing" in rank["few"][1]
        assert rank["keys"] == [["transformer.ln_f.bias"], ["more"]]
        assert rank["more"][0] == "corrupt" and "more" in rank["more"][1] and rank["empty"][0] == "invalid_argument"
        assert all(refused[0] == "invalid_argument" and "first step" in refused[1] for refused in rank["early"])
        assert rank["other partition"][0] == "corrupt" and "partition is another one" in rank["other partition"][1]
        assert rank["shape"][0] == "corrupt" and "[3]" in rank["shape"][1]


def test_an_optimizers_dict_of_other_tools_and_what_is_refused(models, tmp_path):
    """By position, as torch has it, before and after the partition; the moments of the whole go to their owners."""
    found = run(TWO + """
start(2, 2)
module = plain("gpt2")
reference = torch.optim.AdamW(groups_of(module), lr=1e-2)
plain_steps(module, reference, 0, 2)
sd, osd = {n: v.clone() for n, v in module.state_dict().items()}, __import__("copy").deepcopy(reference.state_dict())
results["rest"] = plain_steps(module, reference, 2, 2)
results["losses"] = {}
for when in ("before", "after"):
    model, optimizer = session("gpt2", 2, seed=7)
    if when == "after":
        model.partition()
    model.load_state_dict(sd)
    optimizer.load_state_dict(osd)
    results["lr"] = optimizer.param_groups[0]["lr"]
    results["losses"][when] = steps(model, optimizer, 2, 2)
part = optimizer.local_state_dict()
few = {**osd, "param_groups": [{**osd["param_groups"][0], "params": osd["param_groups"][0]["params"][:3]}, osd["param_groups"][1]]}
results["few"] = refusal(optimizer.load_state_dict, few)
results["one group"] = refusal(optimizer.load_state_dict, {**osd, "param_groups": osd["param_groups"][:1]})
results["no dict"] = refusal(optimizer.load_state_dict, [1])
other = next(iter(osd["state"]))
results["shape"] = refusal(optimizer.load_state_dict, {**osd, "state": {**osd["state"], other: {"exp_avg": torch.ones(3, 3)}}})
results["position"] = refusal(optimizer.load_state_dict, {**osd, "state": {999: {}}})
results["shards"] = refusal(optimizer.load_state_dict, {**part, "state": [part["state"]] * 3})
results["other slice"] = refusal(optimizer.load_state_dict, {**part, "state": {0: {"exp_avg": torch.ones(2, 2)}}})
results["early"] = None
model, optimizer = session("gpt2", 2)
results["early"] = [refusal(optimizer.state_dict), refusal(optimizer.local_state_dict)]
results["assign"] = refusal(model.load_state_dict, sd, assign=True)
""", 2, models, tmp_path)
    for rank in found:
        assert rank["lr"] == 1e-2
        for losses in rank["losses"].values():
            assert losses == pytest.approx(rank["rest"], rel=1e-4)
        texts = {name: rank[name] for name in ("few", "one group", "no dict", "shape", "position", "shards", "other slice", "assign")}
        kinds = {"few": "invalid_argument", "one group": "invalid_argument", "no dict": "invalid_argument", "shape": "corrupt",
                 "position": "corrupt", "shards": "corrupt", "other slice": "corrupt", "assign": "unsupported"}
        assert {name: text and text[0] for name, text in texts.items() if name != "shape"} == {
            name: kind for name, kind in kinds.items() if name != "shape"}
        assert "parameters" in texts["few"][1] and "999" in texts["position"][1] and "3 reduced-data-parallel" in texts["shards"][1]
        assert "[2, 2]" in texts["other slice"][1]
        assert all(refused[0] == "invalid_argument" and "first step" in refused[1] for refused in rank["early"])
    shapes = [rank["shape"] for rank in found if rank["shape"]]
    assert shapes and all(kind == "corrupt" and "[3, 3]" in text for kind, text in shapes), "whoever holds that parameter says so"


def test_a_missing_rank_is_named_in_time(models, tmp_path):
    found = run(TWO + """
model, optimizer = session("gpt2", 2, peer_timeout=8)
steps(model, optimizer, 0, 1)
on_rank_0_alone(lambda: results.update(model=refusal(model.state_dict), optimizer=refusal(optimizer.state_dict)))
finish()
os._exit(0)
""", 2, models, tmp_path)
    for what in ("model", "optimizer"):
        kind, text = found[0][what]
        assert kind == "timeout" and f"{what}.state_dict()" in text and "rank 1" in text and "(0, 1)" in text
    assert found[0]["seconds"] < 20


def test_a_rank_that_fails_is_everybodys_error(models, tmp_path):
    found = run(TWO + """
model, optimizer = session("gpt2", 2, peer_timeout=20)
steps(model, optimizer, 0, 1)
part = model.local_state_dict()
if RANK == 1:
    part[next(iter(part))] = torch.ones(2, 2)
begin = time.monotonic()
results["error"] = refusal(model.load_state_dict, part)
results["seconds"] = time.monotonic() - begin
""", 2, models, tmp_path)
    for rank in found:
        assert rank["error"][0] == "corrupt" and "[2, 2]" in rank["error"][1] and rank["seconds"] < 10
    assert "rank 1" in found[0]["error"][1]


def test_files(models, tmp_path):
    (found,) = run(TWO + """
import collections, pickle, numpy
start(1)
f = FOLDER + "/x.pt"
value = {"a": torch.arange(3.0), "args": numpy.float32(2), "nested": [collections.OrderedDict(b=1)], "_smp_is_partial": True}
smp.save(value, f)
results["names"] = sorted(os.listdir(FOLDER))
back = smp.load(f)
results["same"] = back["a"].tolist() == [0, 1, 2] and back["args"] == 2 and back["nested"] == [{"b": 1}] and back["_smp_is_partial"] is True
smp.save(value | {"a": 2}, f, True, pickle, 2, True)
results["v3"] = sorted(os.listdir(FOLDER))
smp.save(value | {"a": 3}, f)
results["again"] = sorted(os.listdir(FOLDER))
results["last"] = smp.load(f)["a"]
smp.save([1], FOLDER + "/sub/whole", partial=False)
results["whole"] = smp.load(FOLDER + "/sub/whole", partial=False, pickle_module=pickle, encoding="x")
os.rename(f + "_0_0", FOLDER + "/old.pt_0")
results["old"] = [smp.load(FOLDER + "/old.pt", back_compat=True)["a"], refusal(smp.load, FOLDER + "/old.pt")]
results["none"] = refusal(smp.load, FOLDER + "/none.pt")
results["file object"] = refusal(smp.save, 1, sys.stdout)
results["folder"] = refusal(smp.save, 1, "/dev/null/x/y")
results["device"] = refusal(smp.load, FOLDER + "/sub/whole", "elsewhere", None, False)
class Evil:
    def __reduce__(self):
        return os.system, ("touch " + FOLDER + "/executed",)
torch.save({"a": Evil()}, FOLDER + "/evil")
results["evil"] = refusal(smp.load, FOLDER + "/evil", partial=False)
results["executed"] = os.path.exists(FOLDER + "/executed")
results["meta"] = str(smp.load(FOLDER + "/sub/whole", partial=False, map_location="cpu"))
torch.save({"t": torch.ones(2)}, FOLDER + "/t")
results["mapped"] = [str(smp.load(FOLDER + "/t", m, partial=False)["t"].device) for m in ("meta", torch.device("meta"), {"cpu": "meta"}, None)]
results["said"] = [line for line in said if "pickle_module" in line]
""", 1, models, tmp_path)
    assert "x.pt_0_0" in found["names"] and found["same"] and not any(".tmp" in name for name in found["names"])
    assert "x.pt_0_0_0" in found["v3"] and "x.pt_0_0" not in found["v3"], "the other form doesn't stay behind"
    assert "x.pt_0_0_0" not in found["again"] and found["last"] == 3
    assert found["whole"] == [1] and found["old"][0] == 3 and found["old"][1][0] == "not_found" and "back_compat" in found["old"][1][1]
    assert found["none"][0] == "not_found" and "none.pt_0_0" in found["none"][1]
    assert found["file object"][0] == "invalid_argument" and found["folder"][0] == "io" and found["device"][0] == "invalid_argument"
    assert found["evil"][0] == "unsupported" or found["evil"][0] == "corrupt"
    assert "system" in found["evil"][1] and not found["executed"]
    assert found["mapped"] == ["meta", "meta", "meta", "cpu"] and len(found["said"]) == 1
    assert re.match(r"\[1\]", found["meta"]) and json
