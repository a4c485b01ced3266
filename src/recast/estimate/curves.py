"""Gain curves from the rollouts that shards hold, at any order and aggregation."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recast import config, identity, prompts
from recast._version import __version__
from recast.config import Recipe
from recast.core import renyi
from recast.core.curves import GainCurves
from recast.errors import ClampWarning, RecastError
from recast.estimate.shards import Rollouts, Shards
from recast.rewards import base

__all__ = ["at_orders", "from_rollouts", "maps", "nonnegative", "prompt_names", "provenance"]

_CLAMPED = 0.01  # share of negative scores above which a curve is worth a warning


def from_rollouts(
    recipe: Recipe,
    sigmas: Sequence[float],
    found: Sequence[Rollouts],
    models: Mapping[str, base.Reward] | None = None,
    alpha: float | None = None,
    aggregate: renyi.Aggregation | None = None,
) -> GainCurves:
    """Gain curves over the first prompts of a recipe, from their rollouts (Phase 3 of Alg. 1).

    This is the only place where scores are mapped to non-negative ones and where α and the aggregation enter, so
    every curve of the same rollouts is made alike.

    Parameters
    ----------
    recipe : Recipe
        Names the rewards and says how the rollouts were made.
    sigmas : sequence of float, (T+1,)
        The grid.
    found : sequence of Rollouts
        One per prompt, in the order of the recipe's prompts.
    models : mapping, optional
        Rewards that are loaded already, by name. The others are loaded only if their map to non-negative scores
        needs an instance.
    alpha, aggregate : optional
        Rényi order and aggregation over prompts; by default the recipe's.

    Warns
    -----
    ClampWarning
        If more than 1 % of a reward's scores are negative and count as 0.
    """
    settings, names = recipe.estimate, recipe.reward_names
    alpha = settings.alpha if alpha is None else alpha
    aggregate = settings.aggregate if aggregate is None else aggregate
    mapping = maps(recipe, models or {})
    tables = [nonnegative(each, mapping) for each in found]
    for name, (clamped, known) in zip(names, np.sum([counts for _, counts in tables], axis=0), strict=True):
        if clamped > _CLAMPED * known:
            warnings.warn(
                f"{clamped / known:.1%} of the scores of {name!r} are negative and count as 0 in its gain curve; "
                "a custom reward can define the mapping itself with a method `positive`",
                ClampWarning,
                stacklevel=2,
            )
    facts = provenance(recipe, len(found), alpha, aggregate)
    facts["velocity_evaluations"] = sum(each.evaluations for each in found)
    mu = np.stack([each.mu for each, _ in tables])
    return GainCurves.from_mu(names, sigmas, mu, alpha, aggregate, recipe.self_rollouts, facts)


def at_orders(run: Path, orders: Sequence[float]) -> dict[float, GainCurves]:
    """The curves of a finished run at other Rényi orders, from its shards; no policy is loaded (App. B.2)."""
    made = GainCurves.load(run / "gains.json")
    recipe = config.load_run(run / "recipe.yaml")
    shards = Shards(run / "shards", identity.rollouts(recipe))
    count = 0 if made.D_prompts is None else len(made.D_prompts)
    found = [shards.read(name) for name in prompt_names(recipe)[:count]]
    if not found:
        raise RecastError(f"{run} has no rollouts to make curves from: run `recast estimate` again")
    models = {name: model for name, model in maps(recipe, {}).items() if model is not None}
    return {order: from_rollouts(recipe, made.sigmas.tolist(), found, models, order) for order in orders}


def nonnegative(found: Rollouts, maps: Mapping[str, base.Reward | None]) -> tuple[Rollouts, list[Any]]:
    """Rollouts with scores >= 0; per reward, how many scores were clamped at 0 and how many there are."""
    rows = zip(maps.items(), found.scores, strict=True)
    mapped = [base.positive(name, model, scores) for (name, model), scores in rows]
    return Rollouts(np.stack([scores for scores, _ in mapped]), found.evaluations), [counts for _, counts in mapped]


def maps(recipe: Recipe, models: Mapping[str, base.Reward]) -> dict[str, Any]:
    """Per reward, the object whose `positive` maps its scores; None where negative scores are clamped only."""
    if recipe.world.kind == "mixture":
        return dict.fromkeys(recipe.reward_names)
    return {
        name: models[name] if name in models else base.mapper(name, options or {})
        for name, options in recipe.rewards.items()
    }


def prompt_names(recipe: Recipe) -> list[str]:
    """The prompts that the curves are measured on; numbers in the exact world."""
    if recipe.world.kind == "mixture":
        return [str(k) for k in range(recipe.world.prompts)]
    return [row["prompt"] for row in prompts.load(recipe.prompts.source, recipe.prompts.count, recipe.prompts.seed)]


def provenance(
    recipe: Recipe, count: int, alpha: float | None = None, aggregate: renyi.Aggregation | None = None
) -> dict[str, Any]:
    """What curves over the first `count` prompts come from."""
    settings = recipe.estimate
    found: dict[str, Any] = {"recast": __version__, **identity.rollouts(recipe)}
    found["estimate"] |= {
        "alpha": settings.alpha if alpha is None else alpha,
        "aggregate": settings.aggregate if aggregate is None else aggregate,
    }
    if recipe.world.kind == "mixture":
        found["world"] = recipe.world.model_dump() | {"prompts": count}
    else:
        rows = prompts.load(recipe.prompts.source, recipe.prompts.count, recipe.prompts.seed)[:count]
        digest = identity.prompts_hash(rows)
        found["prompts"] = {"source": recipe.prompts.source, "count": len(rows), "sha256": digest}
    return found
