"""The two estimators of conditional rewards: ends of rollouts from noised proposals, before they are scored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recast.errors import RecastError
from recast.estimate.shards import Rollouts
from recast.flow import sampling
from recast.flow.policy import Velocity

__all__ = ["Sampled", "Scorer", "coupled", "paper", "visited"]

_Array = NDArray[np.float64]
Scorer = Callable[[Tensor], "Tensor | _Array"]
"""Scores of clean samples by every reward: (B, ...) to (m, B)."""


@dataclass(frozen=True)
class Sampled:
    """Rollouts of one prompt that are not scored yet.

    Parameters
    ----------
    clean : Tensor, (N, ...)
        The proposals, which level 0 is scored on.
    ends : Tensor, (T, S·K, ...)
        Ends of the K rollouts from each of the S = N · `noisings` noised samples, for the levels t = 1..T.
    noisings : int
        Noisings per proposal.
    repeats : int
        K, rollouts per noised sample.
    evaluations : int
        Velocity evaluations, one per row of a velocity call.

    Examples
    --------
    One proposal at 0 whose two rollouts end at 1 and 3, scored by its value:

    >>> made = Sampled(torch.zeros(1, 1), torch.tensor([[[1.0], [3.0]]]), noisings=1, repeats=2, evaluations=2)
    >>> made.score(lambda x: x.T).mu
    array([[[0.],
            [2.]]])
    """

    clean: Tensor
    ends: Tensor
    noisings: int
    repeats: int
    evaluations: int

    @torch.no_grad()
    def score(self, score: Scorer) -> Rollouts:
        """Scores (m, T+1, S, K) of all ends, and of the proposals for level 0.

        Parameters
        ----------
        score : callable, (B, ...) to (m, B)
            Scores of clean samples by every reward.
        """
        levels = len(self.ends)
        rolled = _scores(score, self.ends.flatten(0, 1)).reshape(
            -1, levels, len(self.clean) * self.noisings, self.repeats
        )
        own = _scores(score, self.clean).repeat(self.noisings, axis=1)[:, None, :, None]
        own = np.broadcast_to(own, rolled[:, :1].shape)
        return Rollouts(np.concatenate([own, rolled], axis=1), self.evaluations)


def paper(
    velocity: Velocity,
    clean: Tensor,
    grid: Sequence[float],
    repeats: int = 16,
    sampler: sampling.Method = "ancestral",
    seed: int = 0,
) -> Sampled:
    """Rollouts by Alg. 1 as printed: at every level, one noising of each x̃_0 and K independent rollouts from it.

    Parameters
    ----------
    velocity, clean
        As for `rollouts`.
    grid : sequence of float, (T+1,)
        Noise levels σ_0 = 0 to σ_T = 1.
    repeats : int, default 16
        K, rollouts per noised sample.
    sampler : {"ancestral", "ancestral2", "sde", "euler", "dpm2"}, default "ancestral"
        The paper leaves the sampler open; only one that draws from the posterior estimates E[r | x_t].
    seed : int, default 0
        Seed of all noise.

    Returns
    -------
    Sampled
        Ends (T, N·K, ...) of the rollouts.

    Examples
    --------
    >>> from recast.flow.mixture_prompts import mixture_prompt
    >>> prompt = mixture_prompt(dimension=4, modes=3, seed=0)
    >>> clean = prompt.proposal.sample(2, torch.Generator().manual_seed(0))
    >>> made = paper(prompt.policy, clean, [0.0, 0.3, 0.7, 1.0], repeats=16)
    >>> made.ends.shape, made.evaluations  # N·K·T(T+1)/2
    (torch.Size([3, 32, 4]), 192)
    """
    generator = torch.Generator().manual_seed(seed)
    samples = len(clean)

    def noise(shape: torch.Size) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=clean.dtype).to(clean.device)

    repeated = torch.Size((samples * repeats, *clean.shape[1:]))
    step_noise = None if sampler in sampling.DETERMINISTIC else lambda _level: noise(repeated)
    ends = []
    for t in range(1, len(grid)):
        noised = (1 - grid[t]) * clean + grid[t] * noise(clean.shape)
        x = noised.repeat_interleave(repeats, dim=0)
        ends.append(sampling.sample(velocity, x, grid, method=sampler, start=t, noise=step_noise))
    steps = len(grid) - 1
    return Sampled(clean, torch.stack(ends), 1, repeats, samples * repeats * steps * (steps + 1) // 2)


def coupled(
    velocity: Velocity,
    clean: Tensor,
    grid: Sequence[float],
    noisings: int = 4,
    repeats: int = 1,
    levels: Sequence[float] | None = None,
    seed: int = 0,
) -> Sampled:
    """Rollouts from all levels that share their noise: the expectation of `paper` at a fraction of the evaluations.

    One noise path b_σ from σ = 1 to 0, the ancestral chain of a clean sample at the origin, serves a noising at all
    levels: rollouts start at x_t = (1−σ_t) x̃_0 + b_{σ_t}, and the step from σ to σ' adds the path's own noise
    b_σ' − A b_σ. Rollouts of adjacent levels then differ only in that one of them took x̂0 for x̃_0 over one step, so
    their difference, the gain, has little noise. Half of the paths mirror the other half.

    Parameters
    ----------
    velocity, clean
        As for `rollouts`.
    grid : sequence of float, (T+1,)
        Noise levels σ_0 to σ_T.
    noisings, repeats, levels, seed
        As for `sample`. Rollouts visit `levels` instead of the grid, with the steps of `ancestral2`.

    Returns
    -------
    Sampled
        Ends (T, N·noisings·K, ...) of the rollouts.

    Examples
    --------
    >>> from recast.flow.mixture_prompts import mixture_prompt
    >>> prompt = mixture_prompt(dimension=4, modes=3, seed=0)
    >>> clean = prompt.proposal.sample(2, torch.Generator().manual_seed(0))
    >>> made = coupled(prompt.policy, clean, [0.0, 0.3, 0.7, 1.0], noisings=4, levels=[0.2, 0.5])
    >>> made.ends.shape, made.evaluations
    (torch.Size([3, 8, 4]), 64)
    """
    walk = visited(grid, levels)
    every = sorted({*grid, *walk})
    path = dict(zip(every, _noise_paths(clean, every, noisings, repeats, seed), strict=True))
    origin = clean.repeat_interleave(noisings, dim=0)[:, None]
    standing: dict[float, list[_Front]] = {level: [] for level in every}
    evaluations = 0
    for level in reversed(every[1:]):
        fronts = standing.pop(level)
        if level in grid[1:]:
            fronts.append(_join(grid.index(level), origin, level, path[level]))
        if fronts:
            lower = max(sigma for sigma in walk if sigma < level)
            denoised = _denoise(velocity, fronts, level)
            noise = _step_noise(path, level, lower)
            standing[lower] += [front.step(x0, level, lower, noise) for front, x0 in zip(fronts, denoised, strict=True)]
            evaluations += denoised.shape[:3].numel()
    ends = [front.x.flatten(0, 1) for front in sorted(standing[0.0], key=lambda front: front.start)]
    return Sampled(clean, torch.stack(ends), noisings, repeats, evaluations)


@dataclass(frozen=True)
class _Front:
    """Rollouts (S, K, ...) that started at the grid level `start`, at the level where they stand now.

    `previous` is x̂0 at the level before; `correct` weighs its change in the correction of the step that led here.
    """

    start: int
    x: Tensor
    previous: Tensor | None = None
    correct: float = 0.0

    def step(self, denoised: Tensor, level: float, lower: float, noise: Tensor) -> _Front:
        """The same rollouts one `ancestral2` step further down, at `lower`."""
        x = self.x
        if self.previous is not None:
            x, denoised = sampling.corrected(x, denoised, self.previous, self.correct)
        keep, pull, _ = sampling.coefficients(level, lower, 1.0)
        return _Front(self.start, keep * x + pull * denoised + noise, denoised, sampling.correction(level, lower))


def _join(start: int, origin: Tensor, level: float, path: Tensor) -> _Front:
    """The rollouts that start here: the K of a noised sample share x_t, noised by the first path."""
    noised = (1 - level) * origin + path[:, :1]
    return _Front(start, noised.expand_as(path))


def _denoise(velocity: Velocity, fronts: Sequence[_Front], level: float) -> Tensor:
    """x̂0 (F, S, K, ...) of all F fronts at a level, by one velocity call."""
    stacked = torch.stack([front.x for front in fronts])
    x = stacked.flatten(0, 2)
    return (x - level * velocity(x, level)).view_as(stacked)


def _step_noise(path: dict[float, Tensor], level: float, lower: float) -> Tensor:
    """What the noise path adds between two levels."""
    keep, _, _ = sampling.coefficients(level, lower, 1.0)
    return path[lower] - keep * path[level]


def visited(grid: Sequence[float], levels: Sequence[float] | None) -> list[float]:
    """The levels that coupled rollouts visit, in order; by default `sampling.rollout_levels(grid)`."""
    walk = sorted({0.0, *map(float, sampling.rollout_levels(grid) if levels is None else levels)})
    for sigma in walk:
        if not 0 <= sigma < 1:
            raise RecastError(f"rollout levels must lie in [0, 1), but one is {sigma:g}")
    return walk


def _noise_paths(clean: Tensor, levels: list[float], noisings: int, repeats: int, seed: int) -> list[Tensor]:
    """Noise paths b (N·noisings, repeats, ...) at each level, with b_σ ~ N(0, σ²).

    The paths of proposal n depend on `seed` and n alone, so the proposals of a prompt may be split over batches or
    machines.
    """
    drawn = (noisings + 1) // 2
    images = []
    for n in range(len(clean)):
        state = int(np.random.SeedSequence([seed, n]).generate_state(1, np.uint64)[0])
        generator = torch.Generator().manual_seed(state % 2**63)
        shape = (len(levels), drawn, repeats, *clean.shape[1:])
        z = torch.randn(shape, generator=generator, dtype=clean.dtype)
        images.append(torch.cat([z, -z], dim=1)[:, :noisings])
    fresh = torch.stack(images, dim=1).flatten(1, 2).to(clean.device)
    path = levels[-1] * fresh[-1]
    paths = [path]
    for j in range(len(levels) - 1, 0, -1):
        keep, _, amount = sampling.coefficients(levels[j], levels[j - 1], 1.0)
        path = keep * path + amount * fresh[j - 1]
        paths.append(path)
    return paths[::-1]


def _scores(score: Scorer, samples: Tensor) -> _Array:
    values = score(samples)
    table = values.detach().cpu().double().numpy() if isinstance(values, Tensor) else np.asarray(values, np.float64)
    if table.ndim != 2 or table.shape[1] != len(samples):
        raise RecastError(f"a scorer must return (rewards, {len(samples)}) scores, not the shape {table.shape}")
    return table
