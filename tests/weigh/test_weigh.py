"""The stage from curves and a budget to W."""

import numpy as np
import pytest

import recast
from recast.core import schedule, sinkhorn
from recast.errors import RecastError
from recast.weigh import METHODS, static

GRID = schedule.from_shift(8)
D = np.cumsum(np.random.default_rng(0).gamma(2.0, size=(3, 9))[:, ::-1], axis=1)[:, ::-1]
CURVES = recast.GainCurves(("clip", "hps", "ocr"), GRID, D)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_spends_exactly_the_budget(method: str) -> None:
    W = recast.weigh(CURVES, {"ocr": 2, "clip": 1, "hps": 1}, method)
    assert W.rewards == ("ocr", "clip", "hps")
    assert W.method == method
    np.testing.assert_allclose(W.matrix.sum(1), [0.5, 0.25, 0.25], atol=1e-9)
    if method not in ("row", "shared"):
        np.testing.assert_allclose(W.matrix.sum(0), 1 / 8, atol=1e-9)


def test_rows_follow_their_own_curves_whatever_the_order_of_the_budget() -> None:
    straight = recast.weigh(CURVES, [1, 2, 3])
    turned = recast.weigh(CURVES, {"ocr": 30, "hps": 20, "clip": 10})
    np.testing.assert_allclose(turned.matrix[::-1], straight.matrix, atol=1e-8)


def test_a_reward_without_a_curve_gets_its_budget_by_the_column_factors() -> None:
    W = recast.weigh(CURVES, {"clip": 1, "new": 1})
    gains = np.stack([CURVES.gains[0], np.zeros(8)])
    np.testing.assert_allclose(W.matrix, sinkhorn.project(gains, [1, 1]).weights)
    assert W.info["without_gain"] == ["new"]
    factors = W.matrix[1] / W.matrix[0] * np.exp(CURVES.normalized()[0])
    np.testing.assert_allclose(factors, factors[0], rtol=1e-6)  # log K = 0 for the new one


def test_static_needs_no_curve() -> None:
    np.testing.assert_allclose(recast.weigh(CURVES, {"new": 1}, "static").matrix, 1 / 8)
    budget = {"ocr": 2, "new": 1}
    with_curves, without = recast.weigh(CURVES, budget, "static"), static(budget, GRID)
    np.testing.assert_array_equal(with_curves.matrix, without.matrix)
    assert (with_curves.rewards, with_curves.method) == (without.rewards, without.method) == (("ocr", "new"), "static")
    with pytest.raises(RecastError, match="from 0 \\(clean\\) to 1"):
        static(budget, [0.0, 0.5])


def test_controls_are_the_same_columns_in_another_order() -> None:
    W = recast.weigh(CURVES, [1, 1, 1]).matrix
    np.testing.assert_array_equal(recast.weigh(CURVES, [1, 1, 1], "reversed").matrix, W[:, ::-1])
    shuffled = recast.weigh(CURVES, [1, 1, 1], "shuffled", seed=3).matrix
    assert not np.array_equal(shuffled, W)
    assert sorted(map(tuple, shuffled.T)) == sorted(map(tuple, W.T))
    np.testing.assert_array_equal(shuffled, recast.weigh(CURVES, [1, 1, 1], "shuffled", seed=3).matrix)
    single = recast.GainCurves(("a",), [0, 1], [[1.0, 0.0]])
    assert recast.weigh(single, [1], "shuffled").matrix.tolist() == [[1.0]]


def test_shared_takes_a_schedule_or_the_aggregate_demand() -> None:
    noise_aware = GRID[1:] * np.sqrt(np.diff(GRID))
    W = recast.weigh(CURVES, [1, 1, 2], "shared", curve=noise_aware)
    np.testing.assert_allclose(W.matrix[2] / W.matrix[0], 2.0)
    np.testing.assert_allclose(W.matrix.sum(0), noise_aware / noise_aware.sum())
    demand = np.array([0.25, 0.25, 0.5]) @ CURVES.normalized()
    np.testing.assert_allclose(recast.weigh(CURVES, [1, 1, 2], "shared").matrix.sum(0), demand / 8)


def test_tau_and_columns_reach_the_solver() -> None:
    nu = np.linspace(1, 2, 8)
    W = recast.weigh(CURVES, [1, 1, 1], tau=0.5, columns=nu)
    np.testing.assert_allclose(W.matrix, sinkhorn.project(CURVES.gains, [1, 1, 1], nu, 0.5).weights)
    np.testing.assert_allclose(W.matrix.sum(0), nu / nu.sum(), atol=1e-9)
    assert W.info["tau"] == 0.5


def test_shrinking_a_curve_of_pure_noise_gives_nearly_static_weights() -> None:
    per_prompt = np.random.default_rng(0).normal(scale=0.2, size=(40, 2, 9))
    curves = recast.GainCurves(("a", "b"), GRID, per_prompt.mean(0), D_prompts=per_prompt)
    plain, drawn = (recast.weigh(curves, [1, 1], shrink=shrink).matrix for shrink in (False, True))
    assert np.abs(drawn - 1 / 16).sum() < 0.6 * np.abs(plain - 1 / 16).sum()
    np.testing.assert_allclose(drawn.sum(1), 0.5, atol=1e-9)
    with pytest.raises(RecastError, match="need D_prompts"):
        recast.weigh(CURVES, [1, 1, 1], shrink=True)


def test_an_option_that_would_not_be_read_is_refused() -> None:
    for method, option in (("row", "tau"), ("static", "columns"), ("sinkhorn", "curve"), ("shared", "tau")):
        value = 0.5 if option == "tau" else np.ones(8)
        with pytest.raises(RecastError, match=f"{option} has no meaning for method '{method}'"):
            recast.weigh(CURVES, [1, 1, 1], method, **{option: value})


def test_bad_budgets_and_methods_are_named() -> None:
    for budget, method, words in (
        ([1, 2], "sinkhorn", "2 numbers for 3 curves .*give a mapping by reward name"),
        ({}, "sinkhorn", "empty"),
        ({"clipp": 1}, "sinkhorn", "none of clipp has a gain curve.*clip, hps, ocr"),
        ({"clip": "x"}, "sinkhorn", "budget must be numbers"),
        ({"clip": -1}, "sinkhorn", "non-negative"),
        ([1, 1, 1], "sinkorn", "unknown method 'sinkorn': choose one of sinkhorn"),
    ):
        with pytest.raises(RecastError, match=words):
            recast.weigh(CURVES, budget, method)
