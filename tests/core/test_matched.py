"""Matched shares: closed forms, limits, floors and intervals."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import recast
from recast.core import matched, renyi, schedule
from recast.core.matched import FLOOR
from recast.errors import RecastError


def noisy(prompts: int, scale: float, seed: int = 0, steps: int = 6) -> recast.GainCurves:
    """Curves of two rewards with mean gains of 1, whose prompts differ by normal noise in every gain."""
    gains = 1 + scale * np.random.default_rng(seed).normal(size=(prompts, 2, steps))
    D = np.concatenate([gains[..., ::-1].cumsum(-1)[..., ::-1], np.zeros((prompts, 2, 1))], axis=-1)
    return recast.GainCurves(("a", "b"), schedule.from_shift(steps), D.mean(0), D_prompts=D)


def test_two_rewards_and_two_steps_by_hand() -> None:
    """Normalized gains (2, 0) and (1, 1), f = 1: g = (3/2, 1/2) and (1, 1); λ = (1/3, 2/3), ν = (1/4, 3/4)."""
    W = matched.matched([[4.0, 0.0], [7.0, 7.0]], [1, 2], [1, 3], floor=1.0)
    np.testing.assert_allclose(W, [[3 / 7 / 4, 3 / 5 / 4], [4 / 7 / 4, 12 / 5 / 4]], rtol=1e-14)


@given(st.integers(0, 2**32 - 1))
def test_columns_sum_to_their_masses_and_odds_to_lambda_times_gain(seed: int) -> None:
    rng = np.random.default_rng(seed)
    gains, lam, nu = rng.gamma(0.5, size=(3, 7)), rng.dirichlet(np.ones(3)), rng.dirichlet(np.ones(7))
    W = matched.matched(gains, lam, nu, floor=[0.05, 0.3, 2.0])
    np.testing.assert_allclose(W.sum(0), nu, rtol=1e-12)
    f = np.array([[0.05], [0.3], [2.0]])
    g = (renyi.normalized(gains) + f) / (1 + f)
    np.testing.assert_allclose(W[0] * lam[1] * g[1], W[1] * lam[0] * g[0], rtol=1e-9)
    np.testing.assert_allclose(g.mean(1), 1)
    np.testing.assert_allclose(matched.matched(gains * [[3.0], [0.1], [20.0]], 5 * lam, 9 * nu, f[:, 0]), W, rtol=1e-9)


def test_equal_curves_a_large_floor_and_no_curves_are_static() -> None:
    rng = np.random.default_rng(0)
    one, lam = rng.gamma(2.0, size=6), np.array([0.2, 0.3, 0.5])
    static = np.repeat(lam[:, None], 6, 1) / 6
    np.testing.assert_allclose(matched.matched(np.stack([one, 2 * one, 5 * one]), lam), static, rtol=1e-12)
    np.testing.assert_allclose(matched.matched(rng.gamma(2.0, size=(3, 6)), lam, floor=1e12), static, rtol=1e-9)
    np.testing.assert_allclose(matched.matched(np.zeros((3, 6)), lam), static, rtol=1e-12)


def test_a_reward_without_gain_anywhere_has_the_odds_of_a_flat_one() -> None:
    gains = np.random.default_rng(1).gamma(2.0, size=(3, 6))
    without, flat = gains.copy(), gains.copy()
    without[1], flat[1] = 0.0, 3.0
    np.testing.assert_allclose(matched.matched(without, [1, 1, 2]), matched.matched(flat, [1, 1, 2]), rtol=1e-12)


def test_many_at_once_are_each_alone() -> None:
    gains = np.random.default_rng(2).gamma(2.0, size=(5, 3, 6))
    together = matched.matched(gains, [1, 1, 2])
    for one, W in zip(gains, together, strict=True):
        np.testing.assert_array_equal(matched.matched(one, [1, 1, 2]), W)


def test_the_floor_is_the_standard_error_of_the_normalized_gains() -> None:
    """With gains of 1 + s·z per prompt, a normalized gain has the error s·sqrt((1 − 1/T)/P) up to order s²."""
    scale, steps = 0.4, 6
    assert matched.floors(noisy(400, scale)).tolist() == [FLOOR, FLOOR]  # 0.018
    found = np.mean([matched.floors(noisy(16, scale, seed)) for seed in range(40)], axis=0)
    np.testing.assert_allclose(found, scale * np.sqrt((1 - 1 / steps) / 16), rtol=0.07)
    alone = noisy(1, scale)
    assert matched.floors(alone).tolist() == [FLOOR, FLOOR]
    assert matched.floors(recast.GainCurves(alone.rewards, alone.sigmas, alone.D)).tolist() == [FLOOR, FLOOR]


def test_weigh_takes_the_floors_of_the_curves() -> None:
    curves = noisy(4, 0.5)
    W = recast.weigh(curves, {"b": 1, "new": 2, "a": 1}, "matched")
    floors = matched.floors(curves)
    assert floors.min() > FLOOR
    assert W.info["floor"] == [floors[1], FLOOR, floors[0]]
    gains = np.stack([curves.gains[1], np.zeros(6), curves.gains[0]])
    np.testing.assert_array_equal(W.matrix, matched.matched(gains, [1, 2, 1], floor=W.info["floor"]))
    np.testing.assert_allclose(W.realized(), W.matrix.sum(1))
    assert np.abs(W.realized() - W.budget).max() > 1e-3


@pytest.mark.parametrize("method", ["sinkhorn", "matched"])
@pytest.mark.parametrize("columns", [None, [1, 2, 0, 4, 5, 6]])
def test_intervals_are_those_of_every_resampled_w(method: str, columns: list[float] | None) -> None:
    curves = noisy(8, 0.4)
    W = recast.weigh(curves, [1, 2], method, columns=columns)
    band = matched.factor_intervals(curves, W)
    assert band is not None
    draws = []
    for D in curves.bootstrap():
        own = recast.GainCurves(curves.rewards, curves.sigmas, D)
        if method == "sinkhorn":
            draws.append(recast.weigh(own, [1, 2], columns=columns).factors)
        else:
            draws.append(matched.matched(own.gains, [1, 2], columns, matched.floors(curves)) / np.maximum(W.nu, 1e-300))
    expected = np.percentile(draws, [2.5, 97.5], axis=0)
    used = W.nu > 0
    np.testing.assert_allclose(band[..., used], expected[..., used], atol=1e-7)
    np.testing.assert_array_equal(band[..., ~used], np.broadcast_to(W.budget[:, None], band.shape)[..., ~used])


def test_what_has_no_interval() -> None:
    curves = noisy(8, 0.4)
    plain = recast.GainCurves(curves.rewards, curves.sigmas, curves.D)
    assert matched.factor_intervals(plain, recast.weigh(plain, [1, 1], "matched")) is None
    assert matched.factor_intervals(curves, recast.weigh(curves, [1, 1], "matched", shrink=True)) is None
    assert matched.factor_intervals(curves, recast.weigh(curves, [1, 1], "row")) is None
    assert matched.factor_intervals(curves, recast.weigh(curves, {"a": 1, "new": 1}, "matched")) is None


def test_bad_input_is_named() -> None:
    good = [[1.0, 0.0], [0.0, 1.0]]
    for call, words in (
        (lambda: matched.matched([1.0, 2.0], [1]), r"shape \(rewards, steps\), not \(2,\)"),
        (lambda: matched.matched([[np.nan, 1.0]], [1]), "gains must be finite"),
        (lambda: matched.matched(good, [1, 2, 3]), "budget must have 2 numbers"),
        (lambda: matched.matched(good, [1, 1], [1, -1]), "columns must be non-negative"),
        (lambda: matched.matched(good, [1, 1], floor=0.0), r"floor must be positive and finite, not \[0.0, 0.0\]"),
    ):
        with pytest.raises(RecastError, match=words):
            call()
