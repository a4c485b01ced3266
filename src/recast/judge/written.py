"""The files of a comparison as strict models, and what a type cannot see about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from recast import strict
from recast.core import artifact
from recast.errors import RecastError

__all__ = ["check_manifest", "check_rows"]

_AGAIN = "run recast judge again"


class _Run(strict.Strict):
    method: str
    budget: dict[str, Annotated[float, Field(ge=0)]]
    seed: int
    images: str = ""


class _Manifest(strict.Strict):
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
    score: Annotated[int, Field(ge=1, le=6)]
    won: _Won


class _Row(strict.Strict):
    """A row of verdicts.jsonl: a pair and its answered orderings."""

    index: Annotated[int, Field(ge=0)]
    prompt: str
    seed: int
    status: Literal["judged", "dropped", "pending"]
    orders: list[_Order]


def check_manifest(manifest: Mapping[str, Any], path: Path) -> None:
    """Raise if a field of manifest.json is wrong."""
    strict.require(_Manifest, manifest, str(path), _AGAIN)
    for name in ("first", "second"):
        artifact.slug(manifest[name]["method"], f"{name}.method", path)


def check_rows(rows: Sequence[Mapping[str, Any]], path: Path, summary: Mapping[str, Any]) -> None:
    """Raise if a row has a wrong field, a pair is there twice or lacks an order, or rows are missing at the end."""
    before = -1
    for number, row in enumerate(rows, start=1):
        where = f"{path}, line {number}"
        strict.require(_Row, row, where, _AGAIN)
        orders = [order["shown_as_a"] for order in row["orders"]]
        if row["index"] <= before or (row["status"] == "judged" and orders != ["first", "second"]):
            raise RecastError(f"{where}: the pair {row['index']} is out of order or lacks one of its orders: {_AGAIN}")
        before = row["index"]
    if summary and sum(summary.get(key, 0) for key in ("pairs", "dropped", "pending")) != len(rows):
        raise RecastError(f"{path} has {len(rows)} rows, another number than summary.json: {_AGAIN}")
