"""The switches of smp.model_creation on models that the engine computes: numbers, and the kernels that run."""
import pytest
import torch
from smp_helpers import make_models, run
from test_nn import kernels


def make(dropout=0.0, dtype=torch.float32):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(5)
    config = GPT2Config(vocab_size=60, n_embd=32, n_layer=4, n_head=2, n_positions=32, resid_pdrop=dropout, embd_pdrop=0,
                        attn_pdrop=0)
    return GPT2LMHeadModel(config).to(dtype)


IDS = torch.randint(0, 60, (2, 12), generator=torch.Generator().manual_seed(2))
SEEN = IDS.index_fill(1, torch.tensor([0, 1, 2]), -100)  # labels that don't come from masked positions
MASK = torch.ones(2, 12, dtype=torch.int64).index_fill(1, torch.tensor([0, 1]), 0)


def compute(model, switches, mask=None, dropout=False):
    """(loss, logits, gradients) by one stage."""
    from shardsmith import _engine
    from shardsmith.smp import weightless

    parameters = dict(model.named_parameters())
    stage = _engine.Stage(weightless.config_text(model), [0, 4], 0, parameters, None, None, None, switches=switches)
    stage.begin_step(0, 1, True, dropout)
    given = {"input_ids": IDS, "labels": IDS if mask is None else SEEN} | ({} if mask is None else {"attention_mask": mask})
    loss = stage.forward(0, given)["loss"]
    logits = stage.output(0)
    stage.backward(0, loss, 1.0)
    stage.finish_microbatch(0)
    stage.finish_step(False)
    gradients = {name: p.grad for name, p in parameters.items()}
    for p in parameters.values():
        p.grad = None
    return loss.detach(), logits.detach(), gradients


SWITCHES = [{"flash_attention": 0}, {"flash_attention": 0, "fused_softmax": 0}, {"flash_attention": 0, "attention_in_fp32": 1},
            {"query_key_layer_scaling": 1}, {"fp32_residual_addition": 1}, {"fused_bias_gelu": 0}, {"fused_dropout": 1}]


@pytest.mark.parametrize("switches", SWITCHES)
@pytest.mark.parametrize("masked", [False, True])
def test_no_switch_of_kernel_or_precision_changes_a_number(switches, masked):
    model = make()
    mask = MASK if masked else None
    plain = model(input_ids=IDS, labels=SEEN if masked else IDS, attention_mask=mask)
    plain.loss.backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = None
    loss, logits, gradients = compute(model, switches, mask)
    torch.testing.assert_close(loss, plain.loss.detach(), atol=1e-5, rtol=1e-5)
    seen = slice(2, None) if masked else slice(None)  # what stands at masked positions means nothing
    torch.testing.assert_close(logits[:, seen], plain.logits.detach()[:, seen], atol=1e-5, rtol=1e-4)
    if not masked:
        for name, gradient in wanted.items():
            torch.testing.assert_close(gradients[name], gradient, atol=1e-5, rtol=1e-3)


def test_fused_dropout_drops_the_same():
    model = make(dropout=0.3)
    plain, fused = (compute(model, {"fused_dropout": on}, dropout=True) for on in (0, 1))
    assert abs(float(plain[0] - compute(model, {})[0])) > 1e-4, "something is dropped"
    torch.testing.assert_close(fused[1], plain[1], atol=1e-5, rtol=1e-4)
    for name, gradient in plain[2].items():
        torch.testing.assert_close(fused[2][name], gradient, atol=1e-5, rtol=1e-3)


def test_alibi_is_what_our_layers_compute():
    from shardsmith.smp import nn
    from shardsmith.smp.nn.huggingface.gpt2 import translate_hf_state_dict_to_smdistributed_gpt2 as translate

    model = make()
    ours = nn.DistributedTransformerLMHead(
        num_layers=4, num_attention_heads=2, attention_head_size=16, hidden_size=32, intermediate_size=128, vocab_size=60,
        num_positions=32, activation="gelu_new", causal_mask_size=32, pre_layernorm=True, post_layernorm=False,
        use_alibi=True, alibi_bias_max=6).eval()
    ours.load_state_dict(translate(dict(model.state_dict())))
    for mask in (None, MASK):
        _, logits, _ = compute(model, {"use_alibi": 1, "alibi_bias_max": 6}, mask)
        expected = ours((IDS, None if mask is None else 1 - mask))
        seen = slice(2, None) if mask is not None else slice(None)
        torch.testing.assert_close(logits[:, seen], expected[:, seen].detach(), atol=1e-5, rtol=1e-4)
    assert float((compute(model, {})[1] - compute(model, {"use_alibi": 1})[1]).abs().max()) > 1e-3


def test_fp32_residual_addition_is_closer_in_bfloat16():
    narrow = make(dtype=torch.bfloat16)
    with torch.no_grad():
        narrow.transformer.wte.weight.mul_(30)
    exact = make()
    exact.load_state_dict({name: value.float() for name, value in narrow.state_dict().items()})
    wanted = compute(exact, {})[1]
    error = {on: float((compute(narrow, {"fp32_residual_addition": on})[1].float() - wanted).abs().mean()) for on in (0, 1)}
    assert error[1] < 0.8 * error[0]


def test_the_kernel_that_runs_is_the_one_asked_for():
    from shardsmith import _engine
    from shardsmith.smp import weightless

    model = make(dropout=0.1)

    def ran(**switches):
        stage = _engine.Stage(weightless.config_text(model), [0, 4], 0, dict(model.named_parameters()), None, None, None,
                              switches=switches)
        stage.begin_step(0, 1, True, True)
        return " ".join(sorted(kernels(lambda: stage.forward(0, {"input_ids": IDS, "labels": IDS})["loss"])))

    default = ran()
    assert "scaled_dot_product" in default and "DropoutAdd" not in default and "aten::gelu" not in default
    assert "MaskedSoftmax" in ran(flash_attention=0) and "scaled_dot_product" not in ran(flash_attention=0)
    assert "MaskedSoftmax" not in ran(flash_attention=0, fused_softmax=0)
    assert "DropoutAdd" in ran(fused_dropout=1) and "aten::gelu" in ran(fused_bias_gelu=0)


@pytest.mark.parametrize("ranks, pp, tp", [(1, 1, 1), pytest.param(2, 2, 1, marks=pytest.mark.long), (2, 1, 2)])
def test_keywords_of_model_creation_reach_the_engine(tmp_path, ranks, pp, tp):
    """Each changes the loss in its last bits, or more; the same ones however the model is split."""
    models = make_models(tmp_path)
    losses = {}
    for name, keywords in {"plain": "", "alibi": "use_alibi=True", "wide": "fp32_residual_addition=True, attention_in_fp32=True"}.items():
        body = f"""
from transformers import AutoModelForCausalLM
start({pp}, 1, tensor_parallel_degree={tp}, ddp=WORLD > {pp}, prescaled_batch=True, bf16={name == "wide"})
with smp.model_creation(tensor_parallelism={tp > 1}, {keywords}):
    model = AutoModelForCausalLM.from_pretrained(os.path.join(MODELS, "gpt2"))
model = smp.DistributedModel(model)
optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
results["losses"] = []
for step in range(2):
    optimizer.zero_grad()
    results["losses"].append(float(train_step(model, ids_of(0)).reduce_mean()))
    optimizer.step()
results["switches"] = sorted(smp.state.model.get_module().__dict__.get("_shardsmith_switches", {{}}))
"""
        losses[name] = run(body, ranks, models, tmp_path / name)[0]
    assert losses["wide"]["switches"] == ["attention_in_fp32", "fp32_residual_addition"]
    assert abs(losses["alibi"]["losses"][0] - losses["plain"]["losses"][0]) > 1e-5
    assert losses["wide"]["losses"] == pytest.approx(losses["plain"]["losses"], rel=1e-2)
