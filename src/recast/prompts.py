"""Prompt sets: the embedded world's splits, a text file of prompts, or GenEval's JSONL with metadata."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recast.errors import RecastError
from recast.rewards import geneval_clauses
from recast.shapes import prompts as shapes
from recast.shapes.prompts import SHAPES

Row = dict[str, Any]
"""One prompt: `prompt`, and whatever metadata its file gives it."""


def load(source: str, count: int | None = None, seed: int | None = None) -> list[Row]:
    """Rows of a prompt set: `shapes:SPLIT`, or a path to a .txt (a prompt a line) or .jsonl file.

    With `count`, the first ones in the file's order, or a random choice where a `seed` is given.
    """
    split = source.removeprefix("shapes:")
    rows = _read(Path(source)) if split == source else shapes.load(split)  # type: ignore[arg-type]
    different: dict[str, Row] = {}
    for row in rows:
        if different.setdefault(row["prompt"], row) != row:
            raise RecastError(
                f"{source}: the prompt {row['prompt']!r} stands there twice, with other metadata each time"
            )
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
    try:
        _check_clauses(row)
    except RecastError as error:
        raise RecastError(f"{path}, line {number}: {error}") from error
    return row


def _check_clauses(row: Row) -> None:
    """Refuse GenEval's metadata with a mistake in it; the shapes world has the same form with classes of its own."""
    entries = row.get("include")
    drawn = isinstance(entries, list) and all(isinstance(e, dict) and e.get("class") in SHAPES for e in entries)
    if row.get("tag") in geneval_clauses.TAGS and not drawn:
        geneval_clauses.parse(row, row["prompt"])
