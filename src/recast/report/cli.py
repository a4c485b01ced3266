"""The verbs `evaluate` and `report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recast.arguments import Overrides, RecipeFile, RunFolder
from recast.console import console, needs, progress
from recast.errors import RecastError


def evaluate(
    recipe: RecipeFile,
    overrides: Overrides = None,
    out: RunFolder = Path("runs/recast"),
    lora: Annotated[Path | None, typer.Option("--lora", help="An adapter's folder; RUN/lora unless told.")] = None,
    base: Annotated[bool, typer.Option("--base", help="The policy without any adapter.")] = False,
) -> None:
    """Score a trained policy on held-out prompts: RUN/scores, with images and a row for each. Makes what is missing.

    Image k has the seed 42 + k whatever the policy, so that policies can be compared picture by picture.

    Example: `recast evaluate recipes/shapes.yaml --out runs/shapes`

    The base to compare with: `recast evaluate recipes/shapes.yaml --base --out runs/base`
    """
    from recast import config

    if base and lora is not None:
        raise RecastError("--base is the policy without an adapter: leave out --lora, or --base")
    settings = config.load(recipe, overrides or [])
    with needs("evaluating", "train,rewards"):
        from recast import evaluate as stage

        adapter = None if base else lora or out / "lora"
        path = stage.evaluate(settings, out, adapter, progress)
    if path is None:  # another process of this launcher writes the table
        raise typer.Exit
    from recast.report import tables
    from recast.report.scores import Scores

    console.print(tables.scores_table(Scores.load(path.parent)))
    console.print(f"wrote {path}", soft_wrap=True)


def report(
    runs: Annotated[list[Path], typer.Argument(help="Evaluated runs, or folders that hold some.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", help="Where the tables and the page go.")] = Path("report"),
) -> None:
    """Compare evaluated runs: tables for terminal, Markdown, LaTeX and CSV, and one page to look at.

    Example: `recast report runs/base runs/static runs/recast --out runs/report`
    """
    from recast.report import render, stage

    made = stage.report(runs, out)
    for table in made.tables:
        console.print(render.rich(table))
    for alarm in made.alarms:
        console.print(f"warning: {alarm}", soft_wrap=True)
    console.print(f"{made.found}\nthe page is {made.page}", soft_wrap=True)
