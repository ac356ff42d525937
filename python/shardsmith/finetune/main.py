"""The command. Checks all that can be told at once, then starts the ranks; under an outer torchrun it is a rank itself.

No traceback for a user's mistake: one line `shardsmith: error: ...` and the blueprint's exit code.
"""
from __future__ import annotations

import os
import shutil
import sys
import tempfile

from shardsmith.errors import Error
from shardsmith.finetune import data, plan, resume
from shardsmith.finetune.config import FinetuneConfig, help_text, parse, resolved_yaml
from shardsmith.words import human_bytes

CONFIG_FILE = "finetune.yaml"  # beside the checkpoints


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        return _main(arguments)
    except Error as error:
        return fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return fail("interrupted", 130)
    except Exception as error:
        if os.environ.get("SHARDSMITH_DEBUG") == "1":
            raise
        return fail(f"internal error: {type(error).__name__}: {error} (SHARDSMITH_DEBUG=1 shows where)", 1)


def fail(text: str, code: int) -> int:
    sys.stdout.flush()
    print(f"shardsmith: error: {' '.join(text.split())}", file=sys.stderr, flush=True)
    return code


def _main(arguments: list[str]) -> int:
    if any(word in ("-h", "--help") for word in arguments):
        print(help_text())
        return 0
    config = parse(arguments)
    inside = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    world_size = int(os.environ["WORLD_SIZE"]) if inside else config.nproc_per_node
    run_plan = plan.make_plan(config, world_size)
    data.check_files(config.data)
    if config.dry_run:
        _dry_run(config, run_plan)
        return 0
    if inside and os.environ["RANK"] != "0":
        return _rank(config)
    choice = resume.choose(config.resume_from_checkpoint, config.output_dir)
    _prepare_output(config, run_plan)
    for line in choice.passed_over:
        print(f"shardsmith: passed over: {line}", file=sys.stderr, flush=True)
    return _rank(config) if inside else _launch(config, world_size)


def _dry_run(config: FinetuneConfig, run_plan: plan.RunPlan) -> None:
    if config.json_output:
        import json

        print(json.dumps(plan.describe(run_plan)))
    else:
        print("\n".join(plan.lines(run_plan)))


def _prepare_output(config: FinetuneConfig, run_plan: plan.RunPlan) -> None:
    from shardsmith import _core

    folder = config.output_dir
    try:
        os.makedirs(folder, exist_ok=True)
        _core.check_same_model(folder, run_plan.config_json)
        free = shutil.disk_usage(folder).free
        if free < run_plan.checkpoint_bytes:
            raise Error("no_space", f"{folder}: a checkpoint needs {human_bytes(run_plan.checkpoint_bytes)}, "
                                    f"{human_bytes(free)} are free")
        temporary = os.path.join(folder, f".{CONFIG_FILE}.tmp")
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(resolved_yaml(config))
        os.replace(temporary, os.path.join(folder, CONFIG_FILE))
    except OSError as error:
        raise Error("io", f"{error.filename or folder}: {error.strerror}") from None


def _rank(config: FinetuneConfig) -> int:
    from shardsmith.finetune.worker import run_rank

    return run_rank(config)


def _launch(config: FinetuneConfig, world_size: int) -> int:
    from shardsmith.launcher.local import Launcher, worker_command

    threads = config.threads or max(1, len(os.sched_getaffinity(0)) // world_size)
    with tempfile.NamedTemporaryFile("w", suffix=".json", prefix="shardsmith-", encoding="utf-8") as file:
        file.write(config.model_dump_json(by_alias=True))
        file.flush()
        launcher = Launcher(worker_command("shardsmith.finetune.worker", file.name), world_size, threads,
                            stop_grace=config.stop_grace)
        outcome = launcher.run()
    return fail(outcome.error, outcome.exit_code) if outcome.error else outcome.exit_code


if __name__ == "__main__":
    sys.exit(main())
