"""Modules of no family under smp.DistributedModel: data and tensor parallelism, sharded state, every checkpoint."""
import pytest
import torch
from smp_helpers import run

_NET = """
import torch.nn.functional as F

class Net(torch.nn.Module):
    def __init__(self, norm=True):
        super().__init__()
        self.embedding = torch.nn.Embedding(20, 8)
        self.body = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.GELU(), torch.nn.Linear(12, 8))
        self.norm = torch.nn.BatchNorm1d(8) if norm else torch.nn.LayerNorm(8)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.head = torch.nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("passing", torch.zeros(3), persistent=False)

    def forward(self, ids, factor=1.0):
        x = self.norm(self.body(self.embedding(ids).mean(1)))
        return {"logits": self.head(x) * self.scale * factor}

def net(norm=True):
    torch.manual_seed(7)
    return Net(norm)

@smp.step
def any_step(model, ids, targets):
    logits = model(ids, factor=1.0)["logits"]
    loss = F.cross_entropy(logits, targets)
    model.backward(loss)
    return loss

def batch(step, rows=8):
    g = torch.Generator().manual_seed(step)
    return torch.randint(0, 20, (rows, 4), generator=g), torch.randint(0, 20, (rows,), generator=g)

def own(tensors):
    parts, number = (smp.rdp_size(), smp.rdp_rank()) if smp.state.cfg.prescaled_batch else (smp.dp_size(), smp.dp_rank())
    return [t.chunk(parts)[number] for t in tensors]

def wrap(module, lr=0.05, **more):
    model = smp.DistributedModel(module, **more)
    return model, smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=lr))

def train(model, optimizer, begin, count):
    losses = []
    for step in range(begin, begin + count):
        optimizer.zero_grad()
        loss = any_step(model, *own(batch(step))).reduce_mean()
        optimizer.clip_master_grads(1.0)
        optimizer.step()
        losses.append(mean_over_replicas(loss))
    return losses

def plain(count, norm=False, microbatches=1):
    model = net(norm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(count):
        optimizer.zero_grad()
        ids, targets = batch(step)
        loss = F.cross_entropy(model(ids)["logits"], targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model
"""


@pytest.mark.parametrize("ranks, config", [
    (1, {"microbatches": 2}), (2, {}), pytest.param(2, {"shard_optimizer_state": True, "microbatches": 2}),
    pytest.param(2, {"tensor_parallel_degree": 2, "prescaled_batch": True}, marks=pytest.mark.long)])
def test_trains_as_plain_torch_and_goes_on(tmp_path, ranks, config):
    program = _NET + f"""
start(1, ddp=True, **{config!r}) if {ranks} > 1 else start(1, **{config!r})
expected, module = plain(5)
model, optimizer = wrap(net(False))
results["plain"], results["losses"] = expected, train(model, optimizer, 0, 3)
smp.save_checkpoint(FOLDER + "/saved", "a", True, model, optimizer, {{"step": 3}})
smp.save_checkpoint(FOLDER + "/saved", "full.pt", False, model, optimizer, optimizer_if_full=True)
results["losses"] += train(model, optimizer, 3, 2)
for name, value in module.state_dict().items():
    torch.testing.assert_close(model.state_dict()[name], value, atol=1e-4, rtol=1e-3)
"""
    for found in run(program, ranks, tmp_path, tmp_path / "first"):
        assert found["losses"] == pytest.approx(found["plain"], rel=1e-4)
    resumed = run(_NET + f"""
start(1, ddp=True, **{config!r}) if {ranks} > 1 else start(1, **{config!r})
torch.manual_seed(99)
model, optimizer = wrap(Net(False))
results["content"] = smp.resume_from_checkpoint(MODELS + "/first/saved", "a")
results["losses"] = train(model, optimizer, 3, 2)
""", ranks, tmp_path, tmp_path / "second")
    for rank in resumed:
        assert rank["content"] == {"step": 3} and rank["losses"] == pytest.approx(found["plain"][3:], rel=1e-4)
    # One process reads what several wrote, from either kind.
    for tag, partial in (("a", True), ("full.pt", False)):
        alone = run(_NET + f"""
start(1)
torch.manual_seed(99)
model, optimizer = wrap(Net(False))
smp.resume_from_checkpoint(MODELS + "/first/saved", "{tag}", partial={partial})
results["losses"] = train(model, optimizer, 3, 2)
""", 1, tmp_path, tmp_path / "third")
        assert alone[0]["losses"] == pytest.approx(found["plain"][3:], rel=1e-4)


def test_the_whole_interface_of_one_module(tmp_path):
    """Buffers, ties, state dicts, bf16, checkpointed activations, wrapping again, and backward without a step."""
    found = run(_NET + """
start(1)
module = net()
smp.set_activation_checkpointing(module.body, strategy="contiguous")
model, optimizer = wrap(module)
results["again"] = smp.DistributedModel(module) is model and smp.DistributedModel(model) is model
results["partitioned"] = model.partitioned
train(model, optimizer, 0, 2)
results["batches"] = int(module.norm.num_batches_tracked)
smp.save_checkpoint(FOLDER, "a", True, model, optimizer)
whole = {name: value.clone() for name, value in model.state_dict().items()}
part = model.local_state_dict()
results["part"] = sorted(set(whole) - set(part))
full = {name: value for name, value in torch.load(FOLDER + "/a_partial/model_0_0.pt", weights_only=True).items()}
results["saved"] = sorted(full)
train(model, optimizer, 2, 1)
model.load_state_dict(whole)
results["loaded"] = all(torch.equal(model.state_dict()[name], value) for name, value in whole.items())
train(model, optimizer, 2, 1)
model.load_state_dict({**part}, same_partition_load=True)
results["tied"] = module.head.weight is module.embedding.weight
train(model, optimizer, 2, 1)
smp.resume_from_checkpoint(FOLDER, "a")
results["batches again"] = int(module.norm.num_batches_tracked)
results["running"] = torch.equal(module.norm.running_mean, full["norm.running_mean"])
optimizer.zero_grad()
F.cross_entropy(model(batch(0)[0])["logits"], batch(0)[1]).backward()
results["norm"] = optimizer.clip_master_grads(1e9)
results["expected norm"] = float(torch.sqrt(sum(p.grad.square().sum() for p in model.parameters())))
optimizer.step()
results["wrong"] = refusal(model.backward, torch.zeros(3, requires_grad=True))
""", 1, tmp_path, tmp_path)[0]
    assert found["again"] and found["partitioned"] and found["loaded"] and found["running"] and found["tied"]
    # A checkpointed part is computed twice, and the batch norm is none of it.
    assert found["batches"] == found["batches again"] == 2
    assert found["part"] == ["head.weight"] and "norm.running_mean" in found["saved"] and "head.weight" not in found["saved"]
    assert found["norm"] == pytest.approx(found["expected norm"], rel=1e-5)
    assert found["wrong"][0] == "invalid_argument" and "scalar loss" in found["wrong"][1]


def test_bf16_has_masters(tmp_path):
    found = run(_NET + """
start(1, bf16=True)
model, optimizer = wrap(net())
results["losses"] = train(model, optimizer, 0, 4)
results["types"] = [str(p.dtype) for p in model.parameters()] + [str(next(iter(optimizer.param_groups[0]["params"])).dtype)]
results["output"] = str(model(batch(0)[0])["logits"].dtype)
expected = plain(4, True)[0]
results["plain"] = expected
""", 1, tmp_path, tmp_path)[0]
    assert set(found["types"][:-1]) == {"torch.bfloat16"} and found["types"][-1] == found["output"] == "torch.float32"
    assert found["losses"] == pytest.approx(found["plain"], rel=0.05)


def test_buffers_are_those_of_rank_0(tmp_path):
    found = run(_NET + """
start(1, ddp=True)
torch.manual_seed(RANK)
model, optimizer = wrap(Net())
model.get_module().norm.running_mean.fill_(RANK + 1)
any_step(model, *own(batch(0)))
results["mean"] = float(model.get_module().norm.running_mean.mean())
results["weights"] = float(sum(p.double().sum() for p in model.parameters()))
""", 2, tmp_path, tmp_path)
    assert found[0]["weights"] == found[1]["weights"]
    assert all(0.5 < rank["mean"] < 1.2 for rank in found), "both began with 1"


def test_a_pipeline_of_such_modules_is_refused(tmp_path):
    found = run(_NET + """
start(2)
results["refused"] = refusal(smp.DistributedModel, net())
""", 2, tmp_path, tmp_path)
    for rank in found:
        assert rank["refused"][0] == "unsupported" and "pipeline_parallel_degree must be 1" in rank["refused"][1]
