"""Versions stand in one place, requirements/constraints.txt; what has to repeat one agrees with it."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import pins as build_pins  # noqa: E402


def test_every_requirement_has_a_pin():
    pinned = build_pins.pins()
    for name in ("runtime.txt", "develop.txt", "models.txt"):
        for line in build_pins.lines(name):
            assert line in pinned


def test_torch_is_the_same_everywhere():
    torch = build_pins.pins()["torch"]
    assert f'"torch=={torch}"' in (ROOT / "pyproject.toml").read_text()
    from shardsmith import pins

    assert pins.TORCH == torch


def test_the_package_depends_on_one_minor_version_of_torch():
    dependencies = build_pins.dynamic_metadata("dependencies")
    assert dependencies[0] == "torch>=2.13.0,<2.14"
    assert all(re.fullmatch(r"[A-Za-z0-9-]+>=[0-9.]+,<[0-9.]+", d) for d in dependencies)


def test_installed_packages_are_the_pinned_ones():
    from importlib.metadata import PackageNotFoundError, version

    for name, pin in build_pins.pins().items():
        try:
            assert version(name).split("+")[0] == pin
        except PackageNotFoundError:
            assert name in build_pins.lines("models.txt") or name in ("cmake", "ninja")
