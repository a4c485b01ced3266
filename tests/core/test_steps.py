"""Levels that are not the steps of W are refused; the numbers are those of Flow-Factory's grid."""

import math

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from recast import RecastError, WeightMatrix
from recast.core import schedule
from recast.core.steps import ROUNDING, match, tolerances


def diffusers(steps: int) -> WeightMatrix:
    """W on the grid of SD3's own scheduler."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(steps)
    return WeightMatrix(("ocr",), schedule.from_scheduler(scheduler.sigmas), [[1 / steps] * steps], [1.0])


def flow_factory(steps: int) -> np.ndarray:
    """linspace(1, 1/T) with shift 3, noisiest first."""
    even = np.linspace(1, 1 / steps, steps)
    return 3 * even / (1 + 2 * even)


def test_the_numbers_of_the_two_grids() -> None:
    np.testing.assert_allclose(flow_factory(5), [1, 0.923, 0.818, 0.667, 0.429], atol=5e-4)
    np.testing.assert_allclose(diffusers(5).sigmas[:0:-1], [1, 0.900, 0.751, 0.503, 0.009], atol=5e-4)
    wrong = diffusers(25).columns(flow_factory(25)[::-1]) != np.arange(25)
    assert wrong.sum() == 11, "of 25 steps look up the wrong column, and nothing says so"


@pytest.mark.parametrize("steps", [4, 5, 10, 25, 50])
def test_the_other_grid_is_refused(steps: int) -> None:
    W, other = diffusers(steps), flow_factory(steps)
    with pytest.raises(RecastError, match=r"curves\.resample\(sigmas\)"):
        W.check(other)
    with pytest.raises(RecastError, match="are not steps of W"):
        W.mix([[1.0]], sigmas=other[None], strict=True)
    assert W.mix([[1.0]], sigmas=other[None]).shape == (1, steps), "the nearest step, unless strict"
    grid = [0, *other[::-1]]
    assert WeightMatrix(("ocr",), grid, W.matrix, [1.0]).check(other).unused == (), "and W of that grid is not"


def test_the_largest_distance_is_named() -> None:
    with pytest.raises(RecastError, match=r"^4 of 5 .*: 0\.6667 is 0\.0845 from the nearest, 0\.7511; weigh again"):
        diffusers(5).check(torch.tensor(flow_factory(5)).expand(3, 5))


@pytest.mark.parametrize("steps", [1, 5, 10, 25, 50])
def test_what_trainers_make_of_the_same_grid_is_accepted(steps: int) -> None:
    """float32, integers (verl-omni) and, up to 25 steps, bfloat16."""
    W = diffusers(steps)
    timesteps = torch.tensor(1000 * W.sigmas[1:], dtype=torch.float32).flip(0)
    assert W.check(timesteps / 1000).distance < 1e-6
    assert 0 < W.check(timesteps.long() / 1000).distance < 1e-3 or steps == 1
    if steps <= 25:
        assert W.check(timesteps.bfloat16() / 1000).unused == ()


def test_what_is_accepted_has_one_nearest_step() -> None:
    for grid in ([0, 1.0], [0, 0.001, 0.0015, 0.5, 1], diffusers(50).sigmas):
        levels = np.asarray(grid)
        allowed, gaps = tolerances(levels), np.diff(levels)
        assert (allowed < gaps / 2).all()
        assert (allowed[:-1] < gaps[1:] / 2).all()
        assert (allowed <= np.maximum(gaps / 10, ROUNDING) + 1e-12).all()
        inside = allowed * (1 - 1e-6)
        edges = np.clip(np.concatenate([levels[1:] - inside, levels[1:] + inside]), 0, 1)
        assert match(levels, edges).unused == ()


def test_a_column_that_is_never_hit_is_reported() -> None:
    W = diffusers(5)
    found = W.check(W.sigmas[[5, 5, 3]])
    assert found.unused == (0, 1, 3)
    assert found.distance == 0.0


@pytest.mark.parametrize("level", [math.nan, -0.1, 1.5, 0.3])
def test_nonsense_is_refused(level: float) -> None:
    with pytest.raises(RecastError, match="1 of 2 noise levels"):
        diffusers(5).check([1.0, level])
