"""The verb `doctor`."""

from __future__ import annotations

from typing import Annotated

import typer

from recast.cli import tables
from recast.cli.arguments import Overrides, RecipeFile
from recast.cli.console import console, needs, training

__all__ = ["doctor"]


def doctor(
    recipe: RecipeFile,
    overrides: Overrides = None,
    prompts: Annotated[int, typer.Option("--prompts", min=2, help="Number of prompts.")] = 8,
    images: Annotated[int, typer.Option("--images-per-prompt", min=2, help="Number of images per prompt.")] = 8,
) -> None:
    """Check the rewards before training: their scales, their spread within groups, conflicts, and constant rewards.

    Example: `recast doctor recipes/shapes.yaml`
    """
    from recast import config

    settings = config.load(recipe, overrides or [])
    with needs("the doctor", "train"):
        from recast.train import doctor as stage

        with training(0) as (on_progress, _):
            found = stage.examine(settings, prompts, images, on_progress)
    console.print(tables.doctor_table(found))
    console.print(tables.correlation_table(found.names, found.correlations))
    for sentence in found.advice:
        console.print(f"- {sentence}", soft_wrap=True)
