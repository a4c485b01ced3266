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

__all__ = ["evaluate"]


def evaluate(
    recipe: RecipeFile,
    overrides: Overrides = None,
    out: RunFolder = Path("runs/recast"),
    lora: Annotated[Path | None, typer.Option("--lora", help="Folder of the adapter; by default RUN/lora.")] = None,
    base: Annotated[bool, typer.Option("--base", help="Evaluate the policy without an adapter.")] = False,
) -> None:
    """Score a policy on held-out prompts; write RUN/scores with one image and one row per prompt. Resumes.

    Image k has the seed 42 + k for every policy, so that policies can be compared image by image.

    Example: `recast evaluate recipes/shapes.yaml --out runs/shapes`

    The untrained policy: `recast evaluate recipes/shapes.yaml --base --out runs/base`
    """
    from recast import config

    if base and lora is not None:
        raise RecastError("--base evaluates the policy without an adapter and excludes --lora")
    settings = config.load(recipe, overrides or [])
    with needs("evaluating", "train,rewards"):
        from recast.evaluate import stage

        adapter = None if base else lora or out / "lora"
        path = stage.evaluate(settings, out, adapter, progress)
    if path is None:  # another process of this launcher writes the table
        raise typer.Exit
    console.print(tables.scores_table(Scores.load(path.parent)))
    console.print(f"wrote {path}", soft_wrap=True)
