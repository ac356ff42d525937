"""Runs the C++ tests (ctest), the Python tests (pytest) and the fuzzers, and ends with one line that sums them up."""

import argparse
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "build" / "reports"


def count(path: Path) -> tuple[int, int, int]:
    """(passed, failed, skipped) of one JUnit file, gtest's, ctest's or pytest's."""
    passed = failed = skipped = 0
    for case in ET.parse(path).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None or case.get("status") == "fail":
            failed += 1
        elif case.find("skipped") is not None or case.get("status") in ("notrun", "disabled"):
            skipped += 1
        else:
            passed += 1
    return passed, failed, skipped


def run_ctest(long: bool, environment: dict[str, str]) -> tuple[int, int, int]:
    """A test program that writes gtest's report counts by its cases, any other as one test."""
    report = REPORTS / "ctest.xml"
    gtest = REPORTS / "gtest"
    environment = environment | {"GTEST_OUTPUT": f"xml:{gtest}/"}
    command = ["ctest", "--test-dir", "build", "--output-on-failure", "--no-tests=ignore", "--output-junit", str(report)]
    command += ["--label-regex", "long"] if long else ["--label-exclude", "long"]
    code = subprocess.run([str(ROOT / ".venv/bin" / command[0]), *command[1:]], cwd=ROOT, env=environment).returncode
    totals = [0, 0, 0]
    programs_failed = 0
    if report.exists():
        passed, programs_failed, skipped = count(report)
        totals = [passed, 0, skipped]
    reports = list(gtest.glob("*.xml"))
    totals[0] = max(0, totals[0] - len(reports))
    for path in reports:
        totals = [a + b for a, b in zip(totals, count(path))]
    # A program that crashed wrote no report, or one without the case that ended it.
    if (programs_failed or code) and totals[1] == 0:
        totals[1] = max(programs_failed, 1)
    return tuple(totals)


def run_pytest(long: bool, environment: dict[str, str]) -> tuple[int, int, int]:
    report = REPORTS / "pytest.xml"
    command = [sys.executable, "-m", "pytest", "-q", "tests/python", "-m", "long" if long else "not long"]
    code = subprocess.run([*command, f"--junitxml={report}"], cwd=ROOT, env=environment).returncode
    passed, failed, skipped = count(report) if report.exists() else (0, 0, 0)
    nothing_collected = code == 5 and long
    if code and not failed and not nothing_collected:
        failed = 1
    return passed, failed, skipped


def run_fuzz(seconds: int, environment: dict[str, str]) -> tuple[int, int, int]:
    """Each reader's fuzzer counts as one test."""
    command = [str(ROOT / "scripts/fuzz"), str(seconds)]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    passed = failed = 0
    for line in process.stdout:
        if not line.startswith("["):  # the compiler's progress
            print(line, end="", flush=True)
        if line.startswith("fuzz: ") and " executions in " in line:
            if line.rstrip().endswith("FAILED"):
                failed += 1
            else:
                passed += 1
    if process.wait() and not failed:
        failed = 1  # it didn't build
    return passed, failed, 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--long", action="store_true", help="the long tests instead of the others")
    long = parser.parse_args().long
    shutil.rmtree(REPORTS, ignore_errors=True)
    (REPORTS / "gtest").mkdir(parents=True)
    environment = dict(os.environ)
    # Tests call the programs by name.
    environment["PATH"] = f"{ROOT / '.venv/bin'}{os.pathsep}{environment.get('PATH', '')}"
    if long:
        environment["SHARDSMITH_LONG"] = "1"
    results = [run_ctest(long, environment), run_pytest(long, environment)]
    results.append(run_fuzz(160 if long else 5, environment))
    passed, failed, skipped = (sum(column) for column in zip(*results))
    sys.stdout.flush()
    print(f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""), flush=True)
    return 1 if failed or (passed == 0 and not long) else 0


if __name__ == "__main__":
    sys.exit(main())
