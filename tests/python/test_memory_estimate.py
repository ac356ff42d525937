"""What `--dry-run` says of memory is what training takes."""
import importlib.util

import preloaded
import pytest
from smp_helpers import REPOSITORY, environment, run

# Small in all but sequence and width, so that tables of a few bytes a position stay below the tolerance.
KEPT = """
import transformers
from shardsmith import _core
ROWS, LENGTH = 4, 128
BASE = dict(hidden_size=128, num_attention_heads=4, max_position_embeddings=256, vocab_size=256)
LLAMA = dict(BASE, num_key_value_heads=2, intermediate_size=384, num_hidden_layers=3)
BERT = dict(BASE, intermediate_size=512, num_hidden_layers=3, use_cache=False)
GPT2 = dict(n_embd=128, n_head=4, n_positions=256, vocab_size=256, n_layer=3)
DRY = dict(attn_pdrop=0, resid_pdrop=0, embd_pdrop=0)
t = transformers
CASES = dict(
    gpt2=lambda: t.GPT2LMHeadModel(t.GPT2Config(**GPT2)),
    gpt2_dry=lambda: t.GPT2LMHeadModel(t.GPT2Config(**GPT2, **DRY)),
    gpt2_relu=lambda: t.GPT2LMHeadModel(t.GPT2Config(**GPT2, **DRY, activation_function="relu")),
    llama=lambda: t.LlamaForCausalLM(t.LlamaConfig(**LLAMA)),
    llama_dropout=lambda: t.LlamaForCausalLM(t.LlamaConfig(**LLAMA, attention_dropout=0.1)),
    qwen2=lambda: t.Qwen2ForCausalLM(t.Qwen2Config(**LLAMA)),
    gpt_neox=lambda: t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**BASE, intermediate_size=512, num_hidden_layers=3)),
    gpt_neox_serial=lambda: t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**BASE, intermediate_size=512, num_hidden_layers=3,
                                                                 use_parallel_residual=False)),
    bert=lambda: t.BertForMaskedLM(t.BertConfig(**BERT)),
)
name, precision = os.environ["CASE"].split()
torch.manual_seed(0)
module = CASES[name]().train()
smp.init({} if precision == "fp32" else {precision: True})
model = smp.DistributedModel(module)
optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
ids = torch.randint(1, 200, (ROWS, LENGTH))
own = {p.untyped_storage().data_ptr() for p in model.local_parameters()}
kept = {}
def pack(tensor):
    storage = tensor.untyped_storage()
    if storage.data_ptr() not in own:
        kept[storage.data_ptr()] = storage  # holds it, so that no other gets the address
    return tensor
with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
    train_step(model, ids)
results["kept"] = sum(storage.nbytes() for storage in kept.values())
memory = _core.activation_memory(model._whole, rows=ROWS, sequence=LENGTH, precision=precision)
# The gradient that the loss makes is held by its function, not saved; a head's transform saves the last hidden states.
results["said"] = (memory["embedding"] + 3 * memory["layer"] + memory["head"]
                   - (0 if name == "bert" else memory["hidden"]))
"""
NAMES = ("gpt2", "gpt2_dry", "gpt2_relu", "llama", "llama_dropout", "qwen2", "gpt_neox", "gpt_neox_serial", "bert")
CASES = [f"{name} fp32" for name in NAMES] + ["gpt2 bf16", "gpt2 fp16", "gpt2_dry fp16", "llama bf16", "llama fp16", "gpt_neox bf16", "bert bf16"]


@pytest.mark.parametrize("case", CASES)
def test_a_microbatch_keeps_what_is_said(case, tmp_path):
    """torch's graph of one forward holds what activation_memory counts; each storage once, parameters not."""
    (rank,) = run(KEPT, 1, tmp_path, tmp_path, env={"CASE": case})
    print(f"{case}: kept {rank['kept']}, said {rank['said']}")
    assert rank["kept"] == pytest.approx(rank["said"], rel=0.015)


BENCH = REPOSITORY / "bench" / "memory.py"
# A tenth of GPT-2 small, and still large beside what the libraries take.
SMALL = """
import sys, torch
from transformers import GPT2Config, GPT2LMHeadModel
torch.manual_seed(0)
GPT2LMHeadModel(GPT2Config(n_embd=512, n_head=8, n_layer=6, vocab_size=8192)).save_pretrained(sys.argv[1])
"""


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_memory", BENCH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("layout", ["one-bf16"])
def test_a_small_model_takes_about_what_a_dry_run_says(layout, bench, tmp_path):
    maker = preloaded.Process(SMALL, [str(tmp_path / "model")], environment())
    out = maker.communicate()[0]
    assert maker.returncode == 0, out
    check(bench, tmp_path / "model", layout)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("layout", ["one-fp32", "one-bf16", "pp2", "tp2", "tp2-memory", "rdp2-shard-bf16", "one-checkpointed"])
def test_training_takes_what_a_dry_run_says(kind, layout, bench, tmp_path):
    bench.make_model(kind, str(tmp_path))
    check(bench, tmp_path, layout)


def check(bench, model, layout):
    for stage in bench.measure(str(model), bench.LAYOUTS[layout]):
        print(f"{layout} stage {stage['stage']}: {stage['measured'] >> 20} MiB, said {stage['estimate'] >> 20}: {stage['ratio']:.3f}")
        assert abs(stage["ratio"] - 1) <= bench.BAR, stage
