"""bf16 and fp16 with float32 masters, loss scale, overflow, clipping, and their checkpoints."""
import math
import os
import subprocess
from pathlib import Path

import pytest

from smp_helpers import REPOSITORY, make_models, run

# Losses over steps, the final masters, and a short hash of everything.
HELPERS = """
import hashlib

def build(family, optimizer="AdamW", pp=1, options=None, **config):
    start(pp, **config)
    model = load(family)
    model.train()
    base = getattr(torch.optim, optimizer)(model.parameters(), **(options or {"lr": 1e-3}))
    return model, base

def train(model, optimizer, steps, clip=0.0):
    losses = []
    for step in steps:
        optimizer.zero_grad()
        losses.append(float(train_step(model, mine(ids_of(step))).reduce_mean()))
        if clip:
            norms.append(optimizer.clip_master_grads(clip))
        optimizer.step()
    return losses

def digest(tensors):
    sums = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sums.update(name.encode() + tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return sums.hexdigest()

norms = []
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


AS_CLOSE = """
model, base = build("{family}", pp={pp}, microbatches=2, {word}=True)
optimizer = smp.DistributedOptimizer(base, dynamic_loss_scale={fp16}, dynamic_loss_args=dict(init_scale=1024.0))
# At fixed weights: losses and gradients of several batches. Then some training.
results["losses"], gradients = [], dict()
for step in range(8):
    optimizer.zero_grad()
    results["losses"] += train_step(model, mine(ids_of(step))).stack().tolist()
    gradients |= {{(step, n): p.grad.float() / optimizer.loss_scale for n, p in model._local.items()}}
gradients = {{k: g for part in smp.allgather(gradients, smp.WORLD) for k, g in part.items()}}
results["trained"] = train(model, optimizer, range(12))
results["dtypes"] = [sorted({{str(p.dtype) for p in model.local_parameters()}}),
                     sorted({{str(p.dtype) for g in optimizer.param_groups for p in g["params"]}})]
results["rounded"] = all(torch.equal(model._local[n].detach(), m.detach().to(model._local[n].dtype))
                         for n, m in model.masters.items())
if RANK == 0:
    def plain_run(dtype):
        other = plain("{family}")
        masters = [p.detach().clone().requires_grad_(True) for p in other.parameters()]
        other.to(dtype)
        adam = torch.optim.AdamW(masters, lr=1e-3)
        scale = 1024.0 if dtype is torch.float16 else 1.0
        losses, fixed, distances = [], [], dict()
        for step in range(8):
            other.zero_grad()
            for half in ids_of(step).chunk(2):
                loss = other(input_ids=half, labels=half).loss
                (loss.float() * scale / 2).backward()
                fixed.append(float(loss))
            distances |= {{(step, n): p.grad.float() / scale for n, p in other.named_parameters()}}
        for step in range(12):
            other.zero_grad()
            loss = other(input_ids=ids_of(step), labels=ids_of(step)).loss
            (loss.float() * scale).backward()
            losses.append(float(loss))
            for p, m in zip(other.parameters(), masters):
                m.grad = p.grad.float() / scale
            adam.step()
            with torch.no_grad():
                for p, m in zip(other.parameters(), masters):
                    p.copy_(m)
        return fixed, distances, losses
    def distance(some, others):
        return sum(float((some[k] - others[k]).square().sum()) for k in others) ** 0.5
    wide, narrow = plain_run(torch.float32), plain_run({dtype})
    results["wide"], results["plain"] = wide[0], narrow[0]
    results["gradients"] = [distance(gradients, wide[1]), distance(narrow[1], wide[1])]
    results["wide_trained"], results["plain_trained"] = wide[2], narrow[2]
"""


@pytest.mark.parametrize("family, pp, word", [
    ("llama", 2, "bf16"), ("gpt2", 2, "fp16"), pytest.param("gpt2", 1, "bf16", marks=pytest.mark.long),
    pytest.param("llama", 1, "fp16", marks=pytest.mark.long)])
def test_is_as_close_to_float32_as_plain_pytorch(models, tmp_path, family, pp, word):
    body = HELPERS + AS_CLOSE.format(family=family, pp=pp, word=word, fp16=word == "fp16",
                                     dtype={"bf16": "torch.bfloat16", "fp16": "torch.float16"}[word])
    found = run(body, pp, models, tmp_path)

    def distance(some, others):
        return math.sqrt(sum((a - b) ** 2 for a, b in zip(some, others, strict=True)))

    one = found[0]
    assert distance(one["losses"], one["wide"]) <= 1.5 * distance(one["plain"], one["wide"])
    assert one["gradients"][0] <= 1.5 * one["gradients"][1]
    # Few numbers with noise in them.
    assert distance(one["trained"], one["wide_trained"]) <= 4 * distance(one["plain_trained"], one["wide_trained"])
    assert one["trained"][-1] < one["trained"][0]
    for rank in found:
        assert rank["dtypes"] == [["torch.bfloat16" if word == "bf16" else "torch.float16"], ["torch.float32"]]
        assert rank["rounded"]


def test_masters_are_the_files_values_and_logits_are_float32(models, tmp_path):
    body = HELPERS + """
model, base = build("llama", bf16=True)
optimizer = smp.DistributedOptimizer(base)
other = dict(plain("llama").named_parameters())
results["exact"] = all(torch.equal(m.detach(), other[n].detach()) for n, m in model.masters.items())
ids = ids_of(0)
with torch.no_grad():
    output = model(input_ids=ids, labels=ids)
results["dtypes"] = [str(output.loss.dtype), str(output.logits.dtype)]
results["identity"] = all(dict(model.get_module().named_parameters())[n] is p for n, p in model._local.items())
"""
    found = run(body, 1, models, tmp_path)[0]
    assert found["exact"] and found["identity"] and found["dtypes"] == ["torch.float32", "torch.float32"]


RESUME = """
config = dict(pp={pp}, microbatches=2, {word}=True)
def make():
    model, base = build("{family}", **config)
    return model, smp.DistributedOptimizer(base, dynamic_loss_scale=True,
                                           dynamic_loss_args=dict(init_scale=2.0**23, scale_window=2))
path = os.path.join({folder!r}, "checkpoints")
model, optimizer = make()
if {resume}:
    content = smp.resume_from_checkpoint(path)
    steps = range(content["step"], 6)
else:
    steps = range(6)
results["losses"] = []
for step in steps:
    results["losses"] += train(model, optimizer, [step], clip=0.5)
    results.setdefault("scales", []).append(optimizer.loss_scale)
    if step == 2 and not {resume}:
        smp.save_checkpoint(path, "half", model=model, optimizer=optimizer, user_content={{"step": 3}})
results["norms"] = norms
results["digest"] = digest(model.masters)
results["states"] = digest({{f"{{n}}/{{k}}": v.reshape(-1) for n, m in model.masters.items()
                            for k, v in optimizer.state.get(m, {{}}).items()}})
"""


@pytest.mark.parametrize("family, pp, word", [
    ("llama", 2, "bf16"), ("gpt2", 1, "fp16"), pytest.param("llama", 1, "bf16", marks=pytest.mark.long),
    pytest.param("gpt2", 2, "fp16", marks=pytest.mark.long)])
def test_three_steps_saved_and_three_more_are_six(models, tmp_path, family, pp, word):
    found = []
    for resume in (False, True):
        body = HELPERS + RESUME.format(family=family, pp=pp, word=word, folder=str(tmp_path), resume=resume)
        found.append(run(body, pp, models, tmp_path / str(resume)))
    for whole, rest in zip(*found):
        assert whole["losses"][3:] == rest["losses"] and whole["scales"][3:] == rest["scales"]
        assert whole["norms"][3:] == rest["norms"]
        assert whole["digest"] == rest["digest"] and whole["states"] == rest["states"]
    if word == "fp16":
        assert -1 in found[0][0]["norms"], "the scale is too large at first: an overflow is part of the test"
        assert any(norm > 0 for norm in found[0][0]["norms"])


MASTER_FILES = """
model, base = build("{family}", pp={pp}, **{config})
optimizer = smp.DistributedOptimizer(base)
path = os.path.join({folder!r}, "checkpoints")
if {resume}:
    smp.resume_from_checkpoint(path)
    model.partition()
else:
    train(model, optimizer, range(3))
    smp.save_checkpoint(path, "t", model=model, optimizer=optimizer)
    results["files"] = sorted(os.listdir(os.path.join(path, "t_partial")))
results["digests"] = {{n: digest({{n: p}}) for n, p in model.optimized.items()}}
results["moments"] = {{n: digest({{n: optimizer.state[p]["exp_avg"]}}) for n, p in model.optimized.items()}}
"""


@pytest.mark.parametrize("before, after", [
    (dict(bf16=True), dict(bf16=True)), (dict(bf16=True), {}),
    pytest.param(dict(bf16=True), dict(fp16=True), marks=pytest.mark.long),
    pytest.param({}, dict(bf16=True), marks=pytest.mark.long)])
def test_a_checkpoint_goes_on_in_another_layout_and_precision(models, tmp_path, before, after):
    found = []
    for number, (pp, config) in enumerate([(2, before), (1, after)]):
        body = HELPERS + MASTER_FILES.format(family="llama", pp=pp, config=config, folder=str(tmp_path), resume=number == 1)
        found.append(run(body, pp, models, tmp_path / str(number)))
    files = found[0][0]["files"]
    assert [f for f in files if f.startswith("fp16_states")] == (["fp16_states_0_0.pt", "fp16_states_1_0.pt"] if before else [])
    for kind in ("digests", "moments"):
        together = {name: value for rank in found[0] for name, value in rank[kind].items()}
        assert together == found[1][0][kind]


OPTIMIZERS = [("SGD", dict(lr=1e-2, momentum=0.9)), ("Adam", dict(lr=1e-3)), ("AdamW", dict(lr=1e-3, foreach=True)),
              ("AdamW", dict(lr=1e-3, fused=True)), ("AdamW", dict(lr=1e-3, amsgrad=True)), ("Adagrad", dict(lr=1e-2)),
              ("RMSprop", dict(lr=1e-4)), ("Adafactor", dict(lr=1e-3)), ("NAdam", dict(lr=1e-3))]


def test_every_torch_optimizer_updates_the_masters(models, tmp_path):
    body = HELPERS + f"""
start(1, bf16=True)
from transformers import AutoModelForCausalLM
from shardsmith.smp.session import state
for number, (name, options) in enumerate({OPTIMIZERS!r}):
    state.model = state.optimizer = None
    model = load("llama")
    model.train()
    optimizer = smp.DistributedOptimizer(getattr(torch.optim, name)(model.parameters(), **options))
    # The same gradients in plain float32 copies.
    copies = [m.detach().clone().requires_grad_(True) for m in model.masters.values()]
    other = getattr(torch.optim, name)(copies, **options)
    for step in range(4):
        optimizer.zero_grad()
        train_step(model, ids_of(step))
        for copy, param in zip(copies, model._local.values()):
            copy.grad = param.grad.float()
        other.step()
        optimizer.step()
    results[str(number)] = max(float((m.detach() - c.detach()).abs().max()) for m, c in zip(model.masters.values(), copies))
"""
    found = run(body, 1, models, tmp_path)[0]
    for number, (name, options) in enumerate(OPTIMIZERS):
        assert found[str(number)] < 1e-6, (name, options)


def test_the_norm_is_that_of_the_masters_gradients(models, tmp_path):
    body = HELPERS + """
model, base = build("llama", pp=2, microbatches=2, bf16=True)
optimizer = smp.DistributedOptimizer(base)
train_step(model, mine(ids_of(0)))
parts = {n: p.grad.double() for n, p in model._local.items()}
for norm_type in (1.0, 2.0, 3.0, math.inf):
    results.setdefault("norms", []).append(optimizer.clip_master_grads(1e9, norm_type))
everything = [part for n, part in [(n, g) for r in smp.allgather(parts, smp.WORLD) for n, g in r.items()]]
seen, flat = set(), []
for rank in smp.allgather(parts, smp.WORLD):
    for name, gradient in rank.items():
        if name not in seen:
            flat.append(gradient.flatten())
        seen.add(name)
results["expected"] = [float(torch.linalg.vector_norm(torch.cat(flat), t)) for t in (1.0, 2.0, 3.0, math.inf)]
results["refusals"] = [refusal(optimizer.clip_master_grads, 0.0), refusal(optimizer.clip_master_grads, 1.0, -1.0)]
before = {n: m.detach().clone() for n, m in model.masters.items()}
results["clipped"] = optimizer.clip_master_grads(1e-3)
""".replace("model, base", "import math\nmodel, base", 1)
    for rank in run(body, 2, models, tmp_path):
        assert rank["norms"] == pytest.approx(rank["expected"], rel=1e-9)
        assert rank["clipped"] == rank["norms"][1]
        assert [kind for kind, _ in rank["refusals"]] == ["invalid_argument"] * 2


def test_an_overflow_is_skipped_alike_on_every_rank(models, tmp_path):
    body = HELPERS + """
model, base = build("llama", pp=2, microbatches=2, fp16=True)
optimizer = smp.DistributedOptimizer(base, dynamic_loss_scale=True, dynamic_loss_args=dict(init_scale=256.0, scale_window=2))
told = []
for step in range(6):
    optimizer.zero_grad()
    train_step(model, mine(ids_of(step)))
    if step in (1, 4) and RANK == step % 2:
        list(model._local.values())[-1].grad[0] = float("inf")
    before = digest(model.optimized), digest({n: p for n, p in model._local.items()})
    optimizer.step()
    same = before == (digest(model.optimized), digest({n: p for n, p in model._local.items()}))
    told.append([optimizer.overflow, optimizer.step_was_skipped, same, optimizer.loss_scale])
results["told"] = told
"""
    for rank in run(body, 2, models, tmp_path):
        assert rank["told"] == [[False, False, False, 256.0], [True, True, True, 128.0], [False, False, False, 128.0],
                                [False, False, False, 256.0], [True, True, True, 128.0], [False, False, False, 128.0]]


@pytest.mark.parametrize("word, choice", [("bf16", "skip"), ("", "skip"), ("bf16", "stop")])
def test_a_loss_that_is_no_number(models, tmp_path, word, choice):
    body = HELPERS + f"""
model, base = build("llama", pp=2, microbatches=2, nan_loss="{choice}", **{dict([(word, True)]) if word else {}})
optimizer = smp.DistributedOptimizer(base)

@smp.step
def spoiled(model, ids, number):
    loss = model(input_ids=ids, labels=ids)["loss"]
    if smp.state.stage == smp.state.stages - 1:
        loss = loss * float("nan")
    model.backward(loss)
    return loss

train(model, optimizer, [0])
optimizer.zero_grad()
before = digest(model.optimized)
results["refused"] = refusal(spoiled, model, mine(ids_of(1)), 1)
if results["refused"] is None:
    optimizer.step()
    results["same"] = before == digest(model.optimized)
    results["skipped"] = optimizer.step_was_skipped
    train(model, optimizer, [2])
    results["goes_on"] = not optimizer.step_was_skipped and before != digest(model.optimized)
else:
    finish()
    os._exit(0)
"""
    for rank in run(body, 2, models, tmp_path):
        if choice == "stop":
            assert "step 2, microbatch 0: the loss is nan" in rank["refused"][1]
        else:
            assert rank["same"] and rank["skipped"] and rank["goes_on"]


def test_parameters_without_gradient_and_duplicates(models, tmp_path):
    body = HELPERS + """
start(1, bf16=True)
model = load("llama")
frozen = [n for n in dict(model.named_parameters()) if "layers.1" in n]
for name in frozen:
    dict(model.named_parameters())[name].requires_grad_(False)
optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
before = {n: m.detach().clone() for n, m in model.masters.items()}
model.train()
train(model, optimizer, range(2))
results["frozen"] = all(torch.equal(before[n], model.masters[n]) for n in frozen)
results["others"] = any(not torch.equal(before[n], m) for n, m in model.masters.items())
smp.save_checkpoint(FOLDER, "t", model=model, optimizer=optimizer)
params = list(model.parameters())
smp.state.optimizer = None
group = torch.optim.SGD(params, lr=1.0)
group.param_groups.append({**group.param_groups[0], "params": [params[3]]})
results["twice"] = refusal(smp.DistributedOptimizer, group)
empty = torch.optim.AdamW(params, lr=1e-2)
empty.param_groups[0]["params"] = []
smp.DistributedOptimizer(empty).step()
"""
    found = run(body, 1, models, tmp_path)[0]
    assert found["frozen"] and found["others"]
    assert found["twice"][0] == "invalid_argument" and "layers" in found["twice"][1]


def test_refusals_of_arguments(models, tmp_path):
    body = """
results["both"] = refusal(smp.init, {"fp16": True, "bf16": True})
start(1, fp16=True)
model = load("llama")
make = lambda **more: smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), **more)
results["args"] = [refusal(make, dynamic_loss_args={"window": 3}), refusal(make, dynamic_loss_args={"scale_window": 0}),
                   refusal(make, static_loss_scale=0.0), refusal(make, dynamic_loss_args={"init_scale": "many"})]
optimizer = make(static_loss_scale=64.0)
ids = ids_of(0)
model(input_ids=ids, labels=ids)["loss"].backward()
results["plain_backward"] = refusal(optimizer.step)
"""
    found = run(body, 1, models, tmp_path)[0]
    assert "both" in found["both"][1]
    for answer, word in zip(found["args"], ("window", "scale_window", "static_loss_scale", "dynamic_loss_args")):
        assert answer[0] == "invalid_argument" and word in answer[1]
    assert "model.backward" in found["plain_backward"][1]


def test_masters_are_resharded_by_the_verb(models, tmp_path):
    program = Path(os.environ.get("SHARDSMITH_BUILD", REPOSITORY / "build")) / "shardsmith"
    body = HELPERS + MASTER_FILES.format(family="llama", pp=2, config=dict(bf16=True), folder=str(tmp_path), resume=False)
    before = run(body, 2, models, tmp_path / "0")
    done = subprocess.run([program, "reshard", tmp_path / "checkpoints", tmp_path / "other" / "checkpoints" / "t_partial",
                           "--pipeline-parallel-degree", "1"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "other" / "checkpoints" / "t_partial"
    assert {f.name for f in folder.glob("fp16_states*")} == {"fp16_states_0_0.pt"}
    body = HELPERS + MASTER_FILES.format(family="llama", pp=1, config=dict(bf16=True), folder=str(tmp_path / "other"),
                                         resume=True)
    after = run(body, 1, models, tmp_path / "1")[0]
    for kind in ("digests", "moments"):
        assert {name: value for rank in before for name, value in rank[kind].items()} == after[kind]


def test_masters_of_a_weight_fused_by_head_are_saved(models, tmp_path):
    """GPT-NeoX's query, key and value alternate in one tensor; in a checkpoint they are tensors of their own."""
    found = run(HELPERS + f"""
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM
from shardsmith.smp.slices import pieces
start(1, bf16=True)
torch.manual_seed(3)
config = GPTNeoXConfig(vocab_size=112, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                       max_position_embeddings=64, hidden_dropout=0, attention_dropout=0)
model = smp.DistributedModel(GPTNeoXForCausalLM(config))
optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
train(model, optimizer, range(2))
smp.save_checkpoint({str(tmp_path)!r}, "t", model=model, optimizer=optimizer)
saved = torch.load(os.path.join({str(tmp_path)!r}, "t_partial", "fp16_states_0_0.pt"), weights_only=True)["state"]
name = "gpt_neox.layers.0.attention.query_key_value.weight"
fused = model.masters[name].detach().view(4, 3, 8, 32)
results["equal"] = [torch.equal(saved["transformer.seq_layers.0.attention." + part + ".weight"]["master"],
                                fused[:, i].reshape(32, 32)) for i, part in enumerate(("query", "key", "value"))]
before = digest(model.masters)
with torch.no_grad():
    for master in model.masters.values():
        master.zero_()
smp.resume_from_checkpoint({str(tmp_path)!r}, tag="t")
results["back"] = digest(model.masters) == before
""", 1, models, tmp_path / "run")
    assert found[0] == {"equal": [True, True, True], "back": True}
