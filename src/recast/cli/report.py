"""The verb `report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recast.cli import show
from recast.report import stage


def report(
    runs: Annotated[list[Path], typer.Argument(help="Evaluated runs, or folders that hold some.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", help="Where the tables and the page go.")] = Path("report"),
) -> None:
    """Compare evaluated runs: tables for terminal, Markdown, LaTeX and CSV, and one page to look at.

    Example: `recast report runs/base runs/static runs/recast --out runs/report`
    """
    show.report(stage.report(runs, out))
