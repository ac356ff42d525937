"""What to go on from, by the option's word. Imports no torch."""
from __future__ import annotations

import os
from dataclasses import dataclass

from shardsmith.errors import Error


@dataclass
class Choice:
    path: str | None  # None: a fresh start
    tag: str | None = None
    passed_over: tuple[str, ...] = ()


def choose(word: str, output_dir: str) -> Choice:
    from shardsmith import _core

    if word == "false":
        return Choice(None)
    if word in ("true", "auto"):
        found, passed = (_core.find_checkpoint(output_dir) if os.path.isdir(output_dir) else (None, []))
        if found is None and word == "true":
            why = f" (passed over: {passed[0]})" if passed else ""
            raise Error("corrupt", f"{output_dir}: there is no complete checkpoint to resume from{why}; "
                                   "`auto` begins anew where there is none")
        if found is None:
            return Choice(None, passed_over=tuple(passed))
        return Choice(output_dir, found["name"].removesuffix("_partial"), tuple(passed))
    if os.path.isdir(word):
        if os.path.isfile(os.path.join(word, "manifest.json")):
            folder = os.path.abspath(word)
            return _tagged(os.path.dirname(folder), os.path.basename(folder).removesuffix("_partial"))
        found, passed = _core.find_checkpoint(word)
        if found is None:
            raise Error("corrupt", f"{word}: there is no complete checkpoint to resume from")
        return Choice(word, found["name"].removesuffix("_partial"), tuple(passed))
    if os.sep in word:
        raise Error("not_found", f"{word}: there is no such checkpoint")
    if not os.path.isdir(output_dir):
        raise Error("not_found", f"{output_dir}: there is no such folder to resume {word} from")
    return _tagged(output_dir, word.removesuffix("_partial"))


def _tagged(path: str, tag: str) -> Choice:
    from shardsmith import _core

    names = {entry["name"]: entry for entry in _core.scan(path)}
    entry = names.get(f"{tag}_partial")
    if entry is None:
        raise Error("not_found", f"{path}: there is no checkpoint {tag}"
                                 + (f"; there are {', '.join(sorted(names))}" if names else ""))
    if not entry["complete"]:
        raise Error("corrupt", f"{os.path.join(path, entry['name'])}: {entry['why_not']}")
    return Choice(path, tag)
