"""`recast estimate`: rollouts into one shard per prompt, then gain curves from the shards."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from recast import device, identity, processes, versions
from recast._version import __version__
from recast.config import Recipe
from recast.core import artifact, renyi, sinkhorn
from recast.core.curves import GainCurves
from recast.errors import ClampWarning, FloorWarning, RecastError
from recast.estimate import curves, worlds
from recast.estimate.estimators import Sampled
from recast.estimate.rollout import call_rows, sample
from recast.estimate.scheduler import Scheduler
from recast.estimate.shards import Rollouts, Shards
from recast.flow import sampling
from recast.flow.mixture_prompts import exact_mu
from recast.progress import Progress

__all__ = [
    "PAPER_ROLLOUTS",
    "Status",
    "Watch",
    "estimate",
    "evaluations_per_prompt",
    "missing",
    "paper_evaluations",
    "rows_per_prompt",
    "sample_prompt",
    "up_to_date",
    "width",
]

PAPER_ROLLOUTS = 16
"""K of the paper's Alg. 1."""
_FEWEST = 8  # prompts below which an interval over prompts is not trusted to stop a run
_TRUTH_NOISINGS = 512  # noisings per proposal for the exact curve: its own error is far below that of any estimate


@dataclass(frozen=True)
class Status:
    """State of a run over all processes: prompts, velocity evaluations, moments at the floor, and the curves so far."""

    done: int
    total: int
    evaluations: int
    planned: int
    floor_hits: int
    curves: GainCurves


Watch = Callable[[Status], None]
"""Called with the status after every prompt."""


def estimate(
    recipe: Recipe,
    out: Path,
    progress: Progress,
    reuse: bool = False,
    until_ci: float | None = None,
    watch: Watch | None = None,
) -> tuple[GainCurves, GainCurves | None] | None:
    """Gain curves of a recipe, written to `gains.json`; in the exact world also the exact ones, in `exact.json`.

    Prompts that have a shard are not estimated again. With `reuse`, none is estimated, and the leading prompts that
    have a shard are used. With `until_ci`, only as many leading prompts are used as make the 95 % interval of W that
    narrow (`width`). Any number of processes may work in one folder, under a launcher or started by hand on several
    machines. Of those under one launcher, the first writes the curves; the others wait for it and return None. Weights
    and figures of earlier curves are removed, since they would contradict the new ones.
    """
    if until_ci is not None and not 0 < until_ci < float("inf"):
        raise RecastError(f"--until-ci must be a finite number above 0, the width of an interval, not {until_ci}")
    _warn_of_bias(recipe)
    shards = _open(recipe, out, reuse)  # first, since other settings leave the folder unchanged
    with _one_thread():
        world = worlds.open_world(recipe, out)
        results = _Results(recipe, world, shards, until_ci)
        if reuse:
            count = results.ready()
            if not count:
                raise RecastError(f"{out / 'shards'} has no rollouts to reuse: run without --reuse")
        else:
            _measure(recipe, world, shards, results, progress, watch)
            count = len(world.names)
        if processes.RANK > 0:
            processes.wait()
            return None
        shards.sweep(world.names)
        names = world.names[: results.enough() or count]
        made = results.curves(names)
        truth = _exact(recipe, world, names) if isinstance(world, worlds.MixtureWorld) else None
    recipe.save(out / "recipe.yaml")
    for name in ("weights.json", "gains.png", "gains.pdf"):
        (out / name).unlink(missing_ok=True)
    if truth is not None:
        truth.save(out / "exact.json")
    made.save(out / "gains.json")
    processes.wait()
    return made, truth


def missing(recipe: Recipe, out: Path) -> int:
    """The number of prompts without rollouts; raises what `estimate` would if RUN has those of other settings."""
    shards = _open(recipe, out)
    return sum(not shards.has(name) for name in curves.prompt_names(recipe))


def _open(recipe: Recipe, out: Path, reuse: bool = False) -> Shards:
    """The shards of RUN; an error if they are of other settings, or would be of two versions of a reward."""
    present = {} if reuse else versions.of(recipe.rewards)
    shards = Shards(out / "shards", identity.rollouts(recipe), present)
    if not (reuse or all(shards.has(name) for name in curves.prompt_names(recipe))):
        shards.require_versions(present)
    return shards


def up_to_date(recipe: Recipe, out: Path) -> GainCurves | None:
    """The curves in RUN if `estimate` would make the same from these settings, else None; no model is loaded.

    Curves by other versions of the rewards count as the same: they are complete, so nothing would be mixed.
    """
    path = out / "gains.json"
    if recipe.world.kind != "images" or not path.is_file():
        return None
    made = GainCurves.load(path)
    spent = made.provenance.get("velocity_evaluations")
    count, scored_by = len(curves.prompt_names(recipe)), made.provenance.get("versions", {})
    wanted = curves.provenance(recipe, count, scored_by) | {"velocity_evaluations": spent}
    return made if artifact.plain(wanted) == made.provenance else None


def _measure(
    recipe: Recipe,
    world: worlds.World,
    shards: Shards,
    results: _Results,
    progress: Progress,
    watch: Watch | None,
) -> None:
    """Make the missing shards, together with all other processes in the folder."""
    missing = [name for name in world.names if not shards.has(name)]
    if not missing:
        return
    worker = _Worker(recipe, world, shards, lambda: None if watch is None else watch(results.status()))
    scheduler = Scheduler(shards, missing, in_order=results.may_stop_early, enough=results.enough, on_wait=worker.check)
    worker.work(scheduler, progress(scheduler, "estimating gains", len(missing)))


class _Results:
    """The shards of all processes so far, and whether they are enough."""

    def __init__(self, recipe: Recipe, world: worlds.World, shards: Shards, until_ci: float | None) -> None:
        self._recipe, self._world, self._shards, self._until = recipe, world, shards, until_ci
        self._found: dict[str, Rollouts] = {}
        self._widths: dict[int, float] = {}
        # `status` runs in the scoring thread, and filters of warnings are shared by all threads.
        self._lock = threading.Lock()

    @property
    def may_stop_early(self) -> bool:
        """Whether the run ends once the interval of W is narrow enough."""
        return self._until is not None

    def ready(self) -> int:
        """The number of leading prompts that have a shard."""
        done = [self._shards.has(name) for name in self._world.names]
        return done.index(False) if False in done else len(done)

    def enough(self) -> int | None:
        """The number of leading prompts that make the interval of W narrow enough, or None while there is none."""
        if self._until is None:
            return None
        for count in range(_FEWEST, self.ready() + 1):
            if count not in self._widths:
                self._widths[count] = width(self._recipe, self._curves_so_far(self._world.names[:count]))
            if self._widths[count] <= self._until:
                return count
        return None

    def rollouts(self, names: Sequence[str]) -> list[Rollouts]:
        """The rollouts of some prompts; each shard is read once."""
        for name in names:
            if name not in self._found:
                self._found[name] = self._shards.read(name, self._world.inputs(name))
        return [self._found[name] for name in names]

    def curves(self, names: Sequence[str]) -> GainCurves:
        """The curves of some prompts."""
        world, scored_by = self._world, self._shards.versions
        return curves.from_rollouts(self._recipe, world.sigmas, self.rollouts(names), world.models, scored_by=scored_by)

    def _curves_so_far(self, names: Sequence[str]) -> GainCurves:
        """Curves without warnings, which are given once, for the final curves."""
        with self._lock, warnings.catch_warnings():
            warnings.simplefilter("ignore", FloorWarning)
            warnings.simplefilter("ignore", ClampWarning)
            return self.curves(names)

    def status(self) -> Status:
        """The status over all processes."""
        names = [name for name in self._world.names if self._shards.has(name)]
        made = self._curves_so_far(names)
        maps = curves.maps(self._recipe, self._world.models)
        tables = [curves.nonnegative(each, maps)[0] for each in self.rollouts(names)]
        return Status(
            len(names),
            len(self._world.names),
            sum(each.evaluations for each in tables),
            evaluations_per_prompt(self._recipe, self._world.sigmas) * len(self._world.names),
            sum(int((each.mu.mean(axis=-1) <= renyi.FLOOR).sum()) for each in tables),
            made,
        )


class _Worker:
    """Samples, scores and stores prompt after prompt.

    Where the world allows it, one prompt is scored in the background while the next one is sampled.
    """

    def __init__(self, recipe: Recipe, world: worlds.World, shards: Shards, on_stored: Callable[[], None]) -> None:
        self._recipe, self._world, self._shards, self._on_stored = recipe, world, shards, on_stored
        self._pending: Future[None] | None = None

    def check(self) -> None:
        """Raise the error of the background scoring, if it has failed."""
        if self._pending is not None and self._pending.done():
            self._pending.result()

    def work(self, scheduler: Scheduler, names: Iterable[str]) -> None:
        """Process the prompts `names` that the scheduler yields; no claim is left, even after an error."""
        try:
            with device.worker(self._world.device) as background:
                for name in names:
                    sampled = sample_prompt(self._recipe, self._world, name)
                    self._wait()
                    self._pending = background.submit(self._store, name, sampled, scheduler)
                    if not self._world.overlaps:
                        self._wait()
                self._wait()
        finally:
            scheduler.release_all()

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.result()

    @torch.no_grad()
    def _store(self, name: str, sampled: Sampled, scheduler: Scheduler) -> None:
        self._shards.write(name, sampled.score(self._world.scorer(name)), self._world.inputs(name))
        scheduler.release(name)
        self._on_stored()


def width(recipe: Recipe, made: GainCurves) -> float:
    """Half the width of the 95 % interval of W, summed over its entries, which sum to 1."""
    budget = recipe.budget
    shares = sinkhorn.simplex(list(budget.values()), len(budget), "budget")
    low, high = made.select(list(budget)).weight_intervals(shares, tau=recipe.weigh.tau)
    return float((high - low).sum() / 2)


def evaluations_per_prompt(recipe: Recipe, sigmas: Sequence[float]) -> int:
    """Velocity evaluations per prompt that a recipe needs."""
    return sum(rows_per_prompt(recipe, sigmas))


def rows_per_prompt(recipe: Recipe, sigmas: Sequence[float]) -> list[int]:
    """Rows of every velocity call that a recipe makes for one prompt."""
    each = recipe.estimate
    levels = _rollout_levels(recipe, sigmas)
    return call_rows(sigmas, each.estimator, each.samples, each.noisings, each.rollouts, levels)


def paper_evaluations(recipe: Recipe, prompts: int) -> int:
    """Velocity evaluations of Alg. 1 with the paper's K = 16, over so many prompts."""
    settings = recipe.estimate
    return prompts * settings.samples * PAPER_ROLLOUTS * (settings.steps * (settings.steps + 1) // 2)


def sample_prompt(recipe: Recipe, world: worlds.World, name: str) -> Sampled:
    """Rollouts of one prompt's proposals, not scored yet; they do not depend on other prompts."""
    settings = recipe.estimate
    return sample(
        world.velocity(name),
        world.clean(name),
        world.sigmas,
        estimator=settings.estimator,
        noisings=settings.noisings,
        repeats=settings.rollouts,
        levels=_rollout_levels(recipe, world.sigmas),
        sampler=settings.sampler,
        seed=world.seed(name),
    )


def _rollout_levels(recipe: Recipe, sigmas: Sequence[float]) -> list[float] | None:
    coupled = recipe.estimate.estimator == "coupled"
    return sampling.rollout_levels(sigmas, recipe.estimate.spacing) if coupled else None


def _exact(recipe: Recipe, world: worlds.MixtureWorld, names: Sequence[str]) -> GainCurves:
    """The exact curves at the proposals of the exact world."""
    tables = []
    for name in names:
        seed = world.seeds(name)[2]
        tables.append(exact_mu(world.prompt(name), world.clean(name), world.sigmas, _TRUTH_NOISINGS, seed))
    setup = recipe.world.model_dump() | {"prompts": len(names)}
    provenance = {"recast": __version__, "world": setup, "estimate": "exact"}
    settings = recipe.estimate
    return GainCurves.from_mu(
        world.rewards, world.sigmas, np.stack(tables), settings.alpha, settings.aggregate, provenance=provenance
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread of torch for the block: batches are small, and a second thread slows down all that runs beside it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _warn_of_bias(recipe: Recipe) -> None:
    settings = recipe.estimate
    own = recipe.self_rollouts
    if (settings.alpha != 2 or own) and settings.rollouts < 4:
        reason = "with the policy's own images" if own else f"at alpha = {settings.alpha:g}"
        warnings.warn(
            f"{reason} the moment is biased in the number of rollouts: "
            f"set estimate.rollouts to 4 or more (it is {settings.rollouts})",
            stacklevel=3,
        )
