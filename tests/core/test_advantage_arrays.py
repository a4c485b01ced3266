"""The advantages of NumPy arrays are those of tensors, which tests/train/test_advantage.py holds to closed forms."""

import numpy as np
import pytest
import torch

from recast import WeightMatrix
from recast.core import advantage

W = WeightMatrix(("a", "b", "c"), [0, 0.2, 0.5, 1], np.full((3, 3), 1 / 9), [1 / 3] * 3)
TIMED = WeightMatrix(
    ("a", "b", "c"), [0, 0.2, 0.5, 1], [[0.1, 0.1, 0.1], [0.3, 0.05, 0.05], [0.02, 0.2, 0.08]], [0.3, 0.4, 0.3]
)


@pytest.mark.parametrize("spread", ["batch", "group"])
@pytest.mark.parametrize("mode", ["step", "shared", "reward"])
@pytest.mark.parametrize("missing", [False, True])
def test_numpy_and_torch_agree(mode: advantage.Mode, spread: advantage.Spread, missing: bool) -> None:
    generator = np.random.default_rng(0)
    rewards, groups = generator.normal(size=(24, 3)), np.arange(24) // 4 * 7 + 1
    if missing:
        rewards[generator.random((24, 3)) < 0.3] = np.nan
        rewards[:4, 1], rewards[5] = np.nan, np.nan  # a prompt without a reward, and a sample without any
    with np.errstate(all="raise"):
        found = advantage.contributions(rewards, groups, TIMED, mode, spread)
    tensors = advantage.contributions(torch.from_numpy(rewards), torch.from_numpy(groups), TIMED, mode, spread)
    assert isinstance(found, np.ndarray)
    np.testing.assert_allclose(found, tensors.numpy(), rtol=1e-11, atol=1e-13)
    assert np.isfinite(found).all()


def test_a_table_is_read_by_level() -> None:
    table, order = np.arange(6.0).reshape(2, 3), np.array([[2, 0, 1], [1, 2, 0]])
    sigmas = W.sigmas[1:][order]
    expected = np.take_along_axis(table, order, 1)
    np.testing.assert_array_equal(advantage.by_sigma(table, W, sigmas, strict=True), expected)
    found = advantage.by_sigma(torch.from_numpy(table), W, torch.from_numpy(sigmas), strict=True)
    assert torch.equal(found, torch.from_numpy(expected))
