"""`recast doctor`: statistics of the rewards on a few prompts, and what they mean for training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recast import prompts
from recast.config import Recipe
from recast.errors import RecastError
from recast.flow import families
from recast.progress import OnProgress, ignore_progress
from recast.rewards import base
from recast.train import advantage, groups
from recast.train.rollout import rollout
from recast.weigh import static

__all__ = ["Diagnosis", "diagnose", "examine"]

Array = NDArray[np.float64]
_CONSTANT, _FLAT, _CONFLICT, _REDUNDANT, _ENOUGH = 1e-9, 0.5, -0.3, 0.9, 32
"""Thresholds of the advice: a standard deviation that counts as 0, the share of prompts with such a one, correlations
that are worth a sentence, and the images that an estimate of a correlation needs."""
_BY_REWARD = "train.normalize=reward makes the shares follow the budget."


@dataclass(frozen=True)
class Diagnosis:
    """Statistics per reward (m,) over `images` images, and its share of the advantage's variance next to its budget.

    `group_std` is the mean standard deviation within groups of one prompt, `zero_std` the share of groups without any.
    """

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
    mode: advantage.Mode
    images: int

    @property
    def advice(self) -> tuple[str, ...]:
        """One sentence per problem, or one that there is no problem."""
        count = len(self.names)
        found = [sentence for k in range(count) for sentence in _about_reward(self, k)]
        found += [sentence for i in range(count) for j in range(i) for sentence in _about_two(self, j, i)]
        return tuple(found) or ("No problem found: every reward varies within groups and has about its share.",)


def examine(recipe: Recipe, count: int, images: int, on_progress: OnProgress = ignore_progress) -> Diagnosis:
    """Sample `images` images for each of `count` prompts with the recipe's policy, and diagnose their rewards."""
    if not recipe.rewards:
        raise RecastError("the recipe names no reward: put at least one under rewards")
    rows = prompts.load(recipe.train.prompts)
    chosen = [rows[k] for k in groups.prompts(recipe.train.seed, 0, count, len(rows))]
    policy = families.load(recipe.policy)
    models = {name: base.load(name, **(options or {})) for name, options in recipe.rewards.items()}
    sigmas = policy.sigmas(recipe.train.steps or recipe.estimate.steps)
    seeds = groups.seeds(recipe.train.seed, 0, count * images, 1)[:, 0].tolist()
    each = [row for row in chosen for _ in range(images)]
    found = rollout(policy, models, each, seeds, sigmas, recipe.train.sample_batch, on_progress)
    members = torch.from_numpy(groups.members([row["prompt"] for row in chosen], images))
    values = torch.from_numpy(found.rewards.copy())
    settings = recipe.train
    return diagnose(values, members, list(models), recipe.budget, settings.normalize, settings.spread)


def diagnose(
    rewards: Tensor,
    members: Tensor,
    names: Sequence[str],
    budget: Mapping[str, float],
    mode: advantage.Mode = "step",
    spread: advantage.Spread = "batch",
) -> Diagnosis:
    """Diagnosis of rewards (B, m) with groups `members` (B,); a reward that is not in the budget has none."""
    shares = {name: float(budget.get(name, 0.0)) for name in names}
    if sum(shares.values()) <= 0:
        raise RecastError(f"the budget {dict(budget)} names none of the rewards {', '.join(names)}")
    weights = static(shares, [0.0, 1.0])
    values = rewards.double()
    overall, _ = advantage.shares(advantage.contributions(values, members, weights, mode, spread))
    first = torch.tensor([int((members == g).nonzero()[0, 0]) for g in members.unique()])
    stds, plain = advantage.group_std(values, members)[first].numpy(), values.numpy()
    return Diagnosis(
        names=tuple(names),
        applies=(~np.isnan(plain)).mean(0),
        mean=_per_reward(np.mean, plain),
        low=_per_reward(np.min, plain),
        high=_per_reward(np.max, plain),
        group_std=_per_reward(np.mean, stds),
        zero_std=_per_reward(lambda column: float(np.mean(column <= _CONSTANT)), stds),
        budget=weights.budget,
        share=overall.numpy(),
        correlations=_correlations((values - advantage.group_mean(values, members)).numpy()),
        mode=mode,
        images=len(values),
    )


def _per_reward(statistic: Callable[[Array], float], values: Array) -> Array:
    """A statistic of the known entries of every column, NaN if a column has none."""
    known = [column[~np.isnan(column)] for column in values.T]
    return np.array([statistic(column) if column.size else np.nan for column in known], dtype=np.float64)


def _correlations(centered: Array) -> Array:
    """Within-group correlations (m, m) over the samples that both rewards apply to; NaN if one does not vary."""
    count = centered.shape[1]
    found = np.full((count, count), np.nan)
    for i in range(count):
        for j in range(count):
            both = ~np.isnan(centered[:, i]) & ~np.isnan(centered[:, j])
            a, b = centered[both, i], centered[both, j]
            size = np.sqrt((a @ a) * (b @ b))
            if size > _CONSTANT:
                found[i, j] = a @ b / size
    return found


def _about_reward(found: Diagnosis, k: int) -> Iterator[str]:
    name, budget, share = found.names[k], found.budget[k], found.share[k]
    if found.applies[k] == 0:
        yield f"{name} applies to none of these images: it has no effect on these prompts."
        return
    if not found.group_std[k] > _CONSTANT:
        yield f"{name} is the same for all images of a prompt (mean {found.mean[k]:.3g}) and has no effect: check it."
        return
    if found.zero_std[k] >= _FLAT:
        yield (
            f"{name} does not vary for {found.zero_std[k]:.0%} of the prompts: "
            "use more images per prompt, or harder prompts."
        )
    if not budget / 2 <= share <= 2 * budget:
        if found.mode == "reward":
            reason = "it is correlated with other rewards; see the correlations."
        elif share < budget:
            reason = f"its scale is smaller than that of the others. {_BY_REWARD}"
        else:
            reason = f"its scale is larger than that of the others, so it dominates. {_BY_REWARD}"
        yield f"{name} has {budget:.0%} of the budget but {share:.0%} of the advantage's variance: {reason}"


def _about_two(found: Diagnosis, i: int, j: int) -> Iterator[str]:
    first, second, correlation = found.names[i], found.names[j], found.correlations[i, j]
    if found.images < _ENOUGH:
        return
    if correlation < _CONFLICT:
        yield f"{first} and {second} conflict (correlation {correlation:.2f}): expect a trade-off."
    elif correlation > _REDUNDANT:
        yield f"{first} and {second} are nearly redundant (correlation {correlation:.2f}): one of them may suffice."
