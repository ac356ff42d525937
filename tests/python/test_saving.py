"""save_checkpoint: full checkpoints by all ranks, and saving in the background."""
import json
import os

import pytest
import torch

from smp_helpers import Ranks, make_models, run
from test_state_dicts import TWO, settings


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


# (pp, tp, more configuration), ranks
LAYOUTS = [((2, 1, {}), 2), ((1, 2, {}), 2), ((1, 1, {"shard_optimizer_state": True}), 2), ((2, 2, {"bf16": True}), 4)]


@pytest.mark.parametrize("layout, ranks", LAYOUTS)
def test_a_full_checkpoint_is_the_whole_model_under_transformers_names(models, tmp_path, layout, ranks):
    """torch.load of the one file is the module's own state_dict, bit for bit; the optimizer and what the user put in stand
    beside it, and a resume takes both."""
    found = run(TWO + f"""
model, optimizer = session("gpt2", {settings(layout)})
steps(model, optimizer, 0, 2)
smp.save_checkpoint(FOLDER + "/ck", "model.pt", partial=False, model=model, optimizer=optimizer, user_content={{"epoch": 3}},
                    optimizer_if_full=True)
sd = model.state_dict()
osd = optimizer.state_dict()
if RANK == 0:
    torch.save(sd, FOLDER + "/expected.pt")
    torch.save(osd, FOLDER + "/optimizer_expected.pt")
smp.barrier()
results["content"] = smp.resume_from_checkpoint(FOLDER + "/ck", partial=False)
results["newest"] = open(FOLDER + "/ck/newest").read()
results["after"] = digest(model.state_dict()) == digest(sd)
""", ranks, models, tmp_path)
    assert all(rank["content"] == {"epoch": 3} and rank["newest"] == "model.pt\n" and rank["after"] for rank in found)
    folder = tmp_path / "ck"
    assert sorted(os.listdir(folder)) == ["hf", "model.pt", "newest", "optimizer_model.pt", "user_content_model.pt"]
    whole = torch.load(folder / "model.pt", weights_only=True, mmap=True)
    expected = torch.load(tmp_path / "expected.pt", weights_only=True)
    assert set(whole) == set(expected)
    assert all(torch.equal(whole[name], expected[name]) for name in expected)
    assert whole["lm_head.weight"].data_ptr() == whole["transformer.wte.weight"].data_ptr()
    moments = torch.load(folder / "optimizer_model.pt", weights_only=True)
    assert moments["class"] == "AdamW" and moments["param_groups"][0]["lr"] == 1e-2
    query = moments["state"]["transformer.seq_layers.1.attention.query.weight"]
    assert query["exp_avg"].shape == (32, 32)
    assert ("master" in query) == ("bf16" in layout[2])
    # c_attn [in, 3 * out] is query, key and value side by side; the position in torch's form is that of the module tree.
    theirs = torch.load(tmp_path / "optimizer_expected.pt", weights_only=False)["state"]
    averages = [entry["exp_avg"] for entry in theirs.values() if entry["exp_avg"].shape == (32, 96)]
    assert any(torch.equal(average[:, :32].T, query["exp_avg"]) for average in averages)


def test_names_as_they_are_and_no_optimizer_where_not_asked_for(models, tmp_path):
    run(TWO + f"""
model, optimizer = session("gpt2", {settings(LAYOUTS[0][0])})
steps(model, optimizer, 0, 1)
smp.save_checkpoint(FOLDER + "/ck", "m", partial=False, model=model, optimizer=optimizer, translate_if_full=False)
""", 2, models, tmp_path)
    assert sorted(os.listdir(tmp_path / "ck")) == ["hf", "m", "newest"]
    whole = torch.load(tmp_path / "ck" / "m", weights_only=True)
    assert "transformer.seq_layers.1.attention.query.weight" in whole and "word_embedding.weight" in whole


BACKGROUND = TWO + """
model, optimizer = session("gpt2", %s)
steps(model, optimizer, 0, 2)
before = digest(model.state_dict())
smp.save_checkpoint(FOLDER + "/ck", "a", %s model=model, optimizer=optimizer, user_content={"step": 2}, blocking=False)
steps(model, optimizer, 2, 2)   # goes on at once: what is saved is what was there at the call
"""


@pytest.mark.parametrize("kind", ["", "partial=False,"])
@pytest.mark.parametrize("layout, ranks", [LAYOUTS[0], LAYOUTS[1], ((1, 1, {}), 1)])
def test_a_save_in_the_background_has_the_values_of_the_call(models, tmp_path, layout, ranks, kind):
    found = run(BACKGROUND % (settings(layout), kind) + f"""
smp.wait_for_checkpoint()
smp.wait_for_checkpoint()
results["content"] = smp.resume_from_checkpoint(FOLDER + "/ck", partial={not kind})
results["same"] = digest(model.state_dict()) == before
results["memory"] = smp.state.saving._thread.memory
""", ranks, models, tmp_path)
    assert all(rank["content"] == {"step": 2} and rank["same"] and rank["memory"] > 0 for rank in found)


def test_a_script_that_ends_while_a_save_runs_finishes_it(models, tmp_path):
    run(BACKGROUND % (settings(LAYOUTS[0][0]), ""), 2, models, tmp_path, fresh=True)
    assert (tmp_path / "ck" / "newest").read_text() == "a_partial\n"
    assert (tmp_path / "ck" / "a_partial" / "manifest.json").exists()


def test_a_failure_in_the_background_is_told_at_the_next_call_and_at_the_end(models, tmp_path):
    """The folder is taken by a file of somebody else's: found out by rank 0, when the caller has gone on."""
    for ends in (False, True):
        folder = tmp_path / str(ends)
        (folder / "ck").mkdir(parents=True)
        (folder / "ck" / "a_partial").mkdir()
        (folder / "ck" / "a_partial" / "mine").write_text("x")
        body = BACKGROUND % (settings(LAYOUTS[0][0]), "")
        if ends:
            ranks = Ranks(body, 2, models, folder, fresh=True).wait()
            assert all(code == 1 and "was being saved when the script ended is not there" in text
                       and "is no checkpoint of ours" in text for code, text in ranks)
            continue
        found = run(body + """
results["wait"] = refusal(smp.wait_for_checkpoint)
results["again"] = refusal(smp.wait_for_checkpoint)
smp.save_checkpoint(FOLDER + "/ck", "a", model=model, blocking=False)
results["next"] = refusal(smp.save_checkpoint, FOLDER + "/ck", "b", model=model)
smp.save_checkpoint(FOLDER + "/ck", "b", model=model)
""", 2, models, folder)
        for rank in found:
            assert rank["wait"][0] == "invalid_argument" and "rank 0: " in rank["wait"][1]
            assert rank["again"] is None and rank["next"] == rank["wait"]
        assert (folder / "ck" / "newest").read_text() == "b_partial\n"


def test_saves_one_after_the_other(models, tmp_path):
    found = run(TWO + f"""
model, optimizer = session("gpt2", {settings(LAYOUTS[1][0])})
steps(model, optimizer, 0, 1)
for number in range(4):
    smp.save_checkpoint(FOLDER + "/ck", f"w{{number}}", model=model, optimizer=optimizer, blocking=False)
    smp.save_checkpoint(FOLDER + "/ck", f"s{{number}}", model=model, optimizer=optimizer, blocking=False, if_busy="skip")
smp.save_checkpoint(FOLDER + "/ck", "last.pt", partial=False, model=model)
results["names"] = sorted(os.listdir(FOLDER + "/ck"))
results["refused"] = [refusal(smp.save_checkpoint, FOLDER + "/ck", "x", if_busy="maybe"),
                      refusal(smp.save_checkpoint, FOLDER + "/ck", "x", partial=False),
                      refusal(smp.save_checkpoint, FOLDER + "/ck", "x", model=model, partial=RANK == 0)]
""", 2, models, tmp_path)
    names = found[0]["names"]
    assert {f"w{number}_partial" for number in range(4)} | {"last.pt", "newest", "hf"} <= set(names)
    assert not [name for name in names if name.startswith(".")]
    assert json.dumps(found[0]["refused"]) == json.dumps(found[1]["refused"]) or found[0]["refused"][0] == found[1]["refused"][0]
    assert "it can be 'wait' or 'skip'" in found[0]["refused"][0][1]
    assert "needs model" in found[0]["refused"][1][1]
    assert "rank 1 calls save_checkpoint with partial=False, but rank 0 with partial=True" in found[0]["refused"][2][1]


def test_a_tensor_that_changes_while_it_is_copied_is_no_snapshot(models, tmp_path):
    found = run(TWO + f"""
from shardsmith.smp import background
model, optimizer = session("gpt2", {settings(((1, 1, {}))) })
steps(model, optimizer, 0, 1)
real, calls = background._versions, []
def racing(tensors):
    calls.append(1)
    if len(calls) == 2:  # another thread wrote into one in the meantime
        with torch.no_grad():
            tensors[0].add_(1)
    return real(tensors)
background._versions = racing
results["torn"] = refusal(smp.save_checkpoint, FOLDER + "/ck", "a", model=model, blocking=False)
results["exists"] = os.path.exists(FOLDER + "/ck/newest")
""", 1, models, tmp_path)
    assert "were changed by another thread while they were copied" in found[0]["torn"][1] and not found[0]["exists"]
