"""The verb `weigh`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recast.cli import show
from recast.cli.arguments import Budget, MethodName, Overrides, Shrink, Tau, parse_budget
from recast.cli.console import console
from recast.core.curves import GainCurves
from recast.errors import RecastError
from recast.weigh import stage


def weigh(
    source: Annotated[Path, typer.Argument(help="gains.json, or a recipe whose RUN folder has one.")],
    overrides: Overrides = None,
    budget: Budget = None,
    method: MethodName = "sinkhorn",
    tau: Tau = 1.0,
    shrink: Shrink = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Where to write; default weights.json beside the curves (a recipe: its RUN)."),
    ] = None,
) -> None:
    """Turn gain curves and a budget into W: weights.json, a table and a heatmap.

    Example: `recast weigh gains.json --budget clipscore=1,ocr=2`

    Or by a recipe: `recast weigh recipes/mixture.yaml weigh.method=row --out runs/mixture`
    """
    if source.suffix in (".yaml", ".yml"):
        from recast import config

        if budget is not None or method != "sinkhorn" or tau != 1.0 or shrink:
            raise RecastError(
                "with a recipe, set weigh.budget.NAME=1, weigh.method, weigh.tau and weigh.shrink instead"
            )
        folder = out or Path("runs/recast")
        settings = config.load(source, overrides or [])
        curves = GainCurves.load(folder / "gains.json")
        weights = stage.weigh_recipe(settings, curves)
        target = stage.save(settings, weights, folder)
    else:
        if overrides:
            raise RecastError(f"{overrides[0]!r} belongs to a recipe; with a gains file use --budget, --method, --tau")
        curves = GainCurves.load(source)
        weights = stage.weigh(curves, parse_budget(budget, curves.rewards), method, tau=tau, shrink=shrink)  # type: ignore[arg-type]
        target = out or source.parent / "weights.json"
        if target.resolve() == source.resolve():
            raise RecastError(f"{source}: the weights would overwrite the curves; choose another --out")
        weights.save(target)
    show.weights(curves, weights)
    console.print(f"wrote {target}", soft_wrap=True)
