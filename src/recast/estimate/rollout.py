"""Conditional rewards μ of one prompt, by rollouts from noised proposals.

Rényi order, aggregation over prompts and gains are in `recast.core.renyi`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from recast.core import schedule
from recast.errors import RecastError
from recast.estimate.estimators import Sampled, Scorer, coupled, paper, visited
from recast.estimate.shards import Rollouts
from recast.flow import sampling
from recast.flow.policy import Velocity

__all__ = ["ESTIMATORS", "Estimator", "call_rows", "planned_evaluations", "rollouts", "sample"]

Estimator = Literal["coupled", "paper"]
ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)


def rollouts(velocity: Velocity, clean: Tensor, sigmas: ArrayLike, score: Scorer, **options: Any) -> Rollouts:
    """Scored rollouts of one prompt by either estimator.

    Parameters
    ----------
    velocity : callable, ((B, ...), float) to (B, ...)
        The policy's velocity v(x, σ) for the prompt.
    clean : Tensor, (N, ...)
        Proposals x̃_0, clean samples of π⁺.
    sigmas : array_like, (T+1,)
        Noise levels σ_0 = 0 to σ_T = 1.
    score : callable, (B, ...) to (m, B)
        Scores of clean samples by every reward.
    **options
        Keyword arguments of `sample`: `estimator`, `noisings`, `repeats`, `levels`, `sampler`, `seed`.

    Returns
    -------
    Rollouts
        Scores (m, T+1, S, K) and the number of velocity evaluations.

    Raises
    ------
    RecastError
        If an argument is out of range, or if `score` returns a wrong shape.

    Examples
    --------
    Eight proposals of an exact Gaussian mixture with three rewards, four noisings each, at T = 5:

    >>> from recast.core import schedule
    >>> from recast.flow.mixture import score_all
    >>> from recast.flow.mixture_prompts import mixture_prompt
    >>> prompt = mixture_prompt(dimension=4, modes=3, seed=0)
    >>> clean = prompt.proposal.sample(8, torch.Generator().manual_seed(0))
    >>> found = rollouts(prompt.policy, clean, schedule.from_shift(5), score_all(list(prompt.rewards)))
    >>> found.scores.shape, found.mu.shape
    ((3, 6, 32, 1), (3, 6, 32))
    """
    return sample(velocity, clean, sigmas, **options).score(score)


@torch.no_grad()
def sample(
    velocity: Velocity,
    clean: Tensor,
    sigmas: ArrayLike,
    *,
    estimator: Estimator = "coupled",
    noisings: int = 4,
    repeats: int = 1,
    levels: Sequence[float] | None = None,
    sampler: sampling.Method | None = None,
    seed: int = 0,
) -> Sampled:
    """Rollouts of one prompt by either estimator, not scored yet.

    Parameters
    ----------
    velocity, clean, sigmas
        As for `rollouts`.
    estimator : {"coupled", "paper"}, default "coupled"
        `paper` is Alg. 1; `coupled` has the same expectation with less noise at equal cost.
    noisings : int, default 4
        Noisings per proposal (`coupled`; `paper` draws one per proposal and level).
    repeats : int, default 1
        K, rollouts per noised sample. 1 is best at α = 2; use at least 4 at other orders.
    levels : sequence of float, optional
        Levels that the rollouts visit (`coupled`); by default `sampling.rollout_levels(sigmas)`.
    sampler : str, optional
        Sampler of the rollouts (`paper`); by default `ancestral`.
    seed : int, default 0
        Seed of all noise.

    Returns
    -------
    Sampled
        Ends of the rollouts, and the number of velocity evaluations.

    Raises
    ------
    RecastError
        If an argument is out of range, or belongs to the other estimator.

    Examples
    --------
    >>> sample(lambda x, sigma: x, torch.zeros(2, 3), [0.0, 0.5, 1.0], noisings=4).ends.shape  # (T, N·noisings·K, ...)
    torch.Size([2, 8, 3])
    """
    grid = schedule.grid(sigmas).tolist()
    _check(clean, noisings, repeats, seed)
    if estimator == "paper":
        if levels is not None:
            raise RecastError("levels belong to the estimator coupled; paper walks down the grid itself")
        return paper(velocity, clean, grid, repeats, sampler or "ancestral", seed)
    if estimator == "coupled":
        if sampler is not None:
            raise RecastError(f"the sampler {sampler!r} belongs to the estimator paper; coupled uses ancestral2")
        return coupled(velocity, clean, grid, noisings, repeats, levels, seed)
    raise RecastError(f"unknown estimator {estimator!r}: choose one of {', '.join(ESTIMATORS)}")


def call_rows(
    sigmas: ArrayLike, estimator: Estimator, samples: int, noisings: int, repeats: int, levels: Sequence[float] | None
) -> list[int]:
    """Rows of every velocity call that `sample` makes for one prompt; their sum is the number of evaluations.

    >>> call_rows([0.0, 0.5, 1.0], "paper", samples=2, noisings=1, repeats=4, levels=None)
    [8, 8, 8]
    """
    grid = schedule.grid(sigmas).tolist()
    steps = len(grid) - 1
    if estimator == "paper":
        return [samples * repeats] * (steps * (steps + 1) // 2)
    walk, starts = visited(grid, levels), grid[1:]
    # At a level stand the rollouts that start there, and on a level of the walk all that started above.
    fronts = [
        sum(start > level for start in starts) * (level in walk) + (level in starts)
        for level in sorted({*starts, *walk})
        if level > 0
    ]
    return [samples * noisings * repeats * count for count in fronts if count]


def planned_evaluations(
    sigmas: ArrayLike, estimator: Estimator, samples: int, noisings: int, repeats: int, levels: Sequence[float] | None
) -> int:
    """The number of velocity evaluations that `rollouts` takes for one prompt."""
    return sum(call_rows(sigmas, estimator, samples, noisings, repeats, levels))


def _check(clean: Tensor, noisings: int, repeats: int, seed: int) -> None:
    if clean.ndim < 2 or len(clean) < 1:
        raise RecastError(f"proposals must be a batch (N, ...) of at least one sample, not {tuple(clean.shape)}")
    if repeats < 1 or noisings < 1:
        raise RecastError(f"noisings and repeats must be at least 1, not {noisings} and {repeats}")
    if seed < 0:
        raise RecastError(f"seed must not be negative, but it is {seed}")
