"""App. A.3: the bounds, their conditions, and that they bound."""

import numpy as np
import pytest

from recast.core import bounds, renyi, sinkhorn
from recast.errors import RecastError


def test_the_formulas_of_app_a3() -> None:
    result = bounds.surrogate(
        mismatch=[0.02], reward_max=1.0, reward_mean=0.5, total_gain=[3.0], steps=10, alpha=2.0, tau=0.5, mass=1.0
    )
    eta = 2 * np.sqrt(0.01)
    b = -np.log(1 - eta)
    np.testing.assert_allclose(result.ratio, 2.0)
    np.testing.assert_allclose(result.eta, eta)
    np.testing.assert_allclose(result.divergence, b)
    np.testing.assert_allclose(result.gain, 2 * b)
    np.testing.assert_allclose(result.profile, 4 * 10 * b / (3 - 2 * b))
    np.testing.assert_allclose(result.weights, result.profile[0] / 0.5)
    assert result.holds


def test_small_mismatch_is_the_square_root_law() -> None:
    ratios = []
    for epsilon in (1e-4, 1e-6, 1e-8):
        result = bounds.surrogate(epsilon, 1.0, 0.25, 1.0, steps=25, alpha=3.0)
        ratios.append(result.divergence[0] / (4.0**2 / 2 * np.sqrt(epsilon / 2)))
    assert abs(ratios[-1] - 1) < 1e-3
    assert abs(ratios[0] - 1) > abs(ratios[1] - 1) > abs(ratios[2] - 1)


def test_conditions_that_fail_say_so() -> None:
    result = bounds.surrogate([1.0, 0.01, 0.0], [1, 1, 1], [0.5, 0.5, 0.5], [5.0, 0.1, 1.0], steps=10)
    assert not result.holds
    assert np.isinf(result.divergence[0])
    assert np.isfinite(result.divergence[1])
    assert np.isinf(result.profile[1])
    assert result.profile[2] == 0.0
    assert result.weights == np.inf
    assert len(result.reasons) == 2
    assert "eta = 1.414 >= 1" in result.reasons[0]
    assert "total gain 0.1 does not exceed 2b" in result.reasons[1]


def test_the_profile_needs_twice_b_and_w_scales_with_mass() -> None:
    b = float(bounds.surrogate(0.01, 1.0, 0.5, 9.0, steps=10).divergence[0])
    assert bounds.surrogate(0.01, 1.0, 0.5, 2.01 * b, steps=10).holds
    assert not bounds.surrogate(0.01, 1.0, 0.5, 1.99 * b, steps=10).holds
    one, five = (bounds.surrogate(0.01, 1.0, 0.5, 9.0, steps=10, mass=mass).weights for mass in (1.0, 5.0))
    np.testing.assert_allclose(five, 5 * one)


def test_it_bounds_a_world_where_everything_is_known() -> None:
    """Finite spaces: old policy, forward kernel, rewards and a proposal near their positive policies."""
    rng = np.random.default_rng(0)
    steps, alpha, states = 6, 2.0, 8
    old = rng.dirichlet(np.ones(states))
    mixing = np.full((states, states), 1 / states)
    forward = [(1 - t / steps) * np.eye(states) + t / steps * mixing for t in range(steps + 1)]
    rewards = 0.2 + 0.8 * rng.random((2, states))
    rewards[1] = rewards[0] + 0.004 * rng.random(states)  # alike, so that one proposal serves both
    positive = [old * r / (old @ r) for r in rewards]
    proposal = positive[0] * (1 + 0.002 * rng.normal(size=states))
    proposal /= proposal.sum()

    def curve(reward: np.ndarray, start: np.ndarray) -> np.ndarray:
        levels = []
        for kernel in forward:
            joint = old[:, None] * kernel  # p(x_0, x_t)
            ratio = (reward @ joint) / joint.sum(0) / (old @ reward)
            levels.append(np.log((start @ kernel) @ ratio ** (alpha - 1)) / (alpha - 1))
        return np.array(levels)

    exact = np.stack([curve(r, p) for r, p in zip(rewards, positive, strict=True)])
    surrogate = np.stack([curve(r, proposal) for r in rewards])
    mismatch = [float(proposal @ np.log(proposal / p)) for p in positive]
    result = bounds.surrogate(mismatch, rewards.max(1), rewards @ old, renyi.total_gain(exact), steps, alpha)
    assert result.holds, result.reasons
    assert (np.abs(surrogate - exact).max(1) <= result.divergence).all()
    gains = [renyi.gains(D, clip=False) for D in (exact, surrogate)]
    assert (np.abs(gains[1] - gains[0]).max(1) <= result.gain).all()
    profiles = [renyi.normalized(g) for g in gains]
    assert (np.abs(profiles[1] - profiles[0]).max(1) <= result.profile).all()
    couplings = [sinkhorn.project(g, [1, 2]).weights for g in gains]
    assert np.abs(couplings[1] - couplings[0]).sum() <= result.weights
    assert np.abs(couplings[1] - couplings[0]).sum() > 0  # the check is not of two equal things


def test_bad_input_is_named() -> None:
    with pytest.raises(RecastError, match="alpha > 1"):
        bounds.surrogate(0.1, 1, 0.5, 1, steps=10, alpha=0.5)
    with pytest.raises(RecastError, match="0 < E"):
        bounds.surrogate(0.1, 1, 2.0, 1, steps=10)
    with pytest.raises(RecastError, match="not of the sizes"):
        bounds.surrogate([0.1, 0.2], [1, 1, 1], 0.5, 1, steps=10)
    with pytest.raises(RecastError, match="must be finite"):
        bounds.surrogate(float("nan"), 1, 0.5, 1, steps=10)
    with pytest.raises(RecastError, match="must be positive"):
        bounds.surrogate(0.1, 1, 0.5, 1, steps=10, tau=0.0)
