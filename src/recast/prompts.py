"""Prompt sets: the splits of the shapes world, a text file of prompts, or GenEval's JSONL with metadata."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from recast.errors import RecastError
from recast.rewards import geneval_clauses
from recast.shapes import prompts as shapes
from recast.shapes.prompts import SHAPES

__all__ = ["Row", "load", "load_distinct"]

Row = dict[str, Any]
"""One prompt: its text under `prompt`, and the metadata of its file."""


def load(source: str, count: int | None = None) -> list[Row]:
    """The rows of a prompt set, one per line of its file, of which `count` limits them to the first.

    `source` is `shapes:SPLIT`, or the path of a .txt (one prompt per line) or .jsonl file. A prompt that a file repeats
    is repeated: the published test file of GenEval has 2,212 lines with 553 different prompts.
    """
    return _first(_all(source), count, source, "prompts")


def load_distinct(source: str, count: int | None = None, seed: int | None = None) -> list[Row]:
    """The different rows of a prompt set, for stages that identify a prompt by its text; a warning counts the others.

    `count` limits them to the first ones in the order of the file, or, with a `seed`, to a random choice.
    """
    rows = _all(source)
    found: dict[str, Row] = {}
    for row in rows:
        if found.setdefault(row["prompt"], row) != row:
            raise RecastError(f"{source}: the prompt {row['prompt']!r} occurs twice with different metadata")
    if len(found) < len(rows):
        warnings.warn(f"{source} has {len(rows)} prompts, {len(found)} distinct: each is measured once", stacklevel=1)
    distinct = list(found.values())
    if seed is not None:
        distinct = [distinct[k] for k in np.random.default_rng(seed).permutation(len(distinct))]
    return _first(distinct, count, source, "distinct prompts")


def _all(source: str) -> list[Row]:
    split = source.removeprefix("shapes:")
    return _read(Path(source)) if split == source else list(shapes.load(split))  # type: ignore[arg-type]


def _first(rows: list[Row], count: int | None, source: str, what: str) -> list[Row]:
    if count is not None and count > len(rows):
        raise RecastError(f"{source} has {len(rows)} {what}, fewer than the {count} requested")
    return rows[:count]


def _read(path: Path) -> list[Row]:
    try:
        content = path.read_bytes()
        lines = content.decode("utf-8-sig").split("\n")
    except OSError as error:
        raise RecastError(f"{path}: the prompts cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        number = content[: error.start].count(b"\n") + 1
        raise RecastError(f"{path}, line {number}: the prompts are not UTF-8 text: {error.reason}") from error
    if path.suffix == ".txt":
        rows: list[Row] = [{"prompt": line.strip()} for line in lines if line.strip()]
    elif path.suffix == ".jsonl":
        rows = [_row(path, k, line) for k, line in enumerate(lines, start=1) if line.strip()]
    else:
        raise RecastError(f"{path}: prompts must be a .txt file, one per line, or a .jsonl file, not {path.suffix!r}")
    if not rows:
        raise RecastError(f"{path} contains no prompts")
    return rows


def _row(path: Path, number: int, line: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise RecastError(f"{path}, line {number}: not valid JSON: {error}") from error
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str) or not row["prompt"].strip():
        raise RecastError(f"{path}, line {number}: a line must be an object with a non-empty 'prompt'")
    try:
        row["prompt"].encode()
    except UnicodeEncodeError as error:
        raise RecastError(f"{path}, line {number}: the prompt has half a character ({error.reason})") from error
    try:
        _check_clauses(row)
    except RecastError as error:
        raise RecastError(f"{path}, line {number}: {error}") from error
    return row


def _check_clauses(row: Row) -> None:
    """Raise for invalid GenEval metadata; those of the shapes world have the same format with other classes."""
    entries = row.get("include")
    drawn = isinstance(entries, list) and all(isinstance(e, dict) and e.get("class") in SHAPES for e in entries)
    if row.get("tag") in geneval_clauses.TAGS and not drawn:
        geneval_clauses.parse(row, row["prompt"])
