"""Arguments that every stage's verb takes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RecipeFile = Annotated[Path, typer.Argument(help="A recipe, e.g. recipes/shapes.yaml.", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Settings to change, as section.key=value.", show_default=False)
]
RunFolder = Annotated[Path, typer.Option("--out", help="The folder that collects the run's artifacts.")]
