"""Arguments and options that several verbs take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recast.errors import RecastError

__all__ = ["Budget", "Jobs", "MethodName", "Overrides", "RecipeFile", "RunFolder", "Shrink", "Tau", "parse_budget"]

RecipeFile = Annotated[Path, typer.Argument(help="A recipe, e.g. recipes/shapes.yaml.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Settings that override the recipe, as section.key=value.", show_default=False),
]
RunFolder = Annotated[Path, typer.Option("--out", help="RUN, the folder that collects the artifacts.")]
Jobs = Annotated[
    int | None, typer.Option("--jobs", min=1, help="Policies trained at the same time; by default one per GPU or core.")
]
Budget = Annotated[
    str | None,
    typer.Option(
        "--budget",
        help="How much each reward counts, as name=number,name=number,…; by default all rewards count the same.",
    ),
]
MethodName = Annotated[
    str, typer.Option("--method", help="How W is made: sinkhorn, static, row, hard, shared, reversed or shuffled.")
]
Tau = Annotated[float, typer.Option("--tau", help="Sinkhorn temperature: below 1 sharper, above 1 flatter.")]
Shrink = Annotated[bool, typer.Option("--shrink", help="Shrink unreliable curves towards static weights.")]


def parse_budget(text: str | None, rewards: tuple[str, ...]) -> dict[str, float]:
    """Mapping from a text such as `clipscore=1,ocr=2`; without a text, every reward gets 1."""
    if text is None:
        return dict.fromkeys(rewards, 1.0)
    budget: dict[str, float] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, equals, number = (piece.strip() for piece in part.partition("="))
        try:
            value = float(number)
        except ValueError:
            value = -1.0
        if not (equals and name) or not 0 <= value < float("inf"):
            raise RecastError(
                f"the budget {text!r} contains {part!r}; every entry must be name=number with a number >= 0"
            )
        if name in budget:
            raise RecastError(f"the budget {text!r} contains {name} twice")
        budget[name] = value
    return budget
