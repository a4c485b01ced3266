"""The stage from curves and a budget to W."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recast
from recast.config import Recipe
from recast.core import schedule, sinkhorn
from recast.core.effects import Effects
from recast.core.weights import control_of
from recast.errors import RecastError
from recast.weigh import METHODS, effects_of, order_of, static, weigh_recipe

GRID = schedule.from_shift(8)
D = np.cumsum(np.random.default_rng(0).gamma(2.0, size=(3, 9))[:, ::-1], axis=1)[:, ::-1]
CURVES = recast.GainCurves(("clip", "hps", "ocr"), GRID, D)


@pytest.mark.parametrize("columns", [None, np.arange(8.0)])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_spends_exactly_the_budget_or_shares_out_every_step(method: str, columns: Any) -> None:
    W = recast.weigh(CURVES, {"ocr": 2, "clip": 1, "hps": 1}, method, columns=columns)
    assert W.rewards == ("ocr", "clip", "hps")
    assert W.method == method
    nu = np.full(8, 1 / 8) if columns is None else columns / columns.sum()
    np.testing.assert_allclose(W.nu, nu)
    base = control_of(method)[0]
    if base != "matched":
        np.testing.assert_allclose(W.matrix.sum(1), [0.5, 0.25, 0.25], atol=1e-9)
        np.testing.assert_allclose(W.realized(), W.budget, atol=1e-9)
    if base not in ("row", "shared"):
        np.testing.assert_allclose(W.matrix.sum(0), nu, atol=1e-9)
        np.testing.assert_allclose(W.factors.sum(0), 1, atol=1e-7)
    rewards = np.random.default_rng(0).normal(size=(4, 3))
    rewards[1, 0] = np.nan
    assert np.isfinite(W.mix(rewards)).all()
    if method == "static":
        np.testing.assert_allclose(W.factors, np.repeat(W.budget[:, None], 8, 1))


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


@pytest.mark.parametrize("base", ["sinkhorn", "row", "matched", "hard", "shared"])
def test_controls_are_the_same_columns_in_another_order(base: str) -> None:
    prefix = "" if base == "sinkhorn" else f"{base}-"
    W = recast.weigh(CURVES, [1, 1, 1], base).matrix
    np.testing.assert_array_equal(recast.weigh(CURVES, [1, 1, 1], f"{prefix}reversed").matrix, W[:, ::-1])
    shuffled = recast.weigh(CURVES, [1, 1, 1], f"{prefix}shuffled", seed=3).matrix
    assert not np.array_equal(shuffled, W)
    assert sorted(map(tuple, shuffled.T)) == sorted(map(tuple, W.T))
    np.testing.assert_array_equal(shuffled, W[:, order_of("shuffled", 8, seed=3)])
    np.testing.assert_array_equal(shuffled, recast.weigh(CURVES, [1, 1, 1], f"{prefix}shuffled", seed=3).matrix)
    single = recast.GainCurves(("a",), [0, 1], [[1.0, 0.0]])
    assert recast.weigh(single, [1], f"{prefix}shuffled").matrix.tolist() == [[1.0]]


@pytest.mark.parametrize("base", ["sinkhorn", "row", "matched", "hard", "shared"])
def test_with_masses_a_control_is_the_method_on_turned_gains(base: str) -> None:
    """The gains are turned, the masses stay where they are."""
    prefix, nu = "" if base == "sinkhorn" else f"{base}-", np.linspace(1, 3, 8)
    gains = CURVES.gains[:, ::-1]
    turned = recast.GainCurves(
        CURVES.rewards, GRID, np.concatenate([gains[:, ::-1].cumsum(1)[:, ::-1], np.zeros((3, 1))], axis=1)
    )
    expected = recast.weigh(turned, [1, 2, 1], base, columns=nu)
    np.testing.assert_allclose(
        recast.weigh(CURVES, [1, 2, 1], f"{prefix}reversed", columns=nu).matrix, expected.matrix, atol=1e-8
    )


@pytest.mark.parametrize("method", METHODS)
def test_uniform_masses_change_no_bit(method: str) -> None:
    plain, given = (recast.weigh(CURVES, [1, 2, 1], method, columns=columns) for columns in (None, np.full(8, 0.7)))
    np.testing.assert_array_equal(plain.matrix, given.matrix)
    np.testing.assert_array_equal(plain.factors, plain.matrix * 8)


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
    for method, option in (("row", "tau"), ("matched-reversed", "tau"), ("sinkhorn", "curve"), ("shared", "tau")):
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
        ([1, 1, 1], "static-reversed", "unknown method 'static-reversed'"),
    ):
        with pytest.raises(RecastError, match=words):
            recast.weigh(CURVES, budget, method)


def test_a_schedule_is_turned_with_its_control() -> None:
    c, nu = np.arange(1.0, 9.0), np.linspace(1, 3, 8)
    W = recast.weigh(CURVES, [1, 1, 2], "shared-reversed", curve=c, columns=nu)
    np.testing.assert_allclose(W.matrix.sum(0), nu * c[::-1] / (nu @ c[::-1]))
    plain = recast.weigh(CURVES, [1, 1, 2], "shared-reversed", curve=c)
    np.testing.assert_allclose(plain.matrix.sum(0), c[::-1] / c.sum())


def test_bad_masses_are_named() -> None:
    for columns, words in (
        ([1, 2, 3], "columns has 3 numbers, but W has 8 steps: give one number per step, the cleanest first"),
        ([1, -1, 1, 1, 1, 1, 1, 1], "columns must be non-negative"),
        ([1, np.nan, 1, 1, 1, 1, 1, 1], "columns must be non-negative, finite"),
        (np.zeros(8), "not all zero"),
        (np.ones((2, 8)), r"columns has the shape \(2, 8\)"),
        (["x"] * 8, "columns must be numbers"),
    ):
        for method in ("sinkhorn", "static", "matched"):
            with pytest.raises(RecastError, match=words):
                recast.weigh(CURVES, [1, 1, 1], method, columns=columns)


def effects(steps: int = 8, seed: int = 0) -> Effects:
    """Effects of random gradients whose size grows with the level."""
    size = np.tile(np.linspace(1, 3, steps), 3)
    g = np.random.default_rng(seed).normal(1.0, 0.5, (6, 3 * steps, 20)) * size[:, None]
    products = np.einsum("qap,rbp->qrab", g, g)
    return Effects.measured(CURVES.rewards, schedule.from_shift(steps), products, 4, batch=32, levels=steps)


def test_a_recipe_takes_masses_from_numbers_or_effects() -> None:
    def recipe(columns: Any) -> Recipe:
        return Recipe.model_validate({"weigh": {"method": "row", "columns": columns}})

    numbers = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    W = weigh_recipe(recipe(numbers), CURVES)
    np.testing.assert_allclose(W.nu, np.array(numbers) / 36)
    assert "columns" not in W.info
    measured = effects()
    W = weigh_recipe(recipe("effect"), CURVES, measured)
    np.testing.assert_allclose(W.nu, measured.effect)
    assert W.nu[-1] > 2 * W.nu[0]
    assert W.info["columns"] == "effect"
    np.testing.assert_array_equal(W.matrix, recast.weigh(CURVES, [1, 1, 1], "row", columns=measured.effect).matrix)
    assert weigh_recipe(recipe("uniform"), CURVES, measured).uniform
    for columns, given, words in (
        ([1.0, 2.0], None, "weigh.columns has 2 numbers, but W has 8 steps"),
        ("effect", None, "weigh.columns = effect needs the effects .*: run recast doctor RECIPE --gradients --out RUN"),
        ("effect", effects(4), "measured at T = 4 from σ = .*, but W has 8 steps"),
    ):
        with pytest.raises(RecastError, match=words):
            weigh_recipe(recipe(columns), CURVES, given)


def test_the_effects_of_a_run_are_read_if_the_recipe_needs_them(tmp_path: Path) -> None:
    needs = Recipe.model_validate({"weigh": {"columns": "effect"}})
    assert effects_of(Recipe(), tmp_path) is None
    with pytest.raises(RecastError, match=f"needs {tmp_path}/effects.json, .*--gradients --out {tmp_path}"):
        effects_of(needs, tmp_path)
    made = effects()
    made.save(tmp_path / "effects.json")
    found = effects_of(needs, tmp_path)
    assert found is not None
    asked = replace(made, batch=needs.train.batch, levels=8)
    np.testing.assert_array_equal(found.effect, asked.effect)
    assert np.abs(found.effect - made.effect).max() > 1e-6
