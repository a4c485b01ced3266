"""The jobs of a comparison: one policy per method, budget and seed, and which of them are done or stale.

The folder of a job is `RUN/[BUDGET/]METHOD-sSEED`, or RUN/base for the untrained policy. A job consists of the public
commands `recast train` and `recast evaluate`, so that a job queue can run it as well.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recast import config
from recast.config import Recipe
from recast.core.curves import GainCurves
from recast.core.weights import ENTROPIC, Method, WeightMatrix
from recast.errors import RecastError, StaleError
from recast.evaluate import stage as evaluation
from recast.progress import no_progress
from recast.train import stage as training
from recast.weigh import weigh

__all__ = ["Job", "budgets_of", "command_lines", "facts", "finished", "jobs_of", "prepare", "run_here", "set_aside"]


@dataclass(frozen=True)
class Job:
    """One policy to train and evaluate; without a method, the base, which is only evaluated."""

    folder: Path
    method: Method | None
    budget: tuple[tuple[str, float], ...]
    seed: int
    overrides: tuple[str, ...]

    def commands(self, recipe: Path) -> list[list[str]]:
        """The arguments of the `recast` commands, in the order in which they run."""
        tail = [str(recipe), *self.overrides, "--out", str(self.folder)]
        if self.method is None:
            return [["evaluate", *tail, "--base"]]
        return [["train", *tail], ["evaluate", *tail]]

    def epochs_done(self) -> int:
        """The number of epochs in the training log."""
        path = self.folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.is_file() else 0


def budgets_of(recipe: Recipe, given: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """The given budgets; by default the paper's: equal ones, then each reward doubled in turn, the last one first."""
    if recipe.world.kind != "images":
        raise RecastError(f"a sweep needs world.kind = images, not {recipe.world.kind}, which has no policy to train")
    names = list(recipe.rewards)
    for name in (name for budget in given for name in budget):
        if name not in names:
            raise RecastError(f"sweep.budgets contains {name!r}, but the rewards of the recipe are {', '.join(names)}")
    if given:
        return [dict(budget) for budget in given]
    even = dict.fromkeys(names, 1.0)
    return [even, *(even | {name: 2.0} for name in reversed(names))]


def jobs_of(
    recipe: Recipe, out: Path, methods: Sequence[Method], seeds: Sequence[int], budgets: Sequence[Mapping[str, float]]
) -> list[Job]:
    """The base, then one job per seed, budget and method; only W differs between the methods."""
    jobs = [Job(out / "base", None, (), recipe.train.seed, ())]
    for seed in seeds:
        for budget in budgets:
            name = "b" + "-".join(f"{weight:g}" for weight in budget.values())
            parent = out / name if len(budgets) > 1 else out
            for method in methods:
                shares = ", ".join(f"{reward}: {weight:g}" for reward, weight in budget.items())
                overrides = (f"weigh.method={method}", f"weigh.budget={{{shares}}}", f"train.seed={seed}")
                jobs.append(Job(parent / f"{method}-s{seed}", method, tuple(budget.items()), seed, overrides))
    return jobs


def prepare(recipe: Recipe, path: Path, curves: GainCurves, job: Job) -> str | None:
    """Write W into the folder of a job and set aside results of other settings; a sentence about it, or None."""
    settings = config.load(path, job.overrides)
    note = None
    if job.method is not None:
        matrix = weigh(
            curves,
            dict(job.budget),
            job.method,
            tau=recipe.weigh.tau if job.method in ENTROPIC else 1.0,
            shrink=recipe.weigh.shrink and job.method != "static",
            seed=recipe.weigh.seed,
        )
        note = _refresh_training(settings, job.folder, matrix)
        matrix.save(job.folder / "weights.json")
    return _refresh_scores(settings, job) or note


def _refresh_training(settings: Recipe, folder: Path, matrix: WeightMatrix) -> str | None:
    """Set aside a training of other settings."""
    try:
        training.check_stale(settings, folder, matrix)
    except StaleError as error:
        return set_aside(folder, error)
    return None


def _refresh_scores(settings: Recipe, job: Job) -> str | None:
    """Set aside scores of other settings or of an earlier epoch."""
    folder, lora = job.folder / "scores", None if job.method is None else job.folder / "lora"
    if not folder.is_dir():
        return None
    try:
        if not _trained(settings, job):
            raise StaleError(f"{folder} contains images of an earlier epoch")
        evaluation.check_stale(settings, folder, lora)
    except StaleError as error:
        return set_aside(folder, error)
    return None


def _trained(settings: Recipe, job: Job) -> bool:
    """Whether a job is trained to its last epoch; True for the base."""
    return job.method is None or training.finished(settings, job.folder)


def finished(path: Path, job: Job) -> bool:
    """Whether nothing is left to do for a job that `prepare` has checked."""
    settings = config.load(path, job.overrides)
    return _trained(settings, job) and evaluation.complete(settings, job.folder / "scores")


def run_here(job: Job, recipe: Path) -> None:
    """Run a job in this process, together with the other processes of the launcher."""
    settings = config.load(recipe, job.overrides)
    if job.method is not None:
        training.train(settings, job.folder)
    lora = None if job.method is None else job.folder / "lora"
    evaluation.evaluate(settings, job.folder, lora, no_progress)


def set_aside(folder: Path, reason: Exception) -> str:
    """Rename a stale folder and return a sentence about it; images may have been paid for, so nothing is deleted."""
    number = 1
    while (target := folder.with_name(f"{folder.name}.stale-{number}")).exists():
        number += 1
    folder.rename(target)
    return f"{str(reason).partition(': choose')[0]}; it was renamed to {target.name} and is made again"


def command_lines(jobs: Sequence[Job], recipe: Path) -> list[str]:
    """One shell command per job, for a job queue; matched jobs are adjacent."""
    return [" && ".join("recast " + shlex.join(words) for words in job.commands(recipe)) for job in jobs]


def facts(jobs: Sequence[Job]) -> dict[str, Any]:
    """The numbers of methods, budgets, seeds and runs."""
    trained = [job for job in jobs if job.method is not None]
    return {
        "methods": len({job.method for job in trained}),
        "budgets": len({job.budget for job in trained}),
        "seeds": len({job.seed for job in trained}),
        "runs": len(trained),
    }
