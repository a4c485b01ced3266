"""Whether the noise levels that a trainer trains are the steps of W.

A lookup by the nearest level cannot fail: levels of another grid take some column, often a wrong one. At T = 5,
Flow-Factory trains σ = 1, .923, .818, .667, .429 where diffusers' own grid for the same model is 1, .900, .751, .503,
.009, and half of the lookups are wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from recast.core import schedule
from recast.core.arrays import Array, namespace
from recast.errors import RecastError

__all__ = ["REMEDY", "Match", "match", "tolerances"]

SHARE = 0.1
"""Of the gap to the nearer neighboring level: far below ½, from where the nearest column is another one."""
ROUNDING = 0.004
"""A timestep of 0 to 1000 that is cut off to an integer is off by .001, one that is rounded to bfloat16, and divided by
1000 in it, by up to .004."""
REMEDY = "weigh again on the trainer's grid (σ from 0 to 1): recast.weigh(curves.resample(sigmas), budget)"
"""What to do about levels that are not the steps of W."""


@dataclass(frozen=True)
class Match:
    """How a trainer's levels meet the steps of W.

    Parameters
    ----------
    distance : float
        The largest distance between a level and its step.
    unused : tuple of int
        Columns of W that no level hits: their share of the budget trains nothing.
    """

    distance: float
    unused: tuple[int, ...]


def tolerances(sigmas: ArrayLike) -> Array:
    """How far a level may be from each step (T,): a tenth of the gap to the nearer neighboring level of the grid.

    Where that is less than 0.004, the rounding of timesteps, it is 0.004, but always less than half the gap: a level
    that is accepted has one nearest step.

    Parameters
    ----------
    sigmas : array-like, shape (T+1,)
        The grid of W.

    Returns
    -------
    ndarray, shape (T,)
        The tolerance of the step that starts at σ_t, t = 1..T.

    Examples
    --------
    >>> tolerances([0, 0.003, 0.5, 1]).round(4).tolist()
    [0.0015, 0.0497, 0.05]
    """
    levels = schedule.grid(sigmas)
    below = np.diff(levels)
    gaps = np.minimum(below, np.append(below[1:], np.inf))
    return np.asarray(np.minimum(np.maximum(SHARE * gaps, ROUNDING), gaps * (0.5 - 1e-9)))


def match(grid: ArrayLike, sigmas: Any) -> Match:
    """How `sigmas` meet the steps of a grid; an error if one is not near any step.

    Parameters
    ----------
    grid : array-like, shape (T+1,)
        The grid of W, from 0 (clean) to 1 (noise).
    sigmas : array-like or tensor, any shape
        Noise levels.

    Returns
    -------
    Match
        The largest distance to a step, and the columns that no level hits.

    Raises
    ------
    RecastError
        If a level is farther from its nearest step than `tolerances` allows; the message has the largest distance,
        and the remedy.

    Examples
    --------
    >>> match([0, 0.5, 1], [1.0, 1.0])
    Match(distance=0.0, unused=(0,))
    """
    steps = schedule.grid(grid)[1:]
    plain = sigmas.detach().double().cpu().numpy() if namespace(sigmas) is not np else np.asarray(sigmas, dtype=float)
    levels = np.unique(plain)  # a trainer repeats few levels many times; NaN stays, and is far from every step
    nearest = np.abs(levels[:, None] - steps).argmin(1)
    distances = np.abs(levels - steps[nearest])
    off = ~(distances <= tolerances(grid)[nearest])
    if off.any():
        worst = int(np.where(off, np.nan_to_num(distances, nan=np.inf), -1).argmax())
        raise RecastError(
            f"{int(off.sum())} of {levels.size} noise levels of the trainer are not steps of W: {levels[worst]:.4g} is "
            f"{distances[worst]:.3g} from the nearest, {steps[nearest[worst]]:.4g}; {REMEDY}"
        )
    unused = np.setdiff1d(np.arange(steps.size), nearest)
    return Match(float(distances.max(initial=0.0)), tuple(unused.tolist()))
