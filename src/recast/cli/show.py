"""What several verbs print and draw: curves being measured, W as a table and a heatmap, the figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recast.cli import tables
from recast.cli.console import console, needs, watching
from recast.errors import RecastError
from recast.report import figures


def estimate(settings: Any, out: Path, reuse: bool = False, until_ci: float | None = None) -> Any:
    """Curves and, where it is known, the truth, with a view of the run; None on all processes but the first."""
    with needs("estimating", "train"):
        from recast.estimate import stage

        with watching() as watch:
            return stage.estimate(settings, out, lambda items, *_: items, reuse, until_ci, watch)


def weights(curves: Any, matrix: Any) -> None:
    """W as a table, a heatmap, and what is worth a note."""
    console.print(tables.weights_table(matrix, curves))
    shades = tables.SHADES if "utf" in console.encoding.lower() else tables.ASCII_SHADES
    for line in tables.heatmap(matrix, console.width, shades):
        console.print(line, soft_wrap=True)
    for note in tables.notes(matrix, curves):
        console.print(f"note: {note}", soft_wrap=True)


def draw(curves: Any, matrix: Any, stem: Path, truth: Any, true_matrix: Any) -> list[Path]:
    """The three-panel figure as PNG and PDF; their paths."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise RecastError("figures need matplotlib: pip install 'recast-diffusion[plot]'") from None

    return figures.save(figures.gain_figure(curves, matrix, truth, true_matrix), stem)


def report(made: Any, tables_shown: int | None = None) -> None:
    """The first tables of a report, its warnings, what was found, and where the page is."""
    for table in made.tables[:tables_shown]:
        console.print(tables.report_table(table))
    for alarm in made.alarms:
        console.print(f"warning: {alarm}", soft_wrap=True)
    console.print(f"{made.found}\nthe page is {made.page}", soft_wrap=True)
