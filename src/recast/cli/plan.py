"""The verb `plan`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from recast.cli.arguments import Overrides, RecipeFile
from recast.cli.console import console, needs
from recast.errors import RecastError

if TYPE_CHECKING:
    from recast.plan import Plan

__all__ = ["plan"]

_GIB = 2**30
_WIDEST = 160


def plan(
    recipe: RecipeFile,
    overrides: Overrides = None,
    gpus: Annotated[int, typer.Option("--gpus", help="Number of GPUs.")] = 1,
    gpu: Annotated[
        int | None,
        typer.Option(
            "--gpu", min=1, help="Memory of a GPU in GB: 24, 40, 48, 80, 141 or 180.", show_default="the card's"
        ),
    ] = None,
    card: Annotated[
        str | None,
        typer.Option(
            "--card",
            help="rtx4090, a100-40, l40s, a100, h100, h200 or b200; by default the one that --gpu stands for.",
            show_default="h100",
        ),
    ] = None,
    utilization: Annotated[
        float, typer.Option("--utilization", help="Share of the card's peak FLOP/s that is reached.")
    ] = 0.2,
    price: Annotated[
        list[str] | None,
        typer.Option("--price", help="NAME=DOLLARS per GPU-hour (gpu) or per request (propose, judge, unifiedreward)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Print what a recipe takes: evaluations, FLOPs, memory, hours, disk and requests. Nothing is loaded or run.

    All numbers are computed, not measured: counts from the settings, FLOPs and memory from the configurations of the
    models on PyTorch's meta device, hours from FLOPs at a share of the card's peak.

    Example: `recast plan recipes/sd35/ocr.yaml --gpus 8 --gpu 80`

    With prices: `recast plan recipes/sd35/ocr.yaml --gpus 8 --card h200 --price gpu=3 --price propose=0.05`

    Without the prompt files: `recast plan recipes/sd35/ocr.yaml evaluate.count=1018`
    """
    from recast import config

    settings = config.load(recipe, overrides or [])
    prices = _prices(price or [])
    with needs("planning", "train,rewards"):
        from recast import plan as planning
        from recast.plan import cards

        machine = planning.Machine(cards.card(card, gpu), gpus, gpu, utilization, prices)
        made = planning.plan(settings, machine)
    if as_json:
        print(json.dumps(made.to_dict(), indent=1))
        return
    for table in _tables(made):
        whole = console.measure(table, options=console.options.update(max_width=_WIDEST)).maximum
        console.print(table, width=max(console.width, whole), crop=False)  # a narrow terminal must not cut off digits
    for note in made.notes:
        console.print(f"- {note}", soft_wrap=True)
    console.print(_said(made), soft_wrap=True)


def _prices(texts: Sequence[str]) -> dict[str, float]:
    found = {}
    for text in texts:
        name, _, number = text.partition("=")
        try:
            found[name] = float(number)
        except ValueError:
            raise RecastError(f"--price {text} must be NAME=DOLLARS, such as gpu=2.5") from None
    return found


def _tables(made: Plan) -> list[Table]:
    tables = [_stages(made)]
    if made.per_row:
        tables += [_flops(made), _memory(made)]
    if made.micro_batches:
        tables.append(_micro_batches(made))
    largest = {name: value for each in made.stages if each.held for name, value in each.held.largest.items()}
    if largest:
        table = _table(
            f"largest settings that fit ({_size(made.machine.room)} GiB for tensors)", ["setting", "at most"]
        )
        for name, value in largest.items():
            if name != "rows":
                table.add_row(name, f"{value:g}")
        tables.append(table)
    return tables


def _table(title: str, headers: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for k, header in enumerate(headers):
        table.add_column(header, justify="right" if k else "left")
    return table


def _stages(made: Plan) -> Table:
    """One column per stage and total, one row per quantity; rows that are 0 everywhere are left out."""
    machine = made.machine
    columns: list[Any] = [*made.stages, *made.totals]
    names = [f"all, {each.name}" if each in made.totals else each.name for each in columns]
    table = _table("computed, not measured", ["", *names])
    rows: list[tuple[str, Callable[[Any], str]]] = [
        ("velocity evaluations", lambda each: _count(each.counts.evaluations)),
        ("(image, level) pairs", lambda each: _count(each.counts.pairs)),
        ("images encoded", lambda each: _count(each.counts.encoded)),
        ("images decoded", lambda each: _count(each.counts.decoded)),
        ("reward calls", lambda each: _count(each.counts.reward_calls)),
        ("API calls", lambda each: _count(sum(each.counts.calls.values()))),
        ("trainings", lambda each: _count(getattr(each, "trainings", 0))),
        ("PFLOP", lambda each: _number(_flop(each) / 1e15)),
        ("GPU-hours", lambda each: _number(_hours(each, made))),
        (f"hours on {machine.gpus} x {machine.card.name}", lambda each: _number(_hours(each, made) / machine.gpus)),
        ("peak per GPU, GiB", lambda each: _size(each.held.peak) if getattr(each, "held", None) else ""),
        ("disk, GB", lambda each: _number(_disk(each) / 1e9)),
    ]
    if machine.prices:
        rows.append(("dollars", lambda each: _dollars(each, made)))
    for name, cell in rows:
        cells = [cell(each) for each in columns]
        if any(cells):
            table.add_row(name, *cells)
    return table


def _hours(each: Any, made: Plan) -> float:
    return float(each.gpu_hours if isinstance(each.gpu_hours, float) else each.gpu_hours(made.machine))


def _flop(each: Any) -> float:
    return float(each.flops if isinstance(each.flops, float) else each.total_flops)


def _disk(each: Any) -> int:
    return each.disk if isinstance(each.disk, int) else sum(each.disk.values())


def _dollars(each: Any, made: Plan) -> str:
    prices = made.machine.prices
    amounts = {"gpu": _hours(each, made), **each.counts.calls}
    found = sum(prices.get(name, 0.0) * amount for name, amount in amounts.items())
    return f"{found:,.0f}" if found >= 10 else _number(found)


def _flops(made: Plan) -> Table:
    table = _table("TFLOP per velocity evaluation, pair and image", ["", "TFLOP"])
    for name, value in made.per_row.items():
        table.add_row(name, _number(value / 1e12))
    return table


def _memory(made: Plan) -> Table:
    """What each stage holds at its peak, in GiB."""
    stages = [each for each in made.stages if each.held is not None]
    parts = list(dict.fromkeys(name for each in stages if each.held for name in each.held.parts))
    table = _table("GiB on one GPU at the peak of each stage", ["", *(each.name for each in stages)])
    for part in parts:
        sizes = [each.held.parts.get(part, 0) for each in stages if each.held]
        if max(sizes) >= 0.005 * _GIB:
            table.add_row(part, *(_size(size) if size else "" for size in sizes))
    table.add_section()
    table.add_row("peak", *(_size(each.held.peak) for each in stages if each.held))
    return table


def _micro_batches(made: Plan) -> Table:
    sizes = next(iter(made.micro_batches.values()))
    table = _table("GiB of training by micro_batch", ["train.checkpointing", *sizes])
    for name, row in made.micro_batches.items():
        table.add_row("false" if name == "plain" else "true", *(_size(size) for size in row.values()))
    return table


def _said(made: Plan) -> str:
    machine = made.machine
    if not made.per_row:
        return f"the exact world needs no GPU; Alg. 1 with K = 16 takes {made.paper_evaluations:,} evaluations"
    paper = (
        "" if made.paper_evaluations is None else f" Alg. 1 with K = 16 takes {made.paper_evaluations:,} evaluations."
    )
    return (
        f"The configuration of the model is {_ORIGINS[made.origin]}. Hours are FLOPs at {machine.utilization:.0%} of "
        f"the {machine.card.name}'s peak; the memory of tensors is {_size(machine.room)} GiB of "
        f"{machine.memory or machine.card.memory}.{paper}"
    )


_ORIGINS = {
    "folder": "that of its folder",
    "cache": "that of the hub's cache",
    "shipped": "the one shipped with this package",
    "loaded": "that of the loaded policy: your family is not a PipelinePolicy",
}


def _count(value: int) -> str:
    return f"{value:,}" if value else ""


def _number(value: float) -> str:
    """A number with three digits, blank if it is 0."""
    if not value:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _size(value: float) -> str:
    """GiB with one digit, or two below 1."""
    return f"{value / _GIB:.1f}" if value >= _GIB else f"{value / _GIB:.2g}"
