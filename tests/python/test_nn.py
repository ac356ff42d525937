"""smp.nn's layers against plain torch: values and gradients, all switches, on one rank and split over two."""
import math

import pytest
import torch
import torch.nn.functional as F
from smp_helpers import run

# A reference of its own, in plain torch, for one process and for the ranks of a program.
_REFERENCE = '''
import math
import torch
import torch.nn.functional as F

def attention_reference(layer, hidden, mask=None, cross=None, causal=False, slopes=None, scale=None):
    """Scores spelled out, from the layer's whole weights."""
    n, d = layer.num_attention_heads, layer.attention_head_size
    x = hidden
    if layer.pre_layernorm is not None:
        x = F.layer_norm(x, x.shape[-1:], layer.pre_layernorm.weight, layer.pre_layernorm.bias, layer.pre_layernorm.eps)
    source = x if cross is None else cross
    heads = lambda y: y.view(*y.shape[:2], n, d).transpose(1, 2)
    q, k, v = (heads(F.linear(given, part.weight, part.bias))
               for given, part in ((x, layer.query), (source, layer.key), (source, layer.value)))
    scores = q @ k.transpose(2, 3) * (1 / math.sqrt(d) if scale is None else scale)
    S, T = scores.shape[-2:]
    if slopes is not None:
        distance = torch.arange(T)[None, :] - torch.arange(S)[:, None]
        scores = scores + slopes[:, None, None] * (distance if causal else -distance.abs())
    if causal:
        scores = scores.masked_fill(torch.ones(S, T, dtype=torch.bool).triu(1), float("-inf"))
    if mask is not None:
        scores = scores + mask
    y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(*hidden.shape[:2], n * d)
    y = hidden + F.linear(y, layer.dense.weight, layer.dense.bias)
    if layer.layernorm is not None:
        y = F.layer_norm(y, y.shape[-1:], layer.layernorm.weight, layer.layernorm.bias, layer.layernorm.eps)
    return y

def output_reference(layer, hidden, activation=F.gelu):
    x = hidden
    if layer.pre_layernorm is not None:
        x = F.layer_norm(x, x.shape[-1:], layer.pre_layernorm.weight, layer.pre_layernorm.bias, layer.pre_layernorm.eps)
    h = activation(F.linear(x, layer.dense1.weight, layer.dense1.bias))
    y = hidden + F.linear(h, layer.dense2.weight, layer.dense2.bias)
    if layer.layernorm is not None:
        y = F.layer_norm(y, y.shape[-1:], layer.layernorm.weight, layer.layernorm.bias, layer.layernorm.eps)
    return y

def head_reference(model, ids, mask=None, labels=None, causal=False):
    """(loss, logits) of a DistributedTransformerLMHead without dropout; mask [N, S], 1 = masked."""
    x = F.embedding(ids, model.word_embedding.weight) + model.position_embedding.weight[:ids.shape[1]]
    added = None if mask is None else mask[:, None, None, :] * -10000.0
    for layer in model.transformer.seq_layers:
        x = output_reference(layer.output, attention_reference(layer.attention, x, added, causal=causal))
    if model.layernorm is not None:
        x = F.layer_norm(x, x.shape[-1:], model.layernorm.weight, model.layernorm.bias, model.layernorm.eps)
    logits = x @ model.word_embedding.weight.T
    if labels is None:
        return None, logits
    guess, wanted = (logits[:, :-1], labels[:, 1:]) if causal else (logits, labels)
    return F.cross_entropy(guess.reshape(-1, logits.shape[-1]), wanted.reshape(-1)), logits
'''
exec(_REFERENCE)

SMALL = dict(num_attention_heads=4, attention_head_size=16, hidden_size=32)
STILL = dict(attention_dropout_prob=0.0, hidden_dropout_prob=0.0)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(1)


def nn():
    from shardsmith.smp import nn

    return nn


def gradients(module, value, *inputs):
    weights = torch.randn(value.shape, generator=torch.Generator().manual_seed(9))
    wanted = [*inputs, *module.parameters()]
    return torch.autograd.grad((value * weights).sum(), wanted, allow_unused=True)


def assert_same(module, ours, theirs, *inputs, atol=2e-5):
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=1e-4)
    for mine, other in zip(gradients(module, ours, *inputs), gradients(module, theirs, *inputs)):
        torch.testing.assert_close(mine, other, atol=10 * atol, rtol=1e-3)


def masked_at_random(rows, keys, share=0.3):
    """[rows, 1, 1, keys] to be added. The first key is seen: of what sees nothing, -10000 leaves few digits."""
    hides = torch.rand(rows, 1, 1, keys) < share
    hides[..., 0] = False
    return torch.zeros(rows, 1, 1, keys).masked_fill(hides, -10000.0)


def hidden(*shape):
    return torch.randn(*shape, requires_grad=True)


@pytest.mark.parametrize("pre, post", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("causal, masked", [(False, True), (True, False), (True, True)])
def test_attention_is_what_plain_torch_computes(pre, post, causal, masked):
    layer = nn().DistributedAttentionLayer(**SMALL, **STILL, pre_layernorm=pre, post_layernorm=post,
                                           causal_mask_size=16 if causal else None)
    x = hidden(2, 9, 32)
    mask = masked_at_random(2, 9) if masked else None
    assert_same(layer, layer((x, mask)), attention_reference(layer, x, mask, causal=causal), x)


def test_cross_attention_looks_at_the_other_states():
    layer = nn().DistributedAttentionLayer(**SMALL, **STILL, cross_attention=True)
    x, states = hidden(2, 5, 32), hidden(2, 7, 32)
    mask = masked_at_random(2, 7)
    assert_same(layer, layer((x, states, mask)), attention_reference(layer, x, mask, cross=states), x, states)


@pytest.mark.parametrize("switches", [
    {"flash_attention": False}, {"flash_attention": False, "fused_softmax": False}, {"attention_in_fp32": True},
    {"query_key_layer_scaling": True, "layer_idx": 6}, {"fp32_residual_addition": True}, {"fused_dropout": True}])
@pytest.mark.parametrize("alibi", [False, True])
def test_switches_of_attention_change_no_number(switches, alibi):
    layer = nn().DistributedAttentionLayer(**SMALL, **STILL, causal_mask_size=16, use_alibi=alibi, **switches)
    x = hidden(2, 9, 32)
    mask = masked_at_random(2, 9, 0.2)
    slopes = torch.tensor([2.0 ** -(8 * (head + 1) / 4) for head in range(4)]) if alibi else None
    assert_same(layer, layer((x, mask)), attention_reference(layer, x, mask, causal=True, slopes=slopes), x)


def test_alibi_slopes_of_any_number_of_heads():
    from shardsmith import _engine

    def published(heads):  # as in the paper's code
        power = lambda n: [2.0 ** (-8 * (i + 1) / n) for i in range(n)]
        if math.log2(heads).is_integer():
            return power(heads)
        below = 2 ** math.floor(math.log2(heads))
        return power(below) + power(2 * below)[0::2][:heads - below]

    for heads in (1, 2, 6, 8, 12, 16, 20):
        torch.testing.assert_close(_engine.alibi_slopes(heads, 8.0, 0, heads), torch.tensor(published(heads)))
    torch.testing.assert_close(_engine.alibi_slopes(12, 8.0, 6, 6), torch.tensor(published(12)[6:]))


def test_scale_keywords():
    layer = nn().DistributedAttentionLayer(**SMALL, **STILL, scale_attn_by_layer_idx=True, layer_idx=2)
    x = hidden(2, 9, 32)
    assert_same(layer, layer((x, None)), attention_reference(layer, x, scale=1 / (4 * 3)), x)
    layer = nn().DistributedAttentionLayer(**SMALL, **STILL, scale_attention_scores=False)
    assert_same(layer, layer((x, None)), attention_reference(layer, x, scale=1.0), x)


@pytest.mark.parametrize("activation, plain", [
    ("gelu", F.gelu), ("relu", F.relu), ("gelu_new", lambda x: F.gelu(x, approximate="tanh"))])
@pytest.mark.parametrize("pre, post", [(True, False), (False, True)])
def test_output_layer_is_what_plain_torch_computes(activation, plain, pre, post):
    layer = nn().DistributedTransformerOutputLayer(hidden_size=32, intermediate_size=48, hidden_dropout_prob=0,
                                                   activation=activation, pre_layernorm=pre, post_layernorm=post)
    x = hidden(2, 5, 32)
    assert_same(layer, layer(x), output_reference(layer, x, plain), x)


def test_layers_and_stack_are_their_parts():
    sizes = dict(**SMALL, **STILL, intermediate_size=48)
    layer = nn().DistributedTransformerLayer(**sizes, causal_mask_size=16)
    x = hidden(2, 6, 32)
    plain = output_reference(layer.output, attention_reference(layer.attention, x, causal=True))
    assert_same(layer, layer((x, None))[0], plain, x)
    states, cross_mask = hidden(2, 4, 32), torch.zeros(2, 1, 1, 4)
    layer = nn().DistributedTransformerLayer(**sizes, add_cross_attention=True)
    given = (x, states, None, cross_mask)
    plain = attention_reference(layer.cross_attention, attention_reference(layer.attention, x), cross_mask, cross=states)
    answer = layer(given)
    assert len(answer) == 4 and answer[1] is states and answer[3] is cross_mask
    assert_same(layer, answer[0], output_reference(layer.output, plain), x, states)
    stack = nn().DistributedTransformer(num_layers=2, **sizes, pre_layernorm=True, post_layernorm=True)
    assert isinstance(stack.seq_layers, torch.nn.Sequential)
    y = F.layer_norm(x, [32], stack.pre_layernorm.weight, stack.pre_layernorm.bias)
    for block in stack.seq_layers:
        y = output_reference(block.output, attention_reference(block.attention, y))
    assert_same(stack, stack((x, None))[0], F.layer_norm(y, [32], stack.layernorm.weight, stack.layernorm.bias), x)


HEAD = dict(num_layers=2, **SMALL, **STILL, intermediate_size=48, vocab_size=50, num_positions=16)


@pytest.mark.parametrize("causal, pre, split", [(True, True, False), (False, False, False), (True, True, True)])
def test_language_model_head(causal, pre, split):
    model = nn().DistributedTransformerLMHead(**HEAD, causal_mask_size=16 if causal else None, pre_layernorm=pre,
                                              post_layernorm=not pre, distribute_embedding=split)
    ids = torch.randint(0, 50, (3, 8))
    mask = (torch.rand(3, 8) < 0.2).float()
    mask[:, 0] = 0
    labels = ids.masked_fill(torch.rand(3, 8) < 0.2, -100)
    loss, logits = model((ids, mask, None, None, labels))
    plain_loss, plain_logits = head_reference(model, ids, mask, labels, causal)
    torch.testing.assert_close(loss, plain_loss)
    torch.testing.assert_close(torch.autograd.grad(loss, model.word_embedding.weight, retain_graph=True),
                               torch.autograd.grad(plain_loss, model.word_embedding.weight, retain_graph=True),
                               atol=2e-5, rtol=1e-4)
    assert_same(model, logits, plain_logits)
    assert model.lm_head.weight is model.word_embedding.weight
    assert model((ids,)).shape == (3, 8, 50)
    assert {name.split(".")[0] for name, _ in model.named_modules() if name} >= {"word_embedding", "position_embedding",
                                                                                  "transformer", "lm_head"}


def test_linear_and_embedding_are_torchs():
    linear = nn().DistributedLinear(12, 7)
    x = hidden(3, 4, 12)
    assert_same(linear, linear(x), F.linear(x, linear.weight, linear.bias), x)
    embedding = nn().DistributedEmbedding(9, 6, padding_idx=2)
    ids = torch.tensor([[1, 2], [8, 1]])
    assert_same(embedding, embedding(ids), F.embedding(ids, embedding.weight, 2))
    assert bool((embedding.weight[2] == 0).all()) and 0.005 < float(embedding.weight[:2].detach().std()) < 0.05


def test_layer_norm_takes_a_wider_stream():
    norm = nn().FusedLayerNorm(32, eps=1e-3)
    x = hidden(3, 32)
    assert_same(norm, norm(x), F.layer_norm(x, [32], norm.weight, norm.bias, 1e-3), x)
    narrow = nn().FusedLayerNorm(32).to(torch.bfloat16)
    large = torch.full((2, 32), 1e5) + torch.arange(32)
    assert narrow(large).dtype == torch.bfloat16
    torch.testing.assert_close(narrow(large).float(), F.layer_norm(large, [32]), atol=0.02, rtol=0.01)
    assert isinstance(norm, torch.nn.LayerNorm) and set(norm._parameters) == {"weight", "bias"}


@pytest.mark.parametrize("options, scale", [({}, 1 / 4), ({"scale": 0.3}, 0.3), ({"scale_attention_scores": False}, 1.0),
                                            ({"scale_attn_by_layer_idx": True, "layer_idx": 1}, 1 / 8)])
def test_flash_attention_layer(options, scale):
    layer = nn().FlashAttentionLayer(attention_dropout_prob=0, attention_head_size=16, **options)
    qkv = hidden(2, 6, 3, 4, 16)
    mask = masked_at_random(2, 6)
    q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
    plain = (q @ k.transpose(2, 3) * scale + mask).softmax(-1) @ v
    assert_same(layer, layer(qkv, mask), plain, qkv)
    later = torch.ones(6, 6, dtype=torch.bool).triu(1)
    plain = (q @ k.transpose(2, 3) * scale).masked_fill(later, float("-inf")).softmax(-1) @ v
    assert_same(layer, layer(qkv, causal=True), plain, qkv)


# Which kernel runs.
def kernels(function):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        result = function()
    nodes, seen = [result.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
    return {event.key for event in profile.key_averages()} | {node.name().rpartition("::")[2] for node in seen}


def test_switches_choose_kernels():
    def ran(size=16, **switches):
        sizes = dict(num_attention_heads=2, attention_head_size=size, hidden_size=32, hidden_dropout_prob=0.1,
                     attention_dropout_prob=0.0)
        attention = nn().DistributedAttentionLayer(**sizes, **switches)
        output = nn().DistributedTransformerOutputLayer(32, 48, 0.1, activation="gelu_new", **switches)
        x = hidden(2, 8, 32)
        return kernels(lambda: output(attention((x, None))))

    def has(found, word):
        return any(word in name for name in found)

    assert has(ran(), "scaled_dot_product")
    assert not has(ran(flash_attention=False), "scaled_dot_product") and has(ran(flash_attention=False), "MaskedSoftmax")
    unfused = ran(flash_attention=False, fused_softmax=False)
    assert has(unfused, "aten::_softmax") and not has(unfused, "MaskedSoftmax")
    assert not has(ran(query_key_layer_scaling=True), "scaled_dot_product") and not has(ran(size=8), "scaled_dot_product")
    assert has(ran(fused_dropout=True), "DropoutAdd") and not has(ran(), "DropoutAdd")
    assert not has(ran(fused_bias_gelu=True), "aten::gelu") and has(ran(fused_bias_gelu=False), "aten::gelu")


def test_query_key_layer_scaling_keeps_float16_from_overflowing():
    from shardsmith import _engine

    q = torch.full((1, 1, 2, 16), 90.0).half()
    v = torch.arange(32.0).view(1, 1, 2, 16).half()
    plain = dict(causal=False, scale=1.0, flash=False)
    assert not torch.isfinite(_engine.attention(q, q, v, None, **plain)).all()
    for switch in ({"query_key_layer": 4}, {"in_fp32": True}):
        torch.testing.assert_close(_engine.attention(q, q, v, None, **plain, **switch),
                                   v.mean(2, keepdim=True).expand(1, 1, 2, 16))


def test_attention_in_fp32_is_closer():
    from shardsmith import _engine

    q, k, v = (torch.randn(2, 2, 33, 16).to(torch.bfloat16) for _ in range(3))
    exact = (q.double() @ k.double().transpose(2, 3) / 4).softmax(-1) @ v.double()
    error = {switch: float((_engine.attention(q, k, v, None, causal=False, scale=0.25, flash=False,
                                              in_fp32=switch).double() - exact).abs().mean()) for switch in (False, True)}
    assert error[True] < 0.8 * error[False]


def test_fp32_residual_addition_keeps_what_bfloat16_loses():
    def stream(switch):
        torch.manual_seed(2)
        stack = nn().DistributedTransformer(num_layers=6, **SMALL, **STILL, intermediate_size=48, pre_layernorm=True,
                                            post_layernorm=False, fp32_residual_addition=switch).to(torch.bfloat16)
        x = 30 * torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(3))
        exact = nn().DistributedTransformer(num_layers=6, **SMALL, **STILL, intermediate_size=48, pre_layernorm=True,
                                            post_layernorm=False)
        exact.load_state_dict({name: value.float() for name, value in stack.state_dict().items()})
        given = x.to(torch.bfloat16)
        found = stack((given, None))[0]
        assert found.dtype == (torch.float32 if switch else torch.bfloat16)
        return float((found.float() - exact((given.float(), None))[0]).abs().mean().detach())

    assert stream(True) < 0.5 * stream(False)


def test_dropout_drops_the_same_fused_or_not():
    from shardsmith import _engine

    x, residual, bias = hidden(3, 5, 32), hidden(3, 5, 32), hidden(32)
    place = (True, 5, 7, 2)
    fused = _engine.dropout_add(x, bias, residual, 0.3, 11, place)
    plain = residual + _engine.dropout(x + bias, 0.3, 11, place)
    weights = torch.randn(3, 5, 32)
    torch.testing.assert_close(fused, plain)
    for mine, other in zip(*(torch.autograd.grad((y * weights).sum(), [x, residual, bias]) for y in (fused, plain))):
        torch.testing.assert_close(mine, other)
    dropped = float((fused == residual).float().mean())
    assert 0.2 < dropped < 0.4
    layer = nn().DistributedTransformerOutputLayer(32, 48, 0.5)
    assert not torch.equal(layer(x), layer(x)) and torch.equal(layer.eval()(x), layer(x))


@pytest.mark.parametrize("make, text", [
    (lambda: nn().DistributedAttentionLayer(**SMALL, pre_layernorm=False, post_layernorm=False), "one of pre_layernorm"),
    (lambda: nn().DistributedTransformerOutputLayer(8, 8, activation="swish"), "activation 'swish'"),
    (lambda: nn().DistributedTransformer(num_layers=0), "num_layers is 0"),
    (lambda: nn().DistributedTransformerLayer(fused_sofmax=True), "did you mean 'fused_softmax'"),
    (lambda: nn().DistributedTransformerOutputLayer(8, 8, hidden_dropout_prob=1.5), "hidden_dropout_prob is 1.5"),
    (lambda: nn().DistributedAttentionLayer(**SMALL, causal_mask_size=4)((torch.zeros(1, 5, 32), None)), "causal_mask_size is 4"),
    (lambda: nn().FlashAttentionLayer()(torch.zeros(2, 3, 4)), r"must be \[B, S, 3, heads, d\]"),
    (lambda: nn().DistributedEmbedding(4, 4, max_norm=1.0), "max_norm"),
])
def test_mistakes_are_named(make, text):
    from shardsmith.errors import Error

    with pytest.raises(Error, match=text):
        make()


# Two ranks.
def test_two_ranks_compute_what_one_does(tmp_path):
    found = run(_REFERENCE + '''
def whole(module):
    """A module of the same seed that is not split, its parameters by name, and how the split one cuts them."""
    return dict(module.named_parameters())

def build(kind):
    torch.manual_seed(4)
    sizes = dict(num_attention_heads=4, attention_head_size=8, hidden_size=32, intermediate_size=48,
                 attention_dropout_prob=0.0, hidden_dropout_prob=0.0, causal_mask_size=16)
    if kind == "layer":
        return smp.nn.DistributedTransformerLayer(**sizes, use_alibi=True, flash_attention=False)
    if kind == "cross":
        del sizes["causal_mask_size"]
        return smp.nn.DistributedTransformerLayer(**sizes, add_cross_attention=True)
    if kind == "linear":
        return smp.nn.DistributedLinear(12, 6)
    if kind == "embedding":
        return smp.nn.DistributedEmbedding(20, 8)
    return smp.nn.DistributedTransformerLMHead(num_layers=2, vocab_size=50, num_positions=16, pre_layernorm=True,
                                               post_layernorm=False, distribute_embedding=kind == "split head", **sizes)

def inputs(kind):
    g = torch.Generator().manual_seed(5)
    if kind == "linear":
        return (torch.randn(4, 3, 12, generator=g, requires_grad=True),)
    if kind == "embedding":
        return (torch.randint(0, 20, (4, 3), generator=g),)
    if kind == "layer":
        return ((torch.randn(4, 6, 32, generator=g, requires_grad=True), None),)
    if kind == "cross":
        return ((torch.randn(4, 6, 32, generator=g), torch.randn(4, 5, 32, generator=g, requires_grad=True), None, None),)
    ids = torch.randint(0, 50, (4, 8), generator=g)
    return ((ids, None, None, None, ids),)

def compute(kind):
    module, given = build(kind), inputs(kind)
    answer = module(*given)
    value = answer[0] if isinstance(answer, tuple) else answer
    weights = torch.randn(value.shape, generator=torch.Generator().manual_seed(6)) if value.dim() else torch.tensor(1.0)
    leaf = next((t for t in torch.utils._pytree.tree_leaves(given) if isinstance(t, torch.Tensor) and t.requires_grad), None)
    (value * weights).sum().backward()
    return value.detach(), leaf, module

KINDS = ["linear", "embedding", "layer", "cross", "head", "split head"]
alone = {kind: compute(kind) for kind in KINDS}  # before init there is one rank
start(1, tensor_parallel_degree=2, ddp=True, prescaled_batch=True)
for kind in KINDS:
    value, leaf, module = compute(kind)
    expected, expected_leaf, expected_module = alone[kind]
    torch.testing.assert_close(value, expected, atol=2e-5, rtol=1e-4)
    if leaf is not None:
        torch.testing.assert_close(leaf.grad, expected_leaf.grad, atol=1e-4, rtol=1e-3)
    split = 0
    for path, part in module.named_modules():
        other = expected_module.get_submodule(path)
        for name, param in part._parameters.items():
            if param is None:
                continue
            axis = part.split_axis_of(name) if isinstance(part, smp.nn.DistributedModule) else None
            split += axis is not None
            for mine, wanted in ((param.detach(), other._parameters[name].detach()), (param.grad, other._parameters[name].grad)):
                if axis is not None:
                    wanted = wanted.chunk(2, axis)[RANK]
                torch.testing.assert_close(mine, wanted, atol=1e-4, rtol=1e-3)
    results[kind] = split
try:
    smp.nn.DistributedAttentionLayer(num_attention_heads=3)
except Error as error:
    results["refused"] = str(error)
''', 2, tmp_path, tmp_path)
    for rank in found:
        assert rank["linear"] == rank["embedding"] == 1 and rank["layer"] == 10 and rank["cross"] == 17
        assert rank["head"] == 20 and rank["split head"] == 22
        assert "num_attention_heads 3 is not a multiple of tensor_parallel_degree 2" in rank["refused"]
