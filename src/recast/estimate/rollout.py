"""The numerical heart of `estimate`: conditional rewards μ by rollouts from noised proposals.

Both estimators take one prompt's velocity, clean proposal samples x̃_0 (N, ...) of any shape, the grid
σ_0..σ_T and a scorer, and return the score of every rollout. What becomes of them (α, aggregation over
prompts, gains) is `recast.core.renyi`'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from recast.core import schedule
from recast.errors import RecastError
from recast.estimate.shards import Rollouts
from recast.flow import sampling
from recast.flow.policy import Velocity

Array = NDArray[np.float64]
Estimator = Literal["coupled", "paper"]
ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)
Scorer = Callable[[Tensor], "Tensor | Array"]
"""Scores of clean samples by every reward: (B, ...) to (m, B)."""


@dataclass(frozen=True)
class Sampled:
    """Rollouts before they are scored: S·K ends for every level t ≥ 1, and the proposals themselves."""

    clean: Tensor
    ends: Tensor
    noisings: int
    repeats: int
    evaluations: int

    @torch.no_grad()
    def score(self, score: Scorer) -> Rollouts:
        """Score every end, and the proposals for level 0."""
        levels = len(self.ends)
        rolled = _scores(score, self.ends.flatten(0, 1)).reshape(
            -1, levels, len(self.clean) * self.noisings, self.repeats
        )
        own = _scores(score, self.clean).repeat(self.noisings, axis=1)[:, None, :, None]
        own = np.broadcast_to(own, rolled[:, :1].shape)
        return Rollouts(np.concatenate([own, rolled], axis=1), self.evaluations)


def rollouts(velocity: Velocity, clean: Tensor, sigmas: ArrayLike, score: Scorer, **options: Any) -> Rollouts:
    """Rollouts of one prompt by either estimator, scored: `sample` with its options, then `Sampled.score`."""
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

    `coupled`: `noisings` noisings of each proposal, `repeats` rollouts from each (1 is best at α = 2;
    keep at least 4 otherwise), along `levels` (default `sampling.rollout_levels(sigmas)`). `paper`: Alg. 1, one fresh
    noising of each proposal at each level and `repeats` (K) rollouts along the grid with `sampler`
    (default `ancestral`).
    """
    grid = schedule.grid(sigmas).tolist()
    if clean.ndim < 2 or len(clean) < 1:
        raise RecastError(f"proposals must be a batch (N, ...) of at least one sample, not {tuple(clean.shape)}")
    if repeats < 1 or noisings < 1:
        raise RecastError(f"noisings and repeats must be at least 1, not {noisings} and {repeats}")
    if seed < 0:
        raise RecastError(f"seed must not be negative, but it is {seed}")
    if estimator == "paper":
        if levels is not None:
            raise RecastError("levels belong to the coupled estimator; Alg. 1 walks down the grid itself")
        return paper(velocity, clean, grid, repeats, sampler or "ancestral", seed)
    if estimator == "coupled":
        if sampler is not None:
            raise RecastError(f"the sampler {sampler!r} belongs to the paper's estimator; coupled has its own")
        return coupled(velocity, clean, grid, noisings, repeats, levels, seed)
    raise RecastError(f"unknown estimator {estimator!r}: choose one of {', '.join(ESTIMATORS)}")


def paper(
    velocity: Velocity,
    clean: Tensor,
    grid: Sequence[float],
    repeats: int = 16,
    sampler: sampling.Method = "ancestral",
    seed: int = 0,
) -> Sampled:
    """Alg. 1 as printed: at every level one noising of each x̃_0 and K independent rollouts from it.

    The paper leaves the rollouts' sampler open; only one that draws from the posterior estimates
    E[r | x_t], so `ancestral` is the default.
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
    """The same expectation, up to the rollouts' discretisation, at a fraction of the evaluations.

    One noise path b_σ from σ = 1 to 0, the ancestral chain of a clean sample at the origin, serves a
    noising for all levels: it starts at x_t = (1−σ_t) x̃_0 + b_{σ_t} for every t, and a rollout's step
    from σ to σ' adds b_σ' − A b_σ, the path's own noise between the two. So adjacent levels' rollouts
    differ only in that one of them took x̂0 for x̃_0 over one step, and their difference, the gain, has
    little noise. Half the paths mirror the other half. Rollouts walk down `levels` (`ancestral2`), not
    the grid; all that stand at one level take their step as one batch.
    """
    walk = _check_levels(sampling.rollout_levels(grid) if levels is None else levels)
    every = sorted({*grid, *walk})
    path = dict(zip(every, _noise_paths(clean, every, noisings, repeats, seed), strict=True))
    stacked = clean.repeat_interleave(noisings, dim=0)[:, None].expand_as(path[0.0])
    waiting: dict[float, list[_Front]] = {level: [] for level in every}
    evaluations = 0
    for level in reversed(every[1:]):
        fronts = waiting.pop(level)
        if level in grid:
            start = (1 - level) * stacked + path[level][:, :1]
            fronts.append(_Front(grid.index(level), start.expand_as(path[level])))
        if not fronts:
            continue
        x = torch.stack([front.x for front in fronts]).flatten(0, 2)
        denoised = (x - level * velocity(x, level)).view(len(fronts), *path[level].shape)
        evaluations += len(x)
        lower = max(sigma for sigma in walk if sigma < level)
        keep, pull, _ = sampling.coefficients(level, lower, 1.0)
        noise = path[lower] - keep * path[level]
        for front, target in zip(fronts, denoised, strict=True):
            x = front.x
            if front.target is not None:
                x, target = sampling.corrected(x, target, front.target, front.correct)
            arrival = keep * x + pull * target + noise
            waiting[lower].append(_Front(front.start, arrival, target, sampling.correction(level, lower)))
    ends = [front.x.flatten(0, 1) for front in sorted(waiting[0.0], key=lambda front: front.start)]
    return Sampled(clean, torch.stack(ends), noisings, repeats, evaluations)


@dataclass(frozen=True)
class _Front:
    """Rollouts (S, K, ...) that started at level index `start` and stand where they are now."""

    start: int
    x: Tensor
    target: Tensor | None = None
    correct: float = 0.0


def planned_evaluations(
    sigmas: ArrayLike, estimator: Estimator, samples: int, noisings: int, repeats: int, levels: Sequence[float] | None
) -> int:
    """Velocity evaluations that `rollouts` takes for one prompt, without taking them."""
    grid = schedule.grid(sigmas).tolist()
    if estimator == "paper":
        return samples * repeats * ((len(grid) - 1) * len(grid) // 2)
    walk = _check_levels(sampling.rollout_levels(grid) if levels is None else levels)
    steps = sum(1 + sum(0 < level < start for level in walk) for start in grid[1:])
    return samples * noisings * repeats * int(steps)


def _check_levels(levels: Sequence[float]) -> list[float]:
    walk = sorted({0.0, *map(float, levels)})
    for sigma in walk:
        if not 0 <= sigma < 1:
            raise RecastError(f"rollout levels must lie in [0, 1), but one is {sigma:g}")
    return walk


def _noise_paths(clean: Tensor, levels: list[float], noisings: int, repeats: int, seed: int) -> list[Tensor]:
    """Noise paths b (N·noisings, repeats, ...) at each level; each b_σ is N(0, σ²) on its own.

    The paths of proposal n depend on `seed` and n alone, so a prompt's proposals may be split over
    batches or machines.
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
    path = fresh[-1]
    paths = [path]
    for j in range(len(levels) - 1, 0, -1):
        keep, _, amount = sampling.coefficients(levels[j], levels[j - 1], 1.0)
        path = keep * path + amount * fresh[j - 1]
        paths.append(path)
    return paths[::-1]


def _scores(score: Scorer, samples: Tensor) -> Array:
    values = score(samples)
    table = values.detach().cpu().double().numpy() if isinstance(values, Tensor) else np.asarray(values, np.float64)
    if table.ndim != 2 or table.shape[1] != len(samples):
        raise RecastError(f"a scorer must return (rewards, {len(samples)}) scores, not the shape {table.shape}")
    return table
