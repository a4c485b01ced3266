"""The most that timing could gain, against search and against weights that are known to be best."""

import numpy as np
import pytest
from test_effects import exact

from recast import WeightMatrix
from recast.core.ceiling import best_weights, ceiling
from recast.core.effects import Effects
from recast.errors import RecastError

EVEN = np.array([0.5, 0.5])


def apart(strength: tuple[float, ...], noise: float = 1.0) -> Effects:
    """Two rewards at two levels, whose gradients are orthogonal with these norms and have independent noise."""
    signal = np.diag(np.square(strength))
    own = np.broadcast_to(signal + noise * np.eye(4), (4, 4, 4))
    return Effects(
        rewards=("a", "b"),
        sigmas=np.array([0.0, 0.5, 1.0]),
        own=own,
        cross=np.broadcast_to(signal, own.shape),
        images=1,
        batch=1,
        levels=2,
        normalize="reward",
        scales=np.ones(2),
        covariance=np.eye(2),
        settings={},
    )


def test_no_weights_that_realize_the_budget_have_a_larger_cosine() -> None:
    found = exact(batch=4)
    best = best_weights(found, [1, 1])
    np.testing.assert_allclose(found.realized(best)[0], EVEN, atol=1e-7)
    np.testing.assert_allclose(best.matrix.sum(axis=0), 1 / 3, atol=1e-12)
    most = found.efficiency(best, budget=EVEN)
    tried = 0
    for shares in np.random.default_rng(0).uniform(0, 1, (600, 3)):
        effect = found.effect
        shares[2] = (0.5 - shares[:2] @ effect[:2]) / effect[2]  # the first reward's share realizes one half
        if 0 <= shares[2] <= 1:
            matrix = np.stack([shares, 1 - shares]) / 3
            other = WeightMatrix(found.rewards, found.sigmas, matrix, matrix.sum(axis=1), "static")
            np.testing.assert_allclose(found.realized(other)[0], EVEN, atol=1e-9)
            assert found.efficiency(other, budget=EVEN) <= most + 1e-9
            tried += 1
    assert tried > 80
    assert ceiling(found, [1, 1]) == pytest.approx(found.gain(best, budget=EVEN)[0])


def test_rewards_with_signals_at_different_levels_are_told_apart() -> None:
    """Of each column all goes to the reward with the signal: half of the noise is left out, none of the signal."""
    found = apart((1.0, 0.0, 0.0, 1.0))
    np.testing.assert_allclose(best_weights(found, [1, 1]).factors, [[1, 0], [0, 1]], atol=1e-6)
    # sᵀGf / √(sᵀGs · fᵀMf), with f = (1, 0, 0, 1) and s = (½, ½, ½, ½): 1 / √(½ · 4), and ½ / √(½ · (½ + 1)).
    assert ceiling(found, [1, 1]) == pytest.approx(np.sqrt(0.5) / (0.5 / np.sqrt(0.75)) - 1, rel=1e-6)


def test_alike_rewards_leave_nothing_to_time() -> None:
    found = apart((1.0, 0.6, 1.0, 0.6))
    assert ceiling(found, [1, 1]) == pytest.approx(0, abs=1e-6)


def test_it_vanishes_with_many_images() -> None:
    found = exact()
    gains = [ceiling(found, [1, 1], images) for images in (1, 16, 256, 4096, 1e6)]
    assert gains[0] > 0.01
    assert gains == sorted(gains, reverse=True)
    assert gains[-1] == pytest.approx(0, abs=1e-4)


def test_without_a_signal_it_says_so() -> None:
    with pytest.raises(RecastError, match="too few to see the gradient of static"):
        ceiling(apart((0.0, 0.0, 0.0, 0.0)), [1, 1])
