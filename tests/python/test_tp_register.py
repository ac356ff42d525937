"""smp.tp_register and the replacement of modules: what is split, what is left alone, and that numbers stay."""
import pytest
from smp_helpers import run

_MODEL = """
import torch.nn.functional as F

class Mixer(torch.nn.Module):
    def __init__(self, width, gain, depth=1):
        super().__init__()
        self.width, self.gain = width, gain
        self.inner = torch.nn.Linear(width, width)

    def forward(self, x, shift=0.0):
        return {"out": self.inner(x) * self.gain + shift}

class SplitMixer(smp.nn.DistributedModule):
    def __init__(self, features, gain):
        super().__init__()
        self.gain = gain
        self.inner = smp.nn.DistributedLinear(features, features)

    def forward(self, x, shift):
        return (self.inner(x) * self.gain + shift,)

def hooks():
    return (lambda width, gain, depth=1: None if depth > 1 else ((width,), {"gain": gain}),
            lambda x, shift=0.0: ((x, shift), {}), lambda output: {"out": output[0]})

class Net(torch.nn.Module):
    def __init__(self, mixer=Mixer):
        super().__init__()
        self.words = torch.nn.Embedding(20, 8)
        self.first = torch.nn.Linear(8, 8)
        self.mixer = mixer(8, 2.0)
        self.last = torch.nn.Linear(8, 20)

    def forward(self, ids):
        x = torch.tanh(self.first(self.words(ids).mean(1)))
        return self.last(x + self.mixer(x, shift=0.5)["out"])

def batch(step, rows=8):
    g = torch.Generator().manual_seed(step)
    return torch.randint(0, 20, (rows, 4), generator=g), torch.randint(0, 20, (rows,), generator=g)

@smp.step
def any_step(model, ids, targets):
    loss = F.cross_entropy(model(ids), targets)
    model.backward(loss)
    return loss

def train(model, optimizer, count, begin=0):
    parts, number = (smp.rdp_size(), smp.rdp_rank()) if smp.state.cfg.prescaled_batch else (smp.dp_size(), smp.dp_rank())
    losses = []
    for step in range(begin, begin + count):
        optimizer.zero_grad()
        loss = any_step(model, *[t.chunk(parts)[number] for t in batch(step)]).reduce_mean()
        results.setdefault("norms", []).append(optimizer.clip_master_grads(0.5))
        optimizer.step()
        losses.append(mean_over_replicas(loss))
    return losses

def plain(module, count):
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    losses = []
    for step in range(count):
        optimizer.zero_grad()
        ids, targets = batch(step)
        loss = F.cross_entropy(module(ids), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses

def kinds(model):
    return {name: type(part).__name__ for name, part in model.get_module().named_modules() if name}
"""


@pytest.mark.parametrize("prescaled", [True, False])
def test_linears_and_embeddings_are_split_and_compute_the_same(tmp_path, prescaled):
    found = run(_MODEL + f"""
torch.manual_seed(3)
expected = plain(Net(), 5)
start(1, tensor_parallel_degree=2, ddp=True, prescaled_batch={prescaled})
torch.manual_seed(3)
with smp.tensor_parallelism():
    module = Net()
model = smp.DistributedModel(module)
optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
results["kinds"], results["plain"] = kinds(model), expected
results["losses"] = train(model, optimizer, 3)
smp.save_checkpoint(FOLDER, "a", True, model, optimizer)
whole = model.state_dict()
results["shapes"] = {{name: list(value.shape) for name, value in whole.items()}}
results["own"] = list(model.get_module().first.weight.shape)
results["losses"] += train(model, optimizer, 2, 3)
""", 2, tmp_path, tmp_path / "split")
    for rank in found:
        assert rank["kinds"]["first"] == rank["kinds"]["last"] == "DistributedLinear"
        assert rank["kinds"]["words"] == "DistributedEmbedding" and rank["kinds"]["mixer.inner"] == "DistributedLinear"
        assert rank["own"] == [8, 4] and rank["shapes"]["first.weight"] == [8, 8] and rank["shapes"]["words.weight"] == [20, 8]
        assert rank["losses"] == pytest.approx(rank["plain"], rel=1e-4)
    assert found[0]["norms"] == pytest.approx(found[1]["norms"])
    # One process, without any split layer, goes on from there.
    alone = run(_MODEL + """
start(1)
torch.manual_seed(9)
model = smp.DistributedModel(Net())
optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
smp.resume_from_checkpoint(MODELS + "/split", "a")
results["losses"] = train(model, optimizer, 2, 3)
""", 1, tmp_path, tmp_path / "alone")
    assert alone[0]["losses"] == pytest.approx(found[0]["plain"][3:], rel=1e-4)


def test_what_is_registered_is_replaced_by_its_hooks(tmp_path):
    found = run(_MODEL + """
start(1, tensor_parallel_degree=2, ddp=True, prescaled_batch=True)
torch.manual_seed(3)
with smp.tensor_parallelism():
    module = Net()
    smp.tp_register_with_module(Mixer, SplitMixer, *hooks())
    with smp.tensor_parallelism(False):
        module.last = torch.nn.Linear(8, 20)
    module.deep = Mixer(8, 2.0, depth=2)
    module.odd = torch.nn.Linear(7, 3)
    module.tied = torch.nn.Linear(8, 8)
    module.tied2 = torch.nn.Linear(8, 8)
    module.tied2.weight = module.tied.weight
late = torch.nn.Linear(8, 8)
module.late = late
smp.set_tensor_parallelism(late)
module.outside = torch.nn.Linear(8, 8)
model = smp.DistributedModel(module)
results["kinds"] = kinds(model)
optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
results["losses"] = train(model, optimizer, 3)
results["gain"] = module.mixer.gain
results["after"] = refusal(smp.tp_register_with_module, Mixer, SplitMixer)
""", 2, tmp_path, tmp_path)
    for rank in found:
        k = rank["kinds"]
        assert k["mixer"] == "SplitMixer" and k["mixer.inner"] == "DistributedLinear" and rank["gain"] == 2.0
        assert k["last"] == "Linear", "the innermost context counts"
        assert k["deep"] == "Mixer" and k["deep.inner"] == "DistributedLinear", "its init_hook says no; what is inside is split"
        assert k["odd"] == "Linear", "7 features over 2 ranks"
        assert k["tied"] == k["tied2"] == "Linear" and k["late"] == "DistributedLinear" and k["outside"] == "Linear"
        assert rank["losses"] == found[0]["losses"] and "before smp.DistributedModel" in rank["after"][1]


def test_the_model_may_exist_before_it_is_registered(tmp_path):
    found = run(_MODEL + """
class Late(Mixer):
    pass

start(1)
smp.tp_register_with_module(Late, SplitMixer, *hooks())
module = Net(Late)
smp.set_tensor_parallelism(module, attention_in_fp32=True)
smp.set_tensor_parallelism(module.first, False)
unknown = Mixer(8, 1.0)
module.unknown = unknown
smp.tp_register(SplitMixer)(Mixer)
smp.set_tensor_parallelism(unknown)
model = smp.DistributedModel(module)
results["kinds"] = kinds(model)
""", 1, tmp_path, tmp_path)[0]
    k = found["kinds"]
    assert k["mixer"] == "SplitMixer" and k["first"] == "Linear" and k["last"] == "DistributedLinear"
    assert k["unknown"] == "Mixer", "nobody knows with what it was built"


def test_hooks_of_gpt2_blocks(tmp_path):
    found = run("""
from transformers import GPT2Config, GPT2Model
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        with smp.tensor_parallelism():
            self.gpt2 = GPT2Model(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=30, n_positions=16,
                                             resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))

    def forward(self, ids):
        return self.gpt2(ids, use_cache=False).last_hidden_state

start(1)
smp.tp_register_with_module(GPT2Block, smp.nn.DistributedTransformerLayer,
                            *smp.nn.huggingface.gpt2.get_hf_gpt2_transformer_layer_hooks())
torch.manual_seed(1)
module = Net()
plain = {name: value.clone() for name, value in module.gpt2.state_dict().items()}
ids = torch.randint(0, 30, (2, 7))
expected = module(ids)
model = smp.DistributedModel(module)
results["kind"] = type(module.gpt2.h[1]).__name__
ours = smp.nn.huggingface.gpt2.translate_hf_state_dict_to_smdistributed_gpt2(plain)
for i in range(2):
    module.gpt2.h[i].load_state_dict({name.removeprefix(f"transformer.seq_layers.{i}."): value for name, value in ours.items()
                                      if name.startswith(f"transformer.seq_layers.{i}.")})
torch.testing.assert_close(model(ids), expected, atol=1e-5, rtol=1e-4)
""", 1, tmp_path, tmp_path)[0]
    assert found["kind"] == "DistributedTransformerLayer"


def test_mistakes_are_named(tmp_path):
    found = run(_MODEL + """
start(1)
results["class"] = refusal(smp.tp_register_with_module, 3, SplitMixer)
results["hook"] = refusal(smp.tp_register_with_module, Mixer, SplitMixer, 3)
smp.tp_register_with_module(Mixer, SplitMixer, lambda width, gain: 5)
with smp.tensor_parallelism():
    module = Net()
results["answer"] = refusal(smp.DistributedModel, module)
results["keyword"] = refusal(smp.set_tensor_parallelism, module, True, use_alibbi=True)
results["thing"] = refusal(smp.set_tensor_parallelism, 5)
""", 1, tmp_path, tmp_path)[0]
    assert "must be a class" in found["class"][1] and "init_hook must be a function" in found["hook"][1]
    assert "must return (args, kwargs)" in found["answer"][1] and "did you mean 'use_alibi'" in found["keyword"][1]
    assert "takes a torch.nn.Module" in found["thing"][1]
