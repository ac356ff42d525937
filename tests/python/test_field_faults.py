"""Faults that people have met with tools of this kind, heading by heading: what is right is shown here, or by the tests
named in SHOWN_BY."""
import os
import re
import stat
from pathlib import Path

import pytest

from smp_helpers import make_models, run
from test_resume import HEAD

TESTS = Path(__file__).resolve().parents[1]

# heading: {what is right: tests}. "Suite.Name" is one of tests/core, "file::name" one of tests/python.
SHOWN_BY = {
    "Crash half-way, pointer": {
        "killed at any instant, the old or the new state is seen, whole": ["Kill.AtEveryCallOfASaveWithRanksAsThreads",
                                                                          "ProcessKill.PartialSaves"],
        "the pointer and the pruning come after the data are durable": ["Kill.PowerIsCutAtEveryCall"],
        "several files of one checkpoint are one unit": ["Find.FilesOfTwoSavesAreNoCheckpoint",
                                                         "test_cli_verify::test_a_full_checkpoint_is_checked_with_its_companions"],
        "0-byte files after a power failure are passed over": ["test_field_faults::test_incomplete_ones_are_passed_over_and_said"],
        "a directory with a step's name is not yet a checkpoint": ["test_field_faults::test_incomplete_ones_are_passed_over_and_said"],
    },
    "Races and hangs": {
        "two writers of one directory": ["ProcessKill.PartialSaves"],
        "different tags or paths are detected and named": ["Save.RanksThatDisagreeAreNamedBeforeAnythingIsWritten",
                                                           "Save.AnEmptyPathOrABadTagOnOneRankIsEverybodysError",
                                                           "test_resume::test_ranks_that_ask_for_different_things",
                                                           "test_field_faults::test_ranks_that_disagree_or_stay_away"],
        "a save on one rank only names the absent ones": ["Save.AnAbsentRankIsNamedInTime",
                                                          "test_field_faults::test_ranks_that_disagree_or_stay_away"],
        "a gather on one rank only names the absent ones": ["test_state_dicts::test_a_missing_rank_is_named_in_time"],
        "a rank that fails to read is everybody's error": ["test_field_faults::test_a_rank_that_fails_to_read_is_everybodys_error",
                                                           "Save.ARankThatFailsToReadItsTensorIsEverybodysError"],
        "a slow or dead rank is named": ["Save.ARankThatIsLateWhileWritingIsNamedAndTheNextSaveSweeps",
                                         "test_smp::test_a_dead_or_stalled_rank_is_named_in_time"],
        "tensor-parallel shards are written by reduced-data-parallel rank 0": [
            "test_field_faults::test_every_slice_has_a_writer"],
    },
    "Retention and order": {
        "keep all, keep one, and the one just saved": ["Prune.KeepsTheNewestAndWhatWasJustSaved", "test_field_faults::test_retention"],
        "several pruning at once, files that vanish": ["RemoveCheckpoints.AnErrorAtAnyCallLeavesEachWholeOrNameless"],
        "the pointer is a bare name; a dangling one falls back": ["test_field_faults::test_a_moved_folder_resumes",
                                                                 "test_resume::test_what_is_resumed_from"],
        "order by step and time, never by name": ["Scan.OrdersByStepAndNotByName", "test_field_faults::test_retention"],
        "a folder without our manifest is never pruned": ["test_field_faults::test_retention",
                                                          "Save.AForeignFolderOfThatNameIsLeftAlone"],
    },
    "Tied and shared weights": {
        "stored once, and both come back": ["test_smp::test_a_checkpoint_is_plain_files_that_torch_opens",
                                            "test_state_dicts::test_the_whole_is_what_one_process_would_have"],
        "ties by identity, not by address or value": ["test_field_faults::test_equal_values_and_flat_buffers_are_no_ties"],
        "slices of one flat buffer are not aliases": ["test_field_faults::test_equal_values_and_flat_buffers_are_no_ties",
                                                      "test_user_content::test_tensors_that_share_memory_go_on_sharing_it"],
        "an export has one copy": ["test_cli::test_export_gpt2_from_any_layout", "Family.ATiedTensorMayStandUnderItsOtherNameOnly"],
    },
    "Another partition": {
        "replicated parameters are taken once": ["test_convert::test_a_key_value_head_for_several_ranks_stands_once",
                                                 "test_state_dicts::test_the_whole_is_what_one_process_would_have"],
        "vocabulary padding never gets out": ["test_field_faults::test_a_vocabulary_that_the_degree_does_not_divide"],
        "optimizer state moves to any data-parallel size": ["test_round_trips::test_some_pairs",
                                                            "test_round_trips::test_every_pair"],
        "each layer lands once": ["Partition.EachLayerLandsOnceForAnyNumbers", "Partition.TenLayersOnThreeStages",
                                  "Partition.TooFewLayersNameBothNumbers"],
        "half of the files: an error that lists the others": ["test_field_faults::test_missing_files_are_listed"],
        "fused weights are stored in their logical layout": ["test_convert::test_from_layout_to_layout"],
        "there and back is the identity": ["test_families::test_split_and_exported", "test_cli::test_export_llama_is_bit_equal"],
        "biases are added once": ["test_tensor_parallel::test_losses_are_those_of_one_process"],
    },
    "Translation": {
        "heads, transposed matrices, rows": ["test_families::test_resharded_by_columns_rows_and_heads",
                                             "Family.Gpt2QueryKeyValueAreColumnsOfTheFusedMatrix"],
        "known buffers are ignored, all else is strict": ["Family.MissingWrongTwiceAndUnexpectedTensorsAreNamed",
                                                          "test_resume::test_strictness"],
        "outputs are those of the other tool": ["test_family_training::test_losses_outputs_and_gradients_are_transformers"],
    },
    "Optimizer state": {
        "duplicates are named at once": ["test_precision::test_parameters_without_gradient_and_duplicates"],
        "by name: one without state shifts nothing, groups keep their own": [
            "test_field_faults::test_state_by_name_with_frozen_and_untouched_parameters"],
        "a half-present state is an error": ["test_field_faults::test_half_of_a_state_is_an_error"],
        "never a shape of [0]": ["test_field_faults::test_state_by_name_with_frozen_and_untouched_parameters"],
        "state of another optimizer is refused": ["test_resume::test_state_by_position_goes_to_the_same_optimizer_only"],
    },
    "Training state": {
        "learning-rate schedule": ["test_user_content::test_schedulers_state"],
        "loss scale with all counters": ["test_field_faults::test_the_loss_scale_goes_on_with_its_counters",
                                         "test_loss_scale::test_goes_on_from_its_saved_counters"],
        "masters": ["test_precision::test_three_steps_saved_and_three_more_are_six"],
        "each rank's random numbers": ["test_smp::test_resuming_gives_the_bits_of_an_uninterrupted_run"],
        "more ranks: reseeded, with a warning": ["test_field_faults::test_more_ranks_than_saved_are_reseeded"],
        "the order of the data": ["test_field_faults::test_the_data_go_on_where_they_were_in_any_layout",
                                  "test_data::test_an_update_takes_the_same_samples_in_every_layout"],
    },
    "Files": {
        "a slice of a large tensor is written small, and sharing kept": [
            "test_user_content::test_tensors_that_share_memory_go_on_sharing_it", "test_formats::test_sharing_survives"],
        "a file cut in half is an error": ["Pt.EveryPrefixIsRefused", "Safetensors.EveryPrefixIsRefusedAndEveryFlippedByteHandled"],
        "an overwrite removes its own old files": ["Save.TheSameTagAgainReplacesIt", "test_state_dicts::test_files"],
        "a lossy cast warns": ["test_resume::test_strictness"],
    },
    "Memory and speed": {
        "a rank takes its own slice": ["test_memory::test_loading_takes_the_own_slices_and_little_more"],
    },
    "Security": {
        "paths out of the folder": ["Hf.PathsOutOfTheFolderAreRefusedUnopened"],
        "a pickle runs nothing": ["test_formats::test_nothing_in_a_pickle_is_executed", "test_state_dicts::test_files"],
        "a restricted load opens every file": ["test_smp::test_a_checkpoint_is_plain_files_that_torch_opens"],
    },
    "Storage": {
        "errors of the disk roll back": ["Kill.EveryCallMayFail", "Save.TooLittleSpaceIsFoundOutBeforeWriting"],
        "permissions are those of the umask": ["test_field_faults::test_files_have_the_permissions_of_the_umask"],
        "damage is named with its tensor": ["test_field_faults::test_damage_is_named_with_its_tensor",
                                            "Verify.EveryFlippedByteOfATensorIsFoundAndNamed"],
    },
    "Silent partial load": {
        "strict stays strict, prefixes are taken off, no match is an error": ["test_resume::test_strictness",
                                                                              "test_resume::test_what_other_tools_wrote_goes_on"],
    },
}


def existing_tests():
    found = set()
    for file in (TESTS / "core").glob("*.cc"):
        found |= {f"{suite}.{name}" for suite, name in re.findall(r"^TEST(?:_F|_P)?\((\w+),\s*(\w+)\)", file.read_text(), re.M)}
    for file in (TESTS / "python").glob("test_*.py"):
        found |= {f"{file.stem}::{name}" for name in re.findall(r"^def (test_\w+)\(", file.read_text(), re.M)}
    return found


def test_the_table_names_tests_that_there_are():
    found = existing_tests()
    named = [name for entries in SHOWN_BY.values() for names in entries.values() for name in names]
    assert len(found) > 300 and [name for name in named if name not in found] == []
    assert all(names for entries in SHOWN_BY.values() for names in entries.values())
    own = {f"test_field_faults::{name}" for name in globals() if name.startswith("test_")} - {
        "test_field_faults::test_the_table_names_tests_that_there_are"}
    assert own <= set(named), "every test of this file stands under a heading"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


# Crash half-way, pointer.
THREE = HEAD + """
model, optimizer = session("gpt2")
for step in range(3):
    steps(model, optimizer, step, 1)
    smp.save_checkpoint(FOLDER + "/../ck", f"t{step + 1}", model=model, optimizer=optimizer, user_content={"step": step + 1})
"""


def test_incomplete_ones_are_passed_over_and_said(models, tmp_path):
    run(THREE, 1, models, tmp_path / "save")
    ck = tmp_path / "ck"
    for file in (ck / "t3_partial").glob("*.pt"):
        file.write_bytes(b"")  # as a power failure leaves them
    (ck / "t4_partial").mkdir()
    (ck / "t4_partial" / "model_0_0.pt").write_bytes((ck / "t2_partial" / "model_0_0.pt").read_bytes())
    (found,) = run(HEAD + """
model, optimizer = session("gpt2", 1)
results["content"] = smp.resume_from_checkpoint(FOLDER + "/../ck")
results["told"] = told()
results["said"] = [line for line in said if line.startswith("passed over")]
results["asked"] = refusal(smp.resume_from_checkpoint, FOLDER + "/../ck", "t3")
results["no manifest"] = refusal(smp.resume_from_checkpoint, FOLDER + "/../ck", "t4")
""", 1, models, tmp_path / "resume")
    assert found["content"] == {"step": 2} and found["told"]["step"] == 2
    assert any("t3_partial" in line and "0 bytes" in line for line in found["told"]["passed_over"])
    assert len(found["said"]) == len(found["told"]["passed_over"]) >= 1
    assert found["asked"][0] == "corrupt" and "0 bytes" in found["asked"][1] and found["no manifest"][0] == "corrupt"


# Races and hangs.
def test_ranks_that_disagree_or_stay_away(models, tmp_path):
    found = run(HEAD + """
model, optimizer = session("gpt2", 2, peer_timeout=8)
steps(model, optimizer, 0, 1)
results["tags"] = refusal(smp.save_checkpoint, FOLDER + "/ck", f"tag{RANK}", model=model)
results["paths"] = refusal(smp.save_checkpoint, FOLDER + f"/ck{RANK}", "tag", model=model)
results["written"] = [name for name in os.listdir(FOLDER) if name.startswith("ck") and os.listdir(FOLDER + "/" + name)]
smp.barrier()
on_rank_0_alone(lambda: results.update(alone=refusal(smp.save_checkpoint, FOLDER + "/ck", "tag", model=model)))
finish()
os._exit(0)
""", 2, models, tmp_path)
    for rank in found:
        assert rank["tags"][0] == "invalid_argument" and "tag0" in rank["tags"][1] and "tag1" in rank["tags"][1]
        assert rank["paths"][0] == "invalid_argument" and "ck0" in rank["paths"][1] and "ck1" in rank["paths"][1]
        assert rank["written"] == []
    assert found[0]["alone"][0] in ("timeout", "peer") and "rank 1" in found[0]["alone"][1] and found[0]["seconds"] < 16


def test_a_rank_that_fails_to_read_is_everybodys_error(models, tmp_path):
    run(THREE, 2, models, tmp_path / "save")
    found = run(HEAD + """
from shardsmith import _core
model, optimizer = session("gpt2", 2, peer_timeout=20)
original = _core.read_partial
def broken(folder):
    if RANK == 1:
        raise Error("io", folder + ": Input/output error")
    return original(folder)
_core.read_partial = broken
begin = time.monotonic()
results["error"] = refusal(smp.resume_from_checkpoint, FOLDER + "/../ck")
_core.read_partial = original
results["content"] = smp.resume_from_checkpoint(FOLDER + "/../ck")
results["seconds"] = time.monotonic() - begin
""", 2, models, tmp_path / "resume")
    for rank in found:
        assert rank["error"][0] == "io" and "Input/output error" in rank["error"][1] and rank["seconds"] < 10
        assert rank["content"] == {"step": 3}, "and they may go on together"
    assert "rank 1" in found[0]["error"][1]


def test_every_slice_has_a_writer(models, tmp_path):
    """2 slices, 2 replicas: where only data-parallel rank 0 wrote, slice 1 would be missing."""
    run(HEAD + """
model, optimizer = session("gpt2", 1, tensor_parallel_degree=2, ddp=True)
steps(model, optimizer, 0, 1)
smp.save_checkpoint(FOLDER + "/ck", "t", model=model, optimizer=optimizer)
sd = model.state_dict()
if RANK == 0:
    torch.save(sd, FOLDER + "/whole.pt")
""", 4, models, tmp_path)
    names = sorted(path.name for path in (tmp_path / "ck/t_partial").glob("*_[0-9]_[0-9].pt"))
    assert names == ["model_0_0.pt", "model_0_1.pt", "optimizer_0_0.pt", "optimizer_0_1.pt"]
    (found,) = run(HEAD + """
model, optimizer = session("gpt2", 1)
smp.resume_from_checkpoint(FOLDER + "/../ck")
whole = torch.load(FOLDER + "/../whole.pt", weights_only=True)
results["same"] = all(p.equal(whole[n]) for n, p in model.local_named_parameters())
""", 1, models, tmp_path / "one")
    assert found["same"]


# Retention and order.
def test_retention(models, tmp_path):
    (found,) = run(HEAD + """
model, optimizer = session("gpt2", 1)
steps(model, optimizer, 0, 1)
def save(folder, tag, step, keep):
    state.optimizer_steps = step
    smp.save_checkpoint(FOLDER + "/" + folder, tag, model=model, num_kept_partial_checkpoints=keep)
    results.setdefault(folder, []).append(sorted(name for name in os.listdir(FOLDER + "/" + folder) if not name.startswith(".")))
for keep in (None, -1):
    for number in range(3):
        save(f"all{keep}", f"t{number}", number, keep)
os.makedirs(FOLDER + "/one/foreign_partial")
os.makedirs(FOLDER + "/one/step7_partial/sub")
for tag, step in (("z", 1), ("a", 2), ("m", 3)):
    save("one", tag, step, 1)
# An older run has left higher numbers; a tag without a number counts like any other.
for tag, step in (("step900", 900), ("step800", 800), ("best", 850)):
    save("older", tag, step, None)
save("older", "step5", 5, 2)
with open(FOLDER + "/older/newest") as file:
    results["newest"] = file.read()
results["resumed"] = [smp.resume_from_checkpoint(FOLDER + "/older"), state.load_report.source]
""", 1, models, tmp_path)
    for keep in (None, -1):
        assert found[f"all{keep}"][-1] == ["hf", "newest", "t0_partial", "t1_partial", "t2_partial"]
    assert found["one"][-1] == ["foreign_partial", "hf", "m_partial", "newest", "step7_partial"]
    assert "step5_partial" in found["older"][-1] and "step900_partial" in found["older"][-1], "the one just saved, and the newest"
    assert "step800_partial" not in found["older"][-1] and "best_partial" not in found["older"][-1]
    assert found["newest"].strip() == "step5_partial" and found["resumed"][1].endswith("step5_partial")


def test_a_moved_folder_resumes(models, tmp_path):
    run(THREE, 1, models, tmp_path / "save")
    assert (tmp_path / "ck/newest").read_text() == "t3_partial\n"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "ck").rename(tmp_path / "elsewhere/moved")
    (found,) = run(HEAD + """
model, optimizer = session("gpt2", 1)
results["content"] = smp.resume_from_checkpoint(FOLDER + "/../elsewhere/moved")
with open(FOLDER + "/../elsewhere/moved/newest", "w") as file:
    file.write("newest")  # itself
results["itself"] = smp.resume_from_checkpoint(FOLDER + "/../elsewhere/moved")
with open(FOLDER + "/../elsewhere/moved/newest", "w") as file:
    file.write("../moved/t1_partial")  # no bare name
results["path"] = smp.resume_from_checkpoint(FOLDER + "/../elsewhere/moved")
""", 1, models, tmp_path / "resume")
    assert found["content"] == found["itself"] == found["path"] == {"step": 3}


# Tied and shared weights.
def test_equal_values_and_flat_buffers_are_no_ties(models, tmp_path):
    run(HEAD + """
start(2, 2)
module = plain("untied")
with torch.no_grad():
    module.lm_head.weight.copy_(module.model.embed_tokens.weight)  # equal, and yet two
parameters = list(module.parameters())
flat = torch.cat([p.detach().reshape(-1) for p in parameters])
at = 0
for p in parameters:  # all in one buffer
    p.data = flat[at:at + p.numel()].view_as(p)
    at += p.numel()
torch.save({n: p.detach().clone() for n, p in module.named_parameters()}, FOLDER + f"/reference{RANK}.pt")
model = smp.DistributedModel(module)
train_step(model, mine(ids_of(0)))
smp.save_checkpoint(FOLDER + "/ck", "t", model=model)
""", 2, models, tmp_path)
    (found,) = run(HEAD + """
model = session("untied", 1, optimizer=False, delayed=False)
with torch.no_grad():
    model.get_module().lm_head.weight.add_(1)
smp.resume_from_checkpoint(FOLDER + "/../ck")
reference = torch.load(FOLDER + "/../reference0.pt", weights_only=True)
results["same"] = all(p.equal(reference[n]) for n, p in model.local_named_parameters())
results["two"] = model.get_module().lm_head.weight.data_ptr() != model.get_module().model.embed_tokens.weight.data_ptr()
results["tied"] = state.load_report.tied
""", 1, models, tmp_path / "resume")
    assert found["same"] and found["two"] and found["tied"] == []
    assert sum(path.stat().st_size for path in (tmp_path / "ck/t_partial").glob("model_*.pt")) < 3 * (tmp_path / "reference0.pt").stat().st_size


# Another partition.
def test_a_vocabulary_that_the_degree_does_not_divide(models, tmp_path):
    body = HEAD + """
from transformers import GPT2Config, GPT2LMHeadModel
state.reset()
start(1, 2, tensor_parallel_degree=TP, ddp=True, prescaled_batch=True)
torch.manual_seed(3)
with smp.model_creation(tensor_parallelism=TP > 1):
    module = GPT2LMHeadModel(GPT2Config(vocab_size=113, n_embd=32, n_layer=2, n_head=2, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
model = smp.DistributedModel(module).train()
optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
results["losses"] = []
for step in range(2):
    optimizer.zero_grad()
    results["losses"].append(float(train_step(model, ids_of(step)).reduce_mean()))
    optimizer.step()
results["rows"] = [len(model.state_dict()["transformer.wte.weight"]), len(model.state_dict()["lm_head.weight"])]
smp.save_checkpoint(FOLDER + "/ck", "t", model=model)
smp.resume_from_checkpoint(FOLDER + "/ck")
results["padded"] = state.load_report.padded
"""
    (one,) = run(body.replace("TP", "1"), 1, models, tmp_path / "one")
    for rank in run(body.replace("TP", "2"), 2, models, tmp_path / "two"):
        assert rank["losses"] == pytest.approx(one["losses"], rel=1e-5)
        assert rank["rows"] == [113, 113] == one["rows"] and rank["padded"] == []
    import torch

    parts = [torch.load(tmp_path / f"two/ck/t_partial/model_0_{tp}.pt", weights_only=True)["word_embedding.weight"] for tp in range(2)]
    assert sum(map(len, parts)) == 113


def test_missing_files_are_listed(models, tmp_path):
    """Half of the files on another machine's disk."""
    run(THREE, 2, models, tmp_path / "save")
    for name in ("model_1_0.pt", "optimizer_1_0.pt", "rng_1.pt"):
        (tmp_path / "ck/t3_partial" / name).unlink()
    found = run(HEAD + """
model, optimizer = session("gpt2", 2)
results["error"] = refusal(smp.resume_from_checkpoint, FOLDER + "/../ck", "t3", strict=False)
results["itself"] = refusal(smp.resume_from_checkpoint, FOLDER + "/../ck/t3_partial")
""", 2, models, tmp_path / "resume")
    for rank in found:
        for error in (rank["error"], rank["itself"]):
            assert error[0] == "corrupt"
            assert all(name in error[1] for name in ("model_1_0.pt", "optimizer_1_0.pt", "rng_1.pt")), error


# Optimizer state.
def test_state_by_name_with_frozen_and_untouched_parameters(models, tmp_path):
    """Frozen parameters are saved; one without a gradient has no state, and shifts nobody's; groups keep lr and betas."""
    body = HEAD + """
model = session("gpt2", PP, optimizer=False)
names = {id(p): n for n, p in model.get_module().named_parameters()}
for n, p in model.get_module().named_parameters():
    p.requires_grad_("h.1." not in n)
ps = list(model.get_module().parameters())
optimizer = smp.DistributedOptimizer(torch.optim.AdamW([{"params": ps[::2], "lr": LR[0], "betas": BETAS[0]},
                                                        {"params": ps[1::2], "lr": LR[1], "betas": BETAS[1]}]))
def run_steps(begin, count):
    for step in range(begin, begin + count):
        optimizer.zero_grad()
        train_step(model, mine(ids_of(step)))
        for p in model.local_parameters():
            if names.get(id(p)) == "transformer.h.2.ln_1.bias":
                p.grad = None  # never updated
        optimizer.step()
if RESUME:
    smp.resume_from_checkpoint(FOLDER + "/../ck")
    results["groups"] = [[g["lr"], list(g["betas"])] for g in optimizer.param_groups]
    model.partition()
    results["states"] = {n: sorted(optimizer.state.get(p, {})) for n, p in model.local_named_parameters()}
    reference = torch.load(FOLDER + "/../whole.pt", weights_only=True)
    whole = torch.load(FOLDER + "/../optimizer.pt", weights_only=True)
    by_name = {n: whole["state"].get(i) for g in whole["param_groups"] for i, n in zip(g["params"], g["param_names"])}
    results["same"] = all(p.equal(reference[n]) and (by_name[n] is None or optimizer.state[p]["exp_avg_sq"].equal(by_name[n]["exp_avg_sq"]))
                          for n, p in model.local_named_parameters())
else:
    run_steps(0, 2)
    smp.save_checkpoint(FOLDER + "/../ck", "t", model=model, optimizer=optimizer)
    sd, osd = model.state_dict(), optimizer.state_dict()
    if RANK == 0:
        smp.save(sd, FOLDER + "/../whole.pt", partial=False)
        smp.save(osd, FOLDER + "/../optimizer.pt", partial=False)
"""
    first = body.replace("PP", "2").replace("LR", "(0.01, 0.02)").replace("BETAS", "((0.8, 0.9), (0.7, 0.95))").replace("RESUME", "False")
    run(first, 2, models, tmp_path / "save")
    import torch

    tensors = {}
    for file in (tmp_path / "ck/t_partial").glob("model_*.pt"):
        tensors |= torch.load(file, weights_only=True)
    assert "transformer.seq_layers.1.attention.query.weight" in tensors, "frozen ones are there"
    for file in (tmp_path / "ck/t_partial").glob("*_[0-9]_0.pt"):
        stack = [torch.load(file, weights_only=True)]
        while stack:
            value = stack.pop()
            if isinstance(value, torch.Tensor):
                assert 0 not in value.shape
            elif isinstance(value, (dict, list)):
                stack += value.values() if isinstance(value, dict) else value
    again = body.replace("PP", "1").replace("LR", "(1, 1)").replace("BETAS", "((0.1, 0.1), (0.1, 0.1))").replace("RESUME", "True")
    (found,) = run(again, 1, models, tmp_path / "resume")
    assert found["groups"] == [[0.01, [0.8, 0.9]], [0.02, [0.7, 0.95]]] and found["same"]
    for name, keys in found["states"].items():
        untouched = ".h.1." in name or name == "transformer.h.2.ln_1.bias"
        assert keys == ([] if untouched else ["exp_avg", "exp_avg_sq", "step"]), name


def test_half_of_a_state_is_an_error(models, tmp_path):
    (found,) = run(HEAD + """
model, optimizer = session("gpt2", 1)
steps(model, optimizer, 0, 1)
names = {id(p): n for n, p in model.local_named_parameters()}
victim = next(p for p in model.local_parameters() if names[id(p)] == "transformer.h.2.mlp.c_fc.weight")
del optimizer.state[victim]["exp_avg_sq"]
smp.save_checkpoint(FOLDER + "/ck", "t", model=model, optimizer=optimizer)
model, optimizer = session("gpt2", 1)
results["error"] = refusal(smp.resume_from_checkpoint, FOLDER + "/ck")
""", 1, models, tmp_path)
    kind, text = found["error"]
    assert kind == "corrupt" and "seq_layers.2.output.dense1.weight" in text and "has exp_avg but not exp_avg_sq" in text


# Training state.
def test_the_loss_scale_goes_on_with_its_counters(models, tmp_path):
    body = HEAD + """
def make():
    model = session("gpt2", 2, optimizer=False, fp16=True)
    return model, smp.DistributedOptimizer(torch.optim.AdamW(groups_of(model.get_module()), lr=1e-3), dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 2.0**30, "scale_window": 3, "delayed_shift": 2, "min_scale": 4})
def go_on(begin, count):
    trace = []
    for step in range(begin, begin + count):
        optimizer.zero_grad()
        loss = train_step(model, mine(ids_of(step))).reduce_mean()
        optimizer.step()
        trace.append([float(loss), optimizer.loss_scale, *optimizer.loss_scaler.state(), optimizer.overflow])
    return trace
model, optimizer = make()
results["before"] = go_on(0, 9)
smp.save_checkpoint(FOLDER + "/ck", "t", model=model, optimizer=optimizer)
results["whole"] = go_on(9, 9)
model, optimizer = make()
smp.resume_from_checkpoint(FOLDER + "/ck")
results["scale"] = [optimizer.loss_scale, *optimizer.loss_scaler.state()]
results["resumed"] = go_on(9, 9)
"""
    for rank in run(body, 2, models, tmp_path):
        assert rank["scale"] == rank["before"][-1][1:-1]
        assert rank["resumed"] == rank["whole"]
        assert any(row[-1] for row in rank["before"]) and len({tuple(row[1:]) for row in rank["whole"]}) > 2, "something happens"


def test_more_ranks_than_saved_are_reseeded(models, tmp_path):
    run(THREE, 1, models, tmp_path / "save")
    body = HEAD + """
model, optimizer = session("gpt2", 1)
torch.manual_seed(int(time.time_ns()) & 0xffff)
smp.resume_from_checkpoint(FOLDER + "/../ck")
results["draws"] = [torch.rand(2).tolist(), random.random()]
results["told"] = told()
results["said"] = [line for line in said if "seeded anew" in line]
results["losses"] = steps(model, optimizer, 3, 1)
"""
    first = run(body, 2, models, tmp_path / "first")
    again = run(body, 2, models, tmp_path / "again")
    (one,) = run(body, 1, models, tmp_path / "one")
    assert [rank["draws"] for rank in first] == [rank["draws"] for rank in again], "as a function of step and rank"
    assert first[0]["draws"] != first[1]["draws"]
    assert all(rank["told"]["reseeded"] and "reseeded" in rank["told"]["line"] for rank in first)
    assert len(first[0]["said"]) == 1 and first[1]["said"] == [] and one["said"] == [] and not one["told"]["reseeded"]
    assert first[0]["losses"] == pytest.approx(one["losses"], rel=1e-5)


def test_the_data_go_on_where_they_were_in_any_layout():
    """What remains of an epoch after a save, each sample once, whatever the number of replicas before and after."""
    from shardsmith.finetune.data import Order, batch_positions

    order = Order(48, 7)
    for before, after in ((1, 4), (4, 1), (2, 4), (4, 3)):
        consumed, seen = 0, []
        for replicas, updates in ((before, 2), (after, 10**9)):
            batch = 12 // replicas
            while consumed < 48 and updates:
                for replica in range(replicas):
                    seen += order.take(batch_positions(consumed, 0, replica, replicas, batch), batch)
                consumed, updates = consumed + 12, updates - 1
        assert seen == order.take(0, 48) and sorted(seen) == list(range(48))


# Storage.
def test_files_have_the_permissions_of_the_umask(models, tmp_path):
    run(HEAD + """
os.umask(0o027)
os.chmod(MODELS + "/gpt2/config.json", 0o444)
model = load("gpt2")  # a source that is read-only
""".replace("model = load", "start(1)\nmodel = load") + """
optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
steps(model, optimizer, 0, 1)
smp.save_checkpoint(FOLDER + "/ck", "t", model=model, optimizer=optimizer, user_content={"a": 1})
smp.save({"a": torch.ones(2)}, FOLDER + "/s.pt")
""", 1, models, tmp_path)
    files = [path for path in [*(tmp_path / "ck").rglob("*"), tmp_path / "s.pt_0_0"] if path.is_file()]
    assert len(files) > 7
    assert {oct(stat.S_IMODE(os.stat(path).st_mode)) for path in files} == {"0o640"}


def test_damage_is_named_with_its_tensor(models, tmp_path):
    run(THREE, 1, models, tmp_path / "save")
    file = tmp_path / "ck/t3_partial/model_0_0.pt"
    data = bytearray(file.read_bytes())
    import torch

    # Where the bytes of one tensor lie: found by its own bytes.
    tensor = torch.load(file, weights_only=True)["transformer.seq_layers.2.output.dense1.weight"]
    at = bytes(data).index(tensor.numpy().tobytes()[:64]) if tensor.is_contiguous() else bytes(data).index(
        tensor.t().contiguous().numpy().tobytes()[:64])
    data[at + 5] ^= 1
    file.write_bytes(data)
    (found,) = run(HEAD + """
model, optimizer = session("gpt2", 1)
results["error"] = refusal(smp.resume_from_checkpoint, FOLDER + "/../ck", "t3")
""", 1, models, tmp_path / "resume")
    kind, text = found["error"]
    assert kind == "corrupt" and "model_0_0.pt" in text and "checksum" in text.lower(), text
