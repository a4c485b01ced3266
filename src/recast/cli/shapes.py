"""The verb `shapes`: pretrain the models of the embedded world again, and draw its images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recast.cli.console import console, needs, progress
from recast.core import artifact
from recast.report import figures
from recast.shapes import prompts

__all__ = ["app"]

app = typer.Typer(
    help="The embedded world: pretrain its models again, or draw its images.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@app.command()
def pretrain(
    out: Annotated[Path, typer.Option("--out", help="Folder for the models, the log and the resume state.")] = Path(
        "runs/shapes"
    ),
) -> None:
    """Pretrain the base pipeline and its CLIP: OUT/pipeline, OUT/clip and OUT/log.json, in minutes.

    An interrupted run resumes where it stopped and ends with the same bytes.

    Example: `recast shapes pretrain --out runs/shapes`
    """
    with needs("the shapes world", "train"):
        from recast.shapes import pretrain as stage
    log = stage.pretrain(out, progress, stage.FLOW, stage.CLIP)
    artifact.write(out / "log.json", "recast.shapes.log", log)
    for name, value in log["scores"].items():
        console.print(f"{name:12} {value:.3f}")
    console.print(f"wrote pipeline, clip and log.json in {out}", soft_wrap=True)


@app.command()
def show(
    out: Annotated[Path, typer.Option("--out", help="Output file without suffix; writes .png and .pdf.")] = Path(
        "shapes"
    ),
    model: Annotated[
        str, typer.Option("--model", help="Folder of a pipeline; shapes is the one that is shipped.")
    ] = "shapes",
    split: Annotated[str, typer.Option("--split", help="train, validation or test.")] = "test",
    count: Annotated[int, typer.Option("--count", min=1, max=64, help="Number of prompts.")] = 8,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Number of denoising steps.")] = 10,
    guidance: Annotated[float, typer.Option("--guidance", help="Classifier-free guidance; 1 is none.")] = 1.0,
) -> None:
    """Draw a contact sheet of prompts, rendered images, images of the base policy and their composition scores.

    Example: `recast shapes show --split validation --count 16 --out sheets/validation`
    """
    with needs("the shapes world", "train"):
        from recast import config
        from recast.flow import families
        from recast.flow.generate import generate
        from recast.shapes import render, rewards
        from recast.shapes.pretrain import SEED
    rows = prompts.load(split)[:count]  # type: ignore[arg-type]
    texts = [row["prompt"] for row in rows]
    policy = families.load(config.policy(model=model, guidance=guidance))
    sampled = generate(policy, texts, range(SEED, SEED + len(rows)), steps=steps)
    drawn = render.render(rows, SEED)
    scores = rewards.Composition()(sampled, texts)
    sheet = figures.contact_sheet(texts, {"renderer": drawn, "base": sampled}, [f"{score:.0%}" for score in scores])
    for path in figures.save(sheet, out.with_suffix("") if out.suffix in (".png", ".pdf") else out):
        console.print(f"wrote {path}", soft_wrap=True)
