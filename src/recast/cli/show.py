"""What several verbs print and draw: curves while they are measured, W, figures, reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recast.cli import tables
from recast.cli.console import console, needs, watching
from recast.errors import RecastError
from recast.progress import no_progress
from recast.report import figures

__all__ = ["draw", "estimate", "report", "weights"]


def estimate(settings: Any, out: Path, reuse: bool = False, until_ci: float | None = None) -> Any:
    """Run the estimate with a live view; returns the curves and the exact ones, None on all processes but the first."""
    with needs("estimating", "train"):
        from recast.estimate import stage

        with watching() as watch:
            return stage.estimate(settings, out, no_progress, reuse, until_ci, watch)


def weights(curves: Any, matrix: Any) -> None:
    """Print W as a table and a heatmap, with notes."""
    console.print(tables.weights_table(matrix, curves))
    shades = tables.SHADES if "utf" in console.encoding.lower() else tables.ASCII_SHADES
    for line in tables.heatmap(matrix, console.width, shades):
        console.print(line, soft_wrap=True)
    for note in tables.notes(matrix, curves):
        console.print(f"note: {note}", soft_wrap=True)


def draw(curves: Any, matrix: Any, stem: Path, truth: Any, true_matrix: Any) -> list[Path]:
    """Write the three-panel figure as PNG and PDF; returns their paths."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise RecastError("figures need matplotlib: pip install 'recast-diffusion[plot]'") from None

    return figures.save(figures.gain_figure(curves, matrix, truth, true_matrix), stem)


def report(made: Any, tables_shown: int | None = None) -> None:
    """Print the first tables of a report, its warnings, its finding and the path of its page."""
    for table in made.tables[:tables_shown]:
        console.print(tables.report_table(table))
    for alarm in made.alarms:
        console.print(f"warning: {alarm}", soft_wrap=True)
    console.print(f"{made.found}\nthe page is {made.page}", soft_wrap=True)
