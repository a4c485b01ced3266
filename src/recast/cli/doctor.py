"""The verb `doctor`."""

from __future__ import annotations

from typing import Annotated

import typer

from recast.cli import tables
from recast.cli.arguments import Overrides, RecipeFile
from recast.cli.console import console, needs, training


def doctor(
    recipe: RecipeFile,
    overrides: Overrides = None,
    groups: Annotated[int, typer.Option("--groups", min=2, help="Prompts to look at.")] = 8,
    images: Annotated[int, typer.Option("--images", min=2, help="Images a prompt.")] = 8,
) -> None:
    """Look at the rewards before training: scales, spread within groups, conflicts, dead rewards, in plain words.

    Example: `recast doctor recipes/shapes.yaml`
    """
    from recast import config

    settings = config.load(recipe, overrides or [])
    with needs("the doctor", "train"):
        from recast.train import doctor as stage

        with training(0) as (on_progress, _):
            found = stage.examine(settings, groups, images, on_progress)
    console.print(tables.doctor_table(found))
    console.print(tables.correlation_table(found.names, found.correlations))
    for sentence in found.advice:
        console.print(f"- {sentence}", soft_wrap=True)
