"""`recast estimate`: rollouts prompt by prompt into shards, then curves from the shards."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recast import prompts
from recast._version import __version__
from recast.config import Recipe
from recast.core.curves import GainCurves
from recast.errors import RecastError
from recast.estimate import worlds
from recast.estimate.rollout import rollout_levels, rollouts
from recast.estimate.shards import Shard, Shards
from recast.flow.worlds import exact_mu

Progress = Callable[[Iterable[Any], str, int], Iterable[Any]]
RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
"""This process among those of one launcher, as torchrun and accelerate tell it."""
POLL = 0.5
"""Seconds between two looks at what other processes are still doing."""
TRUTH_NOISINGS = 512
"""Noisings of each proposal behind the exact curve; its own error is far below any estimate's."""


def estimate(
    recipe: Recipe, out: Path, progress: Progress, reuse: bool = False
) -> tuple[GainCurves, GainCurves | None] | None:
    """`gains.json`, and in the exact world `exact.json` beside it: the truth at the same proposals.

    Prompts that have a shard are not estimated again; with `reuse`, none is. Any number of processes may work in one
    folder, under a launcher or started by hand on several machines; of those under one launcher, the first writes
    the curves and the others return None. Weights and figures of earlier curves are removed: they would contradict
    the new ones.
    """
    _warn(recipe)
    shards = Shards(out / "shards", identity(recipe))  # first: other settings leave the folder as it was
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small batches: a second thread slows them down wherever anything else runs
    try:
        world = worlds.load(recipe, out)
        missing = [name for name in world.names if not shards.has(name)]
        if missing and reuse:
            raise RecastError(f"{len(missing)} of {len(world.names)} prompts have no shard yet: run without --reuse")
        for name in progress(_turns(shards, missing), "estimating gains", len(missing)) if missing else ():
            shards.write(name, one_prompt(recipe, world, name), world.inputs(name))
        if RANK > 0:
            return None
        curves = make_curves(recipe, world, [shards.read(name, world.inputs(name)) for name in world.names])
        truth = _exact(recipe, world) if isinstance(world, worlds.MixtureWorld) else None
    finally:
        torch.set_num_threads(threads)
    recipe.save(out / "recipe.yaml")
    for name in ("weights.json", "gains.png", "gains.pdf"):
        (out / name).unlink(missing_ok=True)
    if truth is not None:
        truth.save(out / "exact.json")
    curves.save(out / "gains.json")
    return curves, truth


def _turns(shards: Shards, names: Sequence[str]) -> Iterator[str]:
    """The prompts that this process has claimed, one by one, until every prompt is done by someone."""
    first = RANK * len(names) // max(1, RANKS)  # processes start apart, so that they seldom ask for the same one
    order = [*names[first:], *names[:first]]
    while order := [name for name in order if not shards.has(name)]:
        worked = False
        for name in order:
            with shards.claim(name) as mine:
                if mine and not shards.has(name):
                    worked = True
                    yield name
        if not worked:
            time.sleep(POLL)


def one_prompt(recipe: Recipe, world: worlds.World, name: str) -> Shard:
    """Rollouts of one prompt's proposals; the same whichever prompts come before it."""
    settings = recipe.estimate
    found = rollouts(
        world.velocity(name),
        world.clean(name),
        world.sigmas,
        world.scorer(name),
        estimator=settings.estimator,
        noisings=settings.noisings,
        repeats=settings.rollouts,
        levels=rollout_levels(world.sigmas, settings.spacing) if settings.estimator == "coupled" else None,
        sampler=settings.sampler,
        seed=world.seed(name),
    )
    return Shard(found.scores, found.evaluations)


def make_curves(recipe: Recipe, world: worlds.World, found: list[Shard]) -> GainCurves:
    """Curves over all prompts; α and aggregation enter here and not before."""
    settings = recipe.estimate
    provenance: dict[str, Any] = {"recast": __version__, **identity(recipe)}
    provenance["estimate"] |= {"alpha": settings.alpha, "aggregate": settings.aggregate}
    if recipe.world.kind == "mixture":
        provenance["world"] = recipe.world.model_dump()
    else:
        rows = prompts.load(recipe.prompts.source, recipe.prompts.count, recipe.prompts.seed)
        provenance["prompts"] = {"source": recipe.prompts.source, "count": len(rows), "sha256": prompts.digest(rows)}
    provenance["velocity_evaluations"] = sum(shard.evaluations for shard in found)
    return GainCurves.from_mu(
        world.rewards,
        world.sigmas,
        np.stack([shard.mu for shard in found]),
        settings.alpha,
        settings.aggregate,
        self_rollout=recipe.world.kind == "images" and recipe.propose.source == "policy",
        provenance=provenance,
    )


def identity(recipe: Recipe) -> dict[str, Any]:
    """The settings that decide a shard; α, aggregation and the choice of prompts do not."""
    late = ("alpha", "aggregate")
    settings = {key: value for key, value in recipe.estimate.used().items() if key not in late}
    if recipe.world.kind == "mixture":
        world = {key: value for key, value in recipe.world.model_dump().items() if key != "prompts"}
        return {"world": world, "estimate": settings}
    from recast import propose

    settings.pop("shift", None)
    policy = {
        key: getattr(recipe.policy, key) for key in ("model", "dtype", "guidance", "resolution", "max_sequence_length")
    }
    return {
        "policy": policy,
        "proposals": propose.identity(recipe),
        "rewards": {name: options or {} for name, options in recipe.rewards.items()},
        "estimate": settings,
    }


def _exact(recipe: Recipe, world: worlds.MixtureWorld) -> GainCurves:
    tables = []
    for name in world.names:
        seed = world.seeds(name)[2]
        tables.append(exact_mu(world.world(name), world.clean(name), world.sigmas, TRUTH_NOISINGS, seed))
    provenance = {"recast": __version__, "world": recipe.world.model_dump(), "estimate": "exact"}
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
