"""Effects against gradients whose signal and noise are known, and predictions against simulation and search."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import brentq

from recast import WeightMatrix
from recast.core.advice import advice
from recast.core.arrays import Array
from recast.core.effects import Effects, Normalization
from recast.errors import RecastError
from recast.weigh import static

M, T, SIZE, IMAGES = 2, 3, 24, 8
SIGMAS = (0.0, 0.3, 0.6, 1.0)
NAMES = ("a", "b")
RNG = np.random.default_rng(0)
MEAN = RNG.normal(size=(M * T, SIZE)) * np.array([2.0, 1.0, 0.2, 0.1, 1.0, 2.0])[:, None]
ROOT = RNG.normal(size=(M * T, M * T)) + 4 * np.eye(M * T)
"""The gradients of one image are MEAN + ROOT z, with z (n, SIZE) standard normal."""
SIGNAL, NOISE = MEAN @ MEAN.T, SIZE * ROOT @ ROOT.T


def products(gradients: Array) -> Array:
    """Inner products (Q, Q, n, n) of gradients (Q, n, SIZE)."""
    return np.einsum("qap,rbp->qrab", gradients, gradients)


def drawn(seed: int, splits: int = 16, images: int = IMAGES) -> Array:
    """Mean gradients (Q, n, SIZE) of `images` images per split."""
    z = np.random.default_rng(seed).normal(size=(splits, M * T, SIZE))
    return MEAN + ROOT @ z / np.sqrt(images)


def effects(seed: int = 0, splits: int = 16, images: int = IMAGES, **more: object) -> Effects:
    how = {"batch": 32, "levels": T} | more
    return Effects.measured(NAMES, SIGMAS, products(drawn(seed, splits, images)), images, **how)  # type: ignore[arg-type]


def exact(**more: object) -> Effects:
    """Effects whose signal and noise are the true ones."""
    four = np.broadcast_to(SIGNAL + NOISE / IMAGES, (4, *SIGNAL.shape))
    how = {"batch": 32, "levels": T, "normalize": "reward"} | more
    return Effects(
        rewards=NAMES,
        sigmas=np.array(SIGMAS),
        own=four,
        cross=np.broadcast_to(SIGNAL, four.shape),
        images=IMAGES,
        scales=np.ones(M),
        covariance=np.eye(M),
        settings={},
        **how,  # type: ignore[arg-type]
    )


def matrix(*rows: tuple[float, ...]) -> WeightMatrix:
    table = np.array(rows) / T
    return WeightMatrix(NAMES, SIGMAS, table, table.sum(axis=1))


TIMED = matrix((0.8, 0.5, 0.2), (0.2, 0.5, 0.8))
STATIC = static({"a": 1.0, "b": 1.0}, SIGMAS)


def test_signal_and_noise_are_unbiased() -> None:
    many = [effects(seed, splits=4) for seed in range(2000)]
    for name, truth in (("signal", SIGNAL), ("noise", NOISE)):
        tables = np.stack([getattr(each, name) for each in many])
        error = tables.std(axis=0) / np.sqrt(len(many))
        assert np.abs((tables.mean(axis=0) - truth) / error).max() < 4
    np.testing.assert_allclose(exact().signal, SIGNAL, rtol=1e-12)
    np.testing.assert_allclose(exact().noise, NOISE, rtol=1e-10)


def test_signal_is_the_mean_over_different_splits_and_each_is_left_out_once() -> None:
    table = products(drawn(3, splits=5))
    found = Effects.measured(NAMES, SIGMAS, table, IMAGES, batch=32, levels=T)
    apart = [table[q, r] for q in range(5) for r in range(5) if q != r]
    np.testing.assert_allclose(found.signal, np.mean(apart, axis=0), rtol=1e-10)
    whole = found._forms(TIMED)
    for left in range(5):
        kept = [q for q in range(5) if q != left]
        less = Effects.measured(NAMES, SIGMAS, table[np.ix_(kept, kept)], IMAGES, batch=32, levels=T)
        for mine, other in zip(less._forms(TIMED), whole, strict=True):
            np.testing.assert_allclose(mine[0], other[left + 1], rtol=1e-8)


def simulated(weights: WeightMatrix, images: int, levels: int, count: int = 20000) -> float:
    """The mean product of updates on `images` images with the noiseless static one, over the root mean square norms."""
    rng = np.random.default_rng(images + levels)
    target = STATIC.factors.ravel() @ MEAN
    f = weights.factors
    total = np.zeros((count, SIZE))
    for _ in range(images):
        g = MEAN + np.einsum("ab,cbp->cap", ROOT, rng.normal(size=(count, M * T, SIZE)))
        trained = rng.permuted(np.tile(np.arange(T) < levels, (count, 1)), axis=1)
        factors = (f[None] * trained[:, None] * T / levels).reshape(count, -1)
        total += np.einsum("ca,cap->cp", factors, g) / images
    return float((total @ target).mean() / np.sqrt((target @ target) * (total**2).sum(axis=1).mean()))


@pytest.mark.parametrize(("images", "levels"), [(1, T), (4, T), (2, 1), (3, 2)])
def test_efficiency_is_that_of_simulated_updates(images: int, levels: int) -> None:
    found = exact(levels=levels)
    for weights in (TIMED, STATIC):
        assert found.efficiency(weights, images) == pytest.approx(simulated(weights, images, levels), abs=0.006)


def test_static_is_noiseless_in_the_limit_and_the_cosine_is_that_of_the_means() -> None:
    found = exact()
    assert found.efficiency(STATIC, 1e12) == pytest.approx(1, abs=1e-9)
    assert found.static(TIMED, 32) == found.efficiency(STATIC, 32)
    assert found.efficiency(STATIC) == found.efficiency(STATIC, 32)
    one, two = (each.factors.ravel() @ MEAN for each in (STATIC, TIMED))
    cosine = one @ two / np.linalg.norm(one) / np.linalg.norm(two)
    assert found.efficiency(TIMED, 1e12) == pytest.approx(cosine, abs=1e-9)


def test_break_even_is_where_a_search_finds_it() -> None:
    """Noise where a reward has no signal: W, which gives it no share there, pays with few images."""
    mean = np.zeros((M * T, SIZE))
    mean[[0, 1, 4, 5], [0, 1, 1, 2]] = [3, 1, 1, 3]
    noise = 40 * np.eye(M * T)
    found = replace(exact(), own=np.stack([mean @ mean.T + noise / IMAGES] * 4), cross=np.stack([mean @ mean.T] * 4))
    timed = matrix((0.7, 0.5, 0.3), (0.3, 0.5, 0.7))
    limit = found.break_even(timed)
    searched = brentq(lambda n: found.efficiency(timed, n) - found.static(timed, n), 1, 1e5)
    assert limit == pytest.approx(searched, rel=1e-6)
    assert found.gain(timed, limit / 2)[0] > 0 > found.gain(timed, 2 * limit)[0]
    assert found.break_even(STATIC) == 0
    assert found.break_even(matrix((0.3, 0.5, 0.7), (0.7, 0.5, 0.3))) == 0  # more to where the signal is not
    low, high = found.break_even_interval(timed)
    assert low == pytest.approx(limit, rel=0.06)  # no error here, and a grid of 40 points per decade
    assert high == pytest.approx(limit, rel=0.06)
    flat = replace(found, cross=np.stack([np.outer(np.r_[1, 1, 1, 0, 0, 0], np.r_[1, 1, 1, 0, 0, 0])] * 4) * 1.0)
    assert flat.break_even(matrix((0.6, 0.6, 0.6), (0.4, 0.4, 0.4))) == 0  # this is a static W itself
    tight = WeightMatrix(NAMES, SIGMAS, np.array([[2, 2, 2], [0, 0, 0]]) / 6, [1.0, 0.0])
    assert flat.efficiency(tight, 4) == flat.static(tight, 4)


def test_a_weight_that_only_drops_noise_pays_at_any_number_of_images() -> None:
    mean = np.zeros((M * T, SIZE))
    mean[[0, 5], 0] = 1
    table = mean @ mean.T
    found = replace(exact(), own=np.stack([table + 5 * np.eye(M * T)] * 4), cross=np.stack([table] * 4))
    assert found.break_even(matrix((1, 0.5, 0), (0, 0.5, 1))) == np.inf


def test_intervals_contain_the_truth_about_as_often_as_they_say() -> None:
    truth = exact().gain(TIMED)[0]
    realized = exact().realized(TIMED)[0]
    found = [effects(seed) for seed in range(300)]
    gains = np.array([each.gain(TIMED) for each in found])
    covered = np.abs(gains[:, 0] - truth) < 2 * gains[:, 1]
    assert 0.9 <= covered.mean() <= 1
    assert gains[:, 1].mean() == pytest.approx(gains[:, 0].std(), rel=0.25)
    shares = np.array([[each[0] for each in one.realized(TIMED)] for one in found])
    assert shares[:, 1].mean() == pytest.approx(shares[:, 0].std(), rel=0.25)
    assert abs(shares[:, 0].mean() - realized[0]) < 0.01


def test_snr_and_effect_by_hand() -> None:
    found = exact(levels=T, batch=50)
    g, c = SIGNAL.diagonal(), NOISE.diagonal()
    np.testing.assert_allclose(found.snr().ravel(), np.sqrt(g / (c / 50)), rtol=1e-9)
    np.testing.assert_allclose(found.snr(200), 2 * found.snr(50), rtol=1e-9)
    norms = np.sqrt((g + c / 50).reshape(M, T).mean(axis=0))
    np.testing.assert_allclose(found.effect, norms / norms.sum(), rtol=1e-9)
    half = exact(levels=1, batch=50)  # each level gets a third of the images, so three times the noise
    spread = 3 * (g + c) - g
    np.testing.assert_allclose(half.snr().ravel(), np.sqrt(g / (spread / 50)), rtol=1e-9)


def test_the_budget_realized_is_that_of_w() -> None:
    found = exact()
    np.testing.assert_allclose(found.realized(TIMED)[0], TIMED.realized(found.effect), rtol=1e-12)
    np.testing.assert_allclose(found.realized(STATIC)[0], [0.5, 0.5], rtol=1e-12)
    scaled = replace(found, normalize="shared", scales=np.array([3.0, 1.0]))
    np.testing.assert_allclose(scaled.realized(STATIC)[0], [0.75, 0.25], rtol=1e-12)


@pytest.mark.parametrize("mode", ["reward", "shared", "step"])
def test_timing_is_what_another_budget_does_not_do(mode: Normalization) -> None:
    found = replace(exact(), normalize=mode, scales=np.array([2.0, 0.5]), covariance=np.diag([4.0, 0.25]))
    even = found.even(TIMED)
    same = static(dict(zip(NAMES, even.tolist(), strict=True)), SIGMAS)
    np.testing.assert_allclose(found.realized(same)[0], found.realized(TIMED)[0], rtol=1e-9)
    assert found.timing(TIMED, 8)[0] == pytest.approx(found.efficiency(TIMED, 8, even) / found.efficiency(same, 8) - 1)
    shifted = WeightMatrix(NAMES, SIGMAS, same.matrix, same.budget, "row")
    assert found.timing(shifted, 8)[0] == pytest.approx(0, abs=1e-9)
    assert abs(found.gain(shifted, 8, STATIC.budget)[0]) > 1e-4
    assert found.break_even(shifted, found.even(shifted)) == 0


def test_columns_by_effect_leave_timing_alone() -> None:
    """With ν the effects, rows sum to the budget realized, so that W's gain is its timing."""
    found = exact()
    rows = np.array([[0.8, 0.5, 0.3], [0.2, 0.5, 0.7]]) * found.effect
    timed = WeightMatrix(NAMES, SIGMAS, rows, rows.sum(axis=1), nu=found.effect)
    np.testing.assert_allclose(found.even(timed), timed.budget, rtol=1e-9)
    assert found.timing(timed) == pytest.approx(found.gain(timed))
    assert not any("realizes" in sentence for sentence in advice(found, timed))


def test_a_shift_of_the_budget_is_not_called_timing() -> None:
    """A reward with a clear gradient gets more than asked for, at all levels alike."""
    mean = np.zeros((M * T, SIZE))
    mean[[0, 1, 2], 0] = 1
    table = mean @ mean.T
    found = replace(exact(), own=np.stack([table + 5 * np.eye(M * T)] * 4), cross=np.stack([table] * 4))
    nu = np.array([0.6, 0.2, 0.2])
    matrix = np.array([[0.9, 0.9, 0.9], [0.1, 0.1, 0.1]]) * nu
    favored = WeightMatrix(NAMES, SIGMAS, matrix, [0.9, 0.1], "row", nu=nu)
    assert found.gain(favored, budget=[0.5, 0.5])[0] > 0.05
    assert found.timing(favored)[0] == pytest.approx(0, abs=1e-9)


def test_a_normalization_per_step_divides_every_column() -> None:
    covariance = np.array([[4.0, 0.6], [0.6, 1.0]])
    found = replace(exact(), normalize="step", scales=np.array([2.0, 1.0]), covariance=covariance)
    f = TIMED.factors
    deviation = [np.sqrt(f[:, t] @ covariance @ f[:, t]) for t in range(T)]
    expected = f * np.array([[2.0], [1.0]]) / deviation
    np.testing.assert_allclose(found._factors(TIMED, f).reshape(M, T), expected, rtol=1e-12)
    s = STATIC.factors * np.array([[2.0], [1.0]])  # its columns are alike, so one divisor for all
    u, v = (each.ravel() for each in (s, expected))
    cosine = u @ SIGNAL @ v / np.sqrt((u @ SIGNAL @ u) * (v @ SIGNAL @ v + v @ NOISE @ v / 32))
    assert found.efficiency(TIMED) == pytest.approx(cosine, rel=1e-9)


def test_no_signal_is_said_and_not_divided_by() -> None:
    none = replace(exact(), cross=np.stack([-0.01 * np.eye(M * T)] * 4))
    assert np.isnan(none.efficiency(TIMED))
    assert np.isnan(none.break_even(TIMED))
    assert not none.clear(TIMED)
    assert (none.snr() == 0).all()
    assert (none.effect > 0).all()
    assert none.effect.sum() == pytest.approx(1)
    said = " ".join(advice(none, TIMED))
    assert "too few to tell static's gradient from noise" in said
    assert "nan" not in said
    assert exact().clear(TIMED)


def test_sentences_for_many_and_few_images() -> None:
    many = advice(exact(batch=10**6), TIMED)
    assert many[0].startswith("With 1,000,000 images per update the gradient of a and b is clear at every level")
    near = matrix((0.51, 0.5, 0.49), (0.49, 0.5, 0.51))
    assert "expect no difference between sinkhorn and static" in advice(exact(batch=10**6), near)[-1]
    few = " ".join(advice(exact(batch=1), TIMED))
    assert "of its squared norm is noise. More images per update" in few
    assert "nothing to time" in advice(_one(), static({"a": 1}, SIGMAS))[-1]


def _one() -> Effects:
    table = products(drawn(0)[:, :T])
    return Effects.measured(("a",), SIGMAS, table, IMAGES, batch=32, levels=T)


def test_saved_and_loaded_and_small(tmp_path: Path) -> None:
    found = effects(settings={"train.beta": 0.1})
    again = Effects.load(found.save(tmp_path / "effects.json"))
    for name in ("own", "cross", "sigmas", "scales", "covariance"):
        np.testing.assert_allclose(getattr(again, name), getattr(found, name), rtol=1e-14, atol=1e-14)
    assert again.settings == {"train.beta": 0.1}
    assert again.gain(TIMED) == pytest.approx(found.gain(TIMED))
    table = np.random.default_rng(0).normal(size=(16, 100, 120))
    names, grid = ("a", "b", "c", "d"), np.linspace(0, 1, 26)
    large = Effects.measured(names, grid, products(table), 4, batch=64, levels=25)
    assert large.save(tmp_path / "large.json").stat().st_size < 5e6


def test_a_damaged_file_is_one_sentence(tmp_path: Path) -> None:
    path = effects().save(tmp_path / "effects.json")
    content = json.loads(path.read_text())
    path.write_text(path.read_text()[:200])
    with pytest.raises(RecastError, match=r"effects\.json: not valid JSON"):
        Effects.load(path)
    for key, value in (("own", [[1.0]]), ("levels", 9), ("normalize", "rows"), ("scales", [None, 1]), ("images", {})):
        path.write_text(json.dumps(content | {key: value}))
        with pytest.raises(RecastError, match=r"effects\.json"):
            Effects.load(path)
    del content["cross"]
    path.write_text(json.dumps(content))
    with pytest.raises(RecastError, match="the field cross is missing"):
        Effects.load(path)


def test_w_of_other_rewards_or_another_grid_is_refused() -> None:
    with pytest.raises(RecastError, match="measured for a, b at T = 3"):
        exact().efficiency(static({"a": 1, "c": 1}, SIGMAS))
    with pytest.raises(RecastError, match="use W of the same rewards and grid"):
        exact().efficiency(static({"a": 1, "b": 1}, [0, 0.5, 1]))
    with pytest.raises(RecastError, match="Q ≥ 4"):
        effects(splits=3)
