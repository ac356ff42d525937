"""Every public name of the interface, with its defaults, as the old library documents them; what each does is in the other tests, or
here where it is little."""
from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import smdistributed.modelparallel
import smdistributed.modelparallel.torch as smp
from shardsmith.errors import Error
from smp_helpers import environment, make_models, run

REQUIRED = inspect.Parameter.empty
ANY = object()  # the documents don't say
NAME_OF_GROUP = ("pp", "tp", "rdp", "dp", "mp")


def takes(text: str) -> dict[str, object]:
    """"a, b=1, *c, **d" as {"a": REQUIRED, "b": 1, "*c": REQUIRED, "**d": REQUIRED}."""
    function = eval(f"lambda {text}: None", {"ANY": ANY, "WORLD": smp.WORLD, "smp": smp, "torch": __import__("torch")})
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return {stars.get(p.kind, "") + name: p.default for name, p in inspect.signature(function).parameters.items()}


# What the reference says; `*` marks where ours has more, by keyword only or with a default.
FUNCTIONS = {
    "init": "config=None",
    "is_initialized": "", "is_tracing": "", "num_microbatches": "",
    "rank": "", "size": "", "local_rank": "", "local_size": "",
    **{f"{kind}_rank": "" for kind in NAME_OF_GROUP}, **{f"{kind}_size": "" for kind in NAME_OF_GROUP},
    **{f"get_{kind}_group": "" for kind in NAME_OF_GROUP}, **{f"get_{kind}_process_group": "" for kind in NAME_OF_GROUP},
    "get_world_process_group": "",
    "broadcast": "obj, group=ANY", "send": "obj, dest_rank, rank_type=ANY", "recv_from": "src_rank, rank_type=ANY",
    "allgather": "obj, group=ANY", "barrier": "group=WORLD", "dp_barrier": "", "mp_barrier": "",
    "model_creation": "tensor_parallelism=False, dtype=None, **tensor_parallel_config",
    "tensor_parallelism": "enabled=True, **config", "set_tensor_parallelism": "module, enabled=True, **config",
    "delay_param_initialization": "enabled=True", "partition": "index", "set_partition": "module, index",
    "set_activation_checkpointing": "module, preserve_rng_state=True, pack_args_as_tuple=False, strategy='each'",
    "step": "function=None, *, non_split_inputs=None, input_split_axes=None, detach_outputs=True",
    "save_checkpoint": "path, tag, partial=True, model=None, optimizer=None, user_content=None, translate_if_full=True, "
                       "num_kept_partial_checkpoints=None, *, blocking=True, if_busy='wait', optimizer_if_full=False",
    "resume_from_checkpoint": "path, tag=None, partial=True, strict=True, load_optimizer=True, load_sharded_optimizer_state=True, "
                              "translate_function=None, load_optimizer_states=None",
    "wait_for_checkpoint": "",
    "save": "obj, f, partial=True, pickle_module=ANY, pickle_protocol=2, v3=False",
    "load": "f, map_location=None, pickle_module=ANY, partial=True, back_compat=False, **pickle_load_args",
    "patches.checkpoint.checkpoint": "module, *args, preserve_rng_state=True, **kwargs",
    "patches.checkpoint.checkpoint_sequential": "sequential, input, strategy='each', preserve_rng_state=True, pack_args_as_tuple=False",
    "utils.get_distribution_axis": "param", "utils.rmsg": "message",
    "amp.GradScaler": "init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, enabled=True",
    "sharded_data_parallel_checkpoint.get_full_state_dict_from_sharded_data_parallel_checkpoint":
        "checkpoint_dir, dtype=torch.float32, tag=None, remove_smp_prefix=True",
    "sharded_data_parallel_checkpoint.get_param_shapes": "model, optimizer",
    "sharded_data_parallel_checkpoint.get_buffer_names": "model",
    "hvd_average_grads": "*args, **kwargs",
    "DistributedModel.__init__": "self, module, trace_device='gpu', trace_execution_times=False, overlapping_allreduce=True, "
                                 "backward_passes_per_step=1, average_grads_across_microbatches=True, bucket_cap_mb=25, "
                                 "trace_memory_usage=False, broadcast_buffers=True, find_unused_parameters=False, gradient_as_bucket_view=False",
    "DistributedOptimizer.__init__": "self, optimizer, static_loss_scale=1.0, dynamic_loss_scale=False, dynamic_loss_args=None",
}
# Of the layers; `**switches` are the documented extra keywords.
_HEADS = "num_attention_heads=32, attention_head_size=32, hidden_size=1024, "
_START = "layernorm_epsilon=1e-5, initializer_range=0.02, use_normal_initialization=False, "
_NORMS = "pre_layernorm=False, post_layernorm=True, "
_ALIBI = "use_alibi=False, alibi_bias_max=8, **switches"
_PROBABILITIES = "attention_dropout_prob=0.1, hidden_dropout_prob=0.1, "
_BLOCK = _HEADS + "intermediate_size=4096, " + _PROBABILITIES + "activation='gelu', " + _START + (
    "causal_mask_size=None, add_cross_attention=False, " + _NORMS + _ALIBI)
FUNCTIONS |= {
    "tp_register": "dist_module, init_hook=None, forward_hook=None, return_hook=None",
    "tp_register_with_module": "module_cls, dist_module, init_hook=None, forward_hook=None, return_hook=None",
    "nn.DistributedModule.__init__": "self",
    "nn.DistributedLinear.__init__": "self, in_features, out_features, bias=True",
    "nn.DistributedEmbedding.__init__": "self, num_embeddings, embedding_dim, padding_idx=None, max_norm=None, norm_type=2.0, "
                                        "scale_grad_by_freq=False, sparse=False, _weight=None, initializer_range=0.02, "
                                        "_skip_allgather=False, _skip_scatter_and_merge=False",
    "nn.DistributedAttentionLayer.__init__": "self, " + _HEADS + _PROBABILITIES + _START
                                             + "cross_attention=False, causal_mask_size=None, " + _NORMS + _ALIBI,
    "nn.DistributedTransformerOutputLayer.__init__": "self, hidden_size=1024, intermediate_size=4096, hidden_dropout_prob=0.1, "
                                                     "activation='gelu', " + _START + _NORMS + "fp32_residual_addition=False, **switches",
    "nn.DistributedTransformerLayer.__init__": "self, " + _BLOCK,
    "nn.DistributedTransformer.__init__": "self, num_layers=12, " + _BLOCK,
    "nn.DistributedTransformerLMHead.__init__":
        "self, num_layers=12, " + _HEADS + "intermediate_size=4096, vocab_size=30522, num_positions=1024, " + _PROBABILITIES
        + "activation='gelu', layernorm_epsilon=1e-5, num_token_types=0, causal_mask_size=None, add_cross_attention=False, "
          "add_lm_head=True, initializer_range=0.02, use_normal_initialization=False, " + _NORMS + _ALIBI,
    "nn.FlashAttentionLayer.__init__": "self, attention_dropout_prob=0.1, attention_head_size=None, scale_attention_scores=True, "
                                       "scale_attn_by_layer_idx=False, layer_idx=None, scale=None, triton_flash_attention=False, "
                                       "use_alibi=False",
    "nn.FlashAttentionLayer.forward": "self, qkv, attn_mask=None, causal=False",
    **{f"nn.huggingface.{family}.{name}_{family}": "state_dict, max_seq_len=None"
       for family in ("gpt2", "gptneox", "bert", "gptj", "gptneo", "roberta", "llama", "mistral", "qwen2")
       for name in ("translate_hf_state_dict_to_smdistributed", "translate_state_dict_to_hf")},
    "nn.huggingface.gpt2.get_hf_gpt2_transformer_layer_hooks": "",
}
MODEL = {
    "backward": "self, tensors, grad_tensors=None", "get_module": "self",
    **{name: "self" for name in ("local_parameters", "local_named_parameters", "local_buffers", "local_named_buffers", "local_modules",
                                 "local_named_modules", "distributed_modules", "default_reducer_named_parameters", "local_state_dict",
                                 "scaled_batch_reducer_named_parameters", "virtual_named_parameters", "cpu", "join", "eval")},
    "is_distributed_parameter": "self, param", "is_distributed_buffer": "self, buffer", "is_scaled_batch_parameter": "self, param",
    "is_scaled_batch_buffer": "self, buffer", "register_post_partition_hook": "self, hook", "register_post_step_hook": "self, hook",
    "state_dict": "self, *args, gather_to_rank0=False, **kwargs",
    "load_state_dict": "self, state_dict, strict=True, same_partition_load=False, **kwargs",
    "register_comm_hook": "self, state, callable", "_register_comm_hook": "self, state, callable", "train": "self, mode=True",
    "zero_grad": "self, set_to_none=True",
}
OPTIMIZER = {
    "step": "self, closure=None", "zero_grad": "self, set_to_none=True", "state_dict": "self", "load_state_dict": "self, state_dict",
    "local_state_dict": "self, gather_if_shard=True", "orig_state_dict": "self", "clip_master_grads": "self, max_norm, norm_type=2",
    "_param_id_to_index": "self", "param_name_to_index": "self", "_param_index_to_param_local": "self",
}
OUTPUT = {name: "self" for name in ("reduce_mean", "reduce_sum", "concat", "stack", "detach")}
PROPERTIES = {"DistributedOptimizer": ("param_groups", "state", "overflow", "loss_scale", "loss_scaler", "redefined_params",
                                       "step_was_skipped", "_is_accelerate_prepared")}
TABLE = [*FUNCTIONS.items(), *((f"DistributedModel.{name}", text) for name, text in MODEL.items()),
         *((f"DistributedOptimizer.{name}", text) for name, text in OPTIMIZER.items()),
         *((f"StepOutput.{name}", text) for name, text in OUTPUT.items())]


def find(path: str):
    found = smp
    for name in path.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("path, text", TABLE, ids=[path for path, _ in TABLE])
def test_signature(path, text):
    expected = takes(text)
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    found = {stars.get(p.kind, "") + name: p.default for name, p in inspect.signature(find(path)).parameters.items()}
    assert list(found) == list(expected)
    for name, default in expected.items():
        if default is not ANY:
            assert found[name] == default and type(found[name]) is type(default) or isinstance(default, (int, float)) and found[name] == default, name
    assert inspect.getdoc(find(path)) or len(expected) <= 1 or path.endswith("__init__"), f"{path} has no docstring"


def test_groups_ranks_and_aliases():
    for name, value in {"WORLD": "world", **{f"{kind.upper()}_GROUP": kind for kind in NAME_OF_GROUP}}.items():
        assert getattr(smp, name) is getattr(smp.CommGroup, name) and smp.CommGroup[name].value == value
    for kind in ("world", *NAME_OF_GROUP):
        name = f"{kind.upper()}_RANK"
        assert getattr(smp, name) is getattr(smp.RankType, name)
    from packaging.version import Version

    import smdistributed.modelparallel.torch.state_mod as state_mod
    assert Version(smdistributed.modelparallel.__version__) >= Version("1.15.0")
    assert smp.model.DistributedModel is smp.DistributedModel and state_mod.state is smp.state and callable(smp.step)
    for owner, names in PROPERTIES.items():
        assert all(hasattr(find(owner), name) for name in names), owner
    assert all(hasattr(smp, name) for name in smp.__all__)
    families, optimizers = smp.nn.huggingface, smp.optimizers
    assert families.gpt2.translate_hf_state_dict_to_smdistributed is families.gpt2.translate_hf_state_dict_to_smdistributed_gpt2
    assert families.bert.translate_hf_state_dict_to_smdistributed and families.roberta.translate_state_dict_to_smdistributed
    assert families.gptj.translate_hf_gptj_state_dict_to_smdistributed
    assert families.gptneo.translate_hf_gptneo_state_dict_to_smdistributed
    assert optimizers.FusedLamb is optimizers.FusedLAMB and issubclass(optimizers.FusedNovoGrad, __import__("torch").optim.Optimizer)
    assert issubclass(smp.nn.FusedLayerNorm, __import__("torch").nn.LayerNorm)


def test_every_way_to_import_gives_the_same_objects():
    """And what works without torch doesn't wait for it."""
    code = """
import sys
import shardsmith
from shardsmith import heap, launcher
assert "torch" not in sys.modules and not hasattr(shardsmith, "_nothing") and "torch" not in sys.modules
import shardsmith as ours
import smdistributed.modelparallel.torch as smp
assert all(getattr(ours, name) is getattr(smp, name) for name in smp.__all__)
import smdistributed.modelparallel.torch.nn.huggingface.gpt2 as translation
from smdistributed.modelparallel.torch.nn import FusedLayerNorm
from smdistributed.modelparallel.torch.amp import GradScaler
from shardsmith import nn
assert translation is nn.huggingface.gpt2 and FusedLayerNorm is nn.FusedLayerNorm and GradScaler is smp.amp.GradScaler
assert not hasattr(ours, "nothing") and "step" in dir(ours) and "transformers" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("use", [
    lambda: smp.sharded_data_parallel_checkpoint.get_full_state_dict_from_sharded_data_parallel_checkpoint("x"),
    lambda: smp.sharded_data_parallel_checkpoint.get_param_shapes(None, None),
    lambda: smp.sharded_data_parallel_checkpoint.get_buffer_names(None),
    lambda: smp.hvd_average_grads(),
])
def test_what_is_refused_says_why(use):
    with pytest.raises(Error) as refused:
        use()
    assert refused.value.kind == "unsupported" and len(str(refused.value)) > 60


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


ASK = """
from transformers import AutoModelForCausalLM
smp.init({config})
with smp.model_creation(tensor_parallelism=smp.tp_size() > 1):
    bare = AutoModelForCausalLM.from_pretrained(MODELS + "/gpt2")
model = smp.DistributedModel(bare)
assert smp.DistributedModel(bare) is model and smp.DistributedModel(model) is model
m = model.get_module()
for depth in (model.module, model.module.module, model.module.module.module):
    assert depth.transformer is m.transformer and list(map(id, depth.parameters())) == list(map(id, m.parameters()))
    assert depth.transformer.h[1].attn is m.transformer.h[1].attn
assert not any("module" in name for name, _ in m.named_modules()) and len(list(m.children())) == 2
optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
calls = []
def hook(what):
    return lambda *given: calls.append([what, given[0] is model, given[1] is optimizer])
removed = model.register_post_step_hook(hook("removed"))
removed.remove()
if not model.partitioned:
    model.register_post_partition_hook(hook("partition"))
model.register_post_step_hook(hook("step"))
for number in range(2):
    optimizer.zero_grad()
    train_step(model, ids_of(number))
    optimizer.step()
results["calls"] = calls
names = dict(m.named_parameters())
local = dict(model.local_named_parameters())
results["local"] = len(local)
results["all"] = len(names)
results["cut"] = sorted(name for name, p in names.items() if model.is_distributed_parameter(p))
results["axes"] = {{name: smp.utils.get_distribution_axis(names[name]) for name in ("transformer.h.1.attn.c_attn.weight", "transformer.h.1.attn.c_proj.weight",
                                                                                  "transformer.ln_f.weight")}}
results["modules"] = len(list(model.distributed_modules()))
results["reducers"] = [len(list(model.default_reducer_named_parameters())), len(list(model.scaled_batch_reducer_named_parameters()))]
results["scaled"] = model.is_scaled_batch_parameter(names["transformer.ln_f.weight"])
results["foreign"] = refusal(model.is_distributed_parameter, torch.nn.Parameter(torch.ones(1)))
results["comm hook"] = refusal(model.register_comm_hook, None, print)
results["join"] = refusal(model.join)
results["index"] = optimizer.param_name_to_index() == {{name: i for i, name in enumerate(local)}}
results["ids"] = {{optimizer._param_index_to_param_local()[i] is p for p, i in ((p, optimizer._param_id_to_index()[id(p)]) for p in local.values())}} == {{True}}
results["orig"] = len(optimizer.orig_state_dict()["state"])
results["same objects"] = not optimizer.redefined_params
results["rmsg"] = smp.utils.rmsg("hello")
whole = model.state_dict()
assert model.cpu() is model
results["whole"] = all(torch.equal(p, whole[name]) for name, p in m.named_parameters()) and m.lm_head.weight is m.transformer.wte.weight
results["computes"] = smp.mp_size() == 1 or bool(torch.isfinite(m(input_ids=ids_of(0)).logits).all())
smp.barrier()
results["over"] = smp.mp_size() == 1 or refusal(train_step, model, ids_of(0))
"""


@pytest.mark.parametrize("config, count", [
    pytest.param({"pipeline_parallel_degree": 2, "microbatches": 2}, 2, id="pp"),
    pytest.param({"tensor_parallel_degree": 2, "ddp": True}, 2, id="tp"),
    pytest.param({}, 1, id="one"),
])
def test_what_scripts_ask_of_a_wrapped_model(models, tmp_path, config, count):
    tp = config.get("tensor_parallel_degree", 1)
    found = run(ASK.format(config=config), count, models, tmp_path)
    for rank, ours in enumerate(found):
        expected = [["step", True, True]]
        assert ours["calls"] == ([["partition", True, True]] if "pipeline_parallel_degree" in config else []) + expected
        assert bool(ours["cut"]) == (tp > 1) == bool(ours["modules"]) and ours["scaled"] == (tp > 1)
        assert ours["axes"]["transformer.ln_f.weight"] is None
        if tp > 1:
            assert ours["axes"]["transformer.h.1.attn.c_attn.weight"] == 1 and ours["axes"]["transformer.h.1.attn.c_proj.weight"] == 0
        assert ours["reducers"] == ([0, ours["local"]] if tp > 1 else [ours["local"], 0])
        assert (ours["local"] < ours["all"]) == ("pipeline_parallel_degree" in config)
        assert ours["foreign"][0] == "invalid_argument" and "no parameter of this model" in ours["foreign"][1]
        assert ours["comm hook"][0] == "unsupported" and "inside of the engine" in ours["comm hook"][1]
        assert (ours["join"] is None) == ("ddp" in config)
        assert ours["index"] and ours["ids"] and ours["same objects"] and ours["orig"] == ours["local"]
        assert ours["rmsg"] == f"[{rank}] hello" and ours["whole"] and ours["computes"]
        assert ours["over"] is True or "trains no more" in ours["over"][1]


def test_an_overflow_on_one_rank_skips_the_update_on_all(models, tmp_path):
    found = run("""
        smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
        model = load("llama")
        optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        scaler = smp.amp.GradScaler(init_scale=1024.0, growth_interval=2)

        @smp.step
        def step(model, ids):
            loss = model(input_ids=ids, labels=ids).loss
            model.backward(scaler.scale(loss))
            return loss

        results["scales"], results["changed"], results["losses"] = [], [], []
        for number in range(4):
            optimizer.zero_grad()
            results["losses"].append(step(model, ids_of(0)).reduce_mean().item())
            own = next(iter(model.local_parameters()))
            before = own.detach().clone()
            if number == 1 and RANK == 1:
                own.grad[0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            results["scales"].append(scaler.get_scale())
            results["changed"].append(not torch.equal(before, own))
        plain_optimizer = torch.optim.AdamW((reference := plain("llama")).parameters(), lr=1e-2)
        results["plain"] = []
        for number in range(4):
            loss = reference(input_ids=ids_of(0), labels=ids_of(0)).loss
            results["plain"].append(loss.item())
            plain_optimizer.zero_grad()
            loss.backward()
            if number != 1:
                plain_optimizer.step()
    """, 2, models, tmp_path)
    for ours in found:
        assert ours["changed"] == [True, False, True, True] and ours["scales"] == [1024.0, 512.0, 512.0, 1024.0]
        assert ours["losses"] == pytest.approx(ours["plain"], rel=1e-4)


def test_activation_checkpointing_inside_of_a_forward():
    import torch

    torch.manual_seed(0)
    layers = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.GELU()) for _ in range(5)))
    calls = []
    for layer in layers:
        layer.register_forward_pre_hook(lambda *_: calls.append(1))
    values = torch.randn(3, 4, requires_grad=True)

    def gradients(compute):
        calls.clear()
        torch.manual_seed(1)
        compute(values).sum().backward()
        found = [values.grad, *(p.grad for p in layers.parameters())]
        values.grad = None
        layers.zero_grad()
        return [g.clone() for g in found], len(calls)

    expected, once = gradients(layers)
    assert once == 5
    sequential = smp.patches.checkpoint.checkpoint_sequential
    for compute in (lambda x: smp.patches.checkpoint.checkpoint(layers, x), lambda x: sequential(layers, x),
                    lambda x: sequential(layers, x, strategy="group_2"), lambda x: sequential(layers, x, "contiguous")):
        found, count = gradients(compute)
        assert count == 10 and all(torch.equal(a, b) for a, b in zip(found, expected))
    for mistake in (lambda: smp.patches.checkpoint.checkpoint(torch.sin, values), lambda: sequential(layers[0][0], values),
                    lambda: sequential(layers, values, strategy="some")):
        with pytest.raises(Error):
            mistake()
