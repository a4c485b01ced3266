"""The stages in order, from one recipe to the artifacts in one folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from recast._version import __version__
from recast.config import Recipe
from recast.core import schedule
from recast.core.curves import GainCurves
from recast.core.weights import WeightMatrix
from recast.errors import RecastError
from recast.weigh import weigh

if TYPE_CHECKING:
    from recast.flow.worlds import World

Progress = Callable[[Iterable[int], str, int], Iterable[int]]
TRUTH_NOISINGS = 512
"""Noisings of each proposal behind the exact curve; its own error is far below any estimate's."""


def estimate(recipe: Recipe, out: Path, progress: Progress) -> tuple[GainCurves, GainCurves]:
    """`gains.json`, estimated by rollouts, and beside it `exact.json`, the truth at the same proposals."""
    try:
        from recast import estimate as estimation
        from recast.flow import mixture, worlds
    except ImportError as error:
        raise RecastError(f"estimating needs torch ({error}): pip install 'recast-diffusion[train]'") from error
    import torch

    settings, setup = recipe.estimate, recipe.world
    sigmas = schedule.from_shift(settings.steps, settings.shift)
    levels = estimation.rollout_levels(sigmas, settings.spacing)
    estimated: list[Any] = []
    exact: list[Any] = []
    evaluations = 0
    for prompt in progress(range(setup.prompts), "estimating gains", setup.prompts):
        seeds = np.random.SeedSequence([setup.seed, settings.seed, prompt]).generate_state(3).tolist()
        world: World = worlds.mixture_world(setup.dimension, setup.modes, setup.seed * 100_003 + prompt)
        clean = world.proposal.sample(settings.samples, torch.Generator().manual_seed(seeds[0]))
        result = estimation.rollouts(
            world.policy,
            clean,
            sigmas,
            mixture.score_all(list(world.rewards)),
            estimator=settings.estimator,
            noisings=settings.noisings,
            repeats=settings.rollouts,
            levels=levels,
            sampler=settings.sampler,
            seed=seeds[1],
        )
        estimated.append(result.mu)
        exact.append(worlds.exact_mu(world, clean, sigmas.tolist(), TRUTH_NOISINGS, seeds[2]))
        evaluations += result.evaluations
    provenance = {"recast": __version__, "world": setup.model_dump(), "estimate": settings.model_dump()}

    def curves_of(mu: list[Any], more: dict[str, Any]) -> GainCurves:
        names, table = worlds.REWARDS, np.stack(mu)
        return GainCurves.from_mu(
            names, sigmas, table, settings.alpha, settings.aggregate, provenance=provenance | more
        )

    curves = curves_of(estimated, {"velocity_evaluations": evaluations})
    truth = curves_of(exact, {"estimate": "exact"})
    recipe.save(out / "recipe.yaml")
    truth.save(out / "exact.json")
    curves.save(out / "gains.json")
    return curves, truth


def weigh_recipe(recipe: Recipe, curves: GainCurves, out: Path) -> WeightMatrix:
    """`weights.json` by the recipe's budget and method."""
    settings = recipe.weigh
    budget = settings.budget or dict.fromkeys(curves.rewards, 1.0)
    weights = weigh(curves, budget, settings.method, tau=settings.tau, shrink=settings.shrink, seed=settings.seed)
    weights.save(out / "weights.json")
    return weights


def verdict(recipe: Recipe, curves: GainCurves, truth: GainCurves, weights: WeightMatrix) -> str:
    """One sentence: how far the estimate is from the truth, and what it cost beside Alg. 1."""
    settings = recipe.estimate
    budget = dict(zip(weights.rewards, weights.budget.tolist(), strict=True))
    exact = weigh(truth, budget, recipe.weigh.method, tau=recipe.weigh.tau, seed=recipe.weigh.seed)
    off = float(np.abs(weights.matrix - exact.matrix).sum())
    spent = int(curves.provenance["velocity_evaluations"])
    algorithm = recipe.world.prompts * settings.samples * 16 * settings.steps * (settings.steps + 1) // 2
    return (
        f"W is {off:.1%} (L1) away from the W of the exact curves, for {spent:,} velocity evaluations; "
        f"Alg. 1 at K = 16 takes {algorithm:,}"
    )
