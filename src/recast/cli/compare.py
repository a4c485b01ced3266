"""The verb `compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recast.cli import tables
from recast.cli.console import console
from recast.core import comparison, schedule
from recast.core.curves import GainCurves
from recast.errors import RecastError

__all__ = ["compare"]


def compare(
    first: Annotated[Path, typer.Argument(help="The first gains.json.")],
    second: Annotated[Path, typer.Argument(help="The second gains.json.")],
    resample: Annotated[
        bool, typer.Option("--resample", help="Resample the second onto the grid of the first.")
    ] = False,
) -> None:
    """Compare two gain curves per reward: correlations, peaks, total gain and remaining gain.

    Example: `recast compare base/gains.json trained/gains.json`
    """
    a, b = GainCurves.load(first), GainCurves.load(second)
    if not resample and not schedule.same(a.sigmas, b.sigmas):
        raise RecastError(
            f"{first} (T = {a.steps}) and {second} (T = {b.steps}) are on different grids; add --resample"
        )
    console.print(
        tables.comparison_table(comparison.compare(a, b.resample(a.sigmas) if resample else b), str(first), str(second))
    )
    console.print(tables.remaining_table(comparison.remaining(a, b), str(first), str(second)))
