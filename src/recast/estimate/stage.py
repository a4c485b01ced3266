"""`recast estimate`: rollouts prompt by prompt into shards, then curves from the shards."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recast import device, processes, prompts
from recast._version import __version__
from recast.config import Recipe
from recast.core import renyi, sinkhorn
from recast.core.curves import GainCurves
from recast.errors import ClampWarning, FloorWarning, RecastError
from recast.estimate import worlds
from recast.estimate.rollout import Sampled, planned_evaluations, rollout_levels, sample
from recast.estimate.shards import Claim, Shard, Shards
from recast.flow.worlds import exact_mu
from recast.rewards import base

Progress = Callable[[Iterable[Any], str, int], Iterable[Any]]
FEWEST = 8
"""Prompts below which an interval over prompts is not trusted to stop a run."""
POLL = 0.5
"""Seconds between two looks at what other processes are still doing."""
CLAMPED = 0.01
"""Share of negative scores above which a curve is worth a warning."""
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
    shards = Shards(out / "shards", identity(recipe))  # first: other settings leave the folder as it was
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small batches: a second thread slows them down wherever anything else runs
    try:
        world = worlds.load(recipe, out)
        run = _Run(recipe, world, shards, until_ci)
        missing = [name for name in world.names if not shards.has(name)]
        ready = run.ready()
        if reuse and not ready:
            raise RecastError(f"{out / 'shards'} has no rollouts to reuse: run without --reuse")
        if missing and not reuse:
            run.work(progress(run.turns(missing), "estimating gains", len(missing)), watch)
        if processes.RANK > 0:
            processes.wait()
            return None
        shards.sweep(world.names)
        names = world.names[: run.enough() or (ready if reuse else len(world.names))]
        curves = run.curves(names)
        truth = _exact(recipe, world, names) if isinstance(world, worlds.MixtureWorld) else None
    finally:
        torch.set_num_threads(threads)
    recipe.save(out / "recipe.yaml")
    for name in ("weights.json", "gains.png", "gains.pdf"):
        (out / name).unlink(missing_ok=True)
    if truth is not None:
        truth.save(out / "exact.json")
    curves.save(out / "gains.json")
    processes.wait()
    return curves, truth


def up_to_date(recipe: Recipe, out: Path) -> GainCurves | None:
    """The curves of RUN, if they are what `estimate` would make of these settings; nothing is loaded to know."""
    path = out / "gains.json"
    if recipe.world.kind != "images" or not path.is_file():
        return None
    curves = GainCurves.load(path)
    rows = prompts.load(recipe.prompts.source, recipe.prompts.count, recipe.prompts.seed)
    spent = curves.provenance.get("velocity_evaluations")
    wanted = _provenance(recipe, len(rows)) | {"velocity_evaluations": spent}
    return curves if json.loads(json.dumps(wanted)) == curves.provenance else None


class _Run:
    """One process's view of a run: which prompts are its turn, and what all processes have found so far."""

    def __init__(self, recipe: Recipe, world: worlds.World, shards: Shards, until_ci: float | None) -> None:
        self._recipe, self._world, self._shards, self._until = recipe, world, shards, until_ci
        self._found: dict[str, Shard] = {}
        self._widths: dict[int, float] = {}
        self._held: dict[str, Claim] = {}
        self._pending: Future[None] | None = None

    def turns(self, names: Sequence[str]) -> Iterator[tuple[str, Claim]]:
        """The prompts that this process has claimed, one by one, until every prompt is done by someone."""
        # Processes start apart, so that they seldom ask for the same prompt; an early stop needs the first ones first.
        first = 0 if self._until is not None else processes.RANK * len(names) // processes.COUNT
        order = [*names[first:], *names[:first]]
        # What this process has claimed is scored behind its back, or has failed there: never waited for here.
        while (order := [name for name in order if self._open(name)]) and not self.enough():
            worked = False
            for name in order:
                claim = None if self._shards.has(name) or self.enough() else self._shards.claim(name)
                if claim is not None and self._shards.has(name):  # done while it was claimed
                    claim.release()
                elif claim is not None:
                    worked = True
                    self._held[name] = claim
                    yield name, claim
            if self._pending is not None and self._pending.done():
                self._pending.result()
            if not worked:
                time.sleep(POLL)

    def _open(self, name: str) -> bool:
        return name not in self._held and not self._shards.has(name)

    def work(self, turns: Iterable[tuple[str, Claim]], watch: Watch | None) -> None:
        """Sample, score and keep prompt after prompt.

        Where the policy has a device of its own, one prompt is scored while the next is sampled.
        """
        try:
            with device.worker(self._world.device) as background:
                for name, claim in turns:
                    sampled = sample_prompt(self._recipe, self._world, name)
                    if self._pending is not None:
                        self._pending.result()
                    self._pending = background.submit(self._finish, name, sampled, claim, watch)
                    if not self._world.overlaps:
                        self._pending.result()
                if self._pending is not None:
                    self._pending.result()
        finally:
            for claim in self._held.values():
                claim.release()

    @torch.no_grad()
    def _finish(self, name: str, sampled: Sampled, claim: Claim, watch: Watch | None) -> None:
        found = sampled.score(self._world.scorer(name))
        self._shards.write(name, Shard(found.scores, found.evaluations), self._world.inputs(name))
        claim.release()
        if watch is not None:
            watch(self.status())

    def ready(self) -> int:
        """How many first prompts are done."""
        done = [self._shards.has(name) for name in self._world.names]
        return done.index(False) if False in done else len(done)

    def enough(self) -> int | None:
        """The number of first prompts that make W's interval narrow enough, once there is one."""
        if self._until is None:
            return None
        for count in range(FEWEST, self.ready() + 1):
            if count not in self._widths:
                self._widths[count] = width(self._recipe, self.curves(self._world.names[:count]))
            if self._widths[count] <= self._until:
                return count
        return None

    def curves(self, names: Sequence[str]) -> GainCurves:
        """The curves of some of the prompts."""
        for name in names:
            if name not in self._found:
                self._found[name] = self._shards.read(name, self._world.inputs(name))
        return make_curves(self._recipe, self._world, names, [self._found[name] for name in names])

    def status(self) -> Status:
        """Over all processes."""
        names = [name for name in self._world.names if self._shards.has(name)]
        with warnings.catch_warnings():
            for kind in (FloorWarning, ClampWarning):  # said once, of the whole
                warnings.simplefilter("ignore", kind)
            curves = self.curves(names)
        tables = [_positive(self._world, self._found[name])[0] for name in names]
        per_prompt = planned(self._recipe, self._world.sigmas)
        return Status(
            len(names),
            len(self._world.names),
            sum(shard.evaluations for shard in tables),
            per_prompt * len(self._world.names),
            sum(int((shard.mu.mean(axis=-1) <= renyi.FLOOR).sum()) for shard in tables),
            curves,
        )


def width(recipe: Recipe, curves: GainCurves) -> float:
    """Half the 95 % interval of W, summed over its entries: of a weight of 1 in all, how much is open."""
    budget = recipe.weigh.budget or dict.fromkeys(curves.rewards, 1.0)
    shares = sinkhorn.simplex(list(budget.values()), len(budget), "budget")
    low, high = curves.select(list(budget)).weight_intervals(shares, tau=recipe.weigh.tau)
    return float((high - low).sum() / 2)


def planned(recipe: Recipe, sigmas: Sequence[float]) -> int:
    """Velocity evaluations a prompt by this recipe."""
    settings = recipe.estimate
    levels = rollout_levels(sigmas, settings.spacing) if settings.estimator == "coupled" else None
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
        levels=rollout_levels(world.sigmas, settings.spacing) if settings.estimator == "coupled" else None,
        sampler=settings.sampler,
        seed=world.seed(name),
    )


def make_curves(recipe: Recipe, world: worlds.World, names: Sequence[str], found: Sequence[Shard]) -> GainCurves:
    """Curves over the named prompts; α, aggregation and the map to scores >= 0 enter here and not before."""
    settings = recipe.estimate
    tables = [_positive(world, shard) for shard in found]
    for name, (clamped, known) in zip(world.rewards, np.sum([counts for _, counts in tables], axis=0), strict=True):
        if clamped > CLAMPED * known:
            warnings.warn(
                f"{clamped / known:.1%} of the scores of {name!r} are negative and count as 0 in its gain curve: "
                "a reward of your own can map them itself, by a method `positive`",
                ClampWarning,
                stacklevel=2,
            )
    provenance = _provenance(recipe, len(names))
    provenance["velocity_evaluations"] = sum(shard.evaluations for shard in found)
    return GainCurves.from_mu(
        world.rewards,
        world.sigmas,
        np.stack([shard.mu for shard, _ in tables]),
        settings.alpha,
        settings.aggregate,
        self_rollout=recipe.world.kind == "images" and recipe.propose.source == "policy",
        provenance=provenance,
    )


def _provenance(recipe: Recipe, count: int) -> dict[str, Any]:
    """What curves over so many prompts come from."""
    found: dict[str, Any] = {"recast": __version__, **identity(recipe)}
    found["estimate"] |= {"alpha": recipe.estimate.alpha, "aggregate": recipe.estimate.aggregate}
    if recipe.world.kind == "mixture":
        found["world"] = recipe.world.model_dump() | {"prompts": count}
    else:
        rows = prompts.load(recipe.prompts.source, recipe.prompts.count, recipe.prompts.seed)[:count]
        found["prompts"] = {"source": recipe.prompts.source, "count": len(rows), "sha256": prompts.digest(rows)}
    return found


def _positive(world: worlds.World, shard: Shard) -> tuple[Shard, list[Any]]:
    """A shard with scores >= 0; of each reward's, how many were clamped and how many there are."""
    rows = zip(world.rewards, shard.scores, strict=True)
    mapped = [base.positive(name, world.judges.get(name), scores) for name, scores in rows]
    return Shard(np.stack([scores for scores, _ in mapped]), shard.evaluations), [counts for _, counts in mapped]


def identity(recipe: Recipe) -> dict[str, Any]:
    """The settings that decide a shard; α, aggregation and the choice of prompts do not."""
    late = ("alpha", "aggregate")
    settings = {key: value for key, value in recipe.estimate.used().items() if key not in late}
    if recipe.world.kind == "mixture":
        world = {key: value for key, value in recipe.world.model_dump().items() if key != "prompts"}
        return {"world": world, "estimate": settings}
    from recast import propose

    settings.pop("shift", None)
    return {
        "policy": propose.policy_identity(recipe),
        "proposals": propose.identity(recipe),
        "rewards": {name: options or {} for name, options in recipe.rewards.items()},
        "order": list(recipe.rewards),  # a shard's rows have no names
        "estimate": settings,
    }


def _exact(recipe: Recipe, world: worlds.MixtureWorld, names: Sequence[str]) -> GainCurves:
    tables = []
    for name in names:
        seed = world.seeds(name)[2]
        tables.append(exact_mu(world.world(name), world.clean(name), world.sigmas, TRUTH_NOISINGS, seed))
    setup = recipe.world.model_dump() | {"prompts": len(names)}
    provenance = {"recast": __version__, "world": setup, "estimate": "exact"}
    settings = recipe.estimate
    return GainCurves.from_mu(
        world.rewards, world.sigmas, np.stack(tables), settings.alpha, settings.aggregate, provenance=provenance
    )


def _warn(recipe: Recipe) -> None:
    settings = recipe.estimate
    own = recipe.world.kind == "images" and recipe.propose.source == "policy"
    if (settings.alpha != 2 or own) and settings.rollouts < 4:
        reason = "with the policy's own images" if own else f"at alpha = {settings.alpha:g}"
        warnings.warn(
            f"{reason} the moment is biased in the number of rollouts: "
            f"set estimate.rollouts to 4 or more (it is {settings.rollouts})",
            stacklevel=3,
        )
