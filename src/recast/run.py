"""The stages in order, from one recipe to the artifacts in one folder."""

from __future__ import annotations

import warnings
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
    from recast.estimate import Rollouts

Progress = Callable[[Iterable[int], str, int], Iterable[int]]
TRUTH_NOISINGS = 512
"""Noisings of each proposal behind the exact curve; its own error is far below any estimate's."""


def estimate(recipe: Recipe, out: Path, progress: Progress) -> tuple[GainCurves, GainCurves]:
    """`gains.json`, estimated by rollouts, and beside it `exact.json`, the truth at the same proposals.

    Weights and figures of earlier curves are removed from the folder: they would contradict the new ones.
    """
    try:
        import torch

        from recast.flow.worlds import REWARDS
    except ImportError as error:
        raise RecastError(f"estimating needs torch ({error}): pip install 'recast-diffusion[train]'") from error
    if recipe.estimate.alpha != 2 and recipe.estimate.rollouts < 4:
        warnings.warn(
            f"at alpha = {recipe.estimate.alpha:g} the moment is biased in the number of rollouts: "
            f"set estimate.rollouts to 4 or more (it is {recipe.estimate.rollouts})",
            stacklevel=2,
        )
    recipe.save(out / "recipe.yaml")  # first, so that a folder that cannot be written is known at once
    settings, setup = recipe.estimate, recipe.world
    sigmas = schedule.from_shift(settings.steps, settings.shift)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small batches: a second thread slows them down wherever anything else runs
    try:
        prompts = progress(range(setup.prompts), "estimating gains", setup.prompts)
        found, exact = zip(*(_one_prompt(recipe, sigmas, prompt) for prompt in prompts), strict=True)
    finally:
        torch.set_num_threads(threads)
    provenance = {"recast": __version__, "world": setup.model_dump()}

    def curves_of(mu: list[Any], more: dict[str, Any]) -> GainCurves:
        table = np.stack(mu)
        return GainCurves.from_mu(
            REWARDS, sigmas, table, settings.alpha, settings.aggregate, provenance=provenance | more
        )

    cost = {"estimate": settings.used(), "velocity_evaluations": sum(result.evaluations for result in found)}
    curves, truth = curves_of([result.mu for result in found], cost), curves_of(list(exact), {"estimate": "exact"})
    for name in ("weights.json", "gains.png", "gains.pdf"):
        (out / name).unlink(missing_ok=True)
    truth.save(out / "exact.json")
    curves.save(out / "gains.json")
    return curves, truth


def _one_prompt(recipe: Recipe, sigmas: np.ndarray, prompt: int) -> tuple[Rollouts, np.ndarray]:
    """Rollouts of one prompt's proposals, and the exact conditional rewards at the same proposals."""
    import torch

    from recast.estimate import rollout_levels, rollouts
    from recast.flow import mixture, worlds

    settings, setup = recipe.estimate, recipe.world
    seeds = np.random.SeedSequence([setup.seed, settings.seed, prompt]).generate_state(3).tolist()
    world = worlds.mixture_world(setup.dimension, setup.modes, setup.seed * 100_003 + prompt)
    clean = world.proposal.sample(settings.samples, torch.Generator().manual_seed(seeds[0]))
    found = rollouts(
        world.policy,
        clean,
        sigmas,
        mixture.score_all(list(world.rewards)),
        estimator=settings.estimator,
        noisings=settings.noisings,
        repeats=settings.rollouts,
        levels=rollout_levels(sigmas, settings.spacing) if settings.estimator == "coupled" else None,
        sampler=settings.sampler,
        seed=seeds[1],
    )
    return found, worlds.exact_mu(world, clean, sigmas.tolist(), TRUTH_NOISINGS, seeds[2])


def weigh_recipe(recipe: Recipe, curves: GainCurves) -> WeightMatrix:
    """W by the recipe's budget and method."""
    settings = recipe.weigh
    budget = settings.budget or dict.fromkeys(curves.rewards, 1.0)
    return weigh(curves, budget, settings.method, tau=settings.tau, shrink=settings.shrink, seed=settings.seed)


def save_weights(recipe: Recipe, weights: WeightMatrix, out: Path) -> Path:
    """`weights.json`, and the recipe it came from."""
    recipe.save(out / "recipe.yaml")
    return weights.save(out / "weights.json")


def verdict(recipe: Recipe, curves: GainCurves, weights: WeightMatrix, exact: WeightMatrix) -> str:
    """One sentence: how far the estimate is from the truth, and what it cost beside Alg. 1."""
    settings = recipe.estimate
    off = float(np.abs(weights.matrix - exact.matrix).sum())
    spent = int(curves.provenance["velocity_evaluations"])
    cost = f"W is {off:.1%} (L1) away from the W of the exact curves, for {spent:,} velocity evaluations"
    if settings.estimator == "paper":
        return f"{cost}, by Alg. 1 at K = {settings.rollouts} (the paper's K is 16)"
    algorithm = recipe.world.prompts * settings.samples * 16 * settings.steps * (settings.steps + 1) // 2
    return f"{cost}; Alg. 1 at K = 16 takes {algorithm:,}"
