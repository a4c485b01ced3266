"""Log-moments, gains and their laws."""

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from recast.core import renyi
from recast.errors import FloorWarning, RecastError

ALPHAS = (0.25, 0.5, 0.75, 1.5, 2.0, 4.0, 8.0)
positive_mu = arrays(np.float64, (3, 5, 7), elements=st.floats(1e-2, 1.0))


def test_log_moment_is_the_formula_of_alg_1() -> None:
    mu = np.array([[0.2, 0.4, 0.9], [0.0, 0.0, 0.5]])
    for alpha in ALPHAS[3:]:
        expected = np.log(np.mean(mu ** (alpha - 1), axis=-1)) / (alpha - 1)
        np.testing.assert_allclose(renyi.log_moment(mu, alpha), expected, rtol=1e-14)
    np.testing.assert_allclose(renyi.log_moment(mu, 2.0), np.log(mu.mean(-1)))


def test_self_rollout_takes_the_exponent_alpha() -> None:
    mu = np.array([0.2, 0.4, 0.9])
    np.testing.assert_allclose(renyi.log_moment(mu, 3.0, self_rollout=True), np.log(np.mean(mu**3)) / 2)


def test_self_rollout_and_positive_samples_have_the_same_gain() -> None:
    """E_old[ρ^α] = E_+[ρ^{α−1}] on a finite space, where π⁺ is a reweighting of π_old."""
    rng = np.random.default_rng(0)
    kernel = rng.dirichlet(np.ones(6), size=6)  # p(x_0 | x_1) under the old policy
    old_noisy, reward = rng.dirichlet(np.ones(6)), rng.random(6)
    old_clean = old_noisy @ kernel
    mu_clean, mu_noisy = reward, kernel @ reward
    plus_clean, plus_noisy = (p * m / (p @ m) for p, m in ((old_clean, mu_clean), (old_noisy, mu_noisy)))
    for alpha in ALPHAS:
        by_plus = np.log((plus_clean @ mu_clean ** (alpha - 1)) / (plus_noisy @ mu_noisy ** (alpha - 1)))
        by_self = np.log((old_clean @ mu_clean**alpha) / (old_noisy @ mu_noisy**alpha))
        np.testing.assert_allclose(by_plus, by_self, rtol=1e-12)
        assert by_plus / (alpha - 1) >= 0  # Theorem 1 in a discrete world: data processing


def test_the_floor_holds_for_both_signs_of_the_exponent() -> None:
    zeros = np.zeros(4)
    np.testing.assert_allclose(renyi.log_moment(zeros, 2.0), np.log(1e-10))
    np.testing.assert_allclose(renyi.log_moment(zeros, 4.0), np.log(1e-10) / 3)
    expected = np.log((1e-10**-0.5 + 0.5**-0.5) / 2) / -0.5
    with pytest.warns(FloorWarning, match="1 of 2 conditional rewards"):
        np.testing.assert_allclose(renyi.log_moment(np.array([0.0, 0.5]), 0.5), expected)


def test_alpha_one_says_why() -> None:
    with pytest.raises(RecastError, match="KL limit.*-inf.*alpha > 1"):
        renyi.log_moment([0.5], 1.0)
    for alpha in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(RecastError, match="positive number"):
            renyi.log_moment([0.5], alpha)


def test_negative_rewards_are_refused_with_a_remedy() -> None:
    with pytest.raises(RecastError, match=r"-0\.3.*sigmoid"):
        renyi.log_moment([0.5, -0.3], 2.0)


def test_nan_drops_out_and_all_nan_stays_nan() -> None:
    mu = np.array([[0.2, np.nan, 0.6], [np.nan, np.nan, np.nan]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        D = renyi.log_moment(mu, 2.0)
    np.testing.assert_allclose(D[0], np.log(0.4))
    assert np.isnan(D[1])


def test_aggregations_differ_as_they_should() -> None:
    moments = np.array([[[0.5, 0.25]], [[0.1, 0.05]]])  # (P=2, m=1, levels=2)
    mean, per_prompt = renyi.aggregate(moments, 2.0, "prompt-mean")
    pooled, _ = renyi.aggregate(moments, 2.0, "pooled")
    np.testing.assert_allclose(mean, np.log(moments).mean(0))
    np.testing.assert_allclose(pooled, np.log(moments.mean(0)))
    np.testing.assert_allclose(per_prompt, np.log(moments))


def test_a_prompt_on_the_floor_warns_and_pooling_ignores_it() -> None:
    moments = np.array([[[0.5, 0.25]], [[0.5, 0.0]]])
    with pytest.warns(FloorWarning, match="1 of 4 moments of single prompts.*pooled"):
        D, _ = renyi.aggregate(moments, 2.0, "prompt-mean")
    np.testing.assert_allclose(D[0, 1], (np.log(0.25) + np.log(1e-10)) / 2)
    pooled, _ = renyi.aggregate(moments, 2.0, "pooled")
    np.testing.assert_allclose(pooled[0, 1], np.log(0.125))
    with pytest.warns(FloorWarning, match="1 of 2 pooled moments"):
        renyi.aggregate(np.array([[[0.5, 0.0]]]), 2.0, "pooled")


def test_a_reward_that_skips_a_prompt_is_averaged_over_the_others() -> None:
    moments = np.array([[[0.5, 0.25]], [[np.nan, np.nan]]])
    D, _ = renyi.aggregate(moments, 2.0)
    np.testing.assert_allclose(D, np.log([[0.5, 0.25]]))


def test_nan_at_some_levels_only_is_an_error() -> None:
    moments = np.array([[[0.9, 0.9, 0.9]], [[0.1, 0.1, np.nan]]])
    with pytest.raises(RecastError, match="reward 0 of prompt 1 is NaN at some levels only"):
        renyi.aggregate(moments, 2.0)


def test_numpy_orders_are_orders() -> None:
    mu = np.random.default_rng(0).random((2, 1, 3, 4))
    for alpha in np.array([2, 4]):
        np.testing.assert_array_equal(renyi.log_moment(mu, alpha), renyi.log_moment(mu, float(alpha)))
    assert np.isnan(renyi.normalized([np.nan, 1.0])).all()


def test_unknown_aggregation_and_wrong_shapes() -> None:
    with pytest.raises(RecastError, match="unknown aggregation 'median'"):
        renyi.aggregate(np.ones((1, 1, 2)), 2.0, "median")
    with pytest.raises(RecastError, match="prompts, rewards, levels"):
        renyi.aggregate(np.ones((1, 2)), 2.0)
    with pytest.raises(RecastError, match="two levels"):
        renyi.gains([1.0])


@given(positive_mu)
def test_raw_gains_telescope_and_clipped_ones_sum_to_at_least_that(mu: np.ndarray) -> None:
    D = renyi.log_moment(mu, 2.0)
    ends = D[:, 0] - D[:, -1]
    np.testing.assert_allclose(renyi.total_gain(D, clip=False), ends, atol=1e-12)
    assert (renyi.total_gain(D) >= np.maximum(ends, 0) - 1e-12).all()
    assert (renyi.gains(D) >= 0).all()


@given(positive_mu)
def test_log_moment_rises_with_alpha(mu: np.ndarray) -> None:
    """Power means rise with their exponent; so does D, as Rényi divergences do with their order."""
    curves = [renyi.log_moment(mu, alpha) for alpha in ALPHAS]
    for lower, higher in zip(curves[:-1], curves[1:], strict=True):
        assert (higher >= lower - 1e-9).all()


@given(positive_mu, st.floats(0.1, 100.0))
def test_gains_do_not_depend_on_the_rewards_scale(mu: np.ndarray, scale: float) -> None:
    """log Z_i cancels (Eq. gain-no-denom)."""
    for alpha in (0.5, 2.0, 4.0):
        first, second = renyi.log_moment(mu, alpha), renyi.log_moment(scale * mu, alpha)
        np.testing.assert_allclose(renyi.gains(first, clip=False), renyi.gains(second, clip=False), atol=1e-9)


@given(arrays(np.float64, (3, 6), elements=st.floats(0.0, 10.0)))
def test_normalized_gains_have_mean_one_or_are_zero(gains: np.ndarray) -> None:
    means = renyi.normalized(gains).mean(axis=1)
    flat = gains.mean(axis=1) <= 1e-12
    np.testing.assert_allclose(means, np.where(flat, 0.0, 1.0), atol=1e-12)


def test_the_rounding_of_a_constant_reward_is_no_curve() -> None:
    D = renyi.log_moment(np.full((20, 7), 0.3) * (1 + 1e-16 * np.arange(20)[:, None]), 4.0)
    assert (renyi.normalized(renyi.gains(D + np.linspace(0, 1e-15, 20)[::-1])) == 0).all()


def test_other_orders_need_no_new_rollouts() -> None:
    mu = np.random.default_rng(1).random((4, 2, 6, 8))  # prompts, rewards, levels, samples
    assert renyi.PAPER_ALPHAS == ALPHAS
    for alpha in ALPHAS:
        D, _ = renyi.aggregate(renyi.moments(mu, alpha), alpha)
        np.testing.assert_allclose(D, renyi.log_moment(mu, alpha).mean(0), rtol=1e-12)
    other, _ = renyi.aggregate(renyi.moments(mu, 3.0, self_rollout=True), 3.0, "pooled")
    np.testing.assert_allclose(other, np.log((mu**3).mean((0, 3))) / 2, rtol=1e-12)
