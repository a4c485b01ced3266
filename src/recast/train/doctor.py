"""`recast doctor`: what the rewards look like on a few groups, and what that means for training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recast import prompts
from recast.config import Recipe
from recast.core.weights import WeightMatrix
from recast.errors import RecastError
from recast.flow import sd3
from recast.progress import OnProgress, ignore_progress
from recast.rewards import base
from recast.train import advantage, groups
from recast.train.rollout import rollout

Array = NDArray[np.float64]
DEAD, FLAT, CONFLICT, TWIN, ENOUGH = 1e-9, 0.5, -0.3, 0.9, 32
"""Limits of the advice: no spread, share of groups without any, correlations that matter, and images they need."""
SMALL = "its units are small. train.normalize=reward makes the budget mean what it says."
LARGE = "it would run the show. train.normalize=reward makes the budget mean what it says."
AGAINST = "it goes along with the others, or against them; look at the correlations."


@dataclass(frozen=True)
class Diagnosis:
    """Per reward (m,): what it is, how it varies, and its share of the advantage beside its share of the budget."""

    names: tuple[str, ...]
    applies: Array
    mean: Array
    low: Array
    high: Array
    group_std: Array
    zero_std: Array
    budget: Array
    share: Array
    correlations: Array
    advice: tuple[str, ...]


def examine(recipe: Recipe, count: int, images: int, on_progress: OnProgress = ignore_progress) -> Diagnosis:
    """Sample `count` groups of `images` under the recipe's policy, and diagnose."""
    if not recipe.rewards:
        raise RecastError("the recipe names no reward: put at least one under rewards")
    rows = prompts.load(recipe.train.prompts)
    chosen = [rows[k] for k in groups.prompts(recipe.train.seed, 0, count, len(rows))]
    policy = sd3.load(recipe.policy)
    models = {name: base.load(name, **(options or {})) for name, options in recipe.rewards.items()}
    steps = recipe.train.steps or recipe.estimate.steps
    seeds = groups.seeds(recipe.train.seed, 0, count * images, 1)[:, 0].tolist()
    each = [row for row in chosen for _ in range(images)]
    found = rollout(policy, models, each, seeds, policy.sigmas(steps), recipe.train.sample_batch, on_progress)
    members = torch.arange(count * images) // images
    values = torch.from_numpy(found.rewards.copy())
    settings = recipe.train
    return diagnose(values, members, list(models), recipe.weigh.budget, settings.normalize, settings.spread)


def diagnose(
    rewards: Tensor,
    members: Tensor,
    names: Sequence[str],
    budget: Mapping[str, float],
    mode: advantage.Mode = "step",
    whose: advantage.Spread = "batch",
) -> Diagnosis:
    """What rewards (B, m) of groups `members` (B,) say; an empty budget counts all alike."""
    values = rewards.double()
    lam = np.array([float(budget.get(name, 0.0)) for name in names]) if budget else np.ones(len(names))
    if lam.sum() <= 0:
        raise RecastError(f"the budget {dict(budget)} names none of the rewards {', '.join(names)}")
    lam = lam / lam.sum()
    spread = advantage.group_std(values, members)
    first = torch.tensor([int((members == g).nonzero()[0, 0]) for g in members.unique()])
    static = WeightMatrix(names, [0.0, 1.0], lam[:, None], lam, "static")
    overall, _ = advantage.shares(advantage.parts(values, members, static, mode, whose))
    centred = (values - advantage.group_mean(values, members)).numpy()
    plain = values.numpy()
    known = ~np.isnan(plain)
    with np.errstate(invalid="ignore"):
        facts = {
            "applies": known.mean(0),
            "mean": _over(np.nanmean, plain, known),
            "low": _over(np.nanmin, plain, known),
            "high": _over(np.nanmax, plain, known),
            "group_std": _over(np.nanmean, spread[first].numpy(), ~np.isnan(spread[first].numpy())),
        }
    spreads = spread[first].numpy()
    facts["zero_std"] = _over(np.mean, (spreads <= DEAD).astype(np.float64), ~np.isnan(spreads))
    correlations = _correlations(centred)
    advice = _advice(names, facts, lam, overall.numpy(), correlations, mode, len(values))
    return Diagnosis(
        tuple(names), **facts, budget=lam, share=overall.numpy(), correlations=correlations, advice=tuple(advice)
    )


def _over(function: object, values: Array, known: NDArray[np.bool_]) -> Array:
    """A NaN-aware statistic of every column, NaN where nothing is known."""
    found = [function(column[ok]) if ok.any() else np.nan for column, ok in zip(values.T, known.T, strict=True)]  # type: ignore[operator]
    return np.array(found, dtype=np.float64)


def _correlations(centred: Array) -> Array:
    """Within-group correlations (m, m) over the samples that both rewards apply to; NaN where one does not vary."""
    count = centred.shape[1]
    found = np.full((count, count), np.nan)
    for i in range(count):
        for j in range(count):
            both = ~np.isnan(centred[:, i]) & ~np.isnan(centred[:, j])
            a, b = centred[both, i], centred[both, j]
            size = np.sqrt((a @ a) * (b @ b))
            if size > DEAD:
                found[i, j] = a @ b / size
    return found


def _advice(
    names: Sequence[str],
    facts: Mapping[str, Array],
    budget: Array,
    share: Array,
    correlations: Array,
    mode: advantage.Mode,
    count: int,
) -> list[str]:
    said: list[str] = []
    for k, name in enumerate(names):
        if facts["applies"][k] == 0:
            said.append(f"{name} applies to none of these images: it is dead weight on these prompts.")
            continue
        if not facts["group_std"][k] > DEAD:
            value = facts["mean"][k]
            said.append(
                f"{name} is dead: it is the same for all images of a prompt (mean {value:.3g}). Check its model."
            )
        elif facts["zero_std"][k] >= FLAT:
            said.append(
                f"{name} does not vary in {facts['zero_std'][k]:.0%} of the groups: "
                "more images a prompt, or harder prompts, would give it something to say."
            )
        if facts["group_std"][k] > DEAD and not budget[k] / 2 <= share[k] <= 2 * budget[k]:
            said.append(
                f"{name} has {budget[k]:.0%} of the budget but {share[k]:.0%} of the advantage's variance: "
                + (AGAINST if mode == "reward" else SMALL if share[k] < budget[k] else LARGE)
            )
    for i, first in enumerate(names):
        for j, second in enumerate(names[:i]):
            if count < ENOUGH:
                continue
            if correlations[i, j] < CONFLICT:
                said.append(
                    f"{second} and {first} pull apart (correlation {correlations[i, j]:.2f}): expect a trade-off."
                )
            elif correlations[i, j] > TWIN:
                said.append(f"{second} and {first} say nearly the same ({correlations[i, j]:.2f}): one of them may do.")
    return said or ["Nothing stands out: every reward varies within groups and has about its share."]
