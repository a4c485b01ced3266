"""Rényi log-moments of conditional rewards, and the per-step gains they difference to.

The arrays are μ (..., N): the conditional reward μ̂_{i,t}^{(n)} of sample n, a mean over its rollouts.
NaN means that the reward does not apply to that sample; it drops out of every mean.
"""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Iterable
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from recast.errors import FloorWarning, RecastError

Array = NDArray[np.float64]
Aggregation = Literal["prompt-mean", "pooled"]

FLOOR = 1e-10
ROUNDING = 1e-12
PAPER_ALPHAS = (0.25, 0.5, 0.75, 1.5, 2.0, 4.0, 8.0)
"""The orders of App. B.2."""


def check_alpha(alpha: float) -> float:
    """`alpha` itself if it is a usable Rényi order, else an error that says why."""
    if not (isinstance(alpha, numbers.Real) and np.isfinite(alpha) and alpha > 0):
        raise RecastError(f"alpha must be a positive number, not {alpha!r}")
    if alpha == 1:
        raise RecastError(
            "alpha = 1 is the KL limit, a mean of log μ that is -inf as soon as one sample's rollouts all score 0; "
            "use alpha > 1 (the paper's default is 2), where such a sample adds 0 to the moment"
        )
    return float(alpha)


def moments(mu: ArrayLike, alpha: float, self_rollout: bool = False) -> Array:
    """Mean of μ^{α−1} over the last axis, with no floor: the inside of Eq. surrogate-gain.

    With samples of π_old itself (`self_rollout`) the exponent is α, since
    E_old[ρ^α] = E_+[ρ^{α−1}] (App. B.3). For a negative exponent (α < 1) μ is floored at 1e-10, so
    that one zero does not make the moment infinite.
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
    """D up to its t-independent constant (log Z_i cancels in gains): μ (..., N) to (...).

    Any α > 0 but 1; see `moments` for `self_rollout`.

    >>> float(log_moment([0.25, 0.75], alpha=2.0))  # log of the mean
    -0.6931471805599453
    """
    return log_of_moments(moments(mu, alpha, self_rollout), alpha)


def aggregate(per_prompt: ArrayLike, alpha: float, how: Aggregation = "prompt-mean") -> tuple[Array, Array]:
    """D (m, T+1) over all prompts and D of each prompt, from moments (P, m, T+1).

    `prompt-mean` averages the prompts' D (Alg. 1 for each prompt); `pooled` takes the log of the mean
    moment, so that one prompt whose rollouts all score 0 does not add log 1e-10 = −23 to the mean.
    Prompts to which a reward does not apply (NaN) drop out.
    """
    values = np.asarray(per_prompt, dtype=np.float64)
    if values.ndim != 3 or values.shape[0] == 0:
        raise RecastError(f"moments must have the shape (prompts, rewards, levels), not {values.shape}")
    absent = np.isnan(values)
    partly = absent.any(axis=-1) & ~absent.all(axis=-1)
    if partly.any():
        prompt, reward = np.argwhere(partly)[0]
        raise RecastError(
            f"reward {reward} of prompt {prompt} is NaN at some levels only: NaN says that a reward does not apply to "
            "the prompt, and then holds at all of them"
        )
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


def gains(D: ArrayLike, clip: bool = True) -> Array:
    """ΔD_{i,t} = D_{i,t−1} − D_{i,t} (Eq. gain), (..., T+1) to (..., T), clipped at 0 unless told.

    Unclipped gains telescope to D_0 − D_T; clipped ones sum to at least that.
    """
    levels = np.asarray(D, dtype=np.float64)
    if levels.ndim < 1 or levels.shape[-1] < 2:
        raise RecastError(f"D needs at least two levels on its last axis, not the shape {levels.shape}")
    steps: Array = levels[..., :-1] - levels[..., 1:]
    return np.maximum(steps, 0.0) if clip else steps


def normalized(steps: ArrayLike) -> Array:
    """Mean-normalised gains (Eq. gain-bar), (..., T): mean 1 over t, or 0 for a curve without gain; NaN stays.

    A zero curve gives log K = 0, the paper's case of a reward that has no curve at all. A mean gain up to
    1e-12 is the rounding of a constant reward's D, and counts as zero: normalising would make it a curve.
    """
    values: Array = np.asarray(steps, dtype=np.float64)
    mean = values.mean(axis=-1, keepdims=True)
    result: Array = np.divide(values, mean, out=np.zeros_like(values), where=~(mean <= ROUNDING))
    return result


def total_gain(D: ArrayLike, clip: bool = True) -> Array:
    """Σ_t ΔD_{i,t} of each reward, (..., T+1) to (...): how much of its gap is left to close."""
    return np.asarray(gains(D, clip).sum(axis=-1), dtype=np.float64)


def sweep(
    mu: ArrayLike,
    alphas: Iterable[float] = PAPER_ALPHAS,
    how: Aggregation = "prompt-mean",
    self_rollout: bool = False,
) -> dict[float, Array]:
    """D (m, T+1) for each order, from stored μ (P, m, T+1, N): no new rollouts (App. B.2)."""
    return {alpha: aggregate(moments(mu, alpha, self_rollout), alpha, how)[0] for alpha in alphas}


def _warn_floor(hits: int, size: int, what: str) -> None:
    hint = "; aggregate='pooled' takes the log after the mean over prompts" if "single" in what else ""
    warnings.warn(f"the floor {FLOOR:g} replaced {hits} of {size} {what}{hint}", FloorWarning, stacklevel=3)


def mean_over_prompts(values: Array) -> Array:
    """Mean over the first axis of what is not NaN, or NaN where nothing is."""
    applies = ~np.isnan(values)
    count = applies.sum(axis=0)
    total = np.where(applies, values, 0.0).sum(axis=0)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)
