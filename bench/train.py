"""Training speed and memory, each figure as a ratio measured in this one run: medians over rounds in which everybody makes
one step in turn, with their spread.

  fp32      one process with 2 threads: a plain PyTorch loop of transformers' model with fused AdamW, eager and compiled
            (torch.compile), and smp with one stage
  bf16      the same with weights in bf16 on both sides, without masters
  masters   smp's bf16 with float32 masters, beside the plain loop under autocast
  stages    two pipeline stages with one thread each, 8 microbatches, beside one process with one thread, and beside
            torch.distributed.pipelining's 1F1B. Bound: balance x m / (m + p - 1) x the scaling of two independent
            processes; balance: mean / max of the stages' multiply-adds; scaling: two such processes at once over one alone
  slices    two tensor-parallel ranks of a Llama, beside one process, and beside DTensor. Bound: scaling x compute /
            (compute + the same sums timed alone), compute: one process's time / scaling
  python    one process with 2 threads through smp, beside the same steps in C++ alone (bench/step.cc; bench_step has to
            be built); and what `import shardsmith` takes beyond torch's import
  sharded   two replicas with shard_optimizer_state, each with its own batch, beside DistributedDataParallel with
            ZeroRedundancyOptimizer; bound as above with the buckets' reduction and gathering

    .venv/bin/python bench/train.py --only fp32,stages --json out.json
"""
from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [os.path.join(ROOT, "python"), os.path.join(ROOT, "bench")]
from shardsmith.launcher.local import free_port  # noqa: E402

SEQUENCE = 256
PARTS = ("fp32", "bf16", "masters", "python", "stages", "stages-masters", "slices", "sharded")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2", help="gpt2 (small, random weights) or a Hugging Face folder")
    parser.add_argument("--batch", type=int, default=4, help="sequences of 256 tokens of a process")
    parser.add_argument("--pipeline-batch", type=int, default=8, help="the same with two stages")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=2, help="steps that don't count")
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--engine", default=os.path.join(ROOT, "build", "bench_step"), help="the program of the part python")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.only.split(",")) - set(PARTS):
        parser.error(f"--only takes {', '.join(PARTS)}, not {', '.join(sorted(unknown))}")
    return args


class Team:
    """The ranks of one kind, processes of this script that make a step when told to."""

    def __init__(self, args: argparse.Namespace, kind: str, ranks: int = 1, threads: int = 1, batch: int = 0,
                 model: str = "", command: list[str] | None = None):
        command = command or [sys.executable, os.path.abspath(__file__), "--worker", kind, "--model", model or args.model,
                              "--batch", str(batch or args.batch), "--warm-up", str(args.warm_up)]
        several = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(free_port())} if ranks > 1 else {}
        self.kind, self.tokens = kind, (batch or args.batch) * SEQUENCE
        self.processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                             env={**os.environ, "OMP_NUM_THREADS": str(threads), **several,
                                  **({"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {})})
            for rank in range(ranks)]
        self._answers()  # one team warms up at a time

    def ask(self) -> None:
        for process in self.processes:
            process.stdin.write("step\n")
            process.stdin.flush()

    def _answers(self) -> list[float]:
        found = []
        for process in self.processes:
            for line in process.stdout:
                if line.startswith("SECONDS "):
                    seconds, self.peak = (float(word) for word in line.split()[1:])
                    found.append(seconds)
                    break
            else:
                raise SystemExit(f"{self.kind}: a worker ended with exit code {process.wait()}")
        return found

    def answer(self) -> float:
        return max(self._answers())

    def seconds(self) -> float:
        self.ask()
        return self.answer()

    def end(self) -> None:
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            process.wait()


def peak_mib() -> float:
    with open("/proc/self/status", encoding="utf-8") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024


def worker(args: argparse.Namespace) -> None:
    import torch
    import train_kinds

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    step = train_kinds.KINDS[args.worker](args.model, args.batch)
    for _ in range(args.warm_up):
        step()
    print(f"SECONDS 0 {peak_mib()}", flush=True)
    for _ in sys.stdin:
        begin = time.perf_counter()
        step()
        print(f"SECONDS {time.perf_counter() - begin} {peak_mib()}", flush=True)


class Report:
    def __init__(self, title: str):
        print(title, flush=True)
        self.values: dict = {}

    def add(self, key: str, text: str, values: list[float], digits: int = 3) -> None:
        self.values[key] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
        s = self.values[key]
        print(f"  {text:<66} {s['median']:.{digits}f}  ({s['min']:.{digits}f} to {s['max']:.{digits}f})", flush=True)

    def number(self, key: str, text: str, value: float, digits: int = 3) -> None:
        self.values[key] = value
        print(f"  {text:<66} {value:.{digits}f}", flush=True)

    def team(self, key: str, text: str, team: Team, seconds: list[float], batches: int = 1) -> None:
        self.add(f"{key}_tokens_per_s", f"{text}, tokens/s", [batches * team.tokens / s for s in seconds], 0)
        self.number(f"{key}_peak_mib", f"{text}, peak memory of a process, MiB", team.peak, 0)


def rounds(args: argparse.Namespace, teams: dict[str, Team]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in teams}
    for _ in range(args.rounds):
        for name, team in teams.items():
            found[name].append(team.seconds())
    return found


def ratios(a: list[float], b: list[float]) -> list[float]:
    return [x / y for x, y in zip(a, b)]


def one_process(args: argparse.Namespace, part: str) -> dict:
    report = Report(f"{args.model}, one process, 2 threads, {part}, batch {args.batch} x {SEQUENCE}")
    kinds = {"eager": "eager-autocast"} if part == "masters" else {"eager": f"eager-{part}", "compiled": f"compiled-{part}"}
    teams = {name: Team(args, kind, threads=2) for name, kind in {**kinds, "ours": f"ours-{part}"}.items()}
    seconds = rounds(args, teams)
    bars = {"fp32": {"eager": "1.05", "compiled": ""}, "bf16": {"eager": "1.25", "compiled": "1.05"},
            "masters": {"eager": "1.25"}}[part]
    for name, team in teams.items():
        report.team(name, {"ours": "shardsmith", "eager": "transformers" + (", autocast" if part == "masters" else "")}
                    .get(name, f"transformers, {name}"), team, seconds[name])
    for name, bar in bars.items():
        report.add(f"ratio_{name}", f"ratio to {name}" + (f" (bar: {bar})" if bar else ""),
                   ratios(seconds[name], seconds["ours"]))
    for team in teams.values():
        team.end()
    return report.values


def through_python(args: argparse.Namespace) -> dict:
    """GPT-2 small with random weights on both sides."""
    report = Report(f"gpt2, one process, 2 threads, through Python, batch {args.batch} x {SEQUENCE}")
    with tempfile.TemporaryDirectory() as folder:
        config = os.path.join(folder, "config.json")
        subprocess.run([sys.executable, "-c", "import sys, train_kinds; train_kinds.write_config(sys.argv[1])", config],
                       env={**os.environ, "PYTHONPATH": os.path.join(ROOT, "bench")}, check=True)
        teams = {"c++": Team(args, "c++", threads=2, command=[args.engine, config, str(args.batch), str(SEQUENCE),
                                                              str(args.warm_up)]),
                 "ours": Team(args, "ours-fp32", threads=2, model="gpt2")}
        seconds = rounds(args, teams)
        for name, team in teams.items():
            report.team(name, {"ours": "shardsmith", "c++": "the engine alone"}[name], team, seconds[name])
            team.end()
    report.add("ratio_c++", "ratio to the engine alone (bar: 0.97)", ratios(seconds["c++"], seconds["ours"]))
    imports = {"torch": "import torch", "shardsmith": "import torch, shardsmith as smp; smp.init"}
    found: dict[str, list[float]] = {name: [] for name in imports}
    for round_ in range(args.rounds + 1):  # the first fills the page cache
        for name, text in imports.items():
            begin = time.perf_counter()
            subprocess.run([sys.executable, "-c", text], check=True,
                           env={**os.environ, "PYTHONPATH": os.path.join(ROOT, "python")})
            if round_:
                found[name].append(time.perf_counter() - begin)
    report.add("import", "import of shardsmith beyond torch's, seconds (bar: 0.3)",
               [ours - torch for ours, torch in zip(found["shardsmith"], found["torch"])])
    return report.values


def together(args: argparse.Namespace, part: str) -> dict:
    """Two ranks beside one process, beside a peer, and beside what is possible."""
    from train_kinds import MICROBATCHES, balance_of

    model = "llama" if part == "slices" else args.model
    batch = args.pipeline_batch if part.startswith("stages") else args.batch
    alone = {"stages": "ours-microbatches", "stages-masters": "ours-microbatches-masters"}.get(part, "ours-fp32")
    ours = {"slices": "ours-slices", "sharded": "ours-sharded"}.get(part, f"ours-{part}")
    peer = {"stages": "pipelining", "slices": "dtensor", "sharded": "zero"}.get(part)
    sent = {"slices": "sums", "sharded": "shards"}.get(part)
    report = Report(f"{model}, two ranks with 1 thread each, {part}, batch {batch} x {SEQUENCE}")
    one, other = (Team(args, alone, batch=batch, model=model) for _ in range(2))
    teams = {"ours": Team(args, ours, 2, batch=batch, model=model)}
    if peer:
        teams["peer"] = Team(args, peer, 2, batch=batch, model=model)
    if sent:
        teams["sent"] = Team(args, sent, 2, batch=batch, model=model)
    seconds: dict[str, list[float]] = {name: [] for name in ("one", "scaling", *teams)}
    for _ in range(args.rounds):
        seconds["one"].append(one.seconds())
        for team in (one, other):
            team.ask()
        seconds["scaling"].append(sum(seconds["one"][-1] / team.answer() for team in (one, other)))
        for name, team in teams.items():
            seconds[name].append(team.seconds())
    batches = 2 if part == "sharded" else 1  # each replica has one of its own
    for name, team in {"one": one, "ours": teams["ours"], **({"peer": teams["peer"]} if peer else {})}.items():
        text = {"one": "one process", "ours": "shardsmith, two ranks", "peer": peer}[name]
        report.team(name, text, team, seconds[name], 1 if name == "one" else batches)
    report.add("scaling", "scaling of two independent processes", seconds["scaling"])
    if sent:
        report.add("sent_seconds", "what is sent, timed alone, seconds", seconds["sent"])
        compute = [batches * one_s / s for one_s, s in zip(seconds["one"], seconds["scaling"])]
        bound = [s * c / (c + sent_s) for s, c, sent_s in zip(seconds["scaling"], compute, seconds["sent"])]
    else:
        balance, bubble = balance_of(model), MICROBATCHES / (MICROBATCHES + 1)
        report.number("balance", "balance of the partition", balance)
        report.number("bubble", f"bubble, {MICROBATCHES} / {MICROBATCHES + 1}", bubble)
        bound = [balance * bubble * s for s in seconds["scaling"]]
    report.add("bound", "bound", bound)
    speedup = [batches * r for r in ratios(seconds["one"], seconds["ours"])]
    report.add("ratio", "two ranks over one process", speedup)
    report.add("of_bound", "of the bound (bar: 0.85)", ratios(speedup, bound))
    if peer:
        report.add("over_peer", f"over {peer} (bar: 1.15, or 0.95 of the bound)", ratios(seconds["peer"], seconds["ours"]))
    for team in (one, other, *teams.values()):
        team.end()
    return report.values


def main() -> None:
    args = arguments()
    if args.worker:
        return worker(args)
    result = {"model": args.model, "rounds": args.rounds}
    for part in args.only.split(","):
        one = part in ("fp32", "bf16", "masters")
        result[part] = through_python(args) if part == "python" else one_process(args, part) if one else together(args, part)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
