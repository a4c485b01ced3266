"""Damages files at random, lets the stages read them, and counts the outcomes.

Allowed are a refusal in one line that changes nothing on disk, and the result of the undamaged file. A file that a user
writes, or whose checksum was made to fit, may also be another valid one.
"""

import json
import random
import signal
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from damage import RESEALED, damaged
from targets import Target

from recast.core import artifact
from recast.errors import RecastError

__all__ = ["ALLOWED", "Case", "fuzz", "table"]

ALLOWED = ("refused", "same", "valid")
OUTCOMES = (*ALLOWED, "silent", "traceback", "dirty", "hang")
LIMIT = 20.0
"""Seconds after which a reader is said to hang."""


@dataclass(frozen=True)
class Case:
    """One damaged file: what was done to it, and what became of it."""

    target: str
    seed: int
    damage: str
    outcome: str
    detail: str


class _HangError(BaseException):
    """Not an Exception, so that no reader takes it for damage."""


def fuzz(targets: list[Target], count: int, first: int = 0) -> Iterator[Case]:
    """So many cases in turn over all targets; a case depends on its target and number only."""
    wanted: dict[str, str] = {}
    kept = {target.folder: _contents(target.folder) for target in targets}
    for target in targets:
        wanted[target.name] = _plain(target.read())
        _restore(target.folder, kept[target.folder])
    for number in range(first, first + count):
        target = targets[number % len(targets)]
        chance = random.Random(f"{target.name} {number // len(targets)}")
        path = target.folder / target.file
        content, way = damaged(kept[target.folder][path], path.suffix, chance)
        path.write_bytes(content)
        before = _contents(target.folder)
        outcome, detail = _outcome(target, wanted[target.name])
        if outcome == "silent" and way.startswith(RESEALED):
            outcome = "valid"
        if (
            outcome == "refused"
            and not way.startswith(RESEALED)
            and (changed := _changes(before, _contents(target.folder)))
        ):
            outcome, detail = "dirty", f"{detail} | changed {', '.join(changed)}"
        _restore(target.folder, kept[target.folder])
        yield Case(target.name, number, way, outcome, detail)


def _outcome(target: Target, wanted: str) -> tuple[str, str]:
    try:
        with _limited(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = _plain(target.read())
    except RecastError as error:
        return ("traceback" if "\n" in str(error) else "refused"), str(error)
    except _HangError:
        return "hang", f"more than {LIMIT:g} seconds"
    except (Exception, SystemExit) as error:
        return "traceback", f"{type(error).__name__}: {error}"
    if found == wanted:
        return "same", ""
    return ("valid" if target.own else "silent"), ""


@contextmanager
def _limited() -> Iterator[None]:
    def late(*_: Any) -> None:
        raise _HangError

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, LIMIT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _plain(value: Any) -> str:
    return json.dumps(artifact.plain(value), sort_keys=True, default=repr)


def _contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".lock")}


def _changes(before: dict[Path, bytes], after: dict[Path, bytes]) -> list[str]:
    return sorted(str(path) for path in {*before, *after} if before.get(path) != after.get(path))


def _restore(folder: Path, kept: dict[Path, bytes]) -> None:
    now = _contents(folder)
    for path in now.keys() - kept.keys():
        path.unlink()
    for path, content in kept.items():
        if now.get(path) != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def table(cases: list[Case]) -> str:
    """Counts by target and outcome."""
    names = list(dict.fromkeys(case.target for case in cases))
    counts = {name: Counter(case.outcome for case in cases if case.target == name) for name in names}
    counts["all"] = sum(counts.values(), Counter())
    lines = [f"{'file':44}" + "".join(f"{outcome:>10}" for outcome in OUTCOMES)]
    lines += [f"{name:44}" + "".join(f"{each[outcome]:10d}" for outcome in OUTCOMES) for name, each in counts.items()]
    return "\n".join(lines)
