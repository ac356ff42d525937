"""Configurations: of smp.init, and of `shardsmith finetune`."""
import json
import subprocess
import sys

import pytest

from shardsmith.errors import Error
from shardsmith.finetune.config import parse, resolved_yaml
from shardsmith.finetune.plan import divisors_near, nearest_multiples
from shardsmith.smp import config as smp_config
from smp_helpers import environment

NEEDED = ["--model", "m", "--data", "a.txt", "--output-dir", "out"]


def refusal(call, *args):
    with pytest.raises(Error) as caught:
        call(*args)
    return caught.value


class TestInit:
    def test_defaults(self, monkeypatch):
        monkeypatch.delenv("SM_HP_MP_PARAMETERS", raising=False)
        cfg = smp_config.resolve({})
        assert cfg.pipeline_parallel_degree == 1 and cfg.microbatches == 1 and cfg.active_microbatches == 1
        assert cfg.placement_strategy == "cluster" and cfg.peer_timeout == 300

    def test_environment_wins_and_partitions_is_a_synonym(self, monkeypatch):
        monkeypatch.setenv("SM_HP_MP_PARAMETERS", json.dumps({"partitions": 4, "microbatches": 8.0}))
        cfg = smp_config.resolve({"pipeline_parallel_degree": 2, "ddp": True})
        assert cfg.pipeline_parallel_degree == 4 and cfg.partitions == 4
        assert cfg.microbatches == 8 and isinstance(cfg.microbatches, int) and cfg.ddp is True
        assert cfg.active_microbatches == 6

    def test_unknown_key_names_the_nearest(self):
        error = refusal(smp_config.resolve, {"microbatch": 2})
        assert error.kind == "invalid_argument" and "did you mean 'microbatches'" in str(error)

    @pytest.mark.parametrize("values", [{"sharded_data_parallel_degree": 2}, {"offload_activations": True}])
    def test_what_is_not_there_says_so(self, values):
        error = refusal(smp_config.resolve, values)
        assert error.kind == "unsupported" and next(iter(values)) in str(error)

    @pytest.mark.parametrize("values", [{"memory_weight": 2}, {"microbatches": 0}, {"microbatches": 1.5},
                                        {"optimize": "sped"}, {"placement_strategy": "DPP"}, {"ddp": "yes"},
                                        {"microbatches": None}, {"ddp_port": 5}, {"auto_partition": False},
                                        {"default_partition": 1}, {"load_partition": True}, {"pipeline": "sample"},
                                        {"partitions": 2, "pipeline_parallel_degree": 3}])
    def test_wrong_values(self, values):
        assert refusal(smp_config.resolve, values).kind == "invalid_argument"

    def test_every_documented_key_is_known(self):
        smp_config.resolve({"sdp_reduce_bucket_size": 5e8, "_match_weights": False, "_fp32_grad_accumulation": True,
                            "use_times": False, "static_mode": True, "fast_mode": False, "_prescaled_batch": True,
                            "activation_loading_horizon": 4, "deterministic_server": True, "skip_tracing": True})


class TestFinetune:
    def test_flags_win_over_pairs_over_yaml(self, tmp_path):
        run = tmp_path / "run.yaml"
        run.write_text("model: m\ndata: [a.txt, b.txt]\noutput_dir: out\nlearning_rate: 1e-3\nseed: 1\nmax_steps: 3\n")
        config = parse(["learning_rate=2e-3", str(run), "--learning-rate", "3e-3", "seed=2"])
        assert (config.learning_rate, config.seed, config.max_steps) == (3e-3, 2, 3)
        assert config.data == ["a.txt", "b.txt"]

    def test_both_spellings_and_several_data(self):
        config = parse(["--model=m", "--data", "a.txt", "b.jsonl", "--output_dir", "o", "--bf16", "--no-json", "-q",
                        "--save-total-limit", "none", "--per_device_train_batch_size", "4"])
        assert config.data == ["a.txt", "b.jsonl"] and config.bf16 and config.quiet and not config.json_output
        assert config.save_total_limit is None and config.per_device_train_batch_size == 4

    def test_unknown_flag_names_the_nearest(self):
        assert "did you mean 'learning_rate'" in str(refusal(parse, [*NEEDED, "--learning-rat", "1"]))

    def test_yaml_mistakes_have_line_and_column(self, tmp_path):
        run = tmp_path / "run.yaml"
        run.write_text("model: m\n\nlearning_rat: 1\n")
        assert f"{run}:3:1: unknown option 'learning_rat'" in str(refusal(parse, [str(run)]))
        run.write_text("model: m\ndata: a\noutput_dir: o\nmax_steps: many\n")
        assert f"{run}:4:12: max_steps: should be a valid integer, not 'many'" in str(refusal(parse, [str(run)]))
        run.write_text("model: [m\n")
        assert str(refusal(parse, [str(run)])).startswith(f"{run}:2:")
        run.write_text("seed: 1\nseed: 2\n")
        assert f"{run}:2:1: 'seed' is given twice" in str(refusal(parse, [str(run)]))

    def test_what_is_missing_is_named(self):
        assert "--data and --output-dir must be given" in str(refusal(parse, ["--model", "m"]))

    @pytest.mark.parametrize("flags", [["--max-steps", "0"], ["--lr-scheduler-type", "cosin"], ["--seed", "x"],
                                       ["--save-total-limit", "0"], ["--learning-rate"], ["stray"], ["-z"]])
    def test_wrong_values(self, flags):
        assert refusal(parse, [*NEEDED, *flags]).exit_code == 2

    def test_what_is_written_is_read_again(self, tmp_path):
        config = parse([*NEEDED, "--max-steps", "7", "--resume-from-checkpoint", "auto"])
        run = tmp_path / "run.yaml"
        run.write_text(resolved_yaml(config))
        again = parse([str(run)])
        assert again.max_steps == 7 and again.resume_from_checkpoint == "false"

    def test_parsing_imports_no_torch(self):
        code = ("import sys; from shardsmith.finetune import main; main.parse(['--model','m','--data','a','--output-dir','o']);"
                "assert 'torch' not in sys.modules and 'transformers' not in sys.modules")
        subprocess.run([sys.executable, "-c", code], check=True, env=environment())


def test_nearest_numbers_that_work():
    assert divisors_near(8, 3) == "2 or 4" and divisors_near(7, 3) == "1 or 7" and divisors_near(4, 5) == "4"
    assert nearest_multiples(10, 4) == "8 or 12" and nearest_multiples(3, 4) == "4"
