"""The verb `propose`."""

from __future__ import annotations

from pathlib import Path

from recast.cli.arguments import Overrides, RecipeFile, RunFolder
from recast.cli.console import console, needs, progress

__all__ = ["propose"]


def propose(recipe: RecipeFile, overrides: Overrides = None, out: RunFolder = Path("runs/recast")) -> None:
    """Collect the proposals, images of π+ for every prompt, in RUN/proposals. Only missing images are made.

    Example: `recast propose recipes/shapes.yaml prompts.count=16 --out runs/shapes`

    Images from an API: `OPENAI_API_KEY=… recast propose recipe.yaml propose.source=openai propose.cap=640`
    """
    from recast import config

    settings = config.load(recipe, overrides or [])
    with needs("making proposals", "train"):
        from recast.propose import stage

        manifest = stage.propose(settings, out, progress)
    if not (out / "gains.json").exists():  # otherwise it is the recipe of those curves
        settings.save(out / "recipe.yaml")
    lines = manifest.read_text(encoding="utf-8").count("\n")
    console.print(f"{lines} proposals by {settings.generator}; wrote {manifest}", soft_wrap=True)
