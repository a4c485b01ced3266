"""The verb `selftest`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from recast.cli.arguments import Overrides
from recast.cli.console import console, needs

__all__ = ["selftest"]

_DEFAULT = {"rewards": dict.fromkeys(("composition", "alignment", "detail", "background"))}
"""The embedded world."""


def selftest(
    recipe: Annotated[
        Path | None, typer.Argument(help="A recipe, e.g. recipes/sd35/ocr.yaml; by default the embedded world.")
    ] = None,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option("--out", help="Folder of the self-test, replaced each time.")] = Path(
        "runs/selftest"
    ),
    processes: Annotated[
        int | None,
        typer.Option("--processes", min=1, help="Processes of the check with several.", show_default="2 with two GPUs"),
    ] = None,
) -> None:
    """Test a recipe's model, rewards and stages on this machine, at tiny settings, in minutes.

    Compares the policy on its device with the CPU, scores drawn pictures with every reward, runs propose, estimate,
    weigh, train and evaluate, kills a training and resumes it, and trains on two processes if there are two GPUs.
    The report, also in OUT/selftest.md, is meant to be pasted into an issue. The exit code is 1 if a check failed.

    Example: `recast selftest`

    The whole of Stable Diffusion 3.5 on a GPU: `recast selftest recipes/sd35/ocr.yaml --out runs/selftest`

    With two processes on a CPU: `recast selftest --processes 2`
    """
    from recast import config

    settings = config.Recipe.model_validate(_DEFAULT) if recipe is None else config.load(recipe, overrides or [])
    with needs("the self-test", "train,rewards"):
        from recast.selftest import stage

        report = stage.selftest(settings, out, processes, _line)
    console.print(f"\n{report.text()}", soft_wrap=True)
    if report.failed:
        raise typer.Exit(1)


def _line(check: Any) -> None:
    off = "" if check.off is None else f", off by {check.off:.2g} of {check.tolerance:.2g} allowed"
    detail = f": {check.detail}" if check.detail else ""
    console.print(f"{check.outcome}: {check.name}{off}{detail} ({check.seconds:.1f} s)", soft_wrap=True)
