"""The verb `plot`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recast.cli import show
from recast.cli.arguments import Budget, MethodName, Shrink, Tau, parse_budget
from recast.cli.console import console
from recast.core.curves import GainCurves
from recast.weigh import weigh

__all__ = ["plot"]


def plot(
    gains: Annotated[Path, typer.Argument(help="gains.json to draw.")],
    budget: Budget = None,
    method: MethodName = "sinkhorn",
    tau: Tau = 1.0,
    shrink: Shrink = False,
    truth: Annotated[Path | None, typer.Option("--truth", help="Another gains.json, drawn dotted.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Output file without suffix; by default beside the curves.")
    ] = None,
) -> None:
    """Draw the three-panel figure (gain, normalized gain, W) as PNG and PDF.

    Example: `recast plot gains.json --budget clipscore=1,ocr=2 --out figures/gains`
    """
    curves = GainCurves.load(gains)
    shares = parse_budget(budget, curves.rewards)
    weights = weigh(curves, shares, method, tau=tau, shrink=shrink)  # type: ignore[arg-type]
    exact, exact_weights = None, None
    if truth is not None:
        exact = GainCurves.load(truth).select(curves.rewards)
        exact_weights = weigh(exact, shares, method, tau=tau)  # type: ignore[arg-type]
    stem = gains.with_suffix("") if out is None else out
    stem = stem / "gains" if stem.is_dir() else stem
    stem = stem.with_suffix("") if stem.suffix in (".png", ".pdf") else stem
    for path in show.draw(curves, weights, stem, exact, exact_weights):
        console.print(f"wrote {path}", soft_wrap=True)
