"""Gain curves from stored rollouts, at any Rényi order and with either aggregation over prompts."""

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
from recast.versions import Versions

__all__ = ["at_orders", "from_rollouts", "maps", "nonnegative", "prompt_names", "provenance"]

_CLAMPED = 0.01  # share of negative scores above which a warning is given


def from_rollouts(
    recipe: Recipe,
    sigmas: Sequence[float],
    found: Sequence[Rollouts],
    models: Mapping[str, base.Reward] | None = None,
    alpha: float | None = None,
    aggregate: renyi.Aggregation | None = None,
    scored_by: Versions | None = None,
) -> GainCurves:
    """Gain curves over the first prompts of a recipe, from their rollouts (Phase 3 of Alg. 1).

    Scores are mapped to non-negative ones here and nowhere else, so all curves of the same rollouts use the same map.

    Parameters
    ----------
    recipe : Recipe
        Names the rewards; its settings become the provenance of the curves.
    sigmas : sequence of float, (T+1,)
        Noise levels σ_0 = 0 to σ_T = 1.
    found : sequence of Rollouts
        The rollouts of one prompt each, in the order of the recipe's prompts.
    models : mapping, optional
        Loaded rewards by name. Other rewards are loaded only if their map to non-negative scores needs an instance.
    alpha : float, optional
        Rényi order; by default `estimate.alpha` of the recipe.
    aggregate : {"prompt-mean", "pooled"}, optional
        Aggregation over prompts; by default `estimate.aggregate` of the recipe.
    scored_by : mapping, optional
        The versions of the rewards that scored the rollouts, for the provenance.

    Returns
    -------
    GainCurves
        D (m, T+1), and D of every prompt.

    Warns
    -----
    ClampWarning
        If more than 1 % of a reward's scores are negative after its map and count as 0.

    Examples
    --------
    One prompt, one noised sample, T = 2, and three rewards that halve from level to level, so each gain is log 2:

    >>> recipe = Recipe.model_validate({"world": {"kind": "mixture"}})
    >>> scores = np.broadcast_to(np.array([0.8, 0.4, 0.2])[:, None, None], (3, 3, 1, 1))  # (m, T+1, S, K)
    >>> curves = from_rollouts(recipe, [0.0, 0.5, 1.0], [Rollouts(scores, evaluations=3)])
    >>> curves.gains[0].round(3)
    array([0.693, 0.693])
    """
    settings, mapping = recipe.estimate, maps(recipe, models or {})
    alpha = settings.alpha if alpha is None else alpha
    aggregate = settings.aggregate if aggregate is None else aggregate
    tables = [nonnegative(each, mapping) for each in found]
    _warn_of_clamping(recipe.reward_names, np.sum([counts for _, counts in tables], axis=0))
    facts = provenance(recipe, len(found), scored_by or {})
    facts["estimate"] |= {"alpha": alpha, "aggregate": aggregate}
    facts["velocity_evaluations"] = sum(each.evaluations for each in found)
    mu = np.stack([each.mu for each, _ in tables])
    return GainCurves.from_mu(recipe.reward_names, sigmas, mu, alpha, aggregate, recipe.self_rollouts, facts)


def at_orders(run: Path, orders: Sequence[float]) -> dict[float, GainCurves]:
    """Gain curves of a finished run at other Rényi orders, from its stored rollouts (App. B.2).

    No policy is loaded. At the order of the run, the result equals its `gains.json`.

    Parameters
    ----------
    run : Path
        Folder in which `recast estimate` has written `gains.json`, `recipe.yaml` and `shards`.
    orders : sequence of float
        Rényi orders α > 0, α ≠ 1.

    Returns
    -------
    dict of float to GainCurves
        One set of curves per order.

    Raises
    ------
    RecastError
        If the folder has no rollouts, or if they belong to other settings than its recipe.

    Examples
    --------
    >>> import tempfile
    >>> from recast.estimate.stage import estimate
    >>> from recast.progress import no_progress
    >>> run = Path(tempfile.mkdtemp())
    >>> recipe = Recipe.model_validate({"world": {"kind": "mixture", "dimension": 2, "prompts": 2},
    ...                                 "estimate": {"steps": 3, "rollouts": 4}})
    >>> made, exact = estimate(recipe, run, no_progress)
    >>> curves = at_orders(run, (2.0, 4.0))
    >>> bool((curves[2.0].D == made.D).all()), curves[4.0].alpha
    (True, 4.0)
    """
    made = GainCurves.load(run / "gains.json")
    recipe = config.load_run(run / "recipe.yaml")
    count = 0 if made.D_prompts is None else len(made.D_prompts)
    if not count or not (run / "shards").is_dir():
        raise RecastError(f"{run} has no rollouts to make curves from: run `recast estimate` again")
    shards = Shards(run / "shards", identity.rollouts(recipe))
    found = [shards.read(name) for name in prompt_names(recipe)[:count]]
    models = {name: model for name, model in maps(recipe, {}).items() if model is not None}  # loaded once
    sigmas, scored_by = made.sigmas.tolist(), shards.versions
    return {order: from_rollouts(recipe, sigmas, found, models, order, scored_by=scored_by) for order in orders}


def nonnegative(found: Rollouts, maps: Mapping[str, Any]) -> tuple[Rollouts, list[Any]]:
    """Rollouts with scores ≥ 0; per reward, how many scores were clamped at 0 and how many there are."""
    rows = zip(maps.items(), found.scores, strict=True)
    mapped = [base.positive(name, model, scores) for (name, model), scores in rows]
    return Rollouts(np.stack([scores for scores, _ in mapped]), found.evaluations), [counts for _, counts in mapped]


def maps(recipe: Recipe, models: Mapping[str, base.Reward]) -> dict[str, Any]:
    """Per reward, the object whose `positive` maps its scores; None where negative scores are only clamped."""
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
    return [
        row["prompt"] for row in prompts.load_distinct(recipe.prompts.source, recipe.prompts.count, recipe.prompts.seed)
    ]


def provenance(recipe: Recipe, count: int, scored_by: Versions) -> dict[str, Any]:
    """Provenance of a recipe's curves over its first `count` prompts, scored by these versions of the rewards."""
    found: dict[str, Any] = {"recast": __version__, **identity.rollouts(recipe)}
    found["estimate"] |= {"alpha": recipe.estimate.alpha, "aggregate": recipe.estimate.aggregate}
    if recipe.world.kind == "mixture":
        found["world"] = recipe.world.model_dump() | {"prompts": count}
    else:
        rows = prompts.load_distinct(recipe.prompts.source, recipe.prompts.count, recipe.prompts.seed)[:count]
        digest = identity.prompts_hash(rows)
        found["prompts"] = {"source": recipe.prompts.source, "count": len(rows), "sha256": digest}
    if scored_by:
        found["versions"] = scored_by
    return found


def _warn_of_clamping(names: Sequence[str], counts: Any) -> None:
    """Warn of every reward with many negative scores; `counts` (m, 2) are its clamped scores and all of them."""
    for name, (clamped, known) in zip(names, counts, strict=True):
        if clamped > _CLAMPED * known:
            warnings.warn(
                f"{clamped / known:.1%} of the scores of {name!r} are negative and count as 0 in its gain curve; "
                "a custom reward can define the mapping itself with a method `positive`",
                ClampWarning,
                stacklevel=3,
            )
