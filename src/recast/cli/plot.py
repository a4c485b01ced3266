"""The verb `plot`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recast.cli import show
from recast.cli.arguments import Budget, MethodName, Shrink, Tau, parse_budget
from recast.cli.console import console
from recast.core import comparison
from recast.core.curves import GainCurves
from recast.errors import RecastError
from recast.weigh import weigh

__all__ = ["plot"]


def plot(
    gains: Annotated[list[Path], typer.Argument(help="gains.json to draw, or several of different rewards.")],
    budget: Budget = None,
    method: MethodName = "sinkhorn",
    tau: Tau = 1.0,
    shrink: Shrink = False,
    truth: Annotated[
        Path | None, typer.Option("--truth", help="Another gains.json of the same rewards, drawn dotted.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Output file without suffix; by default beside the first curves.")
    ] = None,
) -> None:
    """Draw the three-panel figure (gain, normalized gain, W) as PNG and PDF, and print how much the demand varies.

    Several files are laid over each other on t/T: those of another T are resampled onto the grid of the first file and
    dashed, and a reward that several files have is taken from the first of them. `--budget` names the rewards of W.

    Example: `recast plot gains.json --budget clipscore=1,ocr=2 --out figures/gains`

    The paper's figure: `recast plot joint.json ocr.json geneval.json --budget clipscore=1,hpsv2=1,pickscore=1,ocr=1`
    """
    laid = comparison.overlay(_load(gains))
    curves = laid.curves
    shares = parse_budget(budget, curves.rewards)
    weights = weigh(curves, shares, method, tau=tau, shrink=shrink)  # type: ignore[arg-type]
    stem = _stem(out, gains)
    if len(gains) > 1:
        if truth is not None:
            raise RecastError("--truth belongs to one file of curves: leave it out, or draw the files one by one")
        for source, names in laid.left_out.items():
            for name in names:
                console.print(f"note: {name} of {source} is not drawn: an earlier file has it", soft_wrap=True)
        paths = show.overlay(laid, weights, stem)
    else:
        exact, exact_weights = None, None
        if truth is not None:
            exact = GainCurves.load(truth).select(curves.rewards)
            exact_weights = weigh(exact, shares, method, tau=tau)  # type: ignore[arg-type]
        paths = show.draw(curves, weights, stem, exact, exact_weights)
    if budget is not None:
        show.demand(curves, shares)
    show.demand(curves, dict.fromkeys(curves.rewards, 1.0), without_each=True)
    for path in paths:
        console.print(f"wrote {path}", soft_wrap=True)


def _load(paths: list[Path]) -> dict[str, GainCurves]:
    """The curves of every file, by its path."""
    twice = [str(path) for path in paths if paths.count(path) > 1]
    if twice:
        raise RecastError(f"{twice[0]} is named twice: name each file once")
    return {str(path): GainCurves.load(path) for path in paths}


def _stem(out: Path | None, gains: list[Path]) -> Path:
    """The output without suffix: beside the first curves, or as `out` has it."""
    name = gains[0].stem if len(gains) == 1 else "overlay"
    stem = gains[0].parent / name if out is None else out
    stem = stem / ("gains" if len(gains) == 1 else name) if stem.is_dir() else stem
    return stem.with_suffix("") if stem.suffix in (".png", ".pdf") else stem
