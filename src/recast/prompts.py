"""Prompt sets: the embedded world's splits, a text file of prompts, or GenEval's JSONL with metadata."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recast.errors import RecastError

Row = dict[str, Any]
"""One prompt: `prompt`, and whatever metadata its file gives it."""


def load(source: str, count: int | None = None, seed: int | None = None) -> list[Row]:
    """Rows of a prompt set: `shapes:SPLIT`, or a path to a .txt (a prompt a line) or .jsonl file.

    With `count`, the first ones in the file's order, or a random choice where a `seed` is given.
    """
    if source.startswith("shapes:"):
        from recast.shapes import prompts as shapes

        rows = shapes.load(source.removeprefix("shapes:"))  # type: ignore[arg-type]
    else:
        rows = _read(Path(source))
    different: dict[str, Row] = {}
    for row in rows:
        different.setdefault(row["prompt"], row)
    rows = list(different.values())
    if count is not None and count > len(rows):
        raise RecastError(f"{source}: {count} prompts were asked for, but it has {len(rows)} different ones")
    if seed is not None:
        rows = [rows[k] for k in np.random.default_rng(seed).permutation(len(rows))]
    return rows[:count]


def digest(rows: Sequence[Row]) -> str:
    """SHA-256 over prompts and metadata, in order: what an artifact records of the prompts it came from."""
    text = "\n".join(json.dumps(row, sort_keys=True, ensure_ascii=False) for row in rows)
    return hashlib.sha256(text.encode()).hexdigest()


def _read(path: Path) -> list[Row]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RecastError(f"{path}: the prompts cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if path.suffix == ".txt":
        rows: list[Row] = [{"prompt": line.strip()} for line in lines if line.strip()]
    elif path.suffix == ".jsonl":
        rows = [_row(path, k, line) for k, line in enumerate(lines, start=1) if line.strip()]
    else:
        raise RecastError(f"{path}: prompts come as .txt, a prompt a line, or as .jsonl, not as {path.suffix!r}")
    if not rows:
        raise RecastError(f"{path}: there are no prompts in it")
    return rows


def _row(path: Path, number: int, line: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise RecastError(f"{path}, line {number}: not valid JSON: {error}") from error
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str) or not row["prompt"].strip():
        raise RecastError(f"{path}, line {number}: a line is an object with a 'prompt' that is not empty")
    for key in ("include", "exclude"):
        problem = _wrong_clauses(row.get(key, []))
        if problem:
            raise RecastError(f"{path}, line {number}: {key} is not a list of GenEval's clauses: {problem}")
    return row


def _wrong_clauses(entries: Any) -> str | None:
    """What is wrong with GenEval's metadata: entries have a class, a count, perhaps a colour and a position."""
    if not isinstance(entries, list):
        return f"it is a {type(entries).__name__}"
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("class"), str):
            return f"{entry!r} has no 'class'"
        count, color, position = entry.get("count", 1), entry.get("color", ""), entry.get("position")
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            return f"the count of {entry['class']!r} is {count!r}, not a number from 1"
        if not isinstance(color, str):
            return f"the color of {entry['class']!r} is {color!r}, not a word"
        if position is not None:
            others = range(len(entries))
            if not (isinstance(position, list) and len(position) == 2 and isinstance(position[0], str)):
                return f"the position of {entry['class']!r} is {position!r}, not [relation, number of an entry]"
            if position[1] not in others or entries[position[1]] is entry:
                return f"the position of {entry['class']!r} names the entry {position[1]!r}, which is not another one"
    return None
