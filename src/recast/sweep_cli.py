"""The verbs `run` and `sweep`: every stage of a recipe, skipped where nothing changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from recast import processes, show
from recast import sweep as sweeping
from recast.arguments import Overrides, RecipeFile, RunFolder
from recast.console import console, needs, progress
from recast.core.curves import GainCurves
from recast.errors import StaleError

Jobs = Annotated[int | None, typer.Option("--jobs", min=1, help="Policies at a time; one a GPU or core unless told.")]


def run(
    recipe: RecipeFile, overrides: Overrides = None, out: RunFolder = Path("runs/recast"), jobs: Jobs = None
) -> None:
    """All stages of a recipe: propose, estimate, weigh, train each method and seed, evaluate, report.

    A stage whose artifact is there is skipped; one whose settings have changed is set aside and made anew. Kill it
    anywhere and run it again.

    Example: `recast run recipes/shapes.yaml --out runs/shapes`

    The exact world, where the truth is known: `recast run recipes/mixture.yaml --out runs/mixture`
    """
    from recast import config
    from recast import run as stages
    from recast.core.curves import compare as compare_curves
    from recast.report import tables

    settings = config.load(recipe, overrides or [])
    curves, truth = curves_of(settings, out)
    if processes.RANK == 0:
        weights = stages.weigh_recipe(settings, curves)
        exact = None if truth is None else stages.weigh_recipe(settings, truth)
        stages.save_weights(settings, weights, out)
        show.weights(curves, weights)
        if truth is not None:
            console.print(tables.comparison_table(compare_curves(truth, curves), "exact", "estimated"))
        show.draw(curves, weights, out / "gains", truth, exact)
        names = f"recipe.yaml, gains.json, {'' if truth is None else 'exact.json, '}weights.json and gains.png"
        console.print(f"{stages.verdict(settings, curves, weights, exact)}\nwrote {names} in {out}", soft_wrap=True)
    if settings.run.methods:
        budget = settings.weigh.budget or dict.fromkeys(settings.rewards, 1.0)
        planned = sweeping.plan(settings, out, settings.run.methods, settings.run.seeds, [budget])
        _work(settings, out, curves, planned, jobs)


def sweep(
    recipe: RecipeFile,
    overrides: Overrides = None,
    out: RunFolder = Path("runs/sweep"),
    jobs: Jobs = None,
    print_only: Annotated[
        bool, typer.Option("--print", help="Print a command a policy, for a queue, and train nothing.")
    ] = False,
) -> None:
    """Compare methods over budgets and seeds, matched pair by pair: train, evaluate and report all of them.

    Example: `recast sweep recipes/shapes.yaml --out runs/sweep`

    For a queue: `recast sweep recipes/sd35/ocr.yaml --out runs/sweep --print > commands.txt`, and when all are done
    `recast report runs/sweep`
    """
    from recast import config

    settings = config.load(recipe, overrides or [])
    chosen = settings.sweep
    planned = sweeping.plan(settings, out, chosen.methods, chosen.seeds, sweeping.budgets_of(settings, chosen.budgets))
    curves, _ = curves_of(settings, out)
    if print_only:
        settings.save(out / "recipe.yaml")
        for job in planned:
            sweeping.prepare(settings, out / "recipe.yaml", curves, job)
        for line in sweeping.command_lines(planned, out / "recipe.yaml"):
            console.print(line, soft_wrap=True)
        return
    _work(settings, out, curves, planned, jobs)


def curves_of(settings: Any, out: Path) -> tuple[Any, Any]:
    """Proposals, then curves, and the truth where it is known; what other settings made is set aside."""
    if settings.world.kind == "images":
        with needs("making proposals", "train"):
            from recast import propose as proposals
            from recast.estimate import stage

            if processes.RANK == 0:
                _fresh(lambda: proposals.propose(settings, out, progress), out / "proposals")
            processes.wait()
            found = stage.up_to_date(settings, out)
        if found is not None:
            return found, None
    made = _fresh(lambda: show.estimate(settings, out), out / "shards")
    return (GainCurves.load(out / "gains.json"), None) if made is None else (made[0], made[1])


def _fresh(call: Callable[[], Any], folder: Path) -> Any:
    """What a stage makes; once again from nothing where its folder is another recipe's."""
    try:
        return call()
    except StaleError as error:
        if processes.COUNT > 1:  # the others have seen the old folder
            raise
        console.print(f"note: {sweeping.set_aside(folder, error)}", soft_wrap=True)
        return call()


def _work(settings: Any, out: Path, curves: Any, planned: Sequence[sweeping.Job], jobs: int | None) -> None:
    """Train and evaluate every job, then report; under a launcher one after the other, each on all processes."""
    path = out / "recipe.yaml"
    if processes.RANK == 0:
        settings.save(path)
        for job in planned:
            said = sweeping.prepare(settings, path, curves, job)
            if said is not None:
                console.print(f"note: {said}", soft_wrap=True)
    processes.wait()
    # The base is short: last, where a device is free.
    order = sorted((job for job in planned if not sweeping.finished(path, job)), key=lambda job: job.method is None)
    if processes.COUNT > 1:
        for job in order:
            sweeping.run_here(job, path)
    elif order:
        workers = min(jobs or sweeping.workers_here(), len(order))
        facts = ", ".join(f"{count} {name}" for name, count in sweeping.facts(planned).items())
        console.print(f"comparing {facts}, {workers} at a time", soft_wrap=True)
        with _View(order, settings.train.epochs) as watch:
            sweeping.run_jobs(order, path, workers, watch)
    if processes.RANK > 0:
        return
    from recast.report import render, stage

    made = stage.report([job.folder for job in planned], out / "report")
    for table in made.tables[:2]:
        console.print(render.rich(table))
    for alarm in made.alarms:
        console.print(f"warning: {alarm}", soft_wrap=True)
    console.print(f"{made.found}\nthe page is {made.page}", soft_wrap=True)


class _View:
    """A bar over all jobs and one for each that is running."""

    def __init__(self, jobs: Sequence[sweeping.Job], epochs: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._jobs, self._epochs = jobs, epochs
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bars = Progress(*columns, console=Console(stderr=True))
        self._rows: dict[sweeping.Job, Any] = {}
        self._seen: set[sweeping.Job] = set()

    def __enter__(self) -> Callable[[Mapping[sweeping.Job, str]], None]:
        self._bars.start()
        self._whole = self._bars.add_task("policies", total=len(self._jobs))
        return self._watch

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def _watch(self, running: Mapping[sweeping.Job, str]) -> None:
        for job in [job for job in self._rows if job not in running]:
            self._bars.remove_task(self._rows.pop(job))
        self._seen |= set(running)
        self._bars.update(self._whole, completed=len(self._seen) - len(running))
        for job, verb in running.items():
            if job not in self._rows:
                self._rows[job] = self._bars.add_task(job.folder.name, total=self._epochs)
            total = self._epochs if verb == "train" else None  # a bar that only moves
            done = sweeping.epochs_done(job) if total else 0
            self._bars.update(self._rows[job], completed=done, total=total, description=f"{verb} {job.folder.name}")
