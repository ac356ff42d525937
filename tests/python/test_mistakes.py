"""What a new user gets wrong: one helpful message on every rank, and no hang."""
from __future__ import annotations

import pytest

from smp_helpers import make_models, run


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


def expect(found, key, kind, *words):
    for rank, ours in enumerate(found):
        assert ours[key] is not None, f"rank {rank}: {key} passes in silence"
        assert ours[key][0] == kind and "\n" not in ours[key][1], ours[key]
        for word in words:
            assert word in ours[key][1], ours[key]


def test_before_and_around_init(models, tmp_path):
    found = run("""
        results["rank"] = refusal(smp.rank)
        results["model"] = refusal(smp.DistributedModel, torch.nn.Linear(2, 2))
        results["step"] = refusal(train_step, None, ids_of(0))
        results["optimizer"] = refusal(smp.DistributedOptimizer, torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1))
        results["degree"] = refusal(smp.init, {"pipeline_parallel_degree": 3})
        results["key"] = refusal(smp.init, {"pipeline_paralel_degree": 2})
    """, 2, models, tmp_path)
    for key in ("rank", "model", "step", "optimizer"):
        expect(found, key, "invalid_argument", "smp.init() has not been called")
    expect(found, "degree", "invalid_argument", "3", "does not divide the world size 2")
    expect(found, "key", "invalid_argument", "did you mean 'pipeline_parallel_degree'")


def test_ranks_with_different_configurations(models, tmp_path):
    found = run("""
        results["config"] = refusal(smp.init, {"pipeline_parallel_degree": 2 - RANK, "microbatches": 2, "ddp": True, "peer_timeout": 40})
    """, 2, models, tmp_path)
    expect(found, "config", "invalid_argument", "'pipeline_parallel_degree' is 1 on rank 1 and 2 on rank 0")


def test_the_model_used_in_the_wrong_place(models, tmp_path):
    found = run("""
        from transformers import AutoModelForCausalLM
        import logging
        said = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())
        logging.getLogger("shardsmith.smp").addHandler(handler)
        start(2, 2, auto_partition=False, default_partition=0)
        with smp.model_creation():
            bare = AutoModelForCausalLM.from_pretrained(MODELS + "/gpt2")
        smp.set_partition(bare.transformer.h[3], 1)
        results["no wrapper"] = refusal(train_step, bare, ids_of(0))
        results["bare"] = refusal(bare, input_ids=ids_of(0))
        results["part"] = refusal(bare.transformer.h[0], torch.ones(1, 2, 32))
        model = smp.DistributedModel(bare)
        results["outside"] = refusal(model, input_ids=ids_of(0))
        results["backward outside"] = refusal(model.backward, torch.ones(()))
        results["saved early"] = [refusal(f) for f in (model.state_dict, bare.state_dict, lambda: bare.save_pretrained(FOLDER + "/early"),
            lambda: torch.save(bare, FOLDER + "/early.pt"), lambda: torch.save(next(bare.parameters()), FOLDER + "/early.pt"),
            lambda: smp.save_checkpoint(FOLDER + "/ck", "early", model=model))]
        parameters = list(bare.parameters())
        results["twice"] = refusal(lambda: smp.DistributedOptimizer(torch.optim.SGD([*parameters, parameters[2]], lr=1)))

        @smp.step
        def returns_nothing(model, ids):
            model.backward(model(input_ids=ids, labels=ids).loss)

        results["none"] = returns_nothing(model, ids_of(0))
        returns_nothing(model, ids_of(1))
        results["said"] = [text for text in said if "returns None" in text]
        results["too late"] = refusal(smp.set_partition, model.get_module().transformer.h[0], 1)
        results["checkpointing too late"] = refusal(smp.set_activation_checkpointing, model.get_module().transformer.h[0])
        results["bare in a step"] = refusal(bare, input_ids=ids_of(0))
        results["tags"] = refusal(smp.save_checkpoint, FOLDER + "/ck", f"tag{RANK}", model=model)
        smp.barrier()
        results["rows"] = refusal(train_step, model, ids_of(0, rows=7))
    """, 2, models, tmp_path)
    expect(found, "no wrapper", "invalid_argument", "no smp.DistributedModel yet")
    for key in ("bare", "part", "bare in a step"):
        expect(found, key, "unsupported", "smp.DistributedModel(model)")
    for key in ("outside", "backward outside"):
        expect(found, key, "invalid_argument", "decorated with smp.step")
    expect(found, "too late", "invalid_argument", "partition has been made")
    expect(found, "checkpointing too late", "invalid_argument", "after the first step")
    expect(found, "tags", "invalid_argument", "tag1", "tag0")
    expect(found, "rows", "invalid_argument", "'ids' has 7 rows", "6 or 8 rows would do")
    for ours in found:
        assert all(ours["saved early"]), ours["saved early"]
        assert ours["none"] is None and len(ours["said"]) == 1 and "returns_nothing" in ours["said"][0]
    expect(found, "twice", "invalid_argument", "twice", "transformer.h.0.ln_1.weight")


def test_loss_backward_in_a_step_over_several_stages(models, tmp_path):
    found = run("""
        start(2, 2)
        model = load("gpt2")
        @smp.step
        def body(model, ids):
            loss = model(input_ids=ids, labels=ids).loss
            loss = loss / 2
            loss.backward()
            return loss
        results["error"] = refusal(body, model, ids_of(0))
        finish()
        time.sleep(3)  # the store is rank 0's
        os._exit(0)
    """, 2, models, tmp_path)
    for ours in found:
        assert "use model.backward(loss)" in ours["error"][1]
    assert {ours["error"][0] for ours in found} <= {"invalid_argument", "peer"}


def test_a_split_model_computes_only_through_its_wrapper(models, tmp_path):
    found = run("""
        from transformers import AutoModelForCausalLM
        smp.init({"tensor_parallel_degree": 2, "ddp": True})
        with smp.tensor_parallelism():
            bare = AutoModelForCausalLM.from_pretrained(MODELS + "/gpt2")
        model = smp.DistributedModel(bare)
        results["bare"] = refusal(bare, input_ids=ids_of(0))
        results["loss"] = model(input_ids=ids_of(0), labels=ids_of(0)).loss.item()
    """, 2, models, tmp_path)
    expect(found, "bare", "unsupported", "smp.DistributedModel(model)")
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=1e-6)
