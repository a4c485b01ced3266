"""The verb `train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recast import processes
from recast.cli.arguments import Overrides, RecipeFile, RunFolder
from recast.cli.console import console, needs, training

__all__ = ["train"]


def train(
    recipe: RecipeFile,
    overrides: Overrides = None,
    out: RunFolder = Path("runs/recast"),
    weights: Annotated[
        Path | None, typer.Option("--weights", help="W to train with; by default RUN/weights.json.")
    ] = None,
) -> None:
    """Train a LoRA of the policy with W: RUN/checkpoints, RUN/lora, RUN/metrics.jsonl. Resumes a run that was stopped.

    Example: `recast train recipes/shapes.yaml --out runs/shapes`

    Several GPUs: `torchrun --nproc_per_node 8 -m recast train recipes/sd35/ocr.yaml --out runs/ocr`
    """
    from recast import config

    settings = config.load(recipe, overrides or [])
    with needs("training", "train"):
        from recast.train import stage

        with training(settings.train.epochs) as (on_progress, epoch):
            observer = stage.Observer(lambda sizes: console.print(sizes, soft_wrap=True), on_progress, epoch)
            if processes.RANK > 0:
                observer = stage.Observer()
            done = stage.train(settings, out, weights, observer)
    if processes.RANK == 0:
        console.print(f"trained {done} epochs; wrote {out / 'lora'}", soft_wrap=True)
