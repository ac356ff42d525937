"""The smp interface over real ranks: parity, groups, steps, checkpoints, death."""
import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from smp_helpers import REPOSITORY, Ranks, environment, free_port, make_models, run


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


PARITY = """
start({pp}, {microbatches})
model = load("{family}")
model.train()
optimizer = smp.DistributedOptimizer(torch.optim.{optimizer}(model.parameters(), lr=1e-2))
losses, norms = [], []
for step in range(5):
    optimizer.zero_grad()
    losses.append(mean_over_replicas(train_step(model, mine(ids_of(step))).reduce_mean()))
    norms.append(optimizer.clip_master_grads(0.5))
    optimizer.step()
results["losses"], results["norms"] = losses, norms
results["sizes"] = [sum(p.numel() for p in model.local_parameters()), sum(p.numel() for p in model.parameters())]
if RANK == 0:
    other = plain("{family}")
    optimizer = torch.optim.{optimizer}(other.parameters(), lr=1e-2)
    results["plain"], results["plain_norms"] = [], []
    for step in range(5):
        optimizer.zero_grad()
        loss = other(input_ids=ids_of(step), labels=ids_of(step)).loss
        loss.backward()
        results["plain"].append(loss.item())
        results["plain_norms"].append(float(torch.nn.utils.clip_grad_norm_(other.parameters(), 0.5)))
        optimizer.step()
"""


@pytest.mark.parametrize("family, pp, ranks, microbatches, optimizer", [
    ("gpt2", 1, 1, 2, "SGD"), ("llama", 1, 1, 1, "AdamW"), ("gpt2", 2, 2, 4, "SGD"), ("llama", 2, 2, 4, "AdamW"),
    ("untied", 2, 2, 2, "AdamW"), ("llama", 2, 4, 2, "AdamW"), ("llama", 1, 2, 2, "SGD"), ("gpt2", 4, 4, 8, "SGD"),
])
def test_training_equals_plain_pytorch(models, tmp_path, family, pp, ranks, microbatches, optimizer):
    body = PARITY.format(family=family, pp=pp, microbatches=microbatches, optimizer=optimizer)
    found = run(body, ranks, models, tmp_path)
    assert found[0]["losses"] == pytest.approx(found[0]["plain"], rel=2e-5)
    assert found[0]["norms"] == pytest.approx(found[0]["plain_norms"], rel=2e-3)
    assert len({tuple(rank["losses"]) for rank in found}) == 1, "the loss is the same on every rank"
    for local, all_left in (rank["sizes"] for rank in found):
        assert local == all_left, "parameters of other stages hold nothing after the partition"


def test_ranks_groups_and_objects(models, tmp_path):
    found = run("""
        start(2)
        results["ranks"] = [smp.rank(), smp.pp_rank(), smp.rdp_rank(), smp.dp_rank(), smp.mp_rank(), smp.tp_rank()]
        results["sizes"] = [smp.size(), smp.pp_size(), smp.rdp_size(), smp.dp_size(), smp.mp_size(), smp.tp_size()]
        results["groups"] = [smp.get_pp_group(), smp.get_rdp_group(), smp.get_mp_group()]
        results["known"] = smp.is_initialized(), smp.num_microbatches(), 0 in smp.get_pp_group()
        results["gathered"] = smp.allgather({"rank": RANK}, smp.CommGroup.RDP_GROUP)
        if smp.pp_rank() == 0:
            smp.broadcast({"length": 7, "t": torch.arange(3) + RANK}, smp.PP_GROUP)
        else:
            got = smp.recv_from(0, smp.RankType.PP_RANK)
            results["got"] = [got["length"], got["t"].tolist()]
        if RANK == 0:
            smp.send(torch.full((2, 2), 1.5, dtype=torch.bfloat16), 3, smp.RankType.WORLD_RANK)
        if RANK == 3:
            t = smp.recv_from(0)
            results["sent"] = [str(t.dtype), t.float().sum().item()]
        x = torch.tensor([float(RANK)])
        torch.distributed.all_reduce(x, group=smp.get_dp_process_group())
        results["sum"] = x.item()
        for group in smp.CommGroup:
            smp.barrier(group)
        results["refused"] = refusal(smp.send, 1, 9), refusal(smp.recv_from, RANK), refusal(smp.broadcast, 1, "world")
        smp.init({"microbatches": 99})
        results["still"] = smp.num_microbatches()
    """, 4, models, tmp_path)
    assert [r["ranks"][1] for r in found] == [r["groups"][0].index(i) for i, r in enumerate(found)]
    for rank, r in enumerate(found):
        assert r["sizes"] == [4, 2, 2, 2, 2, 1] and r["ranks"][0] == rank and r["known"] [:2] == [True, 1]
        assert r["gathered"] == [{"rank": other} for other in r["groups"][1]]
        assert r["sum"] == sum(r["groups"][1]) and r["still"] == 1
        assert all(kind[0] == "invalid_argument" for kind in r["refused"])
        if r["ranks"][1] == 1:
            assert r["got"] == [7, [r["groups"][0][0] + i for i in range(3)]]
    assert found[3]["sent"] == ["torch.bfloat16", 6.0]


def test_what_a_step_takes_and_gives(models, tmp_path):
    found = run("""
        start(2, 4)
        model = load("llama")
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        class Own:
            def __reduce__(self): raise TypeError("does not travel")
            number = 100 + RANK
        seen = []

        @smp.step(non_split_inputs=["whole"], input_split_axes={"across": 1})
        def body(model, batch, whole, across, *, own, plain, flag=None):
            seen.append([list(whole.shape), list(across.shape), own.number, plain])
            out = model(input_ids=batch["ids"], attention_mask=batch["more"][0], labels=batch["ids"])
            results["is_dict"] = isinstance(out, dict) and "loss" in out and list(out)[0] == "loss"
            model.backward(out.loss)
            return {"loss": out.loss, "rows": batch["ids"][:, 0].clone(), "name": "x", "pair": (own.number, out[0])}

        ids = ids_of(1)
        if RANK == 0:
            out = body(model, {"ids": ids, "more": [torch.ones_like(ids)]}, torch.ones(3), torch.ones(2, 8), own=Own(), plain=[1, "a"])
        else:
            out = body(model, {"ids": torch.empty(8, 0), "more": None}, None, 5, own=Own(), plain=None)
        results["seen"] = seen
        results["types"] = [type(out[k]).__name__ for k in out] + [type(out["pair"]).__name__]
        results["rows"] = out["rows"].concat().tolist()
        results["expected"] = ids[:, 0].tolist()
        results["stacked"] = [list(out["rows"].stack().shape), list(out["loss"].concat().shape)]
        results["means"] = [out["loss"].reduce_mean().item(), out["loss"].reduce_sum().item() / 4, out["pair"][1].detach().reduce_mean().item()]
        results["plain"] = [out["name"], out["pair"][0]]

        @smp.step
        def evaluate(model, ids):
            return model(input_ids=ids, labels=ids)
        @smp.step
        def late(model, ids):
            out = model(input_ids=ids, labels=ids)
            model.backward(out.loss)
            return out
        model.eval()
        with torch.no_grad():
            whole = evaluate(model, mine(ids))
        results["logits"] = list(whole["logits"].concat().shape)
        reference = plain("llama").eval()
        results["close"] = (whole["logits"].concat() - reference(input_ids=ids).logits).abs().max().item()
        results["late"] = (late(model, mine(ids))["logits"].concat() - whole["logits"].concat()).abs().max().item()
        finish()
        os._exit(0)
    """, 2, models, tmp_path)
    for rank, r in enumerate(found):
        assert sorted(r["seen"]) == [[[3], [2, 2], 100 + rank, [1, "a"]]] * 4
        assert r["is_dict"] and r["types"] == ["StepOutput", "StepOutput", "list", "tuple", "tuple"]
        assert r["rows"] == r["expected"] and r["stacked"] == [[4, 2], [4]]
        assert r["means"][0] == pytest.approx(r["means"][1]) and r["means"][0] == r["means"][2]
        assert r["plain"] == [["x"] * 4, [101] * 4], "what is returned comes from the last stage"
        assert r["late"] < 1e-6, "logits are there after the backward too"
        assert r["logits"] == [8, 16, 112] and r["close"] < 1e-5
    assert found[0]["means"] == found[1]["means"]


def test_mistakes_are_clear(models, tmp_path):
    found = run("""
        start(2, 2)
        model = load("llama")
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        results["outside"] = refusal(model, input_ids=ids_of(0))
        results["early save"] = refusal(smp.save_checkpoint, FOLDER, "a", True, model)
        results["full save"] = refusal(smp.save_checkpoint, FOLDER, "a", False, model)
        results["refused function"] = refusal(smp.hvd_average_grads)
        results["no folder"] = refusal(smp.resume_from_checkpoint, FOLDER + "/none")
        results["no checkpoint"] = refusal(smp.resume_from_checkpoint, FOLDER)
        results["second model"] = refusal(smp.DistributedModel, torch.nn.Linear(1, 1))
        train_step(model, mine(ids_of(0)))
        results["optimizer state"] = refusal(optimizer.load_state_dict, {"state": {}})
        results["copied"] = refusal(model.get_module().state_dict)
        results["rows"] = refusal(train_step, model, mine(ids_of(0, 7)))
        finish()
        os._exit(0)
    """, 2, models, tmp_path)
    for r in found:
        kinds = {name: refused and refused[0] for name, refused in r.items()}
        texts = {name: refused[1] for name, refused in r.items()}
        assert kinds == {
            "outside": "invalid_argument", "early save": "invalid_argument", "full save": "invalid_argument",
            "refused function": "unsupported", "no folder": "not_found",
            "no checkpoint": "corrupt", "second model": "invalid_argument", "optimizer state": "invalid_argument",
            "copied": "unsupported", "rows": "invalid_argument"}
        assert "belongs into a function decorated with smp.step" in texts["outside"]
        assert "horovod is not supported" in texts["refused function"]
        assert "no complete checkpoint" in texts["no checkpoint"]
        assert "7 rows along axis 0" in texts["rows"] and "6 or 8 rows would do" in texts["rows"]


def test_mistakes_with_one_rank(models, tmp_path):
    (found,) = run("""
        from transformers import AutoModelForCausalLM
        results["early"] = refusal(smp.rank), refusal(smp.model_creation().__enter__)
        start()
        def missing():
            with smp.model_creation():
                AutoModelForCausalLM.from_pretrained("no/such/folder")
        results["missing"] = refusal(missing)
        results["keyword"] = refusal(smp.model_creation(fused_softmx=True).__enter__)
        model = load("llama")
        p = next(model.parameters())
        twice = torch.optim.SGD([{"params": [p]}], lr=0.1)
        twice.param_groups.append(dict(twice.param_groups[0]))
        results["twice"] = refusal(smp.DistributedOptimizer, twice)
        results["foreign"] = refusal(smp.DistributedOptimizer, torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1))
        results["unknown"] = refusal(model, ids_of(0), inputs_embeds=torch.ones(1))
        results["same"] = smp.DistributedModel(model.get_module()) is model
        out = model(ids_of(0), labels=ids_of(0))
        out.loss.backward()
        reference = plain("llama")
        reference(ids_of(0), labels=ids_of(0)).loss.backward()
        results["grads"] = max((p.grad - q.grad).abs().max().item() for p, q in zip(model.parameters(), reference.parameters()))
        results["state"] = sorted(model.state_dict()) == sorted(reference.state_dict())
    """, 1, models, tmp_path)
    assert [kind for kind, _ in found["early"]] == ["invalid_argument"] * 2
    assert found["missing"][0] == "not_found" and "no/such/folder" in found["missing"][1]
    assert "did you mean 'fused_softmax'" in found["keyword"][1]
    assert "model.embed_tokens.weight" in found["twice"][1]
    assert found["foreign"][0] == "invalid_argument" and "not the model's" in found["foreign"][1]
    assert found["unknown"][0] == "unsupported" and "inputs_embeds" in found["unknown"][1]
    assert found["same"] and found["grads"] < 1e-6 and found["state"]


def test_an_exception_in_one_microbatch_ends_all_ranks(models, tmp_path):
    ranks = Ranks("""
        start(2, 4)
        model = load("llama")
        calls = []
        @smp.step
        def body(model, ids):
            loss = model(input_ids=ids, labels=ids).loss
            calls.append(1)
            if RANK == 1 and len(calls) == 3:
                raise ValueError("my own mistake")
            model.backward(loss)
            return loss
        begin = time.monotonic()
        try:
            body(model, ids_of(0))
        except BaseException as error:
            results["error"] = [type(error).__name__, str(error), time.monotonic() - begin]
        finish()
        os._exit(0)
    """, 2, models, tmp_path)
    found = ranks.results()
    assert found[1]["error"][:2] == ["ValueError", "my own mistake"]
    assert found[0]["error"][0] == "Error" and "rank 1" in found[0]["error"][1] and "my own mistake" in found[0]["error"][1]
    assert max(r["error"][2] for r in found) < 30


@pytest.mark.parametrize("dead, how", [(1, "SIGKILL"), (1, "SIGSTOP")])
def test_a_dead_or_stalled_rank_is_named_in_time(models, tmp_path, dead, how):
    ranks = Ranks(f"""
        start(2, 2, peer_timeout=8)
        model = load("llama")
        train_step(model, ids_of(0))
        smp.barrier()
        if RANK == {dead}:
            os.kill(os.getpid(), signal.{how})
        begin = time.monotonic()
        results["error"] = refusal(train_step, model, ids_of(1)) + [time.monotonic() - begin]
        finish()
        os._exit(0)
    """, 2, models, tmp_path)
    other = 1 - dead
    out = ranks.processes[other].communicate(timeout=120)[0]
    ranks.processes[dead].kill()
    ranks.wait()
    assert (tmp_path / f"results_{other}.json").exists(), out
    import json
    kind, text, seconds = json.loads((tmp_path / f"results_{other}.json").read_text())["error"]
    assert kind in ("peer", "timeout") and f"rank {dead}" in text and seconds < 30


def test_what_code_changed_in_the_configuration_is_in_the_checkpoint(models, tmp_path):
    run("""
        import json, pathlib
        from transformers import AutoModelForCausalLM
        start(1)
        with smp.model_creation():
            model = AutoModelForCausalLM.from_pretrained(MODELS + "/gpt2", resid_pdrop=0.25)
        model = smp.DistributedModel(model)
        train_step(model, ids_of(0))
        smp.save_checkpoint(FOLDER + "/ck", tag="one", partial=True, model=model)
        source = json.loads(pathlib.Path(MODELS, "gpt2", "config.json").read_text())
        for kept in (json.loads(pathlib.Path(FOLDER, "ck", "one_partial", "manifest.json").read_text())["model_config"],
                     json.loads(pathlib.Path(FOLDER, "ck", "hf", "config.json").read_text())):
            assert source["resid_pdrop"] != kept["resid_pdrop"] == 0.25
            assert {k: v for k, v in kept.items() if source.get(k) != v}.keys() <= {"resid_pdrop", "dtype", "torch_dtype"}
    """, 1, models, tmp_path)


SAVE = """
import argparse, datetime, pathlib
import numpy
from transformers import AutoConfig
start(2, 2)
torch.manual_seed(7 + RANK); random.seed(8 + RANK); numpy.random.seed(9 + RANK)
model = load("{family}")
parameters = list(model.get_module().parameters())
groups = [{{"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1}}, {{"params": [p for p in parameters if p.dim() < 2]}}]
optimizer = smp.DistributedOptimizer(torch.optim.{optimizer}(groups, lr=1e-2))
begin = 0
if {resume}:
    content = smp.resume_from_checkpoint(FOLDER + "/ck", tag="two")
    begin = content["step"]
    results["content"] = [repr(content[k]) for k in ("number", "args", "where", "odd", "when", "keys")] + [
        type(content["config"]).__name__, content["config"].vocab_size, content["tensor"].tolist(), str(content["tensor"].dtype),
        type(content["object"]).__name__, content["array"].tolist()]
    results["lr"] = [g["lr"] for g in optimizer.param_groups]
for step in range(begin, 4):
    optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
    optimizer.zero_grad()
    train_step(model, ids_of(step))
    optimizer.step()
    if step == 1:
        class Odd: pass
        smp.save_checkpoint(FOLDER + "/ck", "two", model=model, optimizer=optimizer, user_content={{
            "step": 2, "number": numpy.int64(5), "args": argparse.Namespace(a=[1, (2, 3)], b=pathlib.Path("/x")),
            "where": pathlib.Path("a/b"), "odd": {{1: "one", ("t", 2): None}}, "when": datetime.timedelta(seconds=3),
            "keys": {{"__shardsmith__": "mine"}}, "config": AutoConfig.from_pretrained(MODELS + "/{family}"),
            "tensor": torch.arange(3, dtype=torch.bfloat16), "object": Odd(), "array": numpy.arange(4.0)}}, num_kept_partial_checkpoints=3)
results["draws"] = [torch.rand(2).tolist(), random.random(), numpy.random.rand()]
import hashlib
digest = hashlib.sha256()
for name, p in sorted(model.local_named_parameters()):
    digest.update(p.detach().numpy().tobytes())
    for key in sorted(optimizer.state[p]):
        digest.update(numpy.asarray(optimizer.state[p][key]).tobytes())
results["digest"] = digest.hexdigest()
results["groups"] = [{{k: v for k, v in g.items() if k != "params"}} for g in optimizer.param_groups]
"""


@pytest.mark.parametrize("family, optimizer", [("gpt2", "AdamW"), ("llama", "Adam"), ("untied", "RMSprop")])
def test_resuming_gives_the_bits_of_an_uninterrupted_run(models, tmp_path, family, optimizer):
    whole = run(SAVE.format(family=family, optimizer=optimizer, resume=False), 2, models, tmp_path)
    again = run(SAVE.format(family=family, optimizer=optimizer, resume=True), 2, models, tmp_path)
    for one, other in zip(whole, again):
        assert one["digest"] == other["digest"] and one["draws"] == other["draws"] and one["groups"] == other["groups"]
    assert whole[0]["draws"] != whole[1]["draws"]
    content = again[0]["content"]
    assert content[0] == "np.int64(5)" and content[1] == "Namespace(a=[1, (2, 3)], b=PosixPath('/x'))"
    assert content[2:6] == ["PosixPath('a/b')", "{1: 'one', ('t', 2): None}", "datetime.timedelta(seconds=3)",
                            "{'__shardsmith__': 'mine'}"]
    assert content[6] == {"gpt2": "GPT2Config"}.get(family, "LlamaConfig") and content[7] == 112
    assert content[8:] == [[0.0, 1.0, 2.0], "torch.bfloat16", "Inert", [0.0, 1.0, 2.0, 3.0]]
    assert again[0]["lr"] == [5e-3, 1e-2], "options are restored at once"


def test_a_checkpoint_is_plain_files_that_torch_opens(models, tmp_path):
    run(SAVE.format(family="gpt2", optimizer="AdamW", resume=False), 2, models, tmp_path)
    import torch

    folder = tmp_path / "ck" / "two_partial"
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["manifest.json", "model_0_0.pt", "model_1_0.pt", "optimizer_0_0.pt", "optimizer_1_0.pt",
                     "rng_0.pt", "rng_1.pt", "user_content.pt"]
    assert (tmp_path / "ck" / "newest").read_text().strip() == "two_partial"
    assert (tmp_path / "ck" / "hf" / "config.json").exists() and (tmp_path / "ck" / "hf" / "tokenizer.json").exists()
    trees = {name: torch.load(folder / name, weights_only=True, mmap=True) for name in names if name.endswith(".pt")}
    first, last = trees["model_0_0.pt"], trees["model_1_0.pt"]
    assert "word_embedding.weight" in first and "word_embedding.weight" not in last, "tied tensors are stored once"
    assert not set(first) & set(last)
    assert first["transformer.seq_layers.0.attention.query.weight"].shape == (32, 32)
    state = trees["optimizer_1_0.pt"]["state"]
    assert "word_embedding.weight" not in state and set(state) == set(last)
    assert "word_embedding.weight" in trees["optimizer_1_0.pt"]["param_groups"][0]["params"]


def test_another_number_of_stages_reads_the_same_checkpoint(models, tmp_path):
    whole = run(SAVE.format(family="gpt2", optimizer="AdamW", resume=False), 2, models, tmp_path)
    # The last update was made with the state after step 2: one stage gets the same weights up to rounding.
    (one,) = run("""
        start(1, 2)
        model = load("gpt2")
        ps = list(model.get_module().parameters())
        optimizer = smp.DistributedOptimizer(torch.optim.AdamW([{"params": [p for p in ps if p.dim() > 1], "weight_decay": 0.1}, {"params": [p for p in ps if p.dim() < 2]}], lr=1))
        step = smp.resume_from_checkpoint(FOLDER + "/ck")["step"]
        results["lr"] = optimizer.param_groups[0]["lr"]
        losses = []
        for step in range(step, 4):
            optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
            optimizer.zero_grad()
            losses.append(train_step(model, ids_of(step)).reduce_mean().item())
            optimizer.step()
        results["losses"] = losses
    """, 1, models, tmp_path)
    (plain,) = run("""
        start(1, 2)
        model = load("gpt2")
        ps = list(model.get_module().parameters())
        optimizer = smp.DistributedOptimizer(torch.optim.AdamW([{"params": [p for p in ps if p.dim() > 1], "weight_decay": 0.1}, {"params": [p for p in ps if p.dim() < 2]}], lr=1e-2))
        losses = []
        for step in range(4):
            optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
            optimizer.zero_grad()
            losses.append(train_step(model, ids_of(step)).reduce_mean().item())
            optimizer.step()
        results["losses"] = losses
    """, 1, models, tmp_path)
    assert whole and one["lr"] == 5e-3
    assert one["losses"] == pytest.approx(plain["losses"][2:], rel=1e-5)


def test_full_weights_of_a_script_are_read(models, tmp_path):
    found = run("""
        from transformers import AutoConfig, AutoModelForCausalLM
        start(2, 2, delayed_parameter_initialization=True)
        if RANK == 0:
            torch.save(plain("gpt2").state_dict(), FOLDER + "/fullmodel.pt")
        smp.barrier()
        with smp.model_creation():
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODELS + "/gpt2"))
        model = smp.DistributedModel(model)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), static_loss_scale=None, dynamic_loss_scale=True, dynamic_loss_args={"scale_window": 1000, "min_scale": 1, "delayed_shift": 2})
        results["content"] = smp.resume_from_checkpoint(FOLDER, tag="fullmodel.pt", partial=False)
        results["loss"] = train_step(model, ids_of(0)).reduce_mean().item()
        results["plain"] = plain("gpt2")(input_ids=ids_of(0), labels=ids_of(0)).loss.item()
    """, 2, models, tmp_path)
    for r in found:
        assert r["content"] == {} and r["loss"] == pytest.approx(r["plain"], rel=1e-5)


def torchrun(script, *arguments, ranks=2):
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(free_port()),
            str(script), *map(str, arguments)]


def children_of(pid):
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(word) for word in file.read().split()]
    except FileNotFoundError:
        return []


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_documented_script_is_killed_resumes_and_equals_plain_pytorch(models, tmp_path, family):
    losses = tmp_path / "losses"
    arguments = ["--model_dir", models / family, "--checkpoint_dir", tmp_path / "ck", "--pipeline_parallel_degree", 2,
                 "--microbatches", 4, "--max_steps", 12, "--checkpoint_freq", 4, "--losses", losses]
    script = REPOSITORY / "examples" / "train_smp.py"
    process = subprocess.Popen(torchrun(script, *arguments), env=environment(), start_new_session=True,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (losses.exists() and losses.read_text().count("\n") >= 6) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    # torchrun's ranks are in sessions of their own.
    for pid in [*children_of(process.pid), process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    again = subprocess.run(torchrun(script, *arguments, "--load_partial", 1), env=environment(), capture_output=True,
                           text=True, timeout=240)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "resumed at step" in again.stdout
    found = {}
    for line in losses.read_text().splitlines():
        step, loss = line.split()
        assert found.get(int(step), float(loss)) == float(loss), "a step done twice gives the same loss"
        found[int(step)] = float(loss)
    assert sorted(found) == list(range(1, 13))
    (plain,) = run("""
        model = plain(%r)
        no_decay = ("bias", "norm.weight", "layernorm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight")
        ps = list(model.named_parameters())
        optimizer = torch.optim.AdamW([{"params": [p for n, p in ps if not n.endswith(no_decay)], "weight_decay": 0.01},
                                       {"params": [p for n, p in ps if n.endswith(no_decay)], "weight_decay": 0.0}], lr=1e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.1, 1 - step / 100))
        results["losses"] = []
        for number in range(12):
            ids = torch.randint(0, 112, (8, 64), generator=torch.Generator().manual_seed(12345 * 1_000_003 + number))
            optimizer.zero_grad()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            results["losses"].append(loss.item())
    """ % family, 1, models, tmp_path)
    assert [found[step] for step in range(1, 13)] == pytest.approx(plain["losses"], rel=1e-4)
