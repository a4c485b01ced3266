"""Pairs: every image at different levels, with the r of that level and noise of its own; micro-batches lose nothing."""

import numpy as np
import torch

from recast import WeightMatrix
from recast.train import groups, pairs

SIGMAS = [0.0, 0.3, 0.6, 0.8, 1.0]
WEIGHTS = WeightMatrix(("a",), SIGMAS, [[0.25] * 4], [1.0])
SEEDS = groups.seeds(0, 0, 5, pairs.SEEDS + 4)
QUALITY = torch.arange(20.0).reshape(5, 4) / 20


def test_every_field_belongs_to_the_same_image_and_level() -> None:
    made = pairs.draw(SEEDS, 10, QUALITY, WEIGHTS, SIGMAS, 3)
    assert len(made) == 15
    assert made.row.tolist() == [row for row in range(10, 15) for _ in range(3)]
    for row, column, sigma, r, seed in zip(made.row, made.column, made.sigma, made.r, made.seed, strict=True):
        assert sigma == torch.tensor(SIGMAS[column + 1])
        assert r == QUALITY[row - 10, column]
        assert seed == SEEDS[row - 10, 2 + column]
    levels = made.column.reshape(5, 3)
    assert all(len(set(each.tolist())) == 3 for each in levels)
    assert len({tuple(each.tolist()) for each in levels}) > 1  # an order of its own for each image


def test_an_image_s_pairs_do_not_depend_on_the_others() -> None:
    whole = pairs.draw(SEEDS, 0, QUALITY, WEIGHTS, SIGMAS, 2)
    alone = pairs.draw(SEEDS[3:4], 3, QUALITY[3:4], WEIGHTS, SIGMAS, 2)
    for name in ("row", "column", "sigma", "r", "seed"):
        assert torch.equal(getattr(alone, name), getattr(whole, name)[6:8])
    assert torch.equal(alone.noise((2, 3)), whole.noise((2, 3))[6:8])


def test_micro_batches_are_the_pairs_in_order() -> None:
    made = pairs.draw(SEEDS, 0, QUALITY, WEIGHTS, SIGMAS, 4)
    parts = list(made.split(8))
    assert [len(part) for part in parts] == [8, 8, 4]
    for name in ("row", "column", "sigma", "r", "seed"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(made, name))
    noise = torch.cat([part.noise((3,)) for part in parts])
    assert len(np.unique(noise.numpy(), axis=0)) == 20
