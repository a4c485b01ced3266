"""Arguments and options that several verbs take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from recast.core import schedule
from recast.core.effects import Effects
from recast.errors import RecastError

__all__ = [
    "Budget",
    "Columns",
    "Jobs",
    "MethodName",
    "Overrides",
    "RecipeFile",
    "RunFolder",
    "Shrink",
    "Tau",
    "parse_budget",
    "parse_columns",
]

RecipeFile = Annotated[Path, typer.Argument(help="A recipe, e.g. recipes/shapes.yaml.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Settings that override the recipe, as section.key=value.", show_default=False),
]
RunFolder = Annotated[Path, typer.Option("--out", help="RUN, the folder that collects the artifacts.")]
Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        min=1,
        help="Processes at a time, each with a policy or prompts of its own; by default one per GPU or core.",
    ),
]
Budget = Annotated[
    str | None,
    typer.Option(
        "--budget",
        help="How much each reward counts, as name=number,name=number,…; by default all rewards count the same.",
    ),
]
MethodName = Annotated[
    str,
    typer.Option(
        "--method",
        help="How W is made: sinkhorn, static, row, matched, hard or shared, or a control: reversed, shuffled, "
        "row-reversed, row-shuffled, ….",
    ),
]
Columns = Annotated[
    str,
    typer.Option("--columns", help="Mass ν of each step: uniform, an effects.json, or numbers, the cleanest first."),
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


def parse_columns(text: str, sigmas: Sequence[float]) -> Sequence[float] | None:
    """ν from the path of an effects.json on the grid `sigmas`, or a text such as `1,2,3`; None for `uniform`."""
    if text == "uniform":
        return None
    if text.endswith(".json"):
        effects = Effects.load(text)
        if not schedule.same(effects.sigmas, sigmas):
            raise RecastError(
                f"{text}: the effects were measured on another grid (T = {len(effects.sigmas) - 1}) than the curves "
                f"(T = {len(sigmas) - 1}): measure them with the same steps"
            )
        return list(effects.effect)
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise RecastError(
            f"--columns {text!r} must be uniform, the path of an effects.json, or one number per step as 1,2,3"
        ) from None
