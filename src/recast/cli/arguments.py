"""Arguments and options that several verbs take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recast.errors import RecastError

RecipeFile = Annotated[Path, typer.Argument(help="A recipe, e.g. recipes/shapes.yaml.", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Settings to change, as section.key=value.", show_default=False)
]
RunFolder = Annotated[Path, typer.Option("--out", help="The folder that collects the run's artifacts.")]
Jobs = Annotated[int | None, typer.Option("--jobs", min=1, help="Policies at a time; one a GPU or core unless told.")]
Budget = Annotated[str | None, typer.Option("--budget", help="How much each reward counts: name=number,name=number,…")]
MethodName = Annotated[str, typer.Option("--method", help="sinkhorn, static, row, hard, shared, reversed or shuffled.")]
Tau = Annotated[float, typer.Option("--tau", help="Sinkhorn temperature: below 1 sharper, above 1 flatter.")]
Shrink = Annotated[bool, typer.Option("--shrink", help="Draw curves that are mostly noise towards static weights.")]


def parse_budget(text: str | None, rewards: tuple[str, ...]) -> dict[str, float]:
    """`name=number,name=number` to a mapping; every reward alike when nothing is given."""
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
            raise RecastError(f"the budget {text!r} has {part!r}, where name=number with a number >= 0 is needed")
        if name in budget:
            raise RecastError(f"the budget {text!r} names {name} twice")
        budget[name] = value
    return budget
