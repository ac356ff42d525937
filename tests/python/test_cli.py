"""The `shardsmith` program: its verbs, what they print and their exit codes."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("SHARDSMITH_BUILD", ROOT / "build"))
PROGRAM = BUILD / "shardsmith"
MAKE_PARTIAL = BUILD / "make_partial"


def run(*words, code=0, environment=None, program=PROGRAM):
    result = subprocess.run(
        [str(program), *map(str, words)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | (environment or {}),
        stdin=subprocess.DEVNULL,
    )
    assert result.returncode == code, (words, result.returncode, result.stdout, result.stderr)
    return result


def fails(code, *words, environment=None):
    """The one line of a mistake."""
    result = run(*words, code=code, environment=environment)
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert result.stdout == ""
    return lines[0]


def run_json(*words, code=0):
    result = run(*words, "--json", code=code)
    return json.loads(result.stdout)


def make_partial(model, out, tag, step, pp=2, rdp=1, keep=-1):
    subprocess.run([MAKE_PARTIAL, model, out, tag, str(step), str(pp), str(rdp), str(keep)], check=True, timeout=120)
    (out / "hf").mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        if (model / name).exists():
            shutil.copy(model / name, out / "hf" / name)


def save_model(model, folder):
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0", "made": "for a test"}')
    return folder


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=131,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=64,
    )
    return save_model(LlamaForCausalLM(config), tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(2)
    config = GPT2Config(vocab_size=97, n_embd=32, n_layer=4, n_head=4, n_positions=48)
    return save_model(GPT2LMHeadModel(config), tmp_path_factory.mktemp("gpt2") / "model")


@pytest.fixture(scope="session")
def saved(llama, tmp_path_factory):
    """Two checkpoints; the tag of the older one comes last by name."""
    out = tmp_path_factory.mktemp("saved")
    make_partial(llama, out, "z", 10)
    make_partial(llama, out, "a", 20)
    return out


@pytest.fixture
def copied(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "saved"))


def state_of(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def assert_same_weights(a, b):
    left, right = state_of(a), state_of(b)
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype
        assert torch.equal(left[name], right[name]), name


# The program


def test_help_names_every_verb():
    text = run("--help").stdout
    for verb in ("ls", "inspect", "verify", "export", "plan"):
        assert f"\n  {verb} " in text
        assert "Usage: shardsmith " + verb in run(verb, "--help").stdout


def test_version():
    assert run("--version").stdout.startswith("shardsmith 0.")


def test_no_verb_is_a_mistake():
    assert "Usage" in run(code=2).stderr


def test_an_unknown_verb_names_the_nearest():
    line = fails(2, "exprot", "a", "b")
    assert "'exprot'" in line and "'export'" in line


def test_an_unknown_option_names_the_nearest(saved, tmp_path):
    line = fails(2, "export", saved, tmp_path / "o", "--max-shard-sise", "1GB")
    assert "--max-shard-sise" in line and "did you mean --max-shard-size?" in line
    assert not (tmp_path / "o").exists()
    assert "did you mean --version?" in fails(2, "--verson")


def test_options_take_underscores(llama):
    a = run("plan", "--config", llama, "--pipeline_parallel_degree=2", "--memory_weight", "0.5").stdout
    assert a == run("plan", "--config", llama, "--pipeline-parallel-degree=2", "--memory-weight", "0.5").stdout


def test_a_missing_argument_is_one_line():
    assert "PATH" in fails(2, "inspect")


@pytest.fixture
def installed(tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    shutil.copy(PROGRAM, folder / "shardsmith")
    return folder


def write_script(path, text):
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)


def test_another_verb_is_a_program_beside_ours(installed, tmp_path):
    write_script(installed / "shardsmith-hello", 'echo "beside: $*"; exit 7\n')
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    write_script(elsewhere / "shardsmith-hello", 'echo "path: $*"\n')
    path = {"PATH": f"{elsewhere}:{os.environ['PATH']}"}
    result = run("hello", "--some_option", "x y", code=7, program=installed / "shardsmith", environment=path)
    assert result.stdout == "beside: --some_option x y\n"
    (installed / "shardsmith-hello").unlink()
    result = run("hello", "z", program=installed / "shardsmith", environment=path)
    assert result.stdout == "path: z\n"
    assert "\n  hello" in run("--help", program=installed / "shardsmith", environment=path).stdout


def test_our_own_verbs_are_not_shadowed(installed, saved):
    write_script(installed / "shardsmith-ls", "exit 9\n")
    run("ls", saved, program=installed / "shardsmith")


def test_a_full_disk_under_stdout_is_an_error(saved):
    with open("/dev/full", "w") as full:
        result = subprocess.run([PROGRAM, "ls", saved], stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode == 1 and "stdout" in result.stderr


# ls


def test_ls_lists_by_step_and_marks_the_newest(saved):
    lines = run("ls", saved).stdout.splitlines()
    assert lines[0].split() == ["NAME", "STEP", "LAYOUT", "SIZE", "SAVED", "STATE"]
    assert lines[1].startswith("a_partial") and "20" in lines[1] and lines[1].endswith("complete, newest")
    assert lines[2].startswith("z_partial") and lines[2].endswith("complete")
    assert "2 ranks: pp 2" in lines[1]
    assert len(lines) == 3


def test_ls_as_json(saved):
    found = run_json("ls", saved)["checkpoints"]
    assert [(f["name"], f["manifest"]["step"], f["complete"], f["newest"]) for f in found] == [
        ("a_partial", 20, True, True),
        ("z_partial", 10, True, False),
    ]
    files = sum(f.stat().st_size for f in (saved / "a_partial").iterdir() if f.name != "manifest.json")
    assert found[0]["bytes"] in (files, files + (saved / "a_partial/manifest.json").stat().st_size)


def test_ls_says_what_is_incomplete(copied):
    (copied / "a_partial/manifest.json").unlink()
    text = run("ls", copied).stdout
    assert "incomplete" in text and "manifest.json" in text
    assert [f["complete"] for f in run_json("ls", copied)["checkpoints"] if f["name"] == "a_partial"] == [False]


def test_ls_of_an_empty_folder(tmp_path):
    result = run("ls", tmp_path)
    assert result.stdout == "" and "no checkpoints" in result.stderr
    assert run("ls", tmp_path, "-q").stderr == ""
    assert run_json("ls", tmp_path)["checkpoints"] == []


def test_ls_of_something_else(saved, tmp_path):
    assert str(tmp_path / "absent") in fails(2, "ls", tmp_path / "absent")
    assert "inspect" in fails(2, "ls", saved / "a_partial")
    assert "inspect" in fails(2, "ls", saved / "newest")


def test_ls_needs_no_python_and_milliseconds(saved):
    times = []
    for _ in range(5):
        start = time.perf_counter()
        run("ls", saved)
        times.append(time.perf_counter() - start)
    assert sorted(times)[2] < 0.2


def test_no_colours_outside_of_a_terminal(saved):
    for words in (["ls", saved], ["inspect", saved / "a_partial"], ["verify", saved]):
        assert "\033" not in run(*words).stdout


# inspect


def test_links_and_slashes_are_followed(saved, llama, tmp_path):
    (tmp_path / "saved").symlink_to(saved)
    (tmp_path / "model").symlink_to(llama)
    assert len(run("ls", f"{tmp_path}/saved/").stdout.splitlines()) == 3
    run("inspect", tmp_path / "model")
    run("verify", tmp_path / "saved")
    run("plan", "--config", f"{tmp_path}/model/")
    run("export", tmp_path / "saved", f"{tmp_path}/out/")
    assert_same_weights(llama, tmp_path / "out")


def test_inspect_a_partial_checkpoint(saved, llama):
    text = run("inspect", saved / "a_partial").stdout
    assert "partial" in text and "step 20" in text
    assert "stage 0" in text and "embedding, layers 0-" in text
    assert "stage 1" in text and "norm and head" in text
    assert "made for a test" in text

    got = run_json("inspect", saved / "a_partial")
    assert got["format"] == "partial" and got["manifest"]["pipeline_parallel_degree"] == 2
    by_name = {t["name"]: t for t in got["tensors"]}
    assert by_name["model/word_embedding.weight"]["shape"] == [131, 48]
    key = "transformer.seq_layers.4.attention.key.weight"
    assert by_name["model/" + key]["shape"] == [16, 48]
    assert by_name[f"optimizer/state/{key}/exp_avg"]["dtype"] == "float32"
    assert got["values"]["user_content"]["epoch"] == 1
    elements = sum(p.numel() for p in {t.data_ptr(): t for t in state_of(llama).values()}.values())
    assert got["by_prefix"]["model"]["elements"] == elements
    assert got["by_prefix"]["optimizer"]["elements"] == 2 * elements
    assert got["by_dtype"] == {
        "float32": {"tensors": len(got["tensors"]), "elements": 3 * elements, "bytes": 12 * elements}
    }


def test_inspect_a_hugging_face_folder(llama):
    got = run_json("inspect", llama)
    assert got["format"] == "hf" and got["values"]["model_type"] == "llama"
    by_name = {t["name"]: t for t in got["tensors"]}
    assert by_name["model.layers.0.self_attn.k_proj.weight"]["shape"] == [16, 48]
    only = run_json("inspect", llama, "--filter", "layers.3.")["tensors"]
    assert only and all("layers.3." in t["name"] for t in only)


def test_inspect_files(llama, tmp_path):
    assert run_json("inspect", llama / "model.safetensors")["format"] == "safetensors"
    torch.save({"step": 7, "nested": {"w": torch.zeros(3, 4, dtype=torch.bfloat16)}}, tmp_path / "x.any")
    got = run_json("inspect", tmp_path / "x.any")
    assert got["format"] == "pt" and got["values"]["step"] == 7
    assert [(t["name"], t["dtype"], t["shape"]) for t in got["tensors"]] == [("nested/w", "bfloat16", [3, 4])]
    assert "nested/w" in run("inspect", tmp_path / "x.any").stdout
    assert "nested/w  bfloat16" not in run("inspect", tmp_path / "x.any", "--summary").stdout


def test_control_characters_in_names_never_reach_the_terminal(tmp_path):
    from safetensors.torch import save_file

    save_file({"a\033[31mred\nline": torch.zeros(2)}, tmp_path / "x.safetensors")
    text = run("inspect", tmp_path / "x.safetensors").stdout
    assert "\033" not in text and "a\\x1b[31mred\\x0aline" in text


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_inspect_executes_nothing(tmp_path):
    torch.save({"x": Evil(tmp_path / "made")}, tmp_path / "evil.pt")
    result = subprocess.run([PROGRAM, "inspect", tmp_path / "evil.pt"], capture_output=True, text=True)
    assert not (tmp_path / "made").exists()
    assert "mkdir" in result.stdout + result.stderr
    assert result.returncode in (0, 5)


def test_inspect_of_something_else(saved, tmp_path):
    (tmp_path / "text").write_text("hello, this is no checkpoint\n")
    fails(5, "inspect", tmp_path / "text")
    fails(5, "inspect", tmp_path)
    fails(2, "inspect", tmp_path / "absent")
    assert "shardsmith ls" in fails(2, "inspect", saved)


def test_inspect_of_truncated_files(saved, llama, tmp_path):
    for source in (saved / "a_partial/model_0_0.pt", llama / "model.safetensors"):
        data = source.read_bytes()
        path = tmp_path / "cut"
        for length in (len(data) - 1, len(data) // 2, 20):
            path.write_bytes(data[:length])
            fails(5, "inspect", path)


def test_errors_are_json_too(tmp_path):
    result = run("inspect", tmp_path / "absent", "--json", code=2)
    assert json.loads(result.stdout)["error"]["kind"] == "not_found"
    assert len(result.stderr.splitlines()) == 1


# verify


def test_verify_says_sound(saved, llama):
    assert "sound" in run("verify", saved / "a_partial").stdout
    assert len(run("verify", saved).stdout.splitlines()) == 2
    text = run("verify", llama).stdout
    assert "sound" in text and "no checksums" in text
    assert run_json("verify", saved)["sound"] is True
    assert run_json("verify", llama)["checked"][0]["checksums"] is False


def flip(path, at):
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 0x10]))


def test_verify_finds_one_flipped_bit_anywhere(copied):
    folder = copied / "a_partial"
    names = sorted(f.name for f in folder.iterdir() if f.name != "manifest.json")
    assert len(names) == 5
    for name in names:
        size = (folder / name).stat().st_size
        for at in (0, size // 3, size // 2, size - 30):
            flip(folder / name, at)
            result = run("verify", folder, code=4)
            assert name in result.stdout, (name, at, result.stdout)
            assert run_json("verify", copied, code=4)["sound"] is False
            flip(folder / name, at)
    run("verify", folder)


def test_verify_finds_missing_and_cut_files(copied):
    folder = copied / "a_partial"
    data = (folder / "model_1_0.pt").read_bytes()
    (folder / "model_1_0.pt").write_bytes(data[:-1])
    assert "model_1_0.pt" in run("verify", folder, code=4).stdout
    (folder / "model_1_0.pt").unlink()
    assert "model_1_0.pt" in run("verify", folder, code=4).stdout


def test_verify_finds_a_pointer_to_nothing(copied):
    (copied / "newest").write_text("gone_partial")
    assert "gone_partial" in run("verify", copied, code=4).stdout
    run("verify", copied / "a_partial")


def test_verify_of_a_torch_file(tmp_path):
    path = tmp_path / "x.pt"
    torch.save({"w": torch.arange(100000)}, path)
    assert "every checksum matches" in run("verify", path).stdout
    flip(path, path.stat().st_size // 2)
    assert "data/0" in run("verify", path, code=4).stdout


def test_verify_of_deflated_records(tmp_path):
    import zipfile

    torch.save({"w": torch.arange(300000)}, tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as old:
        with zipfile.ZipFile(tmp_path / "y.pt", "w", zipfile.ZIP_DEFLATED) as new:
            for info in old.infolist():
                new.writestr(info.filename, old.read(info))
    run("verify", tmp_path / "y.pt")
    flip(tmp_path / "y.pt", (tmp_path / "y.pt").stat().st_size // 2)
    assert "data/0" in run("verify", tmp_path / "y.pt", code=4).stdout


def test_verify_of_an_unfinished_save(copied):
    (copied / "a_partial/manifest.json").unlink()
    assert "manifest.json" in fails(5, "verify", copied / "a_partial")
    assert "incomplete" in run("verify", copied, code=4).stdout


# export


def test_export_llama_is_bit_equal(saved, llama, tmp_path):
    from safetensors import safe_open

    out = tmp_path / "out"
    assert "step 20" in run("export", saved / "a_partial", "-o", out).stdout
    assert_same_weights(llama, out)
    with safe_open(out / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys() and file.metadata() == {"format": "pt"}
    assert (out / "tokenizer.json").read_bytes() == (llama / "tokenizer.json").read_bytes()
    old, new = (json.loads((f / "config.json").read_text()) for f in (llama, out))
    assert new == old
    assert sorted(f.name for f in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize("pp,rdp", [(1, 1), (3, 1), (2, 2), (4, 1)])
def test_export_gpt2_from_any_layout(gpt2, tmp_path, pp, rdp):
    make_partial(gpt2, tmp_path / "ck", "t", 1, pp, rdp)
    run("export", tmp_path / "ck" / "t_partial", tmp_path / "out")
    assert_same_weights(gpt2, tmp_path / "out")


def test_export_takes_the_newest_of_a_folder(saved, tmp_path):
    got = run_json("export", saved, tmp_path / "out")
    assert got["step"] == 20 and got["checkpoint"].endswith("a_partial") and got["tokenizer"] is True


def test_export_in_shards(saved, llama, tmp_path):
    out = tmp_path / "out"
    run("export", saved, out, "--max-shard-size", "50KB")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(f.name for f in out.glob("*.safetensors"))
    assert len(files) > 3 and sorted(set(index["weight_map"].values())) == files
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for n, t in state_of(llama).items() if n != "lm_head.weight")
    assert_same_weights(llama, out)
    run("verify", out)


def test_export_to_another_type(saved, llama, tmp_path):
    run("export", saved, tmp_path / "out", "--dtype", "bfloat16")
    old, new = state_of(llama), state_of(tmp_path / "out")
    for name in old:
        assert new[name].dtype == torch.bfloat16 and torch.equal(old[name].to(torch.bfloat16), new[name])
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    fails(2, "export", saved, tmp_path / "p", "--dtype", "int3")


def test_the_config_names_the_type_of_the_weights(saved, llama, tmp_path):
    """A model trained in fp32 from a bf16 one must not be rounded when it is loaded."""
    model = Path(shutil.copytree(llama, tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    config["dtype"] = "bfloat16"
    (model / "config.json").write_text(json.dumps(config))
    make_partial(model, tmp_path / "ck", "t", 1)
    run("export", tmp_path / "ck", tmp_path / "out")
    assert_same_weights(llama, tmp_path / "out")


def test_export_refuses_a_folder_of_someone_else(saved, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("the only copy")
    assert "--overwrite" in fails(2, "export", saved, out)
    assert [f.name for f in out.iterdir()] == ["thesis.txt"]
    run("export", saved, out, "--overwrite")
    assert not (out / "thesis.txt").exists()
    run("export", saved / "z_partial", out)  # an export of ours is replaced
    assert json.loads((out / "shardsmith_export.json").read_text())["step"] == 10
    assert sorted(f.name for f in tmp_path.iterdir()) == ["out"]


def test_export_never_touches_checkpoints(copied):
    before = sorted(copied.rglob("*"))
    for out in (copied, copied / "a_partial", copied / "z_partial", copied / "a_partial/x"):
        fails(2, "export", copied / "a_partial", out, "--overwrite")
    assert sorted(copied.rglob("*")) == before


def test_export_of_damage_leaves_nothing(copied, tmp_path):
    path = copied / "a_partial/model_1_0.pt"
    flip(path, path.stat().st_size // 2)
    assert "model_1_0.pt" in fails(5, "export", "-q", copied / "a_partial", tmp_path / "out")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["saved"]


def test_export_of_an_incomplete_one(copied, tmp_path):
    (copied / "a_partial/manifest.json").unlink()
    fails(5, "export", "-q", copied / "a_partial", tmp_path / "out")
    assert run_json("export", copied, tmp_path / "out")["step"] == 10


def test_export_wants_one_target(saved, tmp_path):
    fails(2, "export", saved)
    fails(2, "export", saved, tmp_path / "a", "-o", tmp_path / "b")
    fails(2, "export", tmp_path / "absent", tmp_path / "b")
    fails(2, "export", saved, tmp_path / "b", "--max-shard-size", "many")


@pytest.fixture(scope="session")
def large(tmp_path_factory):
    """A model of 330 MB, so that an export takes a moment."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=40000, n_embd=1024, n_layer=3, n_head=8, n_positions=64)
    folder = tmp_path_factory.mktemp("large")
    save_model(GPT2LMHeadModel(config), folder / "model")
    make_partial(folder / "model", folder / "ck", "t", 1)
    return folder


def test_export_needs_little_memory(large, tmp_path):
    script = (
        "import resource, subprocess, sys; code = subprocess.run(sys.argv[1:]).returncode;"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(code)"
    )
    result = subprocess.run(
        ["python3", "-c", script, PROGRAM, "export", "-q", large / "ck", tmp_path / "out"],
        capture_output=True,
        text=True,
        check=True,
    )
    weights = (tmp_path / "out/model.safetensors").stat().st_size
    peak = int(result.stdout.splitlines()[-1]) * 1024
    assert weights > 300e6 and peak < 160e6


@pytest.mark.parametrize("number,code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_removes_what_an_export_had_begun(large, tmp_path, number, code):
    process = subprocess.Popen(
        [PROGRAM, "export", "-q", large / "ck", tmp_path / "out"], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    deadline = time.monotonic() + 20
    while not any(f.name.startswith(".out.tmp-") for f in tmp_path.iterdir()):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.001)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == code, stderr
    assert len(stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_an_export_that_does_not_fit_is_said_beforehand(large, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(small)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("no right to mount a small file system")
    try:
        assert "free" in fails(3, "export", large / "ck", small / "out")
        assert list(small.iterdir()) == []
    finally:
        subprocess.run(["umount", str(small)], check=True)


# plan


def test_plan_counts_what_transformers_counts(llama, gpt2):
    from transformers import AutoModelForCausalLM

    for folder in (llama, gpt2):
        model = AutoModelForCausalLM.from_pretrained(folder)
        embedding = model.get_input_embeddings().weight.numel()
        one = run_json("plan", "--config", folder)
        assert one["parameters"] == model.num_parameters()
        assert one["stages"][0]["parameters"] == model.num_parameters()
        assert one["checkpoint_bytes"] == 12 * model.num_parameters()
        two = run_json("plan", "--config", folder / "config.json", "--pipeline-parallel-degree", 2)
        assert sum(s["parameters"] for s in two["stages"]) == model.num_parameters() + embedding  # tied: on both ends
        assert two["partition"][0] == 0 and two["partition"][-1] == model.config.num_hidden_layers
        assert [s["ranks"] for s in two["stages"]] == [[0], [1]]
        first = two["stages"][0]
        assert first["weights_bytes"] == 4 * first["parameters"] and first["moments_bytes"] == 8 * first["parameters"]


def test_plan_deals_out_ranks(llama):
    got = run_json("plan", "--config", llama, "--pipeline-parallel-degree", 2, "--nproc", 4)
    assert got["reduced_data_parallel_degree"] == 2
    assert sorted(r for s in got["stages"] for r in s["ranks"]) == [0, 1, 2, 3]
    half = run_json("plan", "--config", llama, "--tensor-parallel-degree", 2)["stages"][0]["parameters"]
    whole = run_json("plan", "--config", llama)["stages"][0]["parameters"]
    assert whole / 2 < half < whole * 0.6


_PARTS = ("weights", "gradients", "masters", "moments", "activations", "working")


def test_plan_says_what_training_takes(gpt2):
    def stage(*options):
        (found,) = run_json("plan", "--config", gpt2, "--nproc", 2, "--max-seq-length", 16, *options)["stages"]
        assert found["total_bytes"] == sum(found[f"{part}_bytes"] for part in _PARTS)
        return found

    wide = stage()
    narrow = stage("--bf16")
    assert narrow["weights_bytes"] * 2 == wide["weights_bytes"] == narrow["masters_bytes"] and wide["masters_bytes"] == 0
    assert stage("--fp16")["moments_bytes"] == wide["moments_bytes"]
    sharded = stage("--bf16", "--shard_optimizer_state")
    assert sharded["masters_bytes"] < 0.6 * narrow["masters_bytes"] and sharded["moments_bytes"] < 0.6 * narrow["moments_bytes"]
    long = ("--per-device-train-batch-size", 512)
    large = stage(*long)
    assert large["activations_bytes"] > 10 * wide["activations_bytes"]
    assert stage(*long, "--activation-checkpointing", "each")["activations_bytes"] < 0.3 * large["activations_bytes"]
    assert stage(*long, "--microbatches", 8)["activations_bytes"] < 0.3 * large["activations_bytes"]
    assert "ACTIVATIONS" in run("plan", "--config", gpt2).stdout
    for wrong in (("--bf16", "--fp16"), ("--microbatches", 3), ("--max-seq-length", 100000), ("--microbatches", -1),
                  ("--activation-checkpointing", "some"), ("--per-device-train-batch-size", 0)):
        fails(2, "plan", "--config", gpt2, *wrong)


def test_plan_refuses(llama, tmp_path):
    line = fails(2, "plan", "--config", llama, "--pipeline-parallel-degree", 6)
    assert "6" in line and "5" in line
    fails(2, "plan", "--config", llama, "--pipeline-parallel-degree", 2, "--nproc", 3)
    fails(2, "plan", "--config", llama, "--memory-weight", 2)
    fails(2, "plan", "--config", tmp_path / "absent")
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    line = fails(2, "plan", "--config", tmp_path)
    assert "t5" in line and "llama" in line and "gpt2" in line
    (tmp_path / "config.json").write_text('{"model_type": ')
    fails(5, "plan", "--config", tmp_path)
