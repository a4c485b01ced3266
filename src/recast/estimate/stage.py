"""`recast estimate`: rollouts prompt by prompt into shards, then curves from the shards."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from recast import device, identity, processes
from recast._version import __version__
from recast.config import Recipe
from recast.core import artifact, renyi, sinkhorn
from recast.core.curves import GainCurves
from recast.errors import ClampWarning, FloorWarning, RecastError
from recast.estimate import curves, worlds
from recast.estimate.rollout import Sampled, planned_evaluations, sample
from recast.estimate.scheduler import Scheduler
from recast.estimate.shards import Rollouts, Shards
from recast.flow import sampling
from recast.flow.mixture_prompts import exact_mu
from recast.progress import Progress

_FEWEST = 8
"""Prompts below which an interval over prompts is not trusted to stop a run."""
TRUTH_NOISINGS = 512
"""Noisings of each proposal behind the exact curve; its own error is far below any estimate's."""


@dataclass(frozen=True)
class Status:
    """How far a run is: prompts, velocity evaluations, moments that hit the floor, and the curves so far."""

    done: int
    total: int
    evaluations: int
    planned: int
    floor_hits: int
    curves: GainCurves


Watch = Callable[[Status], None]


def estimate(
    recipe: Recipe,
    out: Path,
    progress: Progress,
    reuse: bool = False,
    until_ci: float | None = None,
    watch: Watch | None = None,
) -> tuple[GainCurves, GainCurves | None] | None:
    """`gains.json`, and in the exact world `exact.json` beside it: the truth at the same proposals.

    Prompts that have a shard are not estimated again; with `reuse`, none is, and the first ones that have a shard are
    used. With `until_ci`, only as many prompts are used, in their order, as make the 95 % interval of W that narrow
    (`width`). Any number of processes may work in one folder, under a launcher or started by hand on several machines;
    of those under one launcher, the first writes the curves; the others wait for them and return None. Weights and
    figures of earlier curves are removed: they would contradict the new ones.
    """
    _warn(recipe)
    shards = Shards(out / "shards", identity.rollouts(recipe))  # first: other settings leave the folder as it was
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small batches: a second thread slows them down wherever anything else runs
    try:
        world = worlds.open_world(recipe, out)
        results = _Results(recipe, world, shards, until_ci)
        missing = [name for name in world.names if not shards.has(name)]
        ready = results.ready()
        if reuse and not ready:
            raise RecastError(f"{out / 'shards'} has no rollouts to reuse: run without --reuse")
        if missing and not reuse:
            worker = _Worker(recipe, world, shards, lambda: None if watch is None else watch(results.status()))
            in_order = until_ci is not None
            scheduler = Scheduler(shards, missing, in_order=in_order, enough=results.enough, on_wait=worker.check)
            worker.work(scheduler, progress(scheduler, "estimating gains", len(missing)))
        if processes.RANK > 0:
            processes.wait()
            return None
        shards.sweep(world.names)
        names = world.names[: results.enough() or (ready if reuse else len(world.names))]
        made = results.curves(names)
        truth = _exact(recipe, world, names) if isinstance(world, worlds.MixtureWorld) else None
    finally:
        torch.set_num_threads(threads)
    recipe.save(out / "recipe.yaml")
    for name in ("weights.json", "gains.png", "gains.pdf"):
        (out / name).unlink(missing_ok=True)
    if truth is not None:
        truth.save(out / "exact.json")
    made.save(out / "gains.json")
    processes.wait()
    return made, truth


def up_to_date(recipe: Recipe, out: Path) -> GainCurves | None:
    """The curves of RUN, if they are what `estimate` would make of these settings; nothing is loaded to know."""
    path = out / "gains.json"
    if recipe.world.kind != "images" or not path.is_file():
        return None
    made = GainCurves.load(path)
    spent = made.provenance.get("velocity_evaluations")
    wanted = curves.provenance(recipe, len(curves.prompt_names(recipe))) | {"velocity_evaluations": spent}
    return made if artifact.plain(wanted) == made.provenance else None


class _Results:
    """What all processes have found so far, and whether it is enough."""

    def __init__(self, recipe: Recipe, world: worlds.World, shards: Shards, until_ci: float | None) -> None:
        self._recipe, self._world, self._shards, self._until = recipe, world, shards, until_ci
        self._found: dict[str, Rollouts] = {}
        self._widths: dict[int, float] = {}

    def ready(self) -> int:
        """The number of leading prompts that are done."""
        done = [self._shards.has(name) for name in self._world.names]
        return done.index(False) if False in done else len(done)

    def enough(self) -> int | None:
        """The number of leading prompts that make the interval of W narrow enough, once there is one."""
        if self._until is None:
            return None
        for count in range(_FEWEST, self.ready() + 1):
            if count not in self._widths:
                self._widths[count] = width(self._recipe, self.curves(self._world.names[:count]))
            if self._widths[count] <= self._until:
                return count
        return None

    def rollouts(self, names: Sequence[str]) -> list[Rollouts]:
        """The rollouts of some of the prompts, read once."""
        for name in names:
            if name not in self._found:
                self._found[name] = self._shards.read(name, self._world.inputs(name))
        return [self._found[name] for name in names]

    def curves(self, names: Sequence[str]) -> GainCurves:
        """The curves of some of the prompts."""
        return curves.from_rollouts(self._recipe, self._world.sigmas, self.rollouts(names), self._world.models)

    def status(self) -> Status:
        """Progress over all processes."""
        names = [name for name in self._world.names if self._shards.has(name)]
        with warnings.catch_warnings():
            for kind in (FloorWarning, ClampWarning):  # given once, for the final curves
                warnings.simplefilter("ignore", kind)
            made = self.curves(names)
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

    Where the policy has a device of its own, one prompt is scored while the next is sampled.
    """

    def __init__(self, recipe: Recipe, world: worlds.World, shards: Shards, watch: Callable[[], None]) -> None:
        self._recipe, self._world, self._shards, self._watch = recipe, world, shards, watch
        self._pending: Future[None] | None = None

    def check(self) -> None:
        """Raise the error of the scoring in the background, if it has failed."""
        if self._pending is not None and self._pending.done():
            self._pending.result()

    def work(self, scheduler: Scheduler, names: Iterable[str]) -> None:
        """Process the prompts that the scheduler hands out."""
        try:
            with device.worker(self._world.device) as background:
                for name in names:
                    sampled = sample_prompt(self._recipe, self._world, name)
                    self._wait()
                    self._pending = background.submit(self._finish, name, sampled, scheduler)
                    if not self._world.overlaps:
                        self._wait()
                self._wait()
        finally:
            scheduler.release_all()

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.result()

    @torch.no_grad()
    def _finish(self, name: str, sampled: Sampled, scheduler: Scheduler) -> None:
        self._shards.write(name, sampled.score(self._world.scorer(name)), self._world.inputs(name))
        scheduler.release(name)
        self._watch()


def width(recipe: Recipe, made: GainCurves) -> float:
    """Half the 95 % interval of W, summed over its entries: of a weight of 1 in all, how much is open."""
    budget = recipe.budget or dict.fromkeys(made.rewards, 1.0)
    shares = sinkhorn.simplex(list(budget.values()), len(budget), "budget")
    low, high = made.select(list(budget)).weight_intervals(shares, tau=recipe.weigh.tau)
    return float((high - low).sum() / 2)


def evaluations_per_prompt(recipe: Recipe, sigmas: Sequence[float]) -> int:
    """Velocity evaluations a prompt by this recipe."""
    settings = recipe.estimate
    levels = sampling.rollout_levels(sigmas, settings.spacing) if settings.estimator == "coupled" else None
    return planned_evaluations(
        sigmas, settings.estimator, settings.samples, settings.noisings, settings.rollouts, levels
    )


def sample_prompt(recipe: Recipe, world: worlds.World, name: str) -> Sampled:
    """Rollouts of one prompt's proposals, not scored yet; the same whichever prompts come before it."""
    settings = recipe.estimate
    return sample(
        world.velocity(name),
        world.clean(name),
        world.sigmas,
        estimator=settings.estimator,
        noisings=settings.noisings,
        repeats=settings.rollouts,
        levels=sampling.rollout_levels(world.sigmas, settings.spacing) if settings.estimator == "coupled" else None,
        sampler=settings.sampler,
        seed=world.seed(name),
    )


def _exact(recipe: Recipe, world: worlds.MixtureWorld, names: Sequence[str]) -> GainCurves:
    tables = []
    for name in names:
        seed = world.seeds(name)[2]
        tables.append(exact_mu(world.prompt(name), world.clean(name), world.sigmas, TRUTH_NOISINGS, seed))
    setup = recipe.world.model_dump() | {"prompts": len(names)}
    provenance = {"recast": __version__, "world": setup, "estimate": "exact"}
    settings = recipe.estimate
    return GainCurves.from_mu(
        world.rewards, world.sigmas, np.stack(tables), settings.alpha, settings.aggregate, provenance=provenance
    )


def _warn(recipe: Recipe) -> None:
    settings = recipe.estimate
    own = recipe.self_rollouts
    if (settings.alpha != 2 or own) and settings.rollouts < 4:
        reason = "with the policy's own images" if own else f"at alpha = {settings.alpha:g}"
        warnings.warn(
            f"{reason} the moment is biased in the number of rollouts: "
            f"set estimate.rollouts to 4 or more (it is {settings.rollouts})",
            stacklevel=3,
        )
