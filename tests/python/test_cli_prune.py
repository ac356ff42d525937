"""`shardsmith prune`: what goes, what never goes, and that it asks."""

import json
import os
import pty
import select
import shutil
import subprocess
from pathlib import Path

import pytest
from test_cli_helpers import PROGRAM, fails, gpt2, make_partial, run, run_json  # noqa: F401

STEPS = (100, 200, 300, 400, 500)


@pytest.fixture(scope="session")
def many(gpt2, tmp_path_factory):  # noqa: F811
    out = tmp_path_factory.mktemp("many")
    for step in STEPS:
        make_partial(gpt2, out, f"s{step}", step)
    return out


@pytest.fixture
def folder(many, tmp_path):
    return Path(shutil.copytree(many, tmp_path / "out"))


def left(folder):
    return sorted(int(f.name[1:4]) for f in folder.iterdir() if f.name.endswith("_partial"))


def names(got, key):
    return sorted(int(e["name"][1:4]) for e in got[key])


def test_the_newest_stay(folder):
    before = sum(f.stat().st_size for step in (100, 200, 300) for f in (folder / f"s{step}_partial").iterdir())
    got = run_json("prune", folder, "--keep-last", 2, "--yes")
    assert left(folder) == [400, 500] and names(got, "removed") == [100, 200, 300]
    assert got["bytes_freed"] == before
    assert not [f.name for f in folder.iterdir() if f.name.startswith(".")]
    assert run_json("verify", folder)["sound"]


def test_multiples_and_tags_stay_too(folder):
    got = run_json("prune", folder, "--keep-every", 200, "--keep", "s100", "--yes")
    assert left(folder) == [100, 200, 400, 500]
    assert {e["name"]: e["why"] for e in got["stays"]} == {
        "s500_partial": "the newest",
        "s400_partial": "step 400 is a multiple of 200",
        "s200_partial": "step 200 is a multiple of 200",
        "s100_partial": "named by --keep",
    }


def test_the_order_is_that_of_the_steps_and_not_of_the_names(gpt2, tmp_path):  # noqa: F811
    for tag, step in (("z", 1), ("a", 3), ("m", 2)):
        make_partial(gpt2, tmp_path, tag, step)
    run("prune", tmp_path, "--keep-last", 2, "--yes")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["a_partial", "hf", "m_partial", "newest"]


def test_what_newest_names_stays(folder):
    (folder / "newest").write_text("s200_partial\n")
    got = run_json("prune", folder, "--keep-last", 1, "--yes")
    assert left(folder) == [200, 500]
    assert {"name": "s200_partial", "why": "newest names it"} in got["stays"]


def test_a_dry_run_removes_nothing(folder):
    got = run_json("prune", folder, "--keep-last", 1, "--dry-run")
    assert names(got, "goes") == [100, 200, 300, 400] and got["removed"] == [] and left(folder) == list(STEPS)
    text = run("prune", folder, "--keep-last", 1, "--dry-run").stdout
    assert text.count("goes") == 4 and "would remove 4 checkpoints" in text and left(folder) == list(STEPS)


def test_without_a_terminal_it_refuses(folder):
    result = run("prune", folder, "--keep-last", 1, code=2)
    assert "--yes" in result.stderr and len(result.stderr.splitlines()) == 1
    assert left(folder) == list(STEPS)
    run("prune", folder, "--keep-last", 1, "--json", code=2)
    assert left(folder) == list(STEPS)
    assert "nothing to remove" in run("prune", folder, "--keep-last", 9).stdout


def at_a_terminal(answer, *words):
    main, other = pty.openpty()
    process = subprocess.Popen([PROGRAM, *map(str, words)], stdin=other, stdout=other, stderr=other)
    os.close(other)
    text = b""
    while select.select([main], [], [], 20)[0]:
        try:
            more = os.read(main, 4096)
        except OSError:
            break
        if not more:
            break
        text += more
        if text.endswith(b"[y/N] "):
            os.write(main, answer)
    os.close(main)
    assert process.wait(20) == 0, text
    return text.decode()


def test_a_terminal_is_asked(folder):
    text = at_a_terminal(b"n\n", "prune", folder, "--keep-last", 4)
    assert "Remove 1 checkpoint, " in text and "nothing was removed" in text and left(folder) == list(STEPS)
    at_a_terminal(b"\n", "prune", folder, "--keep-last", 4)
    assert left(folder) == list(STEPS)
    text = at_a_terminal(b"y\n", "prune", folder, "--keep-last", 4)
    assert "removed 1 checkpoint" in text and left(folder) == list(STEPS[1:])


def test_what_is_not_ours_stays(folder):
    (folder / "s050_partial").mkdir()
    (folder / "s050_partial/model_0_0.pt").write_text("someone's")
    (folder / "notes").mkdir()
    (folder / "notes/thesis.txt").write_text("the only copy")
    newer = folder / "s200_partial/manifest.json"
    manifest = json.loads(newer.read_text())
    newer.write_text(json.dumps(manifest | {"format_version": 99}))
    (folder / "s100_partial/manifest.json").write_text("{")
    elsewhere = folder.parent / "elsewhere"
    shutil.move(folder / "s300_partial", elsewhere)
    (folder / "s300_partial").symlink_to(elsewhere)
    got = run_json("prune", folder, "--keep-last", 1, "--incomplete", "--yes")
    assert names(got, "removed") == [400]
    assert left(folder) == [50, 100, 200, 300, 500] and (folder / "notes/thesis.txt").exists()
    assert sorted(f.name for f in elsewhere.iterdir()) == sorted(f.name for f in (folder / "s500_partial").iterdir())
    alone = {e["name"]: e["why"] for e in got["left_alone"]}
    assert "manifest.json" in alone["s050_partial"] and "s200_partial" in alone


def test_incomplete_ones_go_only_where_asked(folder):
    (folder / "s300_partial/model_0_0.pt").unlink()
    got = run_json("prune", folder, "--keep-last", 2, "--yes")
    assert left(folder) == [300, 400, 500]
    assert [e["name"] for e in got["left_alone"]] == ["s300_partial"]
    run("prune", folder, "--incomplete", "--yes")
    assert left(folder) == [400, 500]


def test_an_incomplete_newest_is_not_the_newest(folder):
    """The newest complete one stays, whatever is newer and broken."""
    (folder / "s500_partial/model_0_0.pt").unlink()
    run("prune", folder, "--keep-last", 1, "--incomplete", "--yes")
    assert left(folder) == [400, 500], "newest names 500, so it stays for someone to look at"


def test_mistakes(folder, many, tmp_path):
    assert "--keep-last" in fails(2, "prune", folder)
    assert "did you mean s300?" in fails(2, "prune", folder, "--keep", "s30", "--yes")
    fails(2, "prune", folder, "--keep-last", 0)
    fails(2, "prune", folder, "--keep-last", -1)
    fails(2, "prune", folder, "--keep-every", 0)
    fails(2, "prune", folder / "s100_partial", "--keep-last", 1)
    fails(2, "prune", folder / "newest", "--keep-last", 1)
    assert "did you mean" in fails(2, "prune", tmp_path / "uot", "--keep-last", 1)
    assert left(folder) == list(STEPS)
