"""The (image, level) pairs of one optimizer step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recast.core.weights import WeightMatrix
from recast.flow.generate import start_noise
from recast.train import advantage

__all__ = ["SEEDS", "Pairs", "draw", "weight"]

SEEDS = 2
"""Seeds per image before those of its T noises: one for its start noise, one for the choice of its levels."""


@dataclass(frozen=True)
class Pairs:
    """What one process trains on in one optimizer step; every field has one entry per pair.

    `row` is the image's row in the process's `Rollout`, `column` the column of W (t − 1), `sigma` the noise level σ_t,
    `r` the image's optimality at that level, `seed` the seed of the noise that is added to it, and `anchored` whether
    its distance to the base is computed.
    """

    row: Tensor
    column: Tensor
    sigma: Tensor
    r: Tensor
    seed: Tensor
    anchored: Tensor

    def __len__(self) -> int:
        return len(self.row)

    def split(self, size: int) -> Iterator[Pairs]:
        """Micro-batches of `size` pairs, in order."""
        for parts in zip(*(getattr(self, field.name).split(size) for field in fields(self)), strict=True):
            yield Pairs(*parts)

    def noise(self, shape: Sequence[int]) -> Tensor:
        """The noise ε of every pair (n, *shape), on the CPU."""
        return start_noise(shape, self.seed.tolist())


def draw(
    seeds: NDArray[np.int64],
    first: int,
    quality: Tensor,
    weights: WeightMatrix,
    sigmas: Sequence[float],
    count: int,
    anchor: int = 1,
    before: int = 0,
) -> Pairs:
    """Pairs of n images, each with `count` different levels in random order.

    `seeds` (n, SEEDS + T) are those of `groups.seeds` for the images, which have the rows from `first` on, and
    `quality` (n, T) is their optimality at every step. A pair finds its r by σ, since its position in
    the batch does not determine its step. Every `anchor`-th pair of the optimizer step, in which
    `before` images come before these, is compared with the base; none for 0.
    """
    column = torch.stack([_choose(len(sigmas) - 1, count, seed) for seed in seeds[:, 1].tolist()])
    row = torch.arange(first, first + len(seeds))[:, None].expand_as(column)
    sigma = torch.tensor(sigmas)[column + 1]
    r = advantage.by_sigma(quality, weights, sigma)
    noise = torch.from_numpy(seeds[:, SEEDS:]).gather(1, column)
    place = torch.arange(column.numel()) + before * count
    anchored = place % anchor == 0 if anchor else place < 0
    return Pairs(*(each.flatten() for each in (row, column, sigma, r, noise, anchored)))


def weight(anchor: int, total: int) -> float:
    """The weight of an anchored pair that makes up for the others, if every `anchor`-th of `total` is anchored.

    >>> weight(4, 8), weight(4, 6), weight(1, 6)
    (4.0, 3.0, 1.0)
    """
    return total / -(-total // anchor)


def _choose(steps: int, count: int, seed: int) -> Tensor:
    """`count` different columns in random order."""
    return torch.randperm(steps, generator=torch.Generator().manual_seed(seed))[:count]
