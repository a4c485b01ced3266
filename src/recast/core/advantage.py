"""Advantages of samples at every step, from their rewards and W: NumPy arrays or torch tensors in, the same out.

Three ways to bring rewards to one scale: `step` divides the mixed reward of every step by its own standard deviation
(as DiffusionNFT does with its single reward), `shared` divides all steps by one standard deviation, which keeps the
scale of W's columns, and `reward` standardizes each reward before mixing (GDPO), so that a budget is a share of the
advantage regardless of the rewards' units.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from recast.core.arrays import namespace
from recast.core.weights import WeightMatrix
from recast.errors import RecastError

__all__ = [
    "EPSILON",
    "Mode",
    "Spread",
    "advantages",
    "by_sigma",
    "contributions",
    "group_mean",
    "group_std",
]

Mode = Literal["step", "shared", "reward"]
Spread = Literal["batch", "group"]
EPSILON = 1e-4
"""Added to standard deviations, as DiffusionNFT does."""


def advantages(rewards: Any, groups: Any, weights: WeightMatrix, mode: Mode = "step", spread: Spread = "batch") -> Any:
    """Advantages of samples at every step, each relative to the mean of its prompt's group.

    Parameters
    ----------
    rewards : array or tensor, (B, m)
        Scores in the order of `weights.rewards`. NaN means that a reward does not apply to a sample; its weight goes
        to the others, and a sample without any reward has the advantage 0.
    groups : array or tensor of int, (B,)
        The prompt of every sample, as any integers.
    weights : WeightMatrix
        W with T steps.
    mode : {"step", "shared", "reward"}, default "step"
        How rewards are brought to one scale; see the module's description.
    spread : {"batch", "group"}, default "batch"
        Whether standard deviations are taken over all samples or within each group.

    Returns
    -------
    array or tensor, (B, T)
        In float64. Column j belongs to the step t = j+1; a trainer that shuffles steps selects columns with `by_sigma`.

    Raises
    ------
    RecastError
        If `mode` or `spread` is unknown, or `rewards` does not have one column per reward of W.

    Examples
    --------
    >>> W = WeightMatrix(("clip", "ocr"), [0, 0.5, 1], [[0.4, 0.1], [0.1, 0.4]], [0.5, 0.5])
    >>> rewards = np.array([[1.0, 0.0], [0.0, 1.0], [0.2, 0.5], [0.6, 0.5]])
    >>> advantages(rewards, np.array([0, 0, 1, 1]), W).round(2).tolist()
    [[1.23, -1.4], [-1.23, 1.4], [-0.66, -0.19], [0.66, 0.19]]
    """
    return contributions(rewards, groups, weights, mode, spread).sum(1)


def contributions(
    rewards: Any, groups: Any, weights: WeightMatrix, mode: Mode = "step", spread: Spread = "batch"
) -> Any:
    """Contribution of every reward to the advantages: (B, m, T), which sums to `advantages` over m."""
    if mode not in ("step", "shared", "reward"):
        raise RecastError(f"unknown normalization {mode!r}: choose step, shared or reward")
    if spread not in ("batch", "group"):
        raise RecastError(f"unknown spread {spread!r}: choose batch or group")
    xp = namespace(rewards)
    groups = xp.unique(groups, return_inverse=True)[1]
    raw = np.asarray(rewards, dtype=np.float64) if xp is np else rewards.double()
    # Centered before mixing: otherwise a reward that applies to some images only would count as an advantage itself.
    values = _centered(raw, groups)
    if mode == "reward":
        values = values / (_std(values, groups, spread) + EPSILON)
    found = weights.terms(values)
    # As in DiffusionNFT, differences between prompts included; a missing score adds no spread.
    mixed = found.sum(1) if mode == "reward" else weights.mix(xp.where(xp.isnan(raw), _mean_or_zero(raw), raw))
    scale = _std(mixed, groups, spread)
    if mode != "step":  # one for all steps: the root of their mean variance
        scale = xp.sqrt((scale**2).mean(1)[:, None])
    return xp.nan_to_num(found / (scale + EPSILON)[:, None], nan=0.0)


def by_sigma(table: Any, weights: WeightMatrix, sigmas: Any, strict: bool = False) -> Any:
    """Entries of a per-step table for slots that are given by their noise level.

    Parameters
    ----------
    table : array or tensor, (B, T)
        One value per sample and step, as `advantages` returns it.
    weights : WeightMatrix
        W, whose grid defines the steps.
    sigmas : array or tensor, (B, k)
        The noise level of every slot, in any order per sample.
    strict : bool, default False
        Refuse levels that are not steps of W (`WeightMatrix.check`).

    Returns
    -------
    array or tensor, (B, k)
        For every slot the column of the step whose σ is nearest.

    Raises
    ------
    RecastError
        If a σ is outside [0, 1], or `strict` and it is not a step of W.

    Examples
    --------
    >>> W = WeightMatrix(("clip",), [0, 0.5, 1], [[0.5, 0.5]], [1.0])
    >>> by_sigma(np.array([[1.0, 2.0], [3.0, 4.0]]), W, np.array([[1.0, 0.5], [0.5, 1.0]])).tolist()
    [[2.0, 1.0], [3.0, 4.0]]
    """
    if strict:
        weights.check(sigmas)
    columns = weights.columns(sigmas)
    if namespace(table) is np:
        return np.take_along_axis(table, columns, 1)
    return table.gather(1, columns.to(table.device))


def group_mean(values: Any, groups: Any) -> Any:
    """The mean (B, …) over each sample's group, numbered from 0; NaN entries do not count."""
    xp = namespace(values)
    known = ~xp.isnan(values)
    shape = (int(groups.max()) + 1, *values.shape[1:])
    sums = _sums(xp.where(known, values, xp.zeros_like(values)), groups, shape)
    counts = _sums(xp.where(known, xp.ones_like(values), xp.zeros_like(values)), groups, shape)
    with np.errstate(invalid="ignore"):  # a group without any score has the mean NaN
        return (sums / counts)[groups]


def group_std(values: Any, groups: Any) -> Any:
    """The population standard deviation (B, …) within each sample's group; NaN entries do not count."""
    return namespace(values).sqrt(group_mean(_centered(values, groups) ** 2, groups))


def _sums(values: Any, groups: Any, shape: tuple[int, ...]) -> Any:
    """Sums of `values` (B, …) over groups, one row per group."""
    if namespace(values) is not np:
        return values.new_zeros(shape).index_add_(0, groups, values)
    sums = np.zeros(shape, values.dtype)
    np.add.at(sums, groups, values)
    return sums


def _centered(values: Any, groups: Any) -> Any:
    return values - group_mean(values, groups)


def _mean_or_zero(values: Any) -> Any:
    """The mean of each column without its NaN entries, 0 if it has no others."""
    if namespace(values) is not np:
        return values.nanmean(0).nan_to_num(0.0)
    known = ~np.isnan(values)
    return np.where(known, values, 0.0).sum(0) / np.maximum(known.sum(0), 1)


def _std(values: Any, groups: Any, spread: Spread) -> Any:
    """Standard deviations that broadcast over `values` (B, k)."""
    xp = namespace(values)
    if spread == "group":
        return group_std(values, groups)
    return xp.broadcast_to(group_std(values, xp.zeros_like(groups))[:1], values.shape) if len(values) else values
