"""The live view of jobs that run side by side, for the verbs `run` and `sweep`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from recast.cli.console import console, progress, watching

if TYPE_CHECKING:
    from recast.sweep.jobs import Job
    from recast.sweep.stage import Observer

__all__ = ["observer"]


def observer() -> Observer:
    """The callbacks that display a run in this terminal."""
    from recast.sweep.stage import Observer

    return Observer(lambda text: console.print(text, soft_wrap=True), progress, watching, _View)


class _View:
    """A progress bar for all jobs and one for every running job."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._jobs = jobs
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bars = Progress(*columns, console=Console(stderr=True))
        self._rows: dict[Job, Any] = {}
        self._seen: set[Job] = set()

    def __enter__(self) -> Callable[[Mapping[Job, str]], None]:
        self._bars.start()
        self._whole = self._bars.add_task("policies", total=len(self._jobs))
        return self._watch

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def _watch(self, running: Mapping[Job, str]) -> None:
        for job in [job for job in self._rows if job not in running]:
            self._bars.remove_task(self._rows.pop(job))
        self._seen |= set(running)
        self._bars.update(self._whole, completed=len(self._seen) - len(running))
        for job, verb in running.items():
            if job not in self._rows:
                self._rows[job] = self._bars.add_task(job.folder.name, total=job.epochs)
            total = job.epochs if verb == "train" else None  # an indeterminate bar
            done = job.epochs_done() if total else 0
            self._bars.update(self._rows[job], completed=done, total=total, description=f"{verb} {job.folder.name}")
