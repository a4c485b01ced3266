"""The terminal: console, progress bars, live views, and messages about missing packages."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from rich.console import Console, Group
from rich.text import Text

from recast import processes
from recast.cli import tables
from recast.errors import RecastError

__all__ = ["console", "duration", "needs", "progress", "training", "watching"]

Item = TypeVar("Item")
console = Console(markup=False, highlight=False)  # brackets in names and paths are not markup


def progress(items: Iterable[Item], title: str, total: int) -> Iterable[Item]:
    """The items, with a progress bar on the error stream."""
    from rich.progress import track

    if processes.RANK > 0:  # one bar per launcher
        return items
    return track(items, description=title, total=total, console=Console(stderr=True))


def duration(seconds: float) -> str:
    """A duration in a readable unit.

    >>> duration(42), duration(600), duration(9000), duration(200000)
    ('42 s', '10 min', '2.5 h', '2.3 days')
    """
    for limit, unit, size in ((120, "s", 1), (7200, "min", 60), (172800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / size:.2g} {unit}" if unit == "h" else f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.2g} days"


@contextmanager
def watching() -> Iterator[Callable[[Any], None] | None]:
    """A live view of an estimate run on the error stream: prompts, evaluations, rate, time left and current curves."""
    from rich.live import Live

    if processes.RANK > 0:
        yield None
        return
    begun = time.monotonic()
    first: list[int] = []
    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:

        def watch(status: Any) -> None:

            first[:] = first or [status.done - 1]
            rate = (status.done - first[0]) / max(time.monotonic() - begun, 1e-9)
            left = duration((status.total - status.done) / rate)
            line = (
                f"{status.done} of {status.total} prompts, {status.evaluations:,} of {status.planned:,} velocity "
                f"evaluations, {60 * rate:.1f} prompts/min, {left} left"
            )
            floor = f", the floor was hit {status.floor_hits} times" if status.floor_hits else ""
            if live.console.is_terminal:
                live.update(Group(Text(line + floor), tables.running_table(status.curves)), refresh=True)
            else:  # the log file of a cluster: one line per prompt
                print(line + floor, file=sys.stderr, flush=True)

        yield watch


@contextmanager
def training(epochs: int) -> Iterator[tuple[Callable[[str, int, int], None], Callable[[Any], None]]]:
    """A live view of training on the error stream: epochs, time left, the current phase and its rewards."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    view = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=view, transient=True, disable=processes.RANK > 0 or not view.is_terminal) as bars:
        whole = bars.add_task("epochs", total=epochs, visible=epochs > 0)
        begun = time.monotonic()
        first: list[int] = []
        phase = bars.add_task("sampling", total=None)

        def on_progress(name: str, done: int, total: int) -> None:
            bars.update(phase, description=name, completed=done, total=total)

        def epoch(values: Any) -> None:
            bars.update(whole, completed=values["epoch"])
            first[:] = first or [values["epoch"] - 1]
            each = (time.monotonic() - begun) / (values["epoch"] - first[0])
            rewards = "  ".join(f"{key[7:]} {value:.3f}" for key, value in values.items() if key.startswith("reward/"))
            left = duration(each * (epochs - values["epoch"]))
            line = f"epoch {values['epoch']}/{epochs}  {rewards}  loss {values['loss']:.4g}  {left} left"
            view.print(line, soft_wrap=True)

        yield on_progress, epoch


@contextmanager
def needs(what: str, extra: str) -> Iterator[None]:
    """Turn a failed import inside the block into an error with the command that installs the missing packages."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # otherwise every import mentions torchvision
    try:
        yield
    except ImportError as error:
        if (error.name or "").split(".")[0] == "recast":  # a mistake in this package, not a missing one
            raise
        raise RecastError(
            f"{what} needs packages that are not installed ({error}): pip install 'recast-diffusion[{extra}]'"
        ) from error
