"""The stages in order, from one recipe to the artifacts in one folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from recast.config import Recipe
from recast.core.curves import GainCurves
from recast.core.weights import WeightMatrix
from recast.weigh import weigh


def weigh_recipe(recipe: Recipe, curves: GainCurves) -> WeightMatrix:
    """W by the recipe's budget and method."""
    settings = recipe.weigh
    budget = settings.budget or dict.fromkeys(curves.rewards, 1.0)
    return weigh(curves, budget, settings.method, tau=settings.tau, shrink=settings.shrink, seed=settings.seed)


def save_weights(recipe: Recipe, weights: WeightMatrix, out: Path) -> Path:
    """`weights.json`, and the recipe it came from."""
    recipe.save(out / "recipe.yaml")
    return weights.save(out / "weights.json")


def verdict(recipe: Recipe, curves: GainCurves, weights: WeightMatrix, exact: WeightMatrix | None) -> str:
    """One sentence: what the curves cost beside Alg. 1, and how far they are from the truth where it is known."""
    settings = recipe.estimate
    spent = int(curves.provenance["velocity_evaluations"])
    cost = f"W comes from {spent:,} velocity evaluations"
    if exact is not None:
        off = float(np.abs(weights.matrix - exact.matrix).sum())
        cost = f"W is {off:.1%} (L1) away from the W of the exact curves, for {spent:,} velocity evaluations"
    if settings.estimator == "paper":
        return f"{cost}, by Alg. 1 at K = {settings.rollouts} (the paper's K is 16)"
    prompts = len(curves.D_prompts) if curves.D_prompts is not None else 1
    algorithm = prompts * settings.samples * 16 * settings.steps * (settings.steps + 1) // 2
    return f"{cost}; Alg. 1 at K = 16 takes {algorithm:,}"
