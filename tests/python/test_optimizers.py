"""smp.optimizers against their papers' formulas, and over every layout."""
import math

import pytest
import torch
from smp_helpers import make_models, run

from shardsmith.errors import Error
from shardsmith.smp.optimizers import FusedLAMB, FusedLamb, FusedNovoGrad


def steps(make, count=5):
    """Weights after some steps of a small model, and the gradients that it had."""
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(4, 3)), torch.nn.Parameter(torch.randn(5))]
    optimizer, seen = make(weights), []
    for step in range(count):
        for i, p in enumerate(weights):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + i)) * 3
        seen.append([p.grad.clone() for p in weights])
        optimizer.step()
    return [p.detach() for p in weights], seen


@pytest.mark.parametrize("decay, nvlamb, limit, mode", [(0.1, False, 1.0, True), (0.0, False, 0.0, True), (0.0, True, 2.0, True),
                                                        (0.1, False, 1.0, False)])
def test_lamb(decay, nvlamb, limit, mode):
    found, gradients = steps(lambda p: FusedLAMB(p, lr=0.1, weight_decay=decay, use_nvlamb=nvlamb, max_grad_norm=limit,
                                                 adam_w_mode=mode))
    torch.manual_seed(0)
    weights = [torch.randn(4, 3), torch.randn(5)]
    m, v = [torch.zeros_like(w) for w in weights], [torch.zeros_like(w) for w in weights]
    for t, given in enumerate(gradients, 1):
        norm = math.sqrt(sum(float(g.square().sum()) for g in given))
        for i, w in enumerate(weights):
            g = given[i] / max(1.0, norm / limit) if limit else given[i]
            if not mode:
                g = g + decay * w
            m[i] = 0.9 * m[i] + 0.1 * g
            v[i] = 0.999 * v[i] + 0.001 * g**2
            u = (m[i] / (1 - 0.9**t)) / ((v[i] / (1 - 0.999**t)).sqrt() + 1e-6) + (decay * w if mode else 0)
            ratio = w.norm() / u.norm() if nvlamb or decay else 1.0
            weights[i] = w - 0.1 * ratio * u
    for mine, other in zip(found, weights):
        torch.testing.assert_close(mine, other)
    assert FusedLamb is FusedLAMB


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("kind, zero", [(2, False), (2, True), (0, False)])
def test_novograd(inside, kind, zero):
    found, gradients = steps(lambda p: FusedNovoGrad(p, lr=0.1, betas=(0.9, 0.98), weight_decay=0.05, norm_type=kind,
                                                     init_zero=zero, reg_inside_moment=inside))
    torch.manual_seed(0)
    weights = [torch.randn(4, 3), torch.randn(5)]
    m, n = [torch.zeros_like(w) for w in weights], [None, None]
    for t, given in enumerate(gradients, 1):
        for i, w in enumerate(weights):
            norm = float(given[i].norm() if kind == 2 else given[i].abs().max())
            before = (0.0 if zero else norm) if n[i] is None else n[i]
            n[i] = math.sqrt(0.98 * before**2 + 0.02 * norm**2) if kind == 2 else 0.98 * before + 0.02 * norm
            divisor = n[i] / math.sqrt(1 - 0.98**t) + 1e-8
            if inside:
                m[i] = 0.9 * m[i] + 0.1 * (given[i] / divisor + 0.05 * w)
                weights[i] = w - 0.1 * m[i] / (1 - 0.9**t)
            else:
                m[i] = 0.9 * m[i] + 0.1 * given[i]
                weights[i] = w - 0.1 * (m[i] / (1 - 0.9**t) / divisor + 0.05 * w)
    for mine, other in zip(found, weights):
        torch.testing.assert_close(mine, other)


def test_mistakes_are_named():
    with pytest.raises(Error, match="amsgrad"):
        FusedLAMB([torch.nn.Parameter(torch.zeros(1))], amsgrad=True)
    with pytest.raises(Error, match="norm_type is 1"):
        FusedNovoGrad([torch.nn.Parameter(torch.zeros(1))], norm_type=1)
    with pytest.raises(Error, match="betas in"):
        FusedNovoGrad([torch.nn.Parameter(torch.zeros(1))], betas=(1.0, 0.9))


_TRAIN = """
def losses(tp=1, shard=False):
    from transformers import AutoModelForCausalLM
    start(1, 1, tensor_parallel_degree=tp, ddp=True, shard_optimizer_state=shard, prescaled_batch=True)
    with smp.model_creation(tensor_parallelism=tp > 1):
        model = AutoModelForCausalLM.from_pretrained(os.path.join(MODELS, "llama"))
    model = smp.DistributedModel(model)
    optimizer = smp.DistributedOptimizer(getattr(smp.optimizers, OPTIMIZER)(
        model.parameters(), lr=1e-2, weight_decay=0.1))
    found = []
    for step in range(4):
        optimizer.zero_grad()
        ids = ids_of(0).chunk(smp.rdp_size())[smp.rdp_rank()]
        found.append(mean_over_replicas(train_step(model, ids).reduce_mean()))
        optimizer.step()
    return found
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("optimizer, tp, shard", [("FusedLAMB", 2, False), ("FusedNovoGrad", 1, True),
                                                  pytest.param("FusedLAMB", 1, True, marks=pytest.mark.long),
                                                  pytest.param("FusedNovoGrad", 2, False, marks=pytest.mark.long)])
def test_every_layout_makes_the_same_steps(models, tmp_path, optimizer, tp, shard):
    program = f"OPTIMIZER = '{optimizer}'\n" + _TRAIN
    alone = run(program + "results['losses'] = losses()", 1, models, tmp_path / "alone")[0]["losses"]
    both = run(program + f"results['losses'] = losses({tp}, {shard})", 2, models, tmp_path / "both")
    assert alone[0] > alone[-1]
    for rank in both:
        assert rank["losses"] == pytest.approx(alone, rel=1e-4)
