"""The verb `estimate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recast.cli import show
from recast.cli.arguments import Overrides, RecipeFile, RunFolder
from recast.cli.console import console

__all__ = ["estimate"]


def estimate(
    recipe: RecipeFile,
    overrides: Overrides = None,
    out: RunFolder = Path("runs/recast"),
    alpha: Annotated[float | None, typer.Option("--alpha", help="Rényi order; by default the recipe's.")] = None,
    reuse: Annotated[bool, typer.Option("--reuse", help="Only recompute the curves from stored rollouts.")] = False,
    until_ci: Annotated[
        float | None,
        typer.Option("--until-ci", min=0, help="Stop as soon as the 95 % interval of W is this narrow."),
    ] = None,
) -> None:
    """Measure gain curves and write RUN/gains.json (and RUN/exact.json where the exact curves are known).

    Rollouts are stored per prompt in RUN/shards, and an interrupted run resumes where it stopped. Several processes,
    under torchrun or started separately with the same RUN, share the prompts.

    Example: `recast estimate recipes/shapes.yaml --out runs/shapes`

    Its cost in advance: `recast plan recipes/shapes.yaml`

    Another order, from the same rollouts: `recast estimate recipes/shapes.yaml --alpha 4 --reuse --out runs/shapes`

    Until W is accurate: `recast estimate recipes/shapes.yaml prompts.count=816 --until-ci 0.1 --out runs/a`
    """
    from recast import config

    changed = [*(overrides or []), *([] if alpha is None else [f"estimate.alpha={alpha}"])]
    settings = config.load(recipe, changed)
    found = show.estimate(settings, out, reuse, until_ci)
    if found is None:  # another process of this launcher writes the curves
        raise typer.Exit
    curves, truth = found
    if until_ci is not None:
        from recast.estimate import stage

        used = 0 if curves.D_prompts is None else len(curves.D_prompts)
        found = stage.width(settings, curves)
        met = "as requested" if found <= until_ci else f"above {until_ci:g}: raise prompts.count"
        console.print(f"after {used} prompts the interval of W is {found:.3f}, {met}")
    names = "gains.json" if truth is None else "gains.json and exact.json"
    console.print(f"wrote {names} in {out}", soft_wrap=True)
