"""The jobs of a comparison: one policy per method, budget and seed, and which of them are done or stale.

The folder of a job is `RUN/[BUDGET/]METHOD-sSEED`, RUN/warmup-sSEED for a stage that all policies of a seed resume
from, or RUN/base for the untrained policy. A job consists of the public commands `recast train` and `recast evaluate`,
so that a job queue can run it as well.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recast import config
from recast.config import Recipe
from recast.core.curves import GainCurves
from recast.core.effects import Effects
from recast.core.weights import ENTROPIC, Method, WeightMatrix
from recast.errors import RecastError, StaleError
from recast.evaluate import stage as evaluation
from recast.flow import lora as adapters
from recast.progress import no_progress
from recast.train import stage as training
from recast.weigh import weigh_recipe

__all__ = [
    "Job",
    "budgets_of",
    "command_lines",
    "facts",
    "finished",
    "jobs_of",
    "prepare",
    "run_here",
    "set_aside",
    "warmups_of",
]


@dataclass(frozen=True)
class Job:
    """One policy to train and evaluate; without a method, the base, which is only evaluated, or a warmup, only trained.

    `recipe` is the file that the job reads, `epochs` how long it trains, and `after` the folder of the job that it
    resumes from.
    """

    folder: Path
    method: Method | None
    budget: tuple[tuple[str, float], ...]
    seed: int
    overrides: tuple[str, ...]
    recipe: Path
    epochs: int = 0
    after: Path | None = None

    @property
    def is_warmup(self) -> bool:
        """Whether the job is a stage before those that are compared."""
        return self.method is None and self.epochs > 0

    def load(self) -> Recipe:
        """The job's settings."""
        return config.load(self.recipe, self.overrides)

    def commands(self) -> list[list[str]]:
        """The arguments of the `recast` commands, in the order in which they run."""
        tail = [str(self.recipe), *self.overrides, "--out", str(self.folder)]
        if self.method is None:
            return [["train", *tail]] if self.is_warmup else [["evaluate", *tail, "--base"]]
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


def warmups_of(recipe: Recipe, out: Path) -> dict[Path, Recipe]:
    """The recipes of `sweep.warmup`, each under the path in RUN where its resolved copy belongs."""
    found = {}
    for k, source in enumerate(recipe.sweep.warmup, start=1):
        settings = config.load(Path(source).expanduser())
        later = recipe if k == len(recipe.sweep.warmup) else config.load(Path(recipe.sweep.warmup[k]).expanduser())
        if later.train.lora is not None:
            raise RecastError(
                f"train.lora = {later.train.lora} would replace the adapters of the warmup {source}: set it to null"
            )
        if settings.world.kind != "images" or settings.weigh.method != "static":
            raise RecastError(
                f"sweep.warmup = {source}: a warmup needs world.kind = images and weigh.method = static, not "
                f"{settings.world.kind} and {settings.weigh.method}: other weights would need gain curves of their own"
            )
        found[out / f"warmup{'' if len(recipe.sweep.warmup) == 1 else f'-{k}'}.yaml"] = settings
    return found


def jobs_of(
    recipe: Recipe,
    out: Path,
    methods: Sequence[Method],
    seeds: Sequence[int],
    budgets: Sequence[Mapping[str, float]],
    warmups: Mapping[Path, Recipe] | None = None,
) -> list[Job]:
    """The base, the chain of warmups of every seed, then one job per seed, budget and method.

    Only W differs between the methods. All policies of a seed resume from the last warmup of that seed.
    """
    path, epochs = out / "recipe.yaml", recipe.train.epochs
    jobs = [Job(out / "base", None, (), recipe.train.seed, (), path)]
    last: dict[int, Path | None] = dict.fromkeys(seeds)
    for file, settings in (warmups or {}).items():
        for seed in seeds:
            folder = out / f"{file.stem}-s{seed}"
            chain = (f"train.seed={seed}", *_resuming(last[seed]))
            jobs.append(Job(folder, None, (), seed, chain, file, settings.train.epochs, last[seed]))
            last[seed] = folder
    for seed in seeds:
        for budget in budgets:
            name = "b" + "-".join(f"{weight:g}" for weight in budget.values())
            parent = out / name if len(budgets) > 1 else out
            for method in methods:
                shares = ", ".join(f"{reward}: {weight:.12g}" for reward, weight in budget.items())
                own = (f"weigh.method={method}", f"weigh.budget={{{shares}}}", f"train.seed={seed}")
                overrides = (*own, *_resuming(last[seed]))
                folder = parent / f"{method}-s{seed}"
                jobs.append(Job(folder, method, tuple(budget.items()), seed, overrides, path, epochs, last[seed]))
    _require_distinct(jobs)
    return jobs


def _require_distinct(jobs: Sequence[Job]) -> None:
    """Refuse two jobs in one folder: the same method, seed or budget twice, or budgets that are nearly the same."""
    seen: dict[Path, Job] = {}
    for job in jobs:
        if (other := seen.setdefault(job.folder, job)) is not job:
            what = f"method {job.method}, seed {job.seed}"
            if other.budget != job.budget:
                what = f"budgets {dict(other.budget)} and {dict(job.budget)}"
            raise RecastError(
                f"two policies would be trained in {job.folder} ({what}): name every method, seed and budget once"
            )


def _resuming(folder: Path | None) -> tuple[str, ...]:
    return () if folder is None else (f"train.resume_from={folder}",)


def prepare(
    recipe: Recipe,
    curves: GainCurves,
    job: Job,
    unfinished: Collection[Path] = (),
    effects: Effects | None = None,
) -> str | None:
    """Write W into the folder of a job and set aside results of other settings; a sentence about it, or None.

    `unfinished` are the folders of the warmups that have yet to be trained; what resumed from one of them before is
    set aside as well. `effects` are those of the levels, which `weigh.columns: effect` needs.
    """
    settings = job.load()
    note = None
    if job.after in unfinished and (job.folder / "checkpoints").is_dir():
        note = set_aside(job.folder, StaleError(f"{job.folder} resumed from {job.after} before that was trained on"))
    if job.is_warmup:
        return note or _refresh_warmup(settings, job.folder)
    if job.method is not None:
        own: dict[str, Any] = {"method": job.method, "budget": dict(job.budget)}
        own |= {} if job.method in ENTROPIC else {"tau": 1.0}  # what its method does not read
        own |= {"shrink": False} if job.method == "static" else {}
        weighing = recipe.model_copy(update={"weigh": recipe.weigh.model_copy(update=own)})
        matrix = weigh_recipe(weighing, curves, effects)
        note = note or _refresh_training(settings, job.folder, matrix)
        matrix.save(job.folder / "weights.json")
    return _refresh_scores(settings, job) or note


def _refresh_warmup(settings: Recipe, folder: Path) -> str | None:
    """Set aside a warmup of other settings; its static W is made by its training."""
    path = folder / "weights.json"
    if not path.is_file():
        return None
    matrix = WeightMatrix.load(path)
    try:
        training.check_weights(settings, matrix, path)
    except StaleError as error:
        return set_aside(folder, error)
    return _refresh_training(settings, folder, matrix)


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
        if lora is not None and (lora / adapters.FILE).is_file():
            adapters.read(lora / adapters.FILE)  # a damaged one is no reason to give up the images of the whole one
        return set_aside(folder, error)
    return None


def _trained(settings: Recipe, job: Job) -> bool:
    """Whether a job is trained to its last epoch; True for the base."""
    return job.epochs == 0 or training.finished(settings, job.folder)


def finished(job: Job) -> bool:
    """Whether nothing is left to do for a job that `prepare` has checked."""
    settings = job.load()
    trained = _trained(settings, job) and (job.epochs == 0 or training.tidy(settings, job.folder))
    return trained and (job.is_warmup or evaluation.complete(settings, job.folder / "scores"))


def run_here(job: Job) -> None:
    """Run a job in this process, together with the other processes of the launcher."""
    settings = job.load()
    if job.epochs:
        training.train(settings, job.folder)
    if not job.is_warmup:
        lora = None if job.method is None else job.folder / "lora"
        evaluation.evaluate(settings, job.folder, lora, no_progress)


def set_aside(folder: Path, reason: Exception) -> str:
    """Rename a stale folder and return a sentence about it; images may have been paid for, so nothing is deleted."""
    number = 1
    while (target := folder.with_name(f"{folder.name}.stale-{number}")).exists():
        number += 1
    folder.rename(target)
    said = str(reason).partition(": choose")[0].partition(": run recast")[0]
    return f"{said}; it was renamed to {target.name} and is made again"


def command_lines(jobs: Sequence[Job]) -> list[str]:
    """One shell command per job, for a job queue; matched jobs are adjacent.

    A comment separates the warmups from the jobs that need them.
    """
    lines: list[str] = []
    needed = {job.after for job in jobs}
    begun: set[Path] = set()
    for job in sorted(jobs, key=lambda job: not job.is_warmup):
        if job.after in begun:
            lines.append("# when the commands above have finished:")
            begun.clear()
        lines.append(" && ".join("recast " + shlex.join(words) for words in job.commands()))
        begun |= {job.folder} & needed
    return lines


def facts(jobs: Sequence[Job]) -> dict[str, Any]:
    """The numbers of methods, budgets, seeds and runs."""
    trained = [job for job in jobs if job.method is not None]
    return {
        "methods": len({job.method for job in trained}),
        "budgets": len({job.budget for job in trained}),
        "seeds": len({job.seed for job in trained}),
        "runs": len(trained),
    }
