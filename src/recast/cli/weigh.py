"""The verb `weigh`."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from recast.cli import show
from recast.cli.arguments import Budget, Columns, MethodName, Overrides, Shrink, Tau, parse_budget, parse_columns
from recast.cli.console import console
from recast.core.curves import GainCurves
from recast.errors import RecastError
from recast.weigh import stage

__all__ = ["weigh"]


def weigh(
    source: Annotated[Path, typer.Argument(help="gains.json, or a recipe whose RUN folder contains one.")],
    overrides: Overrides = None,
    budget: Budget = None,
    method: MethodName = "sinkhorn",
    columns: Columns = "uniform",
    tau: Tau = 1.0,
    shrink: Shrink = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="Output file, by default weights.json beside the curves; with a recipe, the RUN folder."
        ),
    ] = None,
) -> None:
    """Compute W from gain curves and a budget; write weights.json and print a table and a heatmap.

    Example: `recast weigh gains.json --budget clipscore=1,ocr=2`

    Steps by their effect on the policy: `recast weigh gains.json --columns effects.json`

    With a recipe: `recast weigh recipes/mixture.yaml weigh.method=row --out runs/mixture`
    """
    if source.suffix in (".yaml", ".yml"):
        from recast import config

        if budget is not None or method != "sinkhorn" or columns != "uniform" or tau != 1.0 or shrink:
            raise RecastError(
                "--budget, --method, --columns, --tau and --shrink belong to a gains file; with a recipe, set "
                "weigh.budget.NAME=1, weigh.method, weigh.columns, weigh.tau and weigh.shrink instead"
            )
        folder = out or Path("runs/recast")
        settings = config.load(source, overrides or [])
        curves = GainCurves.load(folder / "gains.json")
        weights = stage.weigh_recipe(settings, curves, stage.effects_of(settings, folder))
        target = stage.save(settings, weights, folder)
    else:
        if overrides:
            raise RecastError(
                f"{overrides[0]!r} is a setting of a recipe; with a gains file, use --budget, --method, --columns and "
                "--tau"
            )
        curves = GainCurves.load(source)
        shares, nu = parse_budget(budget, curves.rewards), parse_columns(columns, curves.sigmas.tolist())
        weights = stage.weigh(curves, shares, method, tau=tau, columns=nu, shrink=shrink)  # type: ignore[arg-type]
        if columns.endswith(".json"):
            weights = replace(weights, info={**weights.info, "columns": "effect"})
        target = out or source.parent / "weights.json"
        if os.path.realpath(target) == os.path.realpath(source):
            raise RecastError(f"{source}: W would overwrite the curves; choose another --out")
        weights.save(target)
    show.weights(curves, weights)
    console.print(f"wrote {target}", soft_wrap=True)
