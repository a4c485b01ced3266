"""The jobs of a comparison: one policy per method, budget and seed, and which of them are done or stale.

A job is one trained policy in a folder of its own, `RUN/[BUDGET/]METHOD-sSEED`; RUN/base is the untrained one. Jobs are
the public commands `recast train` and `recast evaluate`, so that a queue can run them as well.
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
from recast.core.weights import Method, WeightMatrix
from recast.errors import RecastError, StaleError
from recast.evaluate import stage as evaluation
from recast.progress import no_progress
from recast.train import stage as training
from recast.weigh import weigh


@dataclass(frozen=True)
class Job:
    """One policy to train and evaluate, or, without a method, the base to evaluate."""

    folder: Path
    method: Method | None
    budget: tuple[tuple[str, float], ...]
    seed: int
    overrides: tuple[str, ...]

    def commands(self, recipe: Path) -> list[list[str]]:
        """What `recast` is called with, one after the other."""
        tail = [str(recipe), *self.overrides, "--out", str(self.folder)]
        if self.method is None:
            return [["evaluate", *tail, "--base"]]
        return [["train", *tail], ["evaluate", *tail]]

    def epochs_done(self) -> int:
        """The number of epochs that are logged."""
        path = self.folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.is_file() else 0


def budgets_of(recipe: Recipe, given: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """The given budgets; else, as in the paper, every reward alike and then each of them doubled, the last first."""
    if recipe.world.kind != "images":
        raise RecastError(f"a sweep trains policies that make images, and world.kind = {recipe.world.kind} has none")
    names = list(recipe.rewards)
    for name in (name for budget in given for name in budget):
        if name not in names:
            raise RecastError(f"sweep.budgets names {name!r}, but the recipe's rewards are {', '.join(names)}")
    if given:
        return [dict(budget) for budget in given]
    even = dict.fromkeys(names, 1.0)
    return [even, *(even | {name: 2.0} for name in reversed(names))]


def jobs_of(
    recipe: Recipe, out: Path, methods: Sequence[Method], seeds: Sequence[int], budgets: Sequence[Mapping[str, float]]
) -> list[Job]:
    """The base, then every (seed, budget, method), matched by construction: only W differs within a pair."""
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
    """W of a job in its folder; what was made with other settings is set aside, and the sentence says so."""
    settings = config.load(path, job.overrides)
    said = None
    if job.method is not None:
        entropic = job.method in ("sinkhorn", "reversed", "shuffled")
        matrix = weigh(
            curves,
            dict(job.budget),
            job.method,
            tau=recipe.weigh.tau if entropic else 1.0,
            shrink=recipe.weigh.shrink and job.method != "static",
            seed=recipe.weigh.seed,
        )
        said = _refresh_training(settings, job.folder, matrix)
        matrix.save(job.folder / "weights.json")
    return _refresh_scores(settings, job) or said


def _refresh_training(settings: Recipe, folder: Path, matrix: WeightMatrix) -> str | None:
    try:
        training.check_stale(settings, folder, matrix)
    except StaleError as error:
        return set_aside(folder, error)
    return None


def _refresh_scores(settings: Recipe, job: Job) -> str | None:
    folder, lora = job.folder / "scores", None if job.method is None else job.folder / "lora"
    if not folder.is_dir():
        return None
    try:
        if not _trained(settings, job):
            raise StaleError(f"{folder} holds images of an earlier epoch")
        evaluation.check_stale(settings, folder, lora)
    except StaleError as error:
        return set_aside(folder, error)
    return None


def _trained(settings: Recipe, job: Job) -> bool:
    """Whether a job's last epoch is done; the base has none."""
    return job.method is None or training.finished(settings, job.folder)


def finished(path: Path, job: Job) -> bool:
    """Whether a job that `prepare` has checked has nothing left to do."""
    settings = config.load(path, job.overrides)
    return _trained(settings, job) and evaluation.complete(settings, job.folder / "scores")


def run_here(job: Job, recipe: Path) -> None:
    """Run a job in this process, as one of a launcher's."""
    settings = config.load(recipe, job.overrides)
    if job.method is not None:
        training.train(settings, job.folder)
    lora = None if job.method is None else job.folder / "lora"
    evaluation.evaluate(settings, job.folder, lora, no_progress)


def set_aside(folder: Path, reason: Exception) -> str:
    """Rename what is stale; nothing is deleted, since images may have been paid for."""
    number = 1
    while (target := folder.with_name(f"{folder.name}.stale-{number}")).exists():
        number += 1
    folder.rename(target)
    return f"{str(reason).partition(': choose')[0]}; it is now {target.name}, and is made anew"


def command_lines(jobs: Sequence[Job], recipe: Path) -> list[str]:
    """One line a job for a queue; matched jobs are neighbours."""
    return [" && ".join("recast " + shlex.join(words) for words in job.commands(recipe)) for job in jobs]


def facts(jobs: Sequence[Job]) -> dict[str, Any]:
    """How many of what, for a line before the work begins."""
    trained = [job for job in jobs if job.method is not None]
    return {
        "methods": len({job.method for job in trained}),
        "budgets": len({job.budget for job in trained}),
        "seeds": len({job.seed for job in trained}),
        "runs": len(trained),
    }
