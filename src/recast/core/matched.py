"""Matched shares, beyond the paper: every step is shared out by which rewards gain there."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from recast.core import renyi, sinkhorn
from recast.core.arrays import Array
from recast.core.curves import GainCurves
from recast.core.weights import WeightMatrix
from recast.errors import RecastError

__all__ = ["FLOOR", "factor_intervals", "floors", "matched"]

FLOOR = 0.05
"""Smallest floor of a normalized gain: without gain at a step, g is 1/21 of its value at the mean gain."""


def matched(gains: ArrayLike, budget: ArrayLike, columns: ArrayLike | None = None, floor: ArrayLike = FLOOR) -> Array:
    """W_{i,t} = ν_t λ_i g_{i,t} / Σ_j λ_j g_{j,t} with g = (ΔD̄ + f) / (1 + f): shares of a step by gain.

    λ are the prior odds of the rewards. The columns sum to ν; the rows sum to the budget realized, not to λ.

    Parameters
    ----------
    gains : array-like, shape (..., m, T)
        Gains, clipped at 0 and normalized to mean 1 first. A row without gain has g = 1.
    budget : array-like, shape (m,)
        λ, non-negative, on any scale.
    columns : array-like, shape (T,), optional
        ν, on any scale; uniform by default.
    floor : float or array-like, shape (m,), default 0.05
        f of each reward, positive; see `floors`. W is static in the limit of a large one.

    Returns
    -------
    ndarray, shape (..., m, T)
        W.

    Raises
    ------
    RecastError
        If the shapes disagree or a number is out of range.

    Examples
    --------
    >>> matched([[1.0, 1.0], [1.0, 1.0]], budget=[1, 3]).tolist()  # equal curves: λ_i / T
    [[0.125, 0.125], [0.375, 0.375]]
    >>> matched([[1.0, 0.0], [1.0, 1.0]], budget=[1, 1]).round(3).tolist()
    [[0.331, 0.023], [0.169, 0.477]]
    """
    steps = np.asarray(gains, dtype=np.float64)
    if steps.ndim < 2 or 0 in steps.shape or not np.isfinite(steps).all():
        raise RecastError(f"gains must be finite and have the shape (rewards, steps), not {steps.shape}")
    m, count = steps.shape[-2:]
    lam = sinkhorn.simplex(budget, m, "budget")
    nu = sinkhorn.masses(columns, count)
    least = np.broadcast_to(np.asarray(floor, dtype=np.float64), (m,))[:, None]
    if not (np.isfinite(least) & (least > 0)).all():
        raise RecastError(f"floor must be positive and finite, not {least[:, 0].tolist()}")
    shape = renyi.normalized(np.maximum(steps, 0.0))
    odds = np.where(shape.any(axis=-1, keepdims=True), (shape + least) / (1 + least), 1.0) * lam[:, None]
    return np.asarray(nu * odds / odds.sum(axis=-2, keepdims=True))


def floors(curves: GainCurves, resamples: int = 1000, seed: int = 0) -> Array:
    """The floor f (m,) of each curve: the standard error of its normalized gains over prompts, at least `FLOOR`.

    A share cannot tell a gain below its own error from none. The error is that of resampled prompts, averaged over
    the steps; curves of one prompt, or without D of each prompt, have none.

    Parameters
    ----------
    curves : GainCurves
        Curves of the rewards.
    resamples, seed : int
        Number of bootstrap draws, and their seed.

    Returns
    -------
    ndarray, shape (m,)
        Floors, at least 0.05.

    Examples
    --------
    >>> floors(GainCurves(["ocr"], [0, 0.5, 1], [[1.0, 0.25, 0.0]])).tolist()
    [0.05]
    """
    if curves.D_prompts is None or len(curves.D_prompts) < 2:
        return np.full(len(curves.rewards), FLOOR)
    prompts = len(curves.D_prompts)  # resampling P prompts shows (P−1)/P of their variance
    draws = renyi.normalized(renyi.gains(curves.bootstrap(resamples, seed)))
    error = np.nanstd(draws, axis=0).mean(axis=-1) * np.sqrt(prompts / (prompts - 1))
    return np.asarray(np.maximum(error, FLOOR))


def factor_intervals(curves: GainCurves, weights: WeightMatrix, level: float = 0.95) -> Array | None:
    """Percentile interval (2, m, T) of the factors W/ν over resampled prompts; None if the method or curves have none.

    Parameters
    ----------
    curves : GainCurves
        The curves that W was made of.
    weights : WeightMatrix
        W by `sinkhorn` or `matched`, without shrinkage and with a curve for every reward.
    level : float, default 0.95
        Coverage, between 0 and 1.

    Returns
    -------
    ndarray, shape (2, m, T), or None
        At a step where ν is 0, both ends are λ.
    """
    known = curves.D_prompts is not None and set(weights.rewards) <= set(curves.rewards)
    if not known or weights.method not in ("sinkhorn", "matched") or weights.info.get("shrink"):
        return None
    own, tau = curves.select(weights.rewards), float(weights.info.get("tau", 1.0))
    if weights.method == "sinkhorn" and weights.uniform:
        return own.weight_intervals(weights.budget, tau=tau, level=level) * weights.steps
    steps = renyi.gains(own.bootstrap())
    steps = steps[np.isfinite(steps).all(axis=(1, 2))]  # draws in which every reward has a prompt
    if weights.method == "matched":
        draws = matched(steps, weights.budget, weights.nu, floors(own))
    else:
        draws = sinkhorn.project_many(steps, weights.budget[None], weights.nu, tau=tau).weights
    ends = np.percentile(draws, [50 * (1 - level), 50 * (1 + level)], axis=0)
    static = np.broadcast_to(weights.budget[:, None], ends.shape).copy()
    return np.asarray(np.divide(ends, weights.nu, out=static, where=weights.nu > 0))
