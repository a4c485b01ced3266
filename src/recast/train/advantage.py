"""Optimality of samples and shares of rewards; the advantages themselves are `recast.core.advantage`."""

from __future__ import annotations

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

__all__ = [
    "EPSILON",
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


def optimality(advantages: Tensor, clip: float = 5.0) -> Tensor:
    """r = ½ + adv / (2·clip): the probability that a sample is a good one.

    Parameters
    ----------
    advantages : Tensor
        Of any shape.
    clip : float, default 5.0
        Advantages beyond ±clip are clipped.

    Returns
    -------
    Tensor
        Values in [0, 1] in the shape of `advantages`.

    Examples
    --------
    >>> optimality(torch.tensor([-9.0, 0.0, 2.5]))
    tensor([0.0000, 0.5000, 0.7500])
    """
    return (0.5 + advantages.clamp(-clip, clip) / (2 * clip)).clamp(0, 1)


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
