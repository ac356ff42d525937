"""The package's dependencies from requirements/: torch pinned to one minor version (the extension is built for
it), the others from the tested version up to the next major one. Called by the build backend."""

from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements"


def lines(name: str) -> list[str]:
    text = (REQUIREMENTS / name).read_text(encoding="utf-8")
    return [line for line in (line.split("#")[0].strip() for line in text.splitlines()) if line]


def pins() -> dict[str, str]:
    return dict(line.split("==") for line in lines("constraints.txt"))


def dynamic_metadata(field: str, settings: dict | None = None) -> list[str]:
    assert field == "dependencies"
    versions = pins()
    major, minor = versions["torch"].split(".")[:2]
    result = [f"torch>={versions['torch']},<{major}.{int(minor) + 1}"]
    for name in lines("runtime.txt"):
        first = int(versions[name].split(".")[0])
        result.append(f"{name}>={versions[name]},<{first + 1}")
    return result
