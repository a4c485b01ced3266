"""The paper's own arithmetic, from its tables."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import paper_tables as paper
from recast.core import schedule, sinkhorn
from recast.core.comparison import compare, remaining
from recast.core.curves import GainCurves

GRID = schedule.from_shift(paper.STEPS)


def curves_with_gains(gains: np.ndarray) -> GainCurves:
    """Curves whose clipped gains are the given ones."""
    D = np.concatenate([np.cumsum(gains[:, ::-1], axis=1)[:, ::-1], np.zeros((len(gains), 1))], axis=1)
    return GainCurves(paper.REWARDS, GRID, D)


def bumps(peaks: list[int], width: float = 4.0) -> np.ndarray:
    """Single-peaked gains like the paper's, argmax at the given steps, no two steps alike."""
    offset = np.arange(1, paper.STEPS + 1) - np.array(peaks)[:, None]
    return np.exp(-0.5 * (offset / np.where(offset < 0, width, 0.73 * width)) ** 2)


def test_curve_drift_column_is_the_ratio_of_total_gains() -> None:
    base, now = (np.array([paper.DRIFT[name][k] for name in paper.REWARDS]) for k in (0, 1))
    shape = bumps([17, 15, 17, 15])
    shape /= shape.sum(1, keepdims=True)
    rows = remaining(curves_with_gains(shape * base[:, None]), curves_with_gains(shape * now[:, None]))
    for row, name in zip(rows, paper.REWARDS, strict=False):
        assert (row.reward, round(row.base, 3), round(row.now, 3)) == (name, *paper.DRIFT[name][:2])
        # The printed ratio is of unrounded totals; at the printed precision it is off by one unit at most.
        assert abs(row.ratio - paper.DRIFT[name][2]) <= 0.005 + 0.5e-3 / row.base
    assert rows[-1].reward == "all"
    # The printed sums, too, are of unrounded totals: four roundings of 0.0005 each.
    assert abs(rows[-1].base - paper.DRIFT_ALL[0]) <= 0.002
    assert abs(rows[-1].now - paper.DRIFT_ALL[1]) <= 0.002
    assert round(rows[-1].ratio, 2) == paper.DRIFT_ALL[2]


def test_clipped_gains_sum_to_at_least_the_clean_end() -> None:
    """Why Tab. curve-drift says 0.252 where App. B.3 says 0.245: clipping breaks the telescope."""
    for name, clean_end in paper.CLEAN_END.items():
        assert paper.DRIFT[name][0] >= clean_end
    D = np.array([[0.245, 0.2, 0.207, 0.0]] * 4)
    curves = GainCurves(paper.REWARDS, [0, 0.3, 0.6, 1], D)
    np.testing.assert_allclose(curves.total, 0.252)


def test_surrogate_sensitivity_peaks_and_total_gain() -> None:
    first, second = ([paper.SURROGATE[name][2][k] for name in paper.REWARDS] for k in (0, 1))
    a, b = bumps(first), bumps(second)
    ratio = np.array([paper.SURROGATE[name][3] for name in paper.REWARDS])
    b *= (ratio * a.sum(1) / b.sum(1))[:, None]
    for row in compare(curves_with_gains(a), curves_with_gains(b)):
        assert row.peaks == paper.SURROGATE[row.reward][2]
        np.testing.assert_allclose(row.total_ratio, paper.SURROGATE[row.reward][3], atol=1e-9)
        assert paper.PEAK_SHIFT[0] <= abs(row.peaks[1] - row.peaks[0]) <= paper.PEAK_SHIFT[1]


def test_surrogate_sensitivity_correlations() -> None:
    """Curves built to have the printed Pearson r give it back; Spearman is Pearson of their ranks."""
    rng = np.random.default_rng(0)
    a = bumps([paper.SURROGATE[name][2][0] for name in paper.REWARDS])
    pearson = np.array([paper.SURROGATE[name][0] for name in paper.REWARDS])[:, None]
    x = a - a.mean(1, keepdims=True)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    z = rng.normal(size=x.shape)
    z -= z.mean(1, keepdims=True)
    z -= (z * x).sum(1, keepdims=True) * x
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    b = 1 + pearson * x + np.sqrt(1 - pearson**2) * z
    for row, gains_a, gains_b in zip(compare(curves_with_gains(a), curves_with_gains(b)), a, b, strict=True):
        assert round(row.pearson, 3) == paper.SURROGATE[row.reward][0]
        assert len(set(gains_a)) == paper.STEPS
        ranks = [np.argsort(np.argsort(g)) for g in (gains_a, gains_b)]
        np.testing.assert_allclose(row.spearman, np.corrcoef(*ranks)[0, 1], atol=1e-9)


def test_the_sentence_above_the_table_is_its_range() -> None:
    for column, stated in ((0, paper.PEARSON_RANGE), (1, paper.SPEARMAN_RANGE)):
        values = [row[column] for row in paper.SURROGATE.values()]
        assert np.floor(min(values) * 100) / 100 == stated[0]
        assert round(max(values), 2) == stated[1]


@pytest.mark.parametrize("budget", paper.BUDGETS)
def test_fewer_than_100_iterations_on_curves_like_the_papers(budget: tuple[int, ...]) -> None:
    for width in (1.5, 3.0, 6.0):
        result = sinkhorn.project(bumps([17, 15, 17, 15], width), budget)
        assert result.converged
        assert result.iterations < paper.ITERATIONS_BELOW


@settings(max_examples=100)
@given(
    st.integers(1, 4),
    st.integers(1, 25),
    st.sampled_from(paper.BUDGETS),
    st.integers(0, 2**32 - 1),
)
def test_fewer_than_100_iterations_at_m_4_and_t_25(m: int, steps: int, budget: tuple[int, ...], seed: int) -> None:
    """Any gamma-distributed curves, noisier than the paper's, at its sizes and budgets."""
    gains = np.random.default_rng(seed).gamma(2.0, size=(m, steps))
    result = sinkhorn.project(gains, budget[:m])
    assert result.converged
    assert result.iterations < paper.ITERATIONS_BELOW


def test_the_flat_kernel_gives_lambda_over_t() -> None:
    for budget in paper.BUDGETS:
        lam = np.array(budget) / sum(budget)
        weights = sinkhorn.project(np.full((4, paper.STEPS), 3.0), budget).weights
        np.testing.assert_allclose(weights, np.repeat(lam[:, None] / paper.STEPS, paper.STEPS, 1), atol=1e-12)
