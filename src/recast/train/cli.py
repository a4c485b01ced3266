"""The verbs `train` and `doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recast import processes
from recast.arguments import Overrides, RecipeFile, RunFolder
from recast.console import console, needs, training


def train(
    recipe: RecipeFile,
    overrides: Overrides = None,
    out: RunFolder = Path("runs/recast"),
    weights: Annotated[
        Path | None, typer.Option("--weights", help="W to train with; RUN/weights.json unless told.")
    ] = None,
) -> None:
    """Train the policy's LoRA with W: RUN/checkpoints, RUN/lora and RUN/metrics.jsonl. Goes on where it was stopped.

    Example: `recast train recipes/shapes.yaml --out runs/shapes`

    Several GPUs: `torchrun --nproc_per_node 8 -m recast train recipes/sd35/ocr.yaml --out runs/ocr`
    """
    from recast import config

    settings = config.load(recipe, overrides or [])
    with needs("training", "train"):
        from recast.train import stage

        with training(settings.train.epochs) as (tick, epoch):
            observer = stage.Observer(lambda plan: console.print(plan, soft_wrap=True), tick, epoch)
            if processes.RANK > 0:
                observer = stage.Observer()
            done = stage.train(settings, out, weights, observer)
    if processes.RANK == 0:
        console.print(f"trained {done} epochs; wrote {out / 'lora'}", soft_wrap=True)


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
    from recast.report import tables

    settings = config.load(recipe, overrides or [])
    with needs("the doctor", "train"):
        from recast.train import doctor as stage

        with training(0) as (tick, _):
            found = stage.examine(settings, groups, images, tick)
    console.print(tables.doctor_table(found))
    console.print(tables.correlation_table(found.names, found.correlations))
    for sentence in found.advice:
        console.print(f"- {sentence}", soft_wrap=True)
