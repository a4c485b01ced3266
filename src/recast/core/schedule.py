"""The grid of noise levels σ_0 (clean, 0) … σ_T (noise, 1) that all other arrays refer to.

Arrays over levels have T+1 entries, t = 0..T. Arrays over steps have T entries and column j is the
step t = j+1, which starts at σ_t: the first column is the cleanest step, the last the noisiest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from recast.core.arrays import Array
from recast.errors import RecastError

__all__ = ["from_scheduler", "from_shift", "grid", "same"]

_ROUNDING = 1e-6
"""How far a float32 scheduler may be from 0 and 1 without meaning another level."""
_ENDS = 0.02
"""How far the ends may be from 0 and 1: DPM-Solver with flow sigmas starts at 0.9997, or at 0.999 without a shift."""


def grid(sigmas: ArrayLike) -> Array:
    """A validated grid (T+1,) that increases strictly from 0 to 1, or from and to what the scheduler has instead.

    Parameters
    ----------
    sigmas : array-like, shape (T+1,)
        Noise levels from clean to noise. Ends within 1e-6 of 0 and 1 are set to 0 and 1; they may be up to 0.02 away.

    Returns
    -------
    ndarray, shape (T+1,)
        The levels in float64, a copy.

    Raises
    ------
    RecastError
        If the levels are not finite, do not increase strictly, leave [0, 1], or do not run from near 0 to near 1.

    Examples
    --------
    >>> grid([0, 0.5, 0.9999999]).tolist()
    [0.0, 0.5, 1.0]
    >>> grid([0, 0.5, 0.9997]).tolist()
    [0.0, 0.5, 0.9997]
    """
    try:
        levels = np.array(sigmas, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise RecastError(f"sigmas must be a list of numbers from 0 to 1, not {sigmas!r:.80}") from error
    if levels.ndim != 1 or levels.size < 2:
        raise RecastError(f"sigmas must be a list of T+1 >= 2 levels, not an array of shape {levels.shape}")
    if not np.isfinite(levels).all():
        raise RecastError(f"sigmas must be finite, but level {int(np.argmin(np.isfinite(levels)))} is not")
    levels[[0, -1]] = [_end(levels[0], 0.0), _end(levels[-1], 1.0)]
    if not (0 <= levels[0] <= _ENDS and 1 - _ENDS <= levels[-1] <= 1):
        raise RecastError(
            f"sigmas must run from 0 (clean) to 1 (noise), not from {levels[0]:g} to {levels[-1]:g}; "
            "for a scheduler's descending list use schedule.from_scheduler"
        )
    rises = np.diff(levels) > 0
    if not rises.all():
        t = int(np.argmin(rises)) + 1
        raise RecastError(f"sigmas must increase strictly, but sigma_{t} = {levels[t]:g} follows {levels[t - 1]:g}")
    return levels


def _end(level: float, end: float) -> float:
    return end if abs(level - end) <= _ROUNDING else float(level)


def from_scheduler(sigmas: Any) -> Array:
    """The grid (T+1,) of a diffusers scheduler, from its `sigmas` after `set_timesteps(T)`.

    Parameters
    ----------
    sigmas : list, array or tensor, shape (T+1,) or (T,)
        Noise levels that descend from 1 to 0, or from what the scheduler has instead, such as 0.9997. If the last one
        is above 0, the final 0 is appended, as the scheduler's own sampling loop does; for a scheduler that stops
        above 0, use `grid(sigmas[::-1])`.

    Returns
    -------
    ndarray, shape (T+1,)
        The levels in ascending order.

    Raises
    ------
    RecastError
        If the levels do not start near 1 or do not descend.

    Examples
    --------
    >>> from_scheduler([1.0, 0.75, 0.0]).tolist()
    [0.0, 0.75, 1.0]
    """
    try:
        values = np.asarray(sigmas.tolist() if hasattr(sigmas, "tolist") else sigmas, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise RecastError(f"a scheduler's sigmas must be a list of numbers, not {sigmas!r:.80}") from error
    if values.size and abs(values.flat[0] - 1) > _ENDS and values.flat[0] > values.flat[-1]:
        raise RecastError(
            f"a scheduler's sigmas must start at 1, pure noise, or at most {_ENDS:g} below, not at {values.flat[0]:g}"
        )
    if values.ndim != 1 or values.size < 1 or (values.size > 1 and values[0] < values[-1]):
        raise RecastError(
            "a scheduler's sigmas must be one list that falls from 1 to 0: call set_timesteps(T) first, "
            "and use schedule.grid for a rising list"
        )
    if values[-1] > _ROUNDING:
        values = np.append(values, 0.0)
    return grid(values[::-1])


def from_shift(steps: int, shift: float = 3.0, train_steps: int = 1000) -> Array:
    """The grid of diffusers' `FlowMatchEulerDiscreteScheduler(shift=shift)` for T = `steps`, without torch.

    That scheduler shifts its training sigmas once, spaces T levels evenly between their ends, and shifts again;
    therefore the cleanest step is very short (it starts at 0.0089 for shift 3). If the pipeline is available, use its
    own levels with `from_scheduler`.

    Parameters
    ----------
    steps : int
        T, at least 1.
    shift : float, default 3.0
        The scheduler's shift; 3 is that of Stable Diffusion 3.
    train_steps : int, default 1000
        The scheduler's `num_train_timesteps`.

    Returns
    -------
    ndarray, shape (T+1,)
        The levels in ascending order.

    Raises
    ------
    RecastError
        If `steps` is below 1 or `shift` is not positive.

    Examples
    --------
    >>> from_shift(4).round(4).tolist()
    [0.0, 0.0089, 0.6022, 0.8577, 1.0]
    """
    if steps < 1:
        raise RecastError(f"steps must be at least 1, not {steps}")
    if not shift > 0:
        raise RecastError(f"shift must be positive, not {shift:g}")

    def shifted(sigma: Array) -> Array:
        return shift * sigma / (1 + (shift - 1) * sigma)

    lowest = float(shifted(np.array(1 / train_steps)))
    return grid(np.append(0.0, shifted(np.linspace(1.0, lowest, steps))[::-1]))


def same(a: Sequence[float] | Array, b: Sequence[float] | Array) -> bool:
    """Whether two grids are equal up to the float32 rounding of schedulers."""
    first, second = np.asarray(a), np.asarray(b)
    return first.shape == second.shape and bool(np.allclose(first, second, rtol=0, atol=_ROUNDING))
