"""The verb `analyze`: the analyses of App. B on estimated runs (orders, sampling distributions, generators, drift)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from recast.cli import tables
from recast.cli.console import console, needs
from recast.core import renyi, schedule
from recast.core.comparison import compare, remaining, require_one_version
from recast.core.curves import GainCurves
from recast.errors import RecastError
from recast.report import figures
from recast.weigh import weigh

__all__ = ["app"]

app = typer.Typer(
    help="The paper's analyses of gain curves (App. B), as tables and figures.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
Run = Annotated[Path, typer.Argument(help="A RUN folder of recast estimate.", show_default=False)]
Stem = Annotated[
    Path | None, typer.Option("--out", help="Figure file without suffix; by default inside the first RUN.")
]


@app.command()
def alpha(run: Run, out: Stem = None) -> None:
    """Curves and W at the paper's seven Rényi orders, from stored rollouts: a figure, the peaks, and the range of T·W.

    Example: `recast analyze alpha runs/shapes`
    """
    with needs("reading rollouts", "train"):
        from recast import config
        from recast.estimate import at_orders
    swept = at_orders(run, renyi.PAPER_ALPHAS)
    console.print(tables.orders_table(swept))
    solved = {order: weigh(curves, dict.fromkeys(curves.rewards, 1.0)) for order, curves in swept.items()}
    console.print(tables.excursions_table(solved))
    if config.load_run(run / "recipe.yaml").estimate.rollouts < 4:
        note = "note: with fewer than 4 rollouts (estimate.rollouts) the moment is biased at every order except 2"
        console.print(note, soft_wrap=True)
    named = {f"α = {order:g}": curves for order, curves in swept.items()}
    _save(named, ("gains", "normalized", "W"), out, run, "alpha")


@app.command()
def sampling(
    runs: Annotated[list[Path], typer.Argument(help="RUN folders: proposals of π+ first, then of the policy itself.")],
    out: Stem = None,
) -> None:
    """Curves under different sampling distributions: D, gain, normalized gain and W, one row per run.

    Example: `recast analyze sampling runs/shapes runs/self`
    """
    found = [_curves(run) for run in runs]
    for other in found[1:]:
        require_one_version(found[0], other)
    named = {f"{_source(curves)}\n({path})": curves for path, curves in zip(runs, found, strict=True)}
    _save(named, ("D", "gains", "normalized", "W"), out, runs[0], "sampling")


@app.command()
def generators(first: Run, second: Run, out: Stem = None) -> None:
    """How much the curves depend on the generator that stands for π+: a table and a figure.

    Example: `recast analyze generators runs/gpt-image runs/nano-banana`
    """
    a, b = _pair(first, second)
    titles = _source(a), _source(b)
    console.print(tables.comparison_table(compare(a, b), *titles))
    named = {f"{titles[0]}\n({first})": a, f"{titles[1]}\n({second})": b}
    _save(named, ("gains", "normalized", "W"), out, first, "generators")


@app.command()
def drift(base: Run, trained: Run, out: Stem = None) -> None:
    """How much of each reward's gain a training stage used up: remaining total gain, and D on one axis.

    Example: `recast analyze drift runs/base runs/trained`
    """
    a, b = _pair(base, trained)
    console.print(tables.remaining_table(remaining(a, b), base.name, trained.name))
    with needs("figures", "plot"):
        figure = figures.drift_figure(a, b, (base.name, trained.name))
        for path in figures.save(figure, out or base / "drift"):
            console.print(f"wrote {path}", soft_wrap=True)


def _curves(run: Path) -> GainCurves:
    return GainCurves.load(run / "gains.json")


def _source(curves: GainCurves) -> str:
    """The generator of the proposals."""
    proposals: Any = curves.provenance.get("proposals") or {}
    name = str(proposals.get("generator", "π⁺"))
    return f"{name} itself" if proposals.get("source") == "policy" else name


def _pair(first: Path, second: Path) -> tuple[GainCurves, GainCurves]:
    a, b = _curves(first), _curves(second)
    require_one_version(a, b)
    if not schedule.same(a.sigmas, b.sigmas):
        raise RecastError(f"{first} (T = {a.steps}) and {second} (T = {b.steps}) are on different grids")
    return a, b.select(a.rewards)


def _save(named: dict[str, GainCurves], columns: tuple[str, ...], out: Path | None, run: Path, name: str) -> None:
    with needs("figures", "plot"):
        for path in figures.save(figures.panels_figure(named, columns), out or run / name):
            console.print(f"wrote {path}", soft_wrap=True)
