"""What several verbs print and draw: curves while they are measured, W, figures, reports."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from recast.cli import tables
from recast.cli.console import console, needs, training, watching
from recast.errors import RecastError
from recast.progress import no_progress
from recast.report import figures

__all__ = ["demand", "draw", "effects", "estimate", "overlay", "report", "weights"]


def estimate(settings: Any, out: Path, reuse: bool = False, until_ci: float | None = None) -> Any:
    """Run the estimate with a live view; returns the curves and the exact ones, None on all processes but the first."""
    with needs("estimating", "train"):
        from recast.estimate import stage

        with watching() as watch:
            return stage.estimate(settings, out, no_progress, reuse, until_ci, watch)


def effects(settings: Any, out: Path) -> Any:
    """The effects of the levels if `weigh.columns` is `effect`, measured with a progress bar if need be; else None."""
    if settings.weigh.columns != "effect":
        return None
    with needs("measuring the effects of the levels", "train,rewards"):
        from recast.train import gradients

        with training(0) as (on_progress, _):
            return gradients.effects(settings, out, on_progress=on_progress)


def weights(curves: Any, matrix: Any) -> None:
    """Print W as a table and a heatmap, with notes."""
    console.print(tables.weights_table(matrix, curves))
    shades = tables.SHADES if "utf" in console.encoding.lower() else tables.ASCII_SHADES
    for line in tables.heatmap(matrix, console.width, shades):
        console.print(line, soft_wrap=True)
    for note in tables.notes(matrix, curves):
        console.print(f"note: {note}", soft_wrap=True)
    demand(curves, dict(zip(matrix.rewards, matrix.budget, strict=True)))


def demand(curves: Any, budget: Mapping[str, float], without_each: bool = False) -> None:
    """Print by which factor the aggregate demand varies over the steps, and without each reward in turn."""
    known = {name: share for name, share in budget.items() if name in curves.rewards and share > 0}
    if not known or curves.steps < 2:
        return
    line = _demand(curves, known)
    if without_each and len(known) > 1:
        rest = {name: {key: share for key, share in known.items() if key != name} for name in known}
        line += "; " + ", ".join(f"without {name} {_ratio(curves, others)}" for name, others in rest.items())
    console.print(line, soft_wrap=True)


def _demand(curves: Any, budget: Mapping[str, float]) -> str:
    """A sentence about the demand of rewards that have curves."""
    names, shares = tuple(budget), list(budget.values())
    steps = curves.select(names).demand(shares)[1:]
    even = "uniform λ" if len(set(shares)) == 1 else "λ = (" + ", ".join(f"{share:.3g}" for share in shares) + ")"
    whose = "all rewards" if set(names) == set(curves.rewards) else ", ".join(names)
    what = f"demand Σ λ_i·(normalized gain) of {whose} at {even}"
    if not steps.any():
        return f"{what}: none at the steps 2 to {curves.steps}, because no reward has gain there"
    idle = [str(t) for t in np.flatnonzero(steps == 0) + 2]
    if idle:
        return f"{what}: none at t = {', '.join(idle)}, so its ratio over the steps 2 to {curves.steps} is infinite"
    top, bottom = int(steps.argmax()) + 2, int(steps.argmin()) + 2
    varies = f"varies by {_ratio(curves, budget)} over the steps 2 to {curves.steps}"
    return f"{what}: {varies} (most at t = {top}, least at t = {bottom})"


def _ratio(curves: Any, budget: Mapping[str, float]) -> str:
    return f"{curves.select(tuple(budget)).demand_ratio(list(budget.values())):.2f}×"


def draw(curves: Any, matrix: Any, stem: Path, truth: Any, true_matrix: Any) -> list[Path]:
    """Write the three-panel figure as PNG and PDF; returns their paths."""
    _require_matplotlib()
    return figures.save(figures.gain_figure(curves, matrix, truth, true_matrix), stem)


def overlay(laid: Any, matrix: Any, stem: Path) -> list[Path]:
    """Write the three-panel figure of several sets of curves as PNG and PDF; returns their paths."""
    _require_matplotlib()
    return figures.save(figures.overlay_figure(laid, matrix), stem)


def _require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise RecastError("figures need matplotlib: pip install 'recast-diffusion[plot]'") from None


def report(made: Any, tables_shown: int | None = None) -> None:
    """Print the first tables of a report, its warnings, its finding and the path of its page."""
    for table in made.tables[:tables_shown]:
        console.print(tables.report_table(table))
    for alarm in made.alarms:
        console.print(f"warning: {alarm}", soft_wrap=True)
    console.print(f"{made.found}\nthe page is {made.page}", soft_wrap=True)
