"""The verb `compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recast.cli import tables
from recast.cli.console import console
from recast.core import curves, schedule
from recast.core.curves import GainCurves
from recast.errors import RecastError


def compare(
    first: Annotated[Path, typer.Argument(help="gains.json to compare from.")],
    second: Annotated[Path, typer.Argument(help="gains.json to compare to.")],
    resample: Annotated[
        bool, typer.Option("--resample", help="Resample the second onto the first's grid if they differ.")
    ] = False,
) -> None:
    """Compare two gain curves reward by reward: correlations, peaks, total gain and what remains of it.

    Example: `recast compare base/gains.json trained/gains.json`
    """
    a, b = GainCurves.load(first), GainCurves.load(second)
    if not resample and not schedule.same(a.sigmas, b.sigmas):
        raise RecastError(
            f"{first} (T = {a.steps}) and {second} (T = {b.steps}) lie on different grids: add --resample"
        )
    console.print(
        tables.comparison_table(curves.compare(a, b.resample(a.sigmas) if resample else b), str(first), str(second))
    )
    console.print(tables.remaining_table(curves.remaining(a, b), str(first), str(second)))
