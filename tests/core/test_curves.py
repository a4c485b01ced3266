"""GainCurves: its file, resampling, intervals and comparisons."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import recast
from recast.core import renyi, schedule
from recast.core.comparison import compare, excursions, overlay, remaining
from recast.core.curves import GainCurves
from recast.errors import RecastError


@pytest.fixture
def curves() -> GainCurves:
    rng = np.random.default_rng(0)
    mu = rng.random((12, 2, 11, 8)) * np.linspace(1, 0.3, 11)[:, None]
    grid = schedule.from_shift(10)
    return GainCurves.from_mu(("clip", "ocr"), grid, mu, provenance={"seed": 0, "policy": "π"})


def test_from_mu_is_alg_1(curves: GainCurves) -> None:
    assert curves.D.shape == (2, 11)
    assert curves.gains.shape == (2, 10)
    assert curves.steps == 10
    assert curves.D_prompts is not None
    np.testing.assert_allclose(curves.D, curves.D_prompts.mean(0))
    np.testing.assert_allclose(curves.total, curves.gains.sum(1))
    np.testing.assert_allclose(curves.normalized().mean(1), 1.0)


def test_the_file_keeps_every_bit_and_writes_the_same_bytes(curves: GainCurves, tmp_path: Path) -> None:
    path = curves.save(tmp_path / "deep" / "gains.json")
    again = GainCurves.load(path)
    assert again.rewards == curves.rewards
    assert again.alpha == curves.alpha
    assert dict(again.provenance) == dict(curves.provenance)
    for name in ("sigmas", "D", "D_prompts"):
        np.testing.assert_array_equal(getattr(again, name), getattr(curves, name))
    assert again.save(tmp_path / "second.json").read_bytes() == path.read_bytes()
    assert [entry.name for entry in path.parent.iterdir()] == ["gains.json"]  # no temporary file is left


def test_nan_of_a_prompt_is_null_in_the_file(tmp_path: Path) -> None:
    per_prompt = np.array([[[0.5, 0.0], [0.2, 0.1]], [[0.3, 0.1], [np.nan, np.nan]]])
    curves = GainCurves(("a", "b"), [0, 1], np.nanmean(per_prompt, 0), D_prompts=per_prompt)
    text = curves.save(tmp_path / "gains.json").read_text()
    assert "NaN" not in text
    np.testing.assert_array_equal(GainCurves.load(tmp_path / "gains.json").D_prompts, per_prompt)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.pop("D"), "the field D is missing: run recast estimate again"),
        (lambda c: c.update(version=99), "version 99"),
        (lambda c: c.update(format="recast.weights"), "expected a recast.gains file"),
        (lambda c: c.update(D=[[1, 2], [3]]), "rectangular"),
        (lambda c: c.update(D=[1, 2]), "the field D.0 is 1: input should be a valid list"),
        (lambda c: c.update(sigmas=[0, 0.5]), "to 0.5"),
        (lambda c: c.update(alpha=1), "KL limit"),
        (lambda c: c.update(alpha="two"), "the field alpha is 'two': input should be a valid number"),
        (lambda c: c.update(rewards=["clip", "clip"]), "must differ"),
        (lambda c: c.update(rewards=3), "the field rewards is 3: input should be a valid list"),
        (lambda c: c["gains"][0].__setitem__(0, 9.0), "edited by hand"),
        (lambda c: c["D"][0].__setitem__(0, None), "the field D.0.0 is None"),
        (lambda c: c["D"][0].__setitem__(0, 1e300), "not finite or absurd"),
        (lambda c: c.update(D_promts=c.pop("D_prompts")), "the field D_promts is unknown"),
        (lambda c: c.update(provenance=[1]), "the field provenance is a list: input should be a valid dictionary"),
        (
            lambda c: c.update(aggregate="median"),
            "the field aggregate is 'median': input should be 'prompt-mean' or 'pooled'",
        ),
    ],
)
def test_a_wrong_file_is_one_clear_error(curves: GainCurves, tmp_path: Path, change, words: str) -> None:
    path = curves.save(tmp_path / "gains.json")
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(RecastError, match=words) as caught:
        GainCurves.load(path)
    assert str(path) in str(caught.value)


def test_missing_truncated_and_foreign_files(curves: GainCurves, tmp_path: Path) -> None:
    path = curves.save(tmp_path / "gains.json")
    path.write_text(path.read_text()[:200])
    with pytest.raises(RecastError, match="truncated"):
        GainCurves.load(path)
    with pytest.raises(RecastError, match="No such file"):
        GainCurves.load(tmp_path / "nowhere.json")
    (tmp_path / "list.json").write_text("[1, 2]")
    with pytest.raises(RecastError, match="expected a recast.gains file"):
        GainCurves.load(tmp_path / "list.json")
    for text in ("9" * 5000, "[" * 100_000):
        (tmp_path / "absurd.json").write_text(text)
        with pytest.raises(RecastError, match="not valid JSON"):
            GainCurves.load(tmp_path / "absurd.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecastError, match="not valid JSON"):
        GainCurves.load(tmp_path / "bytes.json")


@given(st.integers(1, 40), st.floats(0.5, 8.0))
def test_resampling_keeps_the_total(steps: int, shift: float) -> None:
    sigmas = schedule.from_shift(10)
    D = np.stack([(1 - sigmas) ** 2, -np.log(0.2 + sigmas)])
    curves = GainCurves(("a", "b"), sigmas, D, D_prompts=np.stack([0.5 * D, 1.5 * D]))
    other = curves.resample(schedule.from_shift(steps, shift))
    assert other.steps == steps
    np.testing.assert_allclose(other.gains.sum(1), D[:, 0] - D[:, -1], rtol=1e-12)
    assert other.D_prompts is not None
    np.testing.assert_allclose(other.D_prompts[1], 1.5 * other.D, rtol=1e-12)


def test_resampling_there_and_back_onto_a_finer_grid_is_exact() -> None:
    coarse = schedule.from_shift(5)
    fine = np.union1d(coarse, schedule.from_shift(17))
    curves = GainCurves(("a",), coarse, [np.linspace(1, 0, 6) ** 2])
    np.testing.assert_allclose(curves.resample(fine).resample(coarse).D, curves.D, atol=1e-12)


def test_resampling_over_steps_interpolates_on_their_share() -> None:
    """D = (1 − t/T)² at T = 25, at every level of T = 10 by hand; linear between two levels of the finer grid."""
    curves = GainCurves(("a",), schedule.from_shift(25), [(1 - np.linspace(0, 1, 26)) ** 2])
    other = curves.resample(schedule.from_shift(10), over="step")
    np.testing.assert_array_equal(other.sigmas, schedule.from_shift(10))
    t = 2.5 * np.arange(11)
    below, above = (1 - np.floor(t) / 25) ** 2, (1 - np.ceil(t) / 25) ** 2
    np.testing.assert_allclose(other.D[0], (below + above) / 2, rtol=1e-12)
    np.testing.assert_allclose(other.total, curves.total)
    assert np.abs(other.D - curves.resample(schedule.from_shift(10)).D).max() > 0.01  # σ is another coordinate
    with pytest.raises(RecastError, match="over 'sigma' or 'step', not 'time'"):
        curves.resample([0, 1], over="time")  # type: ignore[arg-type]


def test_the_demand_of_two_rewards_by_hand() -> None:
    gains = np.array([[1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 3.0, 4.0]])
    D = np.flip(np.cumsum(np.flip(np.pad(gains, ((0, 0), (0, 1))), 1), axis=1), 1)
    curves = GainCurves(("even", "late"), schedule.from_shift(4), D)
    np.testing.assert_allclose(curves.demand(), [0.5, 0.75, 1.25, 1.5])
    np.testing.assert_allclose(curves.demand([1, 3]), [0.25, 0.625, 1.375, 1.75])
    assert curves.demand_ratio() == pytest.approx(2.0)  # the first step, with 0.5, is left out
    assert curves.demand_ratio([1, 3]) == pytest.approx(2.8)
    assert curves.demand_ratio([5, 0]) == 1.0
    with pytest.raises(RecastError, match="budget"):
        curves.demand([1, 2, 3])


def test_a_ratio_without_demand_is_infinite_or_unknown() -> None:
    assert GainCurves(("a",), schedule.from_shift(3), [[2, 1, 0, 0]]).demand_ratio() == np.inf
    assert np.isnan(GainCurves(("a",), schedule.from_shift(3), [[2, 1, 1, 1]]).demand_ratio())
    assert np.isnan(GainCurves(("a",), [0, 1], [[2, 1]]).demand_ratio())


def test_an_overlay_takes_each_reward_from_the_first_set_that_has_it() -> None:
    fine, coarse = np.linspace(0, 1, 9), np.linspace(0, 1, 5)
    joint = GainCurves(("a", "b"), schedule.from_shift(4), [1 - coarse, 1 - coarse**2])
    same = GainCurves(("c",), schedule.from_shift(4), [1 - coarse**3])
    finer = GainCurves(("b", "d"), schedule.from_shift(8), [2 - 2 * fine, 1 - fine**4])
    laid = overlay({"joint": joint, "same": same, "finer": finer})
    assert laid.curves.rewards == ("a", "b", "c", "d")
    assert laid.native == (4, 4, 4, 8)
    assert laid.resampled == ("d",)
    assert laid.left_out == {"finer": ("b",)}
    # the levels of T = 4 are levels of T = 8, so resampling is exact
    np.testing.assert_allclose(laid.curves.D, [1 - coarse, 1 - coarse**2, 1 - coarse**3, 1 - coarse**4], atol=1e-15)
    np.testing.assert_array_equal(laid.curves.sigmas, joint.sigmas)
    for sets, words in (
        ({}, "at least one set"),
        ({"x": joint, "y": joint}, "y adds no reward"),
        ({"x": joint, "y": GainCurves(("e",), [0, 1], [[1, 0]], alpha=4)}, "y has alpha = 4.0, but x has 2.0"),
        ({"x": joint, "y": GainCurves(("e",), [0, 1], [[1, 0]], aggregate="pooled")}, "y has aggregate = pooled"),
    ):
        with pytest.raises(RecastError, match=words):
            overlay(sets)


def test_prompts_of_an_overlay_count_for_their_own_rewards(curves: GainCurves) -> None:
    rng = np.random.default_rng(1)
    per_prompt = rng.random((5, 1, 26)) * np.linspace(1, 0, 26)
    other = GainCurves(("geneval",), schedule.from_shift(25), per_prompt.mean(0), D_prompts=per_prompt)
    laid = overlay({"joint": curves, "other": other}).curves
    assert laid.D_prompts is not None
    assert laid.D_prompts.shape == (17, 3, 11)
    np.testing.assert_array_equal(np.isnan(laid.D_prompts[..., 0]).sum(0), [5, 5, 12])
    np.testing.assert_allclose(laid.D, np.nanmean(laid.D_prompts, 0))
    assert np.isfinite(laid.intervals(resamples=200)["gains"]).all()
    bare = overlay({"joint": curves, "other": GainCurves(("geneval",), other.sigmas, other.D)})
    assert bare.curves.D_prompts is None


def test_excursions_are_the_factors_relative_to_static(curves: GainCurves) -> None:
    weights = recast.weigh(curves, {"clip": 1, "ocr": 3})
    factors = 10 * weights.matrix / np.array([[0.25], [0.75]])
    np.testing.assert_allclose(excursions(weights), np.stack([factors.min(1), factors.max(1)], axis=1))
    np.testing.assert_allclose(excursions(recast.weigh(curves, [1, 3], "static")), 1.0)
    # both rows sum to λ and all columns to 1/T, so with two equal rewards one is above 1 where the other is below
    even = excursions(recast.weigh(curves, [1, 1]))
    np.testing.assert_allclose(even[0] + even[1, ::-1], 2.0, atol=1e-8)


def test_curves_of_two_versions_of_a_reward_are_not_compared(curves: GainCurves) -> None:
    def made(**versions: str) -> GainCurves:
        return replace(curves, provenance={"versions": {"ocr": versions}} if versions else {})

    old, new = made(engine="rapidocr 3.8.0", models="v4"), made(engine="rapidocr 3.9.0", models="v6")
    for function in (compare, remaining):
        with pytest.raises(
            RecastError, match="ocr has engine = rapidocr 3.8.0 in one set of curves and rapidocr 3.9.0"
        ):
            function(old, new)
        assert function(new, new)
        assert function(made(), new)  # an earlier release did not record versions
        assert function(old.select(["clip"]), new)  # only what is compared must agree


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(5)
    sigmas, truth = schedule.from_shift(4), np.array([[1.0, 0.8, 0.5, 0.2, 0.0]])
    hits = []
    for _ in range(200):
        per_prompt = truth + rng.normal(scale=0.3, size=(40, 1, 5))
        curves = GainCurves(("a",), sigmas, per_prompt.mean(0), D_prompts=per_prompt)
        low, high = curves.intervals(level=0.9, resamples=300)["D"]
        hits.append((low <= truth) & (truth <= high))
    # D is taken relative to its last level, which therefore has no width.
    assert 0.84 <= np.mean(hits, axis=0)[0, :-1].mean() <= 0.94


def test_bootstrap_is_resampling_with_replacement(curves: GainCurves) -> None:
    draws = curves.bootstrap(resamples=4000)
    assert draws.shape == (4000, 2, 11)
    np.testing.assert_allclose(draws.mean(0), curves.D, atol=0.02)
    assert curves.D_prompts is not None
    np.testing.assert_allclose(draws.std(0), curves.D_prompts.std(0) / np.sqrt(12), rtol=0.1)
    np.testing.assert_array_equal(curves.bootstrap(seed=3), curves.bootstrap(seed=3))


def test_bootstrap_of_pooled_moments_resamples_moments() -> None:
    mu = np.random.default_rng(0).random((30, 1, 3, 4))
    pooled = GainCurves.from_mu(("a",), [0, 0.5, 1], mu, aggregate="pooled")
    np.testing.assert_allclose(pooled.D, np.log(mu.mean((0, 3))))
    np.testing.assert_allclose(pooled.bootstrap(4000).mean(0), pooled.D, atol=0.02)


def test_a_reward_that_applies_to_few_prompts_keeps_its_intervals_finite() -> None:
    per_prompt = np.random.default_rng(0).random((20, 2, 5))
    per_prompt[3:, 1] = np.nan
    curves = GainCurves(("a", "b"), schedule.from_shift(4), np.nanmean(per_prompt, 0), D_prompts=per_prompt)
    for band in curves.intervals(resamples=200).values():
        assert np.isfinite(band).all()
    draws = curves.bootstrap(4000)[:, 1]
    present = np.isfinite(draws).all(axis=1)
    assert 0.02 < 1 - present.mean() < 0.06  # (17/20)^20 of the draws have no prompt for it
    shape = renyi.normalized(renyi.gains(draws[present]))
    expected = np.percentile(shape, 2.5, axis=0)
    np.testing.assert_allclose(curves.intervals(resamples=4000)["normalized"][0, 1], expected)
    assert expected.max() > 0
    assert np.isfinite(curves.weight_intervals([1, 1], resamples=200)).all()


def test_weight_intervals_hold_the_weights(curves: GainCurves) -> None:
    weights = recast.weigh(curves, {"clip": 1, "ocr": 2}).matrix
    low, high = curves.weight_intervals([1, 2], level=0.99, resamples=500)
    assert ((low <= weights + 0.005) & (weights <= high + 0.005)).all()
    assert (high - low > 0).all()


def test_reliability_tells_a_curve_from_noise() -> None:
    rng = np.random.default_rng(3)
    sigmas = schedule.from_shift(10)
    peaked = np.array([1.0, 1.0, 1.0, 0.95, 0.8, 0.4, 0.1, 0.05, 0, 0, 0])
    truth = np.stack([peaked, np.zeros(11)])
    reliable = []
    for noise in (0.01, 0.3):
        per_prompt = truth + rng.normal(scale=noise, size=(60, 2, 11))
        curves = GainCurves(("real", "nothing"), sigmas, per_prompt.mean(0), D_prompts=per_prompt)
        reliable.append(curves.reliability())
        shape, drawn = curves.normalized(), curves.shrunk()
        np.testing.assert_allclose(drawn.mean(1), 1.0)
        np.testing.assert_allclose(drawn - 1, curves.reliability()[:, None] * (shape - 1))
    assert reliable[0][0] > 0.98
    assert reliable[0][0] > reliable[1][0] > reliable[1][1]
    assert max(r[1] for r in reliable) < 0.5


def test_few_prompts_do_not_look_reliable() -> None:
    """Resampling two prompts shows half of their variance; pure noise must not profit from that."""
    rng = np.random.default_rng(1)
    found = []
    for _ in range(200):
        per_prompt = rng.normal(size=(2, 1, 26))
        curves = GainCurves(("a",), schedule.from_shift(25), per_prompt.mean(0), D_prompts=per_prompt)
        found.append(curves.reliability(200)[0])
    assert np.mean(found) < 0.25


def test_shrinking_leaves_a_curve_without_gain_alone() -> None:
    per_prompt = np.zeros((5, 1, 4))
    curves = GainCurves(("a",), schedule.from_shift(3), per_prompt[0], D_prompts=per_prompt)
    np.testing.assert_array_equal(curves.shrunk(), 0.0)


def test_weight_intervals_are_the_percentiles_of_the_resampled_weights(curves: GainCurves) -> None:
    draws = renyi.gains(curves.bootstrap(50))
    solved = [
        recast.weigh(GainCurves(curves.rewards, curves.sigmas, D), [1, 2], tau=0.3).matrix for D in curves.bootstrap(50)
    ]
    np.testing.assert_allclose(
        curves.weight_intervals([1, 2], tau=0.3, level=0.8, resamples=50),
        np.percentile(solved, [10, 90], axis=0),
        atol=1e-6,
    )
    bands = curves.intervals(level=0.8, resamples=50)
    np.testing.assert_allclose(bands["gains"], np.percentile(draws, [10, 90], axis=0))
    np.testing.assert_allclose(bands["normalized"], np.percentile(renyi.normalized(draws), [10, 90], axis=0))


def test_self_rollouts_reach_the_curves() -> None:
    mu = np.random.default_rng(0).random((3, 1, 4, 5))
    curves = GainCurves.from_mu(("a",), schedule.from_shift(3), mu, alpha=3.0, self_rollout=True)
    np.testing.assert_allclose(curves.D, renyi.log_moment(mu, 3.0, self_rollout=True).mean(0))


def test_intervals_need_prompts() -> None:
    curves = GainCurves(("a",), [0, 1], [[1.0, 0.0]])
    with pytest.raises(RecastError, match="need D_prompts"):
        curves.intervals()
    with pytest.raises(RecastError, match="between 0 and 1"):
        GainCurves(("a",), [0, 1], [[1.0, 0.0]], D_prompts=[[[1.0, 0.0]]]).intervals(level=95)


def test_compare_agrees_with_scipy(curves: GainCurves) -> None:
    other = GainCurves(curves.rewards, curves.sigmas, np.sort(curves.D**2, axis=1)[:, ::-1] * 0.5)
    for i, row in enumerate(compare(curves, other)):
        x, y = curves.gains[i], other.gains[i]
        np.testing.assert_allclose(row.pearson, stats.pearsonr(x, y)[0])
        np.testing.assert_allclose(row.spearman, stats.spearmanr(x, y)[0])
        assert row.peaks == (x.argmax() + 1, y.argmax() + 1)
        np.testing.assert_allclose(row.total_ratio, y.sum() / x.sum())


def test_a_curve_compared_with_itself(curves: GainCurves) -> None:
    for row in compare(curves, curves):
        np.testing.assert_allclose([row.pearson, row.spearman, row.total_ratio], 1.0)
    assert all(row.ratio == pytest.approx(1.0) for row in remaining(curves, curves))


def test_flat_curves_and_t_1_have_no_correlation() -> None:
    flat = GainCurves(("a",), [0, 0.5, 1], [[2.0, 1.0, 0.0]])
    assert np.isnan(compare(flat, flat)[0].pearson)
    one = GainCurves(("a",), [0, 1], [[1.0, 0.0]])
    assert np.isnan(compare(one, one)[0].spearman)
    none = GainCurves(("a",), [0, 1], [[0.0, 1.0]])
    assert np.isnan(remaining(none, one)[0].ratio)


def test_compare_needs_one_grid_and_a_common_reward(curves: GainCurves) -> None:
    with pytest.raises(RecastError, match="different grids.*resample"):
        compare(curves, curves.resample(schedule.from_shift(25)))
    other = GainCurves(("hps",), curves.sigmas, curves.D[:1])
    with pytest.raises(RecastError, match="no reward in common: clip, ocr against hps"):
        remaining(curves, other)
    with pytest.raises(RecastError, match="no curve for hps"):
        curves.select(["hps"])


def test_shapes_are_checked() -> None:
    with pytest.raises(RecastError, match=r"\(1, 3\), not \(1, 2\)"):
        GainCurves(("a",), [0, 0.5, 1], [[1.0, 0.0]])
    with pytest.raises(RecastError, match="D_prompts"):
        GainCurves(("a",), [0, 1], [[1.0, 0.0]], D_prompts=np.zeros((3, 2, 2)))
    with pytest.raises(RecastError, match="list of names"):
        GainCurves((), [0, 1], np.zeros((0, 2)))
    with pytest.raises(RecastError, match="no prompts"):
        GainCurves(("a",), [0, 1], [[1.0, 0.0]], D_prompts=np.zeros((0, 1, 2)))
    with pytest.raises(RecastError, match="not the mean of D_prompts"):
        GainCurves(("a",), [0, 1], [[1.0, 0.0]], D_prompts=np.full((3, 1, 2), 7.0))
    with pytest.raises(RecastError, match="at least two prompts"):
        GainCurves(("a",), [0, 1], [[1.0, 0.0]], D_prompts=[[[1.0, 0.0]]]).reliability()
    with pytest.raises(RecastError, match="D must be a rectangular array"):
        GainCurves(("a", "b"), [0, 1], [[1.0, 0.0], [1.0]])
    with pytest.raises(RecastError, match="alpha must be a positive number, not '2'"):
        GainCurves(("a",), [0, 1], [[1.0, 0.0]], alpha="2")


def test_links_are_followed_and_devices_and_folders_refused(curves: GainCurves, tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    link.symlink_to(real)
    curves.save(link)
    assert link.is_symlink()
    np.testing.assert_array_equal(GainCurves.load(real).D, curves.D)
    os.mkfifo(tmp_path / "pipe")
    for target in (tmp_path, tmp_path / "pipe", Path("")):
        with pytest.raises(RecastError, match="a folder or a device"):
            curves.save(target)


def test_normalized_gains_are_those_of_renyi(curves: GainCurves) -> None:
    np.testing.assert_array_equal(curves.normalized(), renyi.normalized(renyi.gains(curves.D)))
