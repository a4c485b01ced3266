"""Rényi log-moments of conditional rewards, and the per-step gains that are their differences.

The arrays are μ (..., N): the conditional reward μ̂_{i,t}^{(n)} of sample n, a mean over its rollouts.
NaN means that the reward does not apply to that sample; it is left out of every mean.
"""

from __future__ import annotations

import numbers
import warnings
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from recast.core.arrays import Array
from recast.errors import FloorWarning, RecastError

__all__ = [
    "FLOOR",
    "PAPER_ALPHAS",
    "ROUNDING",
    "Aggregation",
    "aggregate",
    "check_alpha",
    "gains",
    "log_moment",
    "log_of_moments",
    "mean_over_prompts",
    "moments",
    "normalized",
    "total_gain",
]

Aggregation = Literal["prompt-mean", "pooled"]
"""How curves of several prompts become one; see `aggregate`."""
FLOOR = 1e-10
"""Lower bound of a moment before its logarithm is taken (Alg. 1)."""
ROUNDING = 1e-12
"""Mean gain up to which a curve counts as having no gain: the rounding error of a constant reward's D."""
PAPER_ALPHAS = (0.25, 0.5, 0.75, 1.5, 2.0, 4.0, 8.0)
"""The Rényi orders of App. B.2."""


def check_alpha(alpha: float) -> float:
    """`alpha` as a float if it is a valid Rényi order; otherwise an error that gives the reason."""
    if not (isinstance(alpha, numbers.Real) and np.isfinite(alpha) and alpha > 0):
        raise RecastError(f"alpha must be a positive number, not {alpha!r}")
    if alpha == 1:
        raise RecastError(
            "alpha = 1 is the KL limit, a mean of log μ that is -inf as soon as one sample's rollouts all score 0; "
            "use alpha > 1 (the paper's default is 2), where such a sample adds 0 to the moment"
        )
    return float(alpha)


def moments(mu: ArrayLike, alpha: float, self_rollout: bool = False) -> Array:
    """Mean of μ^{α−1} over the last axis, without a floor (the argument of the log in Eq. surrogate-gain).

    Parameters
    ----------
    mu : array-like, shape (..., N)
        Conditional rewards, non-negative; NaN where the reward does not apply.
    alpha : float
        Rényi order, positive and not 1. For α < 1 the exponent is negative and μ is floored at 1e-10, so that a
        single zero does not make the moment infinite.
    self_rollout : bool, default False
        Whether the samples come from π_old itself. The exponent is then α, because
        E_old[ρ^α] = E_+[ρ^{α−1}] (App. B.3).

    Returns
    -------
    ndarray, shape (...)
        The moments; NaN where every sample is NaN.

    Raises
    ------
    RecastError
        If `alpha` is not a valid order or a conditional reward is negative.

    Examples
    --------
    >>> moments([[0.25, 0.75], [0.5, float("nan")]], alpha=2.0).tolist()
    [0.5, 0.5]
    """
    check_alpha(alpha)
    values = np.asarray(mu, dtype=np.float64)
    lowest = np.nanmin(values, initial=0.0)
    if lowest < 0:
        raise RecastError(
            f"the gains need rewards >= 0, but the lowest conditional reward is {lowest:g}: "
            "map the reward to non-negative values first (a sigmoid for ImageReward)"
        )
    exponent = alpha if self_rollout else alpha - 1
    if exponent < 0 and (values < FLOOR).any():
        _warn_floor(int((values < FLOOR).sum()), values.size, "conditional rewards")
    powers = np.maximum(values, FLOOR) ** exponent if exponent < 0 else values**exponent
    applies = ~np.isnan(powers)
    count = applies.sum(axis=-1)
    total = np.where(applies, powers, 0.0).sum(axis=-1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def log_of_moments(values: ArrayLike, alpha: float) -> Array:
    """D = log(max(1e-10, moment)) / (α−1), the last line but one of Alg. 1; NaN stays NaN."""
    array: Array = np.asarray(values, dtype=np.float64)
    return np.log(np.maximum(array, FLOOR)) / (check_alpha(alpha) - 1)


def log_moment(mu: ArrayLike, alpha: float, self_rollout: bool = False) -> Array:
    """D up to a constant that does not depend on t (log Z_i cancels in the gains), from μ (..., N).

    Parameters
    ----------
    mu : array-like, shape (..., N)
        Conditional rewards, non-negative; NaN where the reward does not apply.
    alpha : float
        Rényi order, positive and not 1.
    self_rollout : bool, default False
        Whether the samples come from π_old itself; see `moments`.

    Returns
    -------
    ndarray, shape (...)
        log(max(1e-10, moment)) / (α−1); NaN where every sample is NaN.

    Raises
    ------
    RecastError
        If `alpha` is not a valid order or a conditional reward is negative.

    Examples
    --------
    >>> float(log_moment([0.25, 0.75], alpha=2.0))  # the log of the mean
    -0.6931471805599453
    """
    return log_of_moments(moments(mu, alpha, self_rollout), alpha)


def aggregate(per_prompt: ArrayLike, alpha: float, how: Aggregation = "prompt-mean") -> tuple[Array, Array]:
    """D (m, T+1) over all prompts and D (P, m, T+1) of each prompt, from moments (P, m, T+1).

    Parameters
    ----------
    per_prompt : array-like, shape (P, m, T+1)
        Moments of each prompt, reward and level, as `moments` returns them. A reward that does not apply to a prompt
        is NaN at all levels and is left out of the mean over prompts.
    alpha : float
        Rényi order, positive and not 1.
    how : {"prompt-mean", "pooled"}, default "prompt-mean"
        `prompt-mean` averages the prompts' D (Alg. 1 for each prompt). `pooled` takes the log of the mean moment, so
        that a prompt whose rollouts all score 0 does not add log 1e-10 = −23 to the mean.

    Returns
    -------
    D : ndarray, shape (m, T+1)
        The curves over all prompts.
    D_prompts : ndarray, shape (P, m, T+1)
        The curves of each prompt.

    Raises
    ------
    RecastError
        If the shape is wrong, `how` is unknown, or a reward is NaN at some levels of a prompt only.

    Examples
    --------
    >>> D, per_prompt = aggregate([[[0.5, 0.25]], [[0.5, 0.25]]], alpha=2.0)
    >>> D.round(3).tolist(), per_prompt.shape
    ([[-0.693, -1.386]], (2, 1, 2))
    """
    values = np.asarray(per_prompt, dtype=np.float64)
    _check_levels(values)
    logs = log_of_moments(values, alpha)
    if how == "prompt-mean":
        if (values < FLOOR).any():
            _warn_floor(int((values < FLOOR).sum()), values.size, "moments of single prompts")
        return mean_over_prompts(logs), logs
    if how == "pooled":
        pooled = mean_over_prompts(values)
        if (pooled < FLOOR).any():
            _warn_floor(int((pooled < FLOOR).sum()), pooled.size, "pooled moments")
        return log_of_moments(pooled, alpha), logs
    raise RecastError(f"unknown aggregation {how!r}: choose 'prompt-mean' or 'pooled'")


def _check_levels(values: Array) -> None:
    """Raise unless moments are (P, m, T+1) and every reward applies to a prompt at all levels or at none."""
    if values.ndim != 3 or values.shape[0] == 0:
        raise RecastError(f"moments must have the shape (prompts, rewards, levels), not {values.shape}")
    absent = np.isnan(values)
    partly = absent.any(axis=-1) & ~absent.all(axis=-1)
    if partly.any():
        prompt, reward = np.argwhere(partly)[0]
        raise RecastError(
            f"reward {reward} of prompt {prompt} is NaN at some levels only: NaN means that a reward does not apply to "
            "the prompt, so it must be NaN at all levels"
        )


def gains(D: ArrayLike, clip: bool = True) -> Array:
    """ΔD_{i,t} = D_{i,t−1} − D_{i,t} (Eq. gain), (..., T+1) to (..., T).

    Parameters
    ----------
    D : array-like, shape (..., T+1)
        Cumulative discriminability at levels t = 0..T.
    clip : bool, default True
        Whether negative gains are set to 0. Unclipped gains sum to D_0 − D_T; clipped ones to at least that.

    Returns
    -------
    ndarray, shape (..., T)
        Gains; column j is the step t = j+1, so the first column is the cleanest step.

    Raises
    ------
    RecastError
        If `D` has fewer than two levels.

    Examples
    --------
    >>> gains([3.0, 2.0, 2.5, 0.0]).tolist(), gains([3.0, 2.0, 2.5, 0.0], clip=False).tolist()
    ([1.0, 0.0, 2.5], [1.0, -0.5, 2.5])
    """
    levels = np.asarray(D, dtype=np.float64)
    if levels.ndim < 1 or levels.shape[-1] < 2:
        raise RecastError(f"D needs at least two levels on its last axis, not the shape {levels.shape}")
    steps: Array = levels[..., :-1] - levels[..., 1:]
    return np.maximum(steps, 0.0) if clip else steps


def normalized(steps: ArrayLike) -> Array:
    """Gains divided by their mean over the steps (Eq. gain-bar), (..., T) to (..., T).

    A curve without gain is 0, which gives log K = 0, the paper's case of a reward that has no curve. A mean gain of at
    most 1e-12 is the rounding error of a constant reward's D and counts as no gain. NaN stays NaN.

    Parameters
    ----------
    steps : array-like, shape (..., T)
        Gains, usually clipped at 0.

    Returns
    -------
    ndarray, shape (..., T)
        Normalized gains, with mean 1 or 0 over the last axis.

    Examples
    --------
    >>> normalized([[1.0, 3.0], [0.0, 0.0]]).tolist()
    [[0.5, 1.5], [0.0, 0.0]]
    """
    values: Array = np.asarray(steps, dtype=np.float64)
    mean = values.mean(axis=-1, keepdims=True)
    result: Array = np.divide(values, mean, out=np.zeros_like(values), where=~(mean <= ROUNDING))
    return result


def total_gain(D: ArrayLike, clip: bool = True) -> Array:
    """Σ_t ΔD_{i,t} of each reward, (..., T+1) to (...): how much of its gap is left to close.

    Parameters
    ----------
    D : array-like, shape (..., T+1)
        Cumulative discriminability at levels t = 0..T.
    clip : bool, default True
        Whether negative gains are set to 0 first, as in the paper's tables.

    Returns
    -------
    ndarray, shape (...)
        Total gains.

    Examples
    --------
    >>> float(total_gain([3.0, 2.0, 2.5, 0.0])), float(total_gain([3.0, 2.0, 2.5, 0.0], clip=False))
    (3.5, 3.0)
    """
    return np.asarray(gains(D, clip).sum(axis=-1), dtype=np.float64)


def mean_over_prompts(values: Array) -> Array:
    """Mean over the first axis of the entries that are not NaN; NaN where all of them are."""
    applies = ~np.isnan(values)
    count = applies.sum(axis=0)
    total = np.where(applies, values, 0.0).sum(axis=0)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _warn_floor(hits: int, size: int, what: str) -> None:
    hint = "; aggregate='pooled' takes the log after the mean over prompts" if "single" in what else ""
    warnings.warn(f"the floor {FLOOR:g} replaced {hits} of {size} {what}{hint}", FloorWarning, stacklevel=3)
