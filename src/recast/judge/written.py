"""The files of a comparison as strict models, and what a type cannot see about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from recast.core import artifact, strict
from recast.errors import RecastError

__all__ = ["Manifest", "Row", "Summary", "check_rows", "read_manifest"]

_AGAIN = "run recast judge again"


class _Run(strict.Strict):
    method: str
    budget: dict[str, strict.Share]
    seed: strict.Whole
    images: str = ""


class Manifest(strict.Strict):
    """manifest.json: the two runs and the judge."""

    first: _Run
    second: _Run
    model: str = ""
    rubric: str = ""


class _Won(strict.Strict):
    overall: Annotated[int, Field(ge=0, le=1)]
    faithfulness: Annotated[int, Field(ge=0, le=1)] | None
    aesthetics: Annotated[int, Field(ge=0, le=1)] | None


class _Order(strict.Strict):
    shown_as_a: Literal["first", "second"]
    better: Literal["A", "B"]
    score: Annotated[int, Field(ge=1, le=6)]
    confidence: float | None = None
    reasoning: dict[str, str] = {}
    rationale: str = ""
    won: _Won


class Row(strict.Strict):
    """A row of verdicts.jsonl: a pair and its answered orderings."""

    index: strict.Count
    prompt: str
    seed: strict.Whole
    status: Literal["judged", "dropped", "pending"]
    orders: list[_Order]


class Summary(strict.Strict):
    """summary.json: the statistics of a comparison, and what it has cost."""

    pairs: strict.Count
    dropped: strict.Count
    pending: strict.Count
    win_rate: dict[str, list[float | None]]
    decided: dict[str, strict.Count]
    consistency: float | None
    position_bias: float | None
    contradictions: strict.Count
    decisive: dict[str, strict.Count]
    calls: strict.Count = 0
    tokens: list[strict.Count] = []


def read_manifest(path: Path, format: str, remedy: str = _AGAIN) -> dict[str, Any]:
    """The fields of manifest.json, whose methods may become part of a file name."""
    manifest = strict.read(path, format, Manifest, remedy, checked=False)
    for name in ("first", "second"):
        artifact.slug(manifest[name]["method"], f"{name}.method", path)
    artifact.verify(manifest, path)
    return manifest


def check_rows(rows: Sequence[Mapping[str, Any]], path: Path, summary: Mapping[str, Any]) -> None:
    """Raise if a pair is there twice or lacks an order, or rows are missing at the end."""
    before = -1
    for number, row in enumerate(rows, start=1):
        where = f"{path}, line {number}"
        orders = [order["shown_as_a"] for order in row["orders"]]
        if row["index"] <= before or (row["status"] == "judged" and orders != ["first", "second"]):
            raise RecastError(f"{where}: the pair {row['index']} is out of order or lacks one of its orders: {_AGAIN}")
        before = row["index"]
    if summary and sum(summary.get(key, 0) for key in ("pairs", "dropped", "pending")) != len(rows):
        raise RecastError(f"{path} has {len(rows)} rows, another number than summary.json: {_AGAIN}")
