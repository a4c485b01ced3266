"""The verb `sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recast.cli import show
from recast.cli.arguments import Jobs, Overrides, RecipeFile, RunFolder
from recast.cli.console import console, needs
from recast.cli.jobs import observer

__all__ = ["sweep"]


def sweep(
    recipe: RecipeFile,
    overrides: Overrides = None,
    out: RunFolder = Path("runs/sweep"),
    jobs: Jobs = None,
    print_only: Annotated[
        bool, typer.Option("--print", help="Print one command per policy, for a job queue, and train nothing.")
    ] = False,
) -> None:
    """Compare methods over budgets and seeds in matched pairs: train, evaluate and report all policies.

    Example: `recast sweep recipes/shapes.yaml --out runs/sweep`

    With a warmup of every seed, from which its policies resume:
    `recast sweep recipes/sd35/ocr.yaml sweep.warmup=recipes/sd35/warmup.yaml --out runs/sweep`

    For a job queue: `recast sweep recipes/sd35/ocr.yaml --out runs/sweep --print > commands.txt`, and once all are done
    `recast report runs/sweep`
    """
    from recast import config

    settings = config.load(recipe, overrides or [])
    with needs("sweeping", "train"):
        from recast.sweep import jobs as planning
        from recast.sweep import stage

        budgets = planning.budgets_of(settings, settings.sweep.budgets)
        warmups = planning.warmups_of(settings, out)
        planned = planning.jobs_of(settings, out, settings.sweep.methods, settings.sweep.seeds, budgets, warmups)
        curves, _ = stage.curves_of(settings, out, observer(), jobs)
    effects = show.effects(settings, out)
    if print_only:
        stage.prepare(settings, out, curves, planned, warmups, effects)
        for line in planning.command_lines(planned):
            console.print(line, soft_wrap=True)
        return
    with needs("comparing policies", "train,rewards"):
        made = stage.compare(settings, out, curves, planned, jobs, observer(), warmups, effects)
    if made is not None:
        show.report(made, 2)
