"""`recast run` and `recast sweep`: all stages of a recipe, skipped if nothing has changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recast import lock, processes
from recast.config import Recipe
from recast.core.curves import GainCurves
from recast.core.effects import Effects
from recast.core.weights import WeightMatrix
from recast.errors import StaleError
from recast.estimate import stage as estimation
from recast.progress import Progress, no_progress
from recast.propose import stage as proposing
from recast.report import stage as reporting
from recast.sweep import jobs, workers
from recast.sweep.jobs import Job

__all__ = ["Observer", "compare", "cost_sentence", "curves_of", "prepare"]

_Watch = Callable[[Mapping[Job, str]], None]
_WORTHWHILE = 4
"""Prompts per process of an estimate: with fewer, a process would take longer to start than to work."""


@dataclass(frozen=True)
class Observer:
    """Callbacks that display a run; by default nothing is displayed.

    Parameters
    ----------
    note : callable
        Takes a sentence.
    progress : Progress
        Wraps the loop over proposals.
    estimating : callable
        Returns a context manager that yields the callback for the status of the estimate, or None.
    running : callable
        Takes the jobs; returns a context manager that yields a callback for the running jobs and their current command.
    """

    note: Callable[[str], None] = lambda _: None
    progress: Progress = no_progress
    estimating: Callable[[], AbstractContextManager[Any]] = nullcontext
    running: Callable[[Sequence[Job]], AbstractContextManager[_Watch]] = lambda *_: nullcontext(lambda _: None)


def curves_of(
    recipe: Recipe, out: Path, observer: Observer, most: int | None = None
) -> tuple[GainCurves, GainCurves | None]:
    """Make proposals and gain curves: the curves, and the exact ones if known. Stale results are set aside.

    At most `most` processes share the prompts; by default one per local device.
    """
    with _locked(out):
        return _curves_of(recipe, out, observer, most)


def _locked(out: Path) -> AbstractContextManager[None]:
    return lock.alone(out / ".run.lock", f"running a recipe in {out}")


def _curves_of(recipe: Recipe, out: Path, observer: Observer, most: int | None) -> tuple[GainCurves, GainCurves | None]:
    if recipe.world.kind == "images":
        if processes.RANK == 0:
            _fresh(lambda: proposing.propose(recipe, out, observer.progress), out / "proposals", observer)
        processes.wait()
        found = estimation.up_to_date(recipe, out)
        if found is not None:
            return found, None

    def estimate() -> tuple[GainCurves, GainCurves | None] | None:
        with observer.estimating() as watch, _sharing(recipe, out, most):
            return estimation.estimate(recipe, out, no_progress, watch=watch)

    made = _fresh(estimate, out / "shards", observer)
    return (GainCurves.load(out / "gains.json"), None) if made is None else made


def _sharing(recipe: Recipe, out: Path, most: int | None = None) -> AbstractContextManager[None]:
    """Processes on the other local devices that share the prompts of an estimate, if there are prompts for them."""
    if recipe.world.kind != "images" or processes.COUNT > 1:
        return nullcontext()
    count = min(most or workers.workers_here(), estimation.missing(recipe, out) // _WORTHWHILE)
    if count < 2:
        return nullcontext()
    recipe.save(out / "recipe.yaml")
    return workers.beside(["estimate", str(out / "recipe.yaml"), "--out", str(out)], count)


def _fresh(call: Callable[[], Any], folder: Path, observer: Observer) -> Any:
    """The result of a stage; if its folder is stale, the folder is set aside and the stage is run again."""
    try:
        return call()
    except StaleError as error:
        if processes.COUNT > 1:  # the other processes have seen the old folder
            raise
        observer.note(f"note: {jobs.set_aside(folder, error)}")
        return call()


def compare(
    recipe: Recipe,
    out: Path,
    curves: GainCurves,
    planned: Sequence[Job],
    most: int | None,
    observer: Observer,
    warmups: Mapping[Path, Recipe] | None = None,
    effects: Effects | None = None,
) -> reporting.Report | None:
    """Train and evaluate all jobs, at most `most` at a time, and report; None on all processes but the first.

    Under a launcher, the jobs run in sequence, each on all processes. `weigh.columns: effect` needs `effects`.
    """
    with _locked(out):
        if processes.RANK == 0:
            for note in prepare(recipe, out, curves, planned, warmups or {}, effects):
                observer.note(f"note: {note}")
        processes.wait()
        _run_all(planned, most, observer)
    if processes.RANK > 0:
        return None
    return reporting.report([job.folder for job in planned if not job.is_warmup], out / "report")


def _run_all(planned: Sequence[Job], most: int | None, observer: Observer) -> None:
    """Train and evaluate the jobs that are not finished."""
    # Warmups first, since others resume from them; the base only has to be evaluated: last, on the first free device.
    order = sorted(
        (job for job in planned if not jobs.finished(job)), key=lambda job: (not job.is_warmup, job.method is None)
    )
    if processes.COUNT > 1:
        for job in order:
            jobs.run_here(job)
    elif order:
        count = min(most or workers.workers_here(), len(order))
        facts = ", ".join(f"{number} {name}" for name, number in jobs.facts(planned).items())
        observer.note(f"comparing {facts}, {count} at a time")
        with observer.running(order) as watch:
            workers.run_jobs(order, count, watch)


def prepare(
    recipe: Recipe,
    out: Path,
    curves: GainCurves,
    planned: Sequence[Job],
    warmups: Mapping[Path, Recipe],
    effects: Effects | None = None,
) -> list[str]:
    """Write the recipes and the W of every job, and set stale results aside; a sentence for each of these."""
    recipe.save(out / "recipe.yaml")
    for path, settings in warmups.items():
        settings.save(path)
    notes: list[str] = []
    unfinished: set[Path] = set()
    for job in planned:  # warmups come before what resumes from them
        note = jobs.prepare(recipe, curves, job, unfinished, effects)
        notes += [] if note is None else [note]
        if job.is_warmup and not jobs.finished(job):
            unfinished.add(job.folder)
    return notes


def cost_sentence(recipe: Recipe, curves: GainCurves, weights: WeightMatrix, exact: WeightMatrix | None) -> str:
    """A sentence about the cost of the curves compared with Alg. 1, and the distance of W from the exact W if known."""
    settings = recipe.estimate
    spent = int(curves.provenance["velocity_evaluations"])
    cost = f"W comes from {spent:,} velocity evaluations"
    if exact is not None:
        off = float(np.abs(weights.matrix - exact.matrix).sum())
        cost = f"W is {off:.1%} (L1) away from the W of the exact curves, for {spent:,} velocity evaluations"
    if settings.estimator == "paper":
        return f"{cost}, by Alg. 1 at K = {settings.rollouts} (the paper's K is {estimation.PAPER_ROLLOUTS})"
    prompts = len(curves.D_prompts) if curves.D_prompts is not None else 1
    algorithm = estimation.paper_evaluations(recipe, prompts)
    return f"{cost}; Alg. 1 at K = {estimation.PAPER_ROLLOUTS} takes {algorithm:,}"
