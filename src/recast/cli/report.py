"""The verb `report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recast.cli import show
from recast.report import stage

__all__ = ["report"]


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Evaluated runs, or folders that contain them.", show_default=False)
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder for the tables and the page.")] = Path("report"),
) -> None:
    """Compare evaluated runs: tables (terminal, Markdown, LaTeX, CSV), figures and a self-contained web page.

    Example: `recast report runs/base runs/static runs/recast --out runs/report`
    """
    show.report(stage.report(runs, out))
