"""Advantages and optimality of samples at every step, from their rewards and W.

Three ways to bring rewards to one scale: `step` divides the mixed reward of every step by its own standard deviation
(as DiffusionNFT does with its single reward), `shared` divides all steps by one standard deviation, which keeps the
scale of W's columns, and `reward` standardizes each reward before mixing (GDPO), so that a budget is a share of the
advantage regardless of the rewards' units.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from recast.core.weights import WeightMatrix
from recast.errors import RecastError

__all__ = [
    "EPSILON",
    "AdvMode",
    "Mode",
    "Spread",
    "advantages",
    "by_sigma",
    "contributions",
    "group_mean",
    "group_std",
    "optimality",
    "shares",
]

Mode = Literal["step", "shared", "reward"]
Spread = Literal["batch", "group"]
AdvMode = Literal["all", "positive_only", "negative_only", "one_only", "binary"]
EPSILON = 1e-4
"""Added to standard deviations, as DiffusionNFT does."""


def advantages(
    rewards: Tensor, groups: Tensor, weights: WeightMatrix, mode: Mode = "step", spread: Spread = "batch"
) -> Tensor:
    """Advantages of samples at every step, each relative to the mean of its prompt's group.

    Parameters
    ----------
    rewards : Tensor, (B, m)
        Scores in the order of `weights.rewards`. NaN means that a reward does not apply to a sample; its weight goes
        to the others, and a sample without any reward has the advantage 0.
    groups : Tensor of int, (B,)
        The prompt of every sample, as any integers.
    weights : WeightMatrix
        W with T steps.
    mode : {"step", "shared", "reward"}, default "step"
        How rewards are brought to one scale; see the module's description.
    spread : {"batch", "group"}, default "batch"
        Whether standard deviations are taken over all samples or within each group.

    Returns
    -------
    Tensor, (B, T)
        In float64. Column j belongs to the step t = j+1; a trainer that shuffles steps selects columns with `by_sigma`.

    Raises
    ------
    RecastError
        If `mode` or `spread` is unknown, or `rewards` does not have one column per reward of W.

    Examples
    --------
    >>> W = WeightMatrix(("clip", "ocr"), [0, 0.5, 1], [[0.4, 0.1], [0.1, 0.4]], [0.5, 0.5])
    >>> rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.2, 0.5], [0.6, 0.5]])
    >>> advantages(rewards, torch.tensor([0, 0, 1, 1]), W).numpy().round(2).tolist()
    [[1.23, -1.4], [-1.23, 1.4], [-0.66, -0.19], [0.66, 0.19]]
    """
    return contributions(rewards, groups, weights, mode, spread).sum(1)


def contributions(
    rewards: Tensor, groups: Tensor, weights: WeightMatrix, mode: Mode = "step", spread: Spread = "batch"
) -> Tensor:
    """Contribution of every reward to the advantages: (B, m, T), which sums to `advantages` over m."""
    if mode not in ("step", "shared", "reward"):
        raise RecastError(f"unknown normalization {mode!r}: choose step, shared or reward")
    if spread not in ("batch", "group"):
        raise RecastError(f"unknown spread {spread!r}: choose batch or group")
    groups = groups.unique(return_inverse=True)[1]
    raw = rewards.double()
    # Centered before mixing: otherwise a reward that applies to some images only would count as an advantage itself.
    values = _centered(raw, groups)
    if mode == "reward":
        values = values / (_std(values, groups, spread) + EPSILON)
    found = weights.terms(values)
    if mode == "reward":
        mixed = found.sum(1)
    else:  # as in DiffusionNFT, differences between prompts included; a missing score adds no spread
        mixed = weights.mix(torch.where(raw.isnan(), raw.nanmean(0).nan_to_num(0.0), raw))
    scale = _std(mixed, groups, spread)
    if mode != "step":  # one for all steps: the root of their mean variance
        scale = (scale**2).mean(1, keepdim=True).sqrt()
    return (found / (scale + EPSILON).unsqueeze(1)).nan_to_num(0.0)


def by_sigma(table: Tensor, weights: WeightMatrix, sigmas: Tensor) -> Tensor:
    """Entries of a per-step table for slots that are given by their noise level.

    Parameters
    ----------
    table : Tensor, (B, T)
        One value per sample and step, as `advantages` returns it.
    weights : WeightMatrix
        W, whose grid defines the steps.
    sigmas : Tensor, (B, k)
        The noise level of every slot, in any order per sample.

    Returns
    -------
    Tensor, (B, k)
        For every slot the column of the step whose σ is nearest.

    Raises
    ------
    RecastError
        If a σ is outside [0, 1].

    Examples
    --------
    >>> W = WeightMatrix(("clip",), [0, 0.5, 1], [[0.5, 0.5]], [1.0])
    >>> by_sigma(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), W, torch.tensor([[1.0, 0.5], [0.5, 1.0]]))
    tensor([[2., 1.],
            [3., 4.]])
    """
    return table.gather(1, weights.columns(sigmas).to(table.device))


def optimality(advantages: Tensor, clip: float = 5.0, mode: AdvMode = "all") -> Tensor:
    """r = ½ + adv / (2·clip): the probability that a sample is a good one.

    Parameters
    ----------
    advantages : Tensor
        Of any shape.
    clip : float, default 5.0
        Advantages beyond ±clip are clipped.
    mode : {"all", "positive_only", "negative_only", "one_only", "binary"}, default "all"
        DiffusionNFT's `adv_mode`: all advantages, the positive or the negative ones with 0 for the others, 1 for
        positive and 0 for others, or the signs. The last two are 1, not `clip`, so r stays within ½ ± 1/(2·clip).

    Returns
    -------
    Tensor
        Values in [0, 1] in the shape of `advantages`.

    Examples
    --------
    >>> optimality(torch.tensor([-9.0, 0.0, 2.5]))
    tensor([0.0000, 0.5000, 0.7500])
    """
    if mode not in get_args(AdvMode):
        raise RecastError(f"unknown train.adv_mode {mode!r}: choose one of {', '.join(get_args(AdvMode))}")
    low, high = (0.0 if mode == "positive_only" else -clip), (0.0 if mode == "negative_only" else clip)
    kept = advantages.clamp(low, high)
    if mode == "one_only":
        kept = (kept > 0).to(kept.dtype)
    elif mode == "binary":
        kept = kept.sign()
    return (0.5 + kept / (2 * clip)).clamp(0, 1)


def shares(contributions: Tensor) -> tuple[Tensor, Tensor]:
    """Each reward's share of the variance of the advantages, overall and at each step.

    Parameters
    ----------
    contributions : Tensor, (B, m, T)
        As `contributions` returns them.

    Returns
    -------
    overall : Tensor, (m,)
        Cov(contribution, advantage) / Var(advantage), which sums to 1. It is below the budget of a reward that hardly
        varies, negative for one that opposes the others, and 0 if nothing varies.
    steps : Tensor, (m, T)
        The same at each step.

    Examples
    --------
    >>> W = WeightMatrix(("clip", "ocr"), [0, 0.5, 1], [[0.4, 0.1], [0.1, 0.4]], [0.5, 0.5])
    >>> rewards = torch.tensor([[1.0, 0.1], [0.0, 0.1], [0.2, 0.5], [0.6, 0.6]])
    >>> overall, steps = shares(contributions(rewards, torch.tensor([0, 0, 1, 1]), W))
    >>> overall.numpy().round(2).tolist()
    [0.96, 0.04]
    """
    whole = contributions.sum(1, keepdim=True)
    joint, total = (contributions * whole).sum(0), (whole * whole).sum(0)
    overall = joint.sum(1) / total.sum().clamp(min=torch.finfo(contributions.dtype).tiny)
    return overall, joint / total.clamp(min=torch.finfo(contributions.dtype).tiny)


def group_mean(values: Tensor, groups: Tensor) -> Tensor:
    """The mean (B, …) over each sample's group; NaN entries do not count."""
    known = ~values.isnan()
    shape = (int(groups.max()) + 1, *values.shape[1:])
    sums = values.new_zeros(shape).index_add_(0, groups, torch.where(known, values, 0.0))
    counts = values.new_zeros(shape).index_add_(0, groups, known.to(values.dtype))
    return (sums / counts)[groups]


def group_std(values: Tensor, groups: Tensor) -> Tensor:
    """The population standard deviation (B, …) within each sample's group; NaN entries do not count."""
    return group_mean(_centered(values, groups) ** 2, groups).sqrt()


def _centered(values: Tensor, groups: Tensor) -> Tensor:
    return values - group_mean(values, groups)


def _std(values: Tensor, groups: Tensor, spread: Spread) -> Any:
    """Standard deviations that broadcast over `values` (B, k)."""
    if spread == "group":
        return group_std(values, groups)
    return group_std(values, torch.zeros_like(groups))[:1].expand_as(values) if len(values) else values
