"""The level grid and its validation."""

import numpy as np
import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler

from recast.core import schedule
from recast.errors import RecastError
from recast.weigh.stage import static


def test_shift_three_gives_the_grid_of_sd3() -> None:
    grid = schedule.from_shift(10, 3.0)
    known = [1, 0.960, 0.913, 0.858, 0.790, 0.707, 0.602, 0.465, 0.278, 0.0089, 0]
    np.testing.assert_allclose(grid[::-1], known, atol=5e-4)


@pytest.mark.parametrize("shift", [1.0, 3.0, 7.5])
@pytest.mark.parametrize("steps", [1, 2, 10, 25])
def test_from_shift_and_from_scheduler_agree_with_diffusers(steps: int, shift: float) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(steps)
    own = schedule.from_scheduler(scheduler.sigmas)
    assert own.shape == (steps + 1,)
    assert own[0] == 0
    assert own[-1] == 1
    np.testing.assert_allclose(schedule.from_shift(steps, shift), own, atol=1e-6)
    assert schedule.same(own, schedule.from_shift(steps, shift))


def test_from_scheduler_takes_lists_tensors_and_a_missing_zero() -> None:
    expected = [0, 0.25, 1]
    for given in ([1, 0.25, 0], np.array([1, 0.25, 0]), torch.tensor([1, 0.25, 0]), [1, 0.25]):
        np.testing.assert_array_equal(schedule.from_scheduler(given), expected)


@pytest.mark.parametrize(
    ("sigmas", "words"),
    [
        ([0.0], "T\\+1 >= 2"),
        ([[0.0, 1.0]], "shape"),
        ([0.0, 0.5, 0.5, 1.0], "sigma_2 = 0.5 follows 0.5"),
        ([0.0, 0.7, 0.3, 1.0], "sigma_2 = 0.3 follows 0.7"),
        ([1.0, 0.5, 0.0], "from_scheduler"),
        ([0.0, 0.5, 0.9], "to 0.9"),
        ([0.1, 0.5, 1.0], "from 0.1"),
        ([-0.01, 0.5, 1.0], "from -0.01"),
        ([0.0, 0.5, 1.01], "to 1.01"),
        ([0.0, float("nan"), 1.0], "finite"),
        (["a", "b"], "list of numbers"),
    ],
)
def test_a_wrong_grid_is_named(sigmas: list[float], words: str) -> None:
    with pytest.raises(RecastError, match=words):
        schedule.grid(sigmas)


def test_wrong_shift_steps_and_scheduler_lists() -> None:
    for call, words in (
        (lambda: schedule.from_shift(0), "steps must be at least 1"),
        (lambda: schedule.from_shift(5, 0.0), "shift must be positive"),
        (lambda: schedule.from_scheduler([0.0, 0.5, 1.0]), "falls from 1 to 0"),
        (lambda: schedule.from_scheduler(["a"]), "list of numbers"),
        (
            lambda: schedule.from_scheduler([0.9, 0.5, 0.0]),
            "start at 1, pure noise, .* not at 0.9",
        ),
    ):
        with pytest.raises(RecastError, match=words):
            call()


@pytest.mark.parametrize("steps", [2, 20])
@pytest.mark.parametrize(("final", "first"), [("zero", 0.0), ("sigma_min", 0.01)])
def test_ends_are_what_the_scheduler_says(steps: int, final: str, first: float) -> None:
    scheduler = DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, final_sigmas_type=final
    )
    scheduler.set_timesteps(steps)
    grid = schedule.grid(scheduler.sigmas.flip(0).tolist())
    assert grid[0] == pytest.approx(first, abs=1e-5)
    assert grid[-1] == pytest.approx(0.99967, abs=1e-5)  # 3 · .999 / (1 + 2 · .999)
    weights = static({"ocr": 1.0, "clip": 1.0}, grid)
    assert weights.columns(scheduler.sigmas[:-1]).tolist() == list(range(steps))[::-1]
    if final == "zero":
        np.testing.assert_array_equal(schedule.from_scheduler(scheduler.sigmas), grid)


def test_float32_ends_are_snapped() -> None:
    grid = schedule.grid(np.array([1e-8, 0.5, 0.9999999], dtype=np.float32))
    assert grid[0] == 0.0
    assert grid[-1] == 1.0
