"""Ranks of a training die while they save, at a sampled call into the file system. The others end in time with an error
that names the dead one; `ls`, `verify` and a resume find the old or the new state, whole, and the next save goes through."""
import json
import random
import re
import subprocess

import pytest

import storage_calls
from smp_helpers import Ranks, make_models, run, with_names
from test_cli import PROGRAM
from test_state_dicts import TWO

KINDS = {
    "partial": "model=model, optimizer=optimizer, user_content=content",
    "full": "partial=False, model=model, optimizer=optimizer, user_content=content, optimizer_if_full=True",
    "partial in the background": "model=model, optimizer=optimizer, user_content=content, blocking=False",
    "full in the background": "partial=False, model=model, optimizer=optimizer, user_content=content, optimizer_if_full=True, "
                              "blocking=False",
}
# Tags saved before, and that of the save that dies.
SCENARIOS = {"a first save": ([], "a"), "an overwrite": (["a"], "a"), "another one, with retention": (["a"], "b")}
VICTIMS = ("0", "1", "both")
PEER_TIMEOUT = 6

HEAD = TWO + storage_calls.HEAD + f"""
KINDS, SCENARIOS = {KINDS!r}, {SCENARIOS!r}

def begin():
    return session("gpt2", pp=2, ddp=True, peer_timeout=LIMIT)

def save(folder, kind, tag, content):
    smp.save_checkpoint(folder, tag, num_kept_partial_checkpoints=1 if tag == "b" else None,
                        **eval(f"dict({{KINDS[kind]}})", globals() | {{"content": content}}))
    if "background" in kind:
        smp.wait_for_checkpoint()

def local_digest():
    return digest(dict(model.local_named_parameters()))

def until_the_save(folder, kind, scenario):
    # State "old" after one step, saved where the scenario says so; "new" after two.
    global model, optimizer
    model, optimizer = begin()
    steps(model, optimizer, 0, 1)
    old = local_digest()
    for tag in SCENARIOS[scenario][0]:
        save(folder, kind, tag, "old")
    losses.extend(steps(model, optimizer, 1, 1))
    return old, local_digest()
losses = []
"""

COUNTS = HEAD + """
for kind in KINDS:
    for scenario in SCENARIOS:
        folder = f"{FOLDER}/{kind}/{scenario}"
        digests = until_the_save(folder, kind, scenario)
        arm(folder)
        save(folder, kind, SCENARIOS[scenario][1], "new")
        results[f"{kind}/{scenario}"] = calls()
        results["digests"] = digests
results["losses"] = losses[-1:] + steps(model, optimizer, 2, 2)  # of the second, third and fourth step
"""

DIES = HEAD + """
until_the_save(FOLDER + "/ck", KIND, SCENARIO)
pids = smp.allgather(os.getpid(), smp.WORLD)
smp.barrier()
if VICTIM == "both":
    if RANK == AT_RANK:
        arm(FOLDER + "/ck", KILL, AT, pids[1 - RANK])
elif RANK == int(VICTIM):
    arm(FOLDER + "/ck", KILL, AT)
began = time.monotonic()
try:
    save(FOLDER + "/ck", KIND, SCENARIOS[SCENARIO][1], "new")
    smp.barrier()
    results["error"] = None
except Error as error:
    results["error"] = str(error)
results["seconds"] = time.monotonic() - began
finish()
os._exit(3)
"""

RESUMES = HEAD + """
for folder, kind, had_old in FOLDERS:
    model, optimizer = begin()
    is_partial = kind.startswith("partial")
    found = {"error": None}
    try:
        found["content"] = smp.resume_from_checkpoint(folder, partial=is_partial)
        found["step"] = state.optimizer_steps
        found["losses"] = steps(model, optimizer, found["step"], 2)
    except Error as error:
        if had_old:
            raise
        found["error"] = error.kind
        steps(model, optimizer, 0, 1)
    save(folder, "partial" if is_partial else "full", "next", "next")
    found["left"] = sorted(name for name in os.listdir(folder) if name.startswith("."))
    results[folder] = found
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


def _points(count, calls, seed=6):
    """Every kind, scenario and victim in turn, at calls that are drawn."""
    combinations = [(kind, scenario, victim) for scenario in SCENARIOS for victim in VICTIMS for kind in KINDS]
    chance = random.Random(seed)
    chance.shuffle(combinations)
    for number in range(count):
        kind, scenario, victim = combinations[number % len(combinations)]
        at_rank = chance.randrange(2) if victim == "both" else int(victim)
        yield kind, scenario, victim, at_rank, chance.randrange(calls[at_rank][f"{kind}/{scenario}"])


def _json(*words):
    done = subprocess.run([PROGRAM, *words, "--json"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"shardsmith {' '.join(map(str, words))}: {done.stdout}{done.stderr}"
    return json.loads(done.stdout)


def _check_survivors(ranks, folder, victim, at_rank):
    """Returns how many there were."""
    survivors = 0
    for rank, (code, out) in enumerate(ranks.wait(timeout=90)):
        if victim == "both" or rank == at_rank:
            assert code == -9, f"rank {rank} was to be killed and ended with {code}:\n{out[-3000:]}"
            continue
        assert code == 3, f"rank {rank} ended with {code}:\n{out[-3000:]}"
        said = json.loads((folder / f"results_{rank}.json").read_text())
        assert said["error"] and re.search(rf"\brank {at_rank}\b", said["error"]), said
        assert said["seconds"] < PEER_TIMEOUT + 3, said
        survivors += 1
    return survivors


def _check_folder(folder, kind, had_old):
    """What `ls` and `verify` say of it."""
    if not folder.exists():
        assert not had_old
        return
    complete = [entry for entry in _json("ls", folder)["checkpoints"] if entry["complete"]]
    assert complete or not had_old
    for entry in complete:
        assert entry["kind"] == kind.split()[0]
        assert _json("verify", entry.get("folder") or entry["file"])["sound"]


def _campaign(models, tmp_path, count):
    counts = run(with_names(COUNTS, LIMIT=60), 2, models, tmp_path / "counts", env=storage_calls.environment())
    old, new = ([rank["digests"][i] for rank in counts] for i in (0, 1))
    assert old[0] != new[0] and old[1] != new[1]
    waiting, running, survivors = list(_points(count, counts)), [], 0
    folders = []
    while waiting or running:
        while waiting and len(running) < 2:
            kind, scenario, victim, at_rank, at = waiting.pop(0)
            folder = tmp_path / f"point{len(folders)}"
            program = with_names(DIES, LIMIT=PEER_TIMEOUT, KIND=kind, SCENARIO=scenario, VICTIM=victim, AT=at, AT_RANK=at_rank)
            folders.append((folder / "ck", kind, bool(SCENARIOS[scenario][0]), f"{kind}, {scenario}, {victim} at {at}"))
            running.append((Ranks(program, 2, models, folder, env=storage_calls.environment()), folder, victim, at_rank))
        survivors += _check_survivors(*running.pop(0))
    for folder, kind, had_old, _ in folders:
        _check_folder(folder, kind, had_old)
    there = [(str(folder), kind, had_old) for folder, kind, had_old, _ in folders if folder.exists()]
    resumed = run(with_names(RESUMES, LIMIT=60, FOLDERS=there), 2, models, tmp_path / "resumed", env=storage_calls.environment())
    ends = {"old": 0, "new": 0, "none": 0}
    for folder, kind, had_old, what in folders:
        if not folder.exists():
            ends["none"] += 1
            continue
        for rank in resumed:
            found = rank[str(folder)]
            assert found["left"] == [], what
            if found["error"] is not None:
                assert not had_old and found["error"] in ("not_found", "corrupt"), (what, found)
                continue
            assert found["step"] == {"old": 1, "new": 2}[found["content"]], (what, found)
            assert found["losses"] == counts[0]["losses"][found["step"] - 1:][:2], what
        ends[found.get("content", "none") if found["error"] is None else "none"] += 1
    print(f"kill points with torch: {len(folders)}, {survivors} survivors named the dead rank; found afterwards: {ends}")
    return ends


def test_ranks_that_die_while_they_save(models, tmp_path):
    _campaign(models, tmp_path, 3)


@pytest.mark.long
def test_ranks_that_die_while_they_save_at_sixty_points(models, tmp_path):
    ends = _campaign(models, tmp_path, 60)
    assert ends["old"] > 10 and ends["new"] > 5
