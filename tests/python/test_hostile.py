"""Files that try to do harm (tests/hostile/make.py), through every verb: an error in one line that names the file and what
was forbidden, soon, within memory; nothing is executed, nothing is written, inside of the folder or out of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = ROOT / "tests" / "hostile"
PROGRAM = Path(os.environ.get("SHARDSMITH_BUILD", ROOT / "build")) / "shardsmith"
sys.path.insert(0, str(HOSTILE))
import make  # noqa: E402

SECONDS = 5
MIB = 1 << 20
REFUSED = (2, 5)
VERBS = {
    "inspect": ["inspect", "{hostile}"],
    "verify": ["verify", "{hostile}"],
    "diff": ["diff", "{hostile}", "{good}"],
    "diff-of-good": ["diff", "{good}", "{hostile}"],
    "convert": ["convert", "{hostile}", "{out}", "--to", "pt"],
    "merge": ["merge", "{hostile}", "{out}"],
    "export": ["export", "{hostile}", "{out}"],
}
# What only shows in the data is no error of those who read headers, and damage to `verify`.
IN_THE_DATA = {"partial-block-damaged": (0, 4)}
# Valid, only large once inflated: done within memory, or refused beforehand.
VALID = {"zip-bomb.pt"}
# A manifest of a newer release is not ours to judge, so the folder is no checkpoint, but a readable one may be named.
REQUIRED = {
    "pickle-os-system.pt", "pickle-reduce-eval.pt", "pickle-build-on-foreign-class.pt", "pickle-stack-global-trick.pt",
    "pickle-ext-code.pt", "pickle-memo-index.pt", "pickle-deep-nesting.pt", "pickle-billion-laughs.pt", "zip-bomb.pt",
    "zip-overlapping-records.pt", "zip-duplicate-name.pt", "zip-offset-past-end.pt", "storage-too-short.pt",
    "stride-overflow.pt", "negative-size.pt", "hf-index-dotdot", "hf-index-absolute", "hf-link-out", "manifest-dotdot",
    "partial-slice-overlap", "partial-slice-missing", "dcp-dotdot", "dcp-os-system",
}  # fmt: skip


def measured(commands, folder):
    arguments = [sys.executable, "-S", str(HOSTILE / "measure.py"), str(folder), str(SECONDS)]
    text = json.dumps([[str(word) for word in command] for command in commands])
    return json.loads(subprocess.run(arguments, input=text, capture_output=True, text=True, check=True).stdout)


def command(words, hostile, good, out):
    return [PROGRAM, *(word.format(hostile=hostile, good=good, out=out) for word in words)]


def tree(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """{(file, verb): what became of it}, all run from one folder, and what that folder then holds."""
    files, work = tmp_path_factory.mktemp("hostile"), tmp_path_factory.mktemp("work")
    make.write(files)
    before = tree(files)
    keys, commands = [], []
    for file in make.CASES:
        for verb, words in VERBS.items():
            keys.append((file, verb))
            commands.append(command(words, files / file, files / "good.pt", f"out-{verb}-{file}"))
    outcome = dict(zip(keys, measured(commands, work)))
    assert tree(files) == before
    return outcome, tree(work)


def test_the_files_are_the_same_each_time(tmp_path):
    make.write(tmp_path / "a")
    make.write(tmp_path / "b")
    for path in (tmp_path / "a").rglob("*"):
        other = tmp_path / "b" / path.relative_to(tmp_path / "a")
        if path.is_symlink():
            assert os.readlink(path) == os.readlink(other)
        elif path.is_file():
            assert path.read_bytes() == other.read_bytes()


def test_the_good_file_is_good(tmp_path):
    """Otherwise all the refusals would say nothing."""
    make.write(tmp_path)
    good = tmp_path / "good.pt"
    commands = [command(words, good, good, f"out-{verb}") for verb, words in VERBS.items()]
    for verb, result in zip(VERBS, measured(commands, tmp_path)):
        assert result["code"] == (2 if verb == "export" else 0), (verb, result)  # export needs a config


def test_nothing_was_executed_and_nothing_written(results):
    outcome, left = results
    done = {f"out-{verb}-{file}" for (file, verb), result in outcome.items() if result["code"] == 0}
    assert set(left) <= {".out", ".err"} | done, left


@pytest.mark.parametrize("file", make.CASES)
def test_refused_by_every_verb(results, file):
    outcome, _ = results
    words = make.CASES[file][1]
    for verb in VERBS:
        result = outcome[file, verb]
        told = (file, verb, result)
        assert result["cpu"] < (6 if file in VALID else 1) * SECONDS, told
        assert result["peak"] < 300 * MIB, told
        if file in VALID:
            assert result["code"] in (0, 1, 3, 4, *REFUSED), told
            continue
        if file in IN_THE_DATA:
            sound, damaged = IN_THE_DATA[file]
            if verb == "inspect":
                assert result["code"] == sound, told
            if verb in ("inspect", "diff", "diff-of-good"):  # another shape than the good file's: nothing to compare
                continue
            assert result["code"] in (damaged, *REFUSED), told
        else:
            assert result["code"] in (REFUSED + (4,) if verb == "verify" else REFUSED), told
        lines = result["err"].splitlines()
        if verb == "verify" and result["code"] == 4:
            text = result["out"] + result["err"]
        else:
            if lines[:-1] and file in IN_THE_DATA:  # it was said what would be written
                assert lines.pop(0).startswith("writing "), told
            assert len(lines) == 1, told
            text = lines[0]
            assert result["out"] == "", told
        assert file in text, told
        if file in IN_THE_DATA and result["code"] == 2:  # refused for another reason, before the data were read
            continue
        for word in words:
            assert word in text, (word, *told)


@pytest.mark.parametrize("file", make.NAMES)
def test_names_play_no_tricks(file, tmp_path):
    make.write(tmp_path)
    work = tmp_path / "work"
    work.mkdir()
    path = tmp_path / file
    lines = [
        ["inspect", path], ["inspect", path, "--slices"], ["verify", path, "--values"], ["diff", path, tmp_path / "good.pt"],
        ["inspect", path, "--html", "page.html"], ["convert", path, "a.pt", "--to", "pt"], ["convert", path, "d", "--to", "dcp"],
        ["convert", path, "p_partial", "--to", "partial"], ["convert", path, "a.safetensors", "--to", "safetensors"],
        ["export", path, "e"], ["verify", "p_partial"], ["ls", "."],
    ]  # fmt: skip
    for words, result in zip(lines, measured([[PROGRAM, *words] for words in lines], work)):
        for text in (result["out"], result["err"]):
            for trick in ("\x1b", "\x07", "\r", "\u202e"):
                assert trick not in text, (words, text)
        assert result["code"] in (0, 2, 4, 5), (words, result)
    page = (work / "page.html").read_text("utf-8")
    assert "alert(1)" in page and "<script>alert" not in page
    assert not (work / make.CANARY).exists() and not (tmp_path / "x").exists()


def test_a_link_among_the_companions_is_not_followed(tmp_path):
    make.write(tmp_path)
    (result,) = measured([[PROGRAM, "convert", tmp_path / make.LINKED, "out", "--to", "hf"]], tmp_path)
    assert result["code"] == 5 and "tokenizer.json" in result["err"], result
    assert not (tmp_path / "out").exists()


def test_all_that_was_promised_is_there():
    assert REQUIRED <= set(make.CASES)
    for kind in ("header-huge", "overlap", "hole", "shape-overflow", "duplicate-key"):
        assert f"safetensors-{kind}.safetensors" in make.CASES
