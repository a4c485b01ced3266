"""Optimality of samples and shares of rewards; the advantages themselves are `recast.core.advantage`."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from recast.core.advantage import (
    EPSILON,
    Mode,
    Spread,
    advantages,
    by_sigma,
    contributions,
    group_mean,
    group_std,
)
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

AdvMode = Literal["all", "positive_only", "negative_only", "one_only", "binary"]


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
    >>> from recast import WeightMatrix
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
