"""The verb `doctor`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recast import processes
from recast.cli import effects, tables
from recast.cli.arguments import Overrides, RecipeFile
from recast.cli.console import console, needs, training
from recast.core.advice import advice
from recast.core.curves import GainCurves
from recast.core.effects import Effects
from recast.core.weights import WeightMatrix
from recast.errors import RecastError
from recast.weigh import stage as weighing

if TYPE_CHECKING:
    from recast.config import Recipe

__all__ = ["doctor"]


def doctor(
    recipe: RecipeFile,
    overrides: Overrides = None,
    gradients: Annotated[
        bool, typer.Option("--gradients", help="Measure the gradient of every reward at every level instead.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="RUN, for effects.json (`--gradients`).", show_default="runs/recast"),
    ] = None,
    prompts: Annotated[
        int | None, typer.Option("--prompts", min=2, help="Number of prompts.", show_default="8; 64 with --gradients")
    ] = None,
    images: Annotated[
        int | None,
        typer.Option("--images-per-prompt", min=2, help="Number of images per prompt.", show_default="8"),
    ] = None,
) -> None:
    """Check the rewards before training: their scales, their spread within groups, conflicts, and constant rewards.

    Example: `recast doctor recipes/shapes.yaml`

    With `--gradients`: signal and noise of their gradients, the effect of each level, the budget realized, and the
    images per update up to which timing pays: `recast doctor recipes/shapes.yaml --gradients --out runs/shapes`
    """
    from recast import config

    settings = config.load(recipe, overrides or [])
    if gradients:
        _gradients(settings, out or Path("runs/recast"), prompts, images)
        return
    if out is not None:
        raise RecastError(f"--out {out} is for effects.json, which only --gradients writes: add --gradients")
    with needs("the doctor", "train"):
        from recast.train import doctor as stage

        with training(0) as (on_progress, _):
            found = stage.examine(settings, prompts or 8, images or 8, on_progress)
    console.print(tables.doctor_table(found))
    console.print(tables.correlation_table(found.names, found.correlations))
    for sentence in found.advice:
        console.print(f"- {sentence}", soft_wrap=True)


def _gradients(recipe: Recipe, out: Path, prompts: int | None, images: int | None) -> None:
    """Measure the gradients, or read them, and print what follows."""
    costs: list[Mapping[str, int]] = []

    def show(cost: Mapping[str, int]) -> None:
        costs.append(cost)
        console.print(tables.plan_table(cost))

    with needs("the doctor", "train"):
        from recast.train import gradients as stage

        with training(0) as (on_progress, _):
            found = stage.effects(recipe, out, prompts, images, on_progress, show)
    if processes.RANK > 0:
        return
    weights, origin = _weights(recipe, out, found)
    static = weighing.static(dict(zip(weights.rewards, weights.budget.tolist(), strict=True)), found.sigmas)
    console.print(effects.levels_table(found))
    console.print(effects.budget_table(found, weights, static))
    console.print(effects.efficiency_table(found, weights))
    for sentence in (*advice(found, weights), origin):
        console.print(f"- {sentence}", soft_wrap=True)
    done, total = "wrote" if costs else "read", found.images * len(found.own)
    console.print(f"{done} {out / 'effects.json'}, from the gradients of {total:,} images", soft_wrap=True)


def _weights(recipe: Recipe, out: Path, found: Effects) -> tuple[WeightMatrix, str]:
    """W of RUN, or static if RUN has neither W nor curves, and a sentence on where it comes from."""
    if (path := out / "weights.json").exists():
        return WeightMatrix.load(path), f"W is {path}."
    if (path := out / "gains.json").exists():
        weights = weighing.weigh_recipe(recipe, GainCurves.load(path), effects=found)
        return weights, f"W is computed from {path} by weigh.method = {weights.method}."
    remedy = f"recast run RECIPE run.methods=[] --out {out} measures gain curves, from which W is computed."
    return weighing.static(recipe.budget, found.sigmas), f"{out} has no weights.json and no gains.json: {remedy}"
