"""Completions: what the shells are told, and what bash makes of it."""

import os
import shutil
import subprocess

import pytest
from test_cli_helpers import PROGRAM, fails, run

VERBS = ("ls", "inspect", "verify", "diff", "merge", "reshard", "convert", "export", "prune", "plan", "completion")


def complete(*words, cwd=None):
    """What bash offers for the last word of a line."""
    line = " ".join(words)
    script = """
source <("$1" completion bash)
shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMP_LINE="$*" COMP_POINT=${#COMP_LINE}
_shardsmith
printf '%s\\n' "${COMPREPLY[@]}"
"""
    result = subprocess.run(["bash", "-euc", script, "bash", PROGRAM, *words], capture_output=True, text=True, cwd=cwd, timeout=60)
    assert result.returncode == 0 and result.stderr == "", (line, result.stderr)
    return result.stdout.split("\n")[:-1]


def test_verbs_are_completed():
    offered = complete("shardsmith", "")
    for verb in VERBS:
        assert verb in offered
    assert complete("shardsmith", "ver") == ["verify"]
    assert set(complete("shardsmith", "--")) == {"--help", "--version"}


@pytest.mark.parametrize("verb", VERBS)
def test_options_are_those_of_the_help(verb):
    offered = complete("shardsmith", verb, "--")
    help_text = run(verb, "--help").stdout
    assert "--json" in offered and "--help" in offered
    for option in offered:
        assert option in help_text
    if verb == "diff":
        assert complete("shardsmith", "diff", "a", "b", "--ig") == ["--ignore-dtype"]


def test_words_of_an_option_are_completed():
    assert complete("shardsmith", "convert", "a", "--to", "s") == ["safetensors"]
    assert complete("shardsmith", "convert", "a", "--to", "=", "d") == ["dcp"]
    assert set(complete("shardsmith", "convert", "a", "--to", "=")) >= {"pt", "safetensors", "hf", "dcp", "partial", "full"}
    assert complete("shardsmith", "export", "--dtype", "b") == ["bfloat16"]
    assert set(complete("shardsmith", "completion", "")) == {"bash", "zsh", "fish"}


def test_files_are_completed(tmp_path):
    (tmp_path / "out dir").mkdir()
    (tmp_path / "output.pt").touch()
    assert sorted(complete("shardsmith", "inspect", "out", cwd=tmp_path)) == ["out dir", "output.pt"]
    assert sorted(complete("shardsmith", "inspect", "--html", "out", cwd=tmp_path)) == ["out dir", "output.pt"]


def test_other_programs_are_verbs_too(tmp_path):
    other = tmp_path / "shardsmith-hello"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    text = run("completion", "bash", environment={"PATH": f"{tmp_path}:{os.environ['PATH']}"}).stdout
    assert " hello " in text


def test_scripts_name_every_verb_and_option():
    zsh, fish = run("completion", "zsh").stdout, run("completion", "fish").stdout
    assert zsh.startswith("#compdef shardsmith\n")
    for verb in VERBS:
        assert f"'{verb}:" in zsh and f"-a {verb} " in fish
        for option in complete("shardsmith", verb, "--"):
            assert option in zsh and f"-l {option[2:]} " in fish


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_are_sound_where_the_shell_is_there(shell, tmp_path):
    program = shutil.which(shell)
    if not program:
        pytest.skip(f"no {shell} here")
    (tmp_path / "script").write_text(run("completion", shell).stdout)
    subprocess.run([program, "-n", tmp_path / "script"], check=True, timeout=60)


def test_an_unknown_shell_names_the_nearest():
    assert "did you mean fish?" in fails(2, "completion", "fisch")
    fails(2, "completion")


@pytest.mark.parametrize("verb", VERBS)
def test_help_has_examples(verb):
    text = run(verb, "--help").stdout
    examples = text[text.index("Examples:") :].splitlines()[1:]
    assert examples and all("shardsmith " + verb in line for line in examples if line.strip())
