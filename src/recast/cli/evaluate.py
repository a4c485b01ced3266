"""The verb `evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recast.cli import tables
from recast.cli.arguments import Overrides, RecipeFile, RunFolder
from recast.cli.console import console, needs, progress
from recast.errors import RecastError
from recast.evaluate import Scores


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
        from recast.evaluate import stage

        adapter = None if base else lora or out / "lora"
        path = stage.evaluate(settings, out, adapter, progress)
    if path is None:  # another process of this launcher writes the table
        raise typer.Exit
    console.print(tables.scores_table(Scores.load(path.parent)))
    console.print(f"wrote {path}", soft_wrap=True)
