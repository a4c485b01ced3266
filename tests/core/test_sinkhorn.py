"""The projection against POT, its optimality conditions and brute force."""

import itertools
import warnings

import numpy as np
import ot
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recast.core import renyi, sinkhorn
from recast.errors import ConvergenceWarning, RecastError


def assert_optimal(gains: np.ndarray, budget: np.ndarray, result: sinkhorn.Projection, tau: float = 1.0) -> None:
    """Marginals to 1e-9, and log W − log K of rank one (a_i + b_t): the conditions of Eq. sinkhorn-form."""
    lam, steps = np.asarray(budget) / np.sum(budget), gains.shape[1]
    assert result.converged
    np.testing.assert_allclose(result.weights.sum(1), lam, rtol=0, atol=1e-9)
    np.testing.assert_allclose(result.weights.sum(0), 1 / steps, rtol=0, atol=1e-9)
    used = lam > 0
    residual = np.log(result.weights[used]) - renyi.normalized(np.maximum(gains, 0))[used] / tau
    centred = residual - residual.mean(0) - residual.mean(1, keepdims=True) + residual.mean()
    np.testing.assert_allclose(centred, 0, atol=1e-6)


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    m, steps = draw(st.integers(1, 5)), draw(st.integers(1, 25))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["smooth", "heavy", "one-hot", "with zeros"]))
    gains = rng.gamma(2.0, size=(m, steps)) ** (3 if kind == "heavy" else 1)
    if kind == "one-hot":
        gains = np.eye(steps)[rng.integers(0, steps, m)]
    if kind == "with zeros":
        gains[rng.random(m) < 0.5] = 0.0
    budget = 10.0 ** rng.uniform(-6, 0, m) if draw(st.booleans()) else rng.dirichlet(np.ones(m))
    return gains, budget


@settings(max_examples=200)
@given(problems(), st.sampled_from([1.0, 0.3, 3.0]))
def test_every_kernel_meets_the_optimality_conditions(problem: tuple[np.ndarray, np.ndarray], tau: float) -> None:
    gains, budget = problem
    result = sinkhorn.project(gains, budget, tau=tau)
    assert_optimal(gains, budget, result, tau)


@pytest.mark.parametrize(
    ("gains", "budget"),
    [
        (np.eye(25)[[3, 17]], [1, 1]),  # one-hot
        (np.eye(25)[[3, 3]], [1, 24]),  # a budget that is exactly one column, contested
        (np.eye(25)[[3, 17]], [1, 24]),  # a budget that is exactly its own column: Sinkhorn alone crawls
        (np.zeros((3, 10)), [1, 2, 3]),  # no gain at all
        (np.ones((1, 7)), [5]),  # m = 1
        (np.ones((4, 1)), [1, 2, 3, 4]),  # T = 1
        (np.random.default_rng(0).gamma(2.0, size=(4, 25)), [1, 1, 1, 1e6]),
        (np.random.default_rng(1).gamma(2.0, size=(2, 25)), [1e-6, 1]),
    ],
)
def test_hard_kernels(gains: np.ndarray, budget: list[float]) -> None:
    assert_optimal(gains, np.array(budget), sinkhorn.project(gains, budget))


@pytest.mark.parametrize("tau", [0.1, 0.03, 0.01])
def test_sharp_kernels_converge_and_approach_the_transport_problem(tau: float) -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        gains, budget = rng.gamma(1.0, size=(4, 12)), rng.dirichlet(np.ones(4))
        result = sinkhorn.project(gains, budget, tau=tau)
        assert result.converged
        best = (sinkhorn.hard(gains, budget) * renyi.normalized(gains)).sum()
        value = (result.weights * renyi.normalized(gains)).sum()
        # Entropy of a 4 × 12 plan is at most log 48, so τ log 48 bounds the loss.
        assert best - tau * np.log(48) - 1e-9 <= value <= best + 1e-9


@pytest.mark.parametrize("tau", [0.5, 1.0, 2.0])
def test_it_agrees_with_pot(tau: float) -> None:
    rng = np.random.default_rng(7)
    for _ in range(10):
        m, steps = rng.integers(1, 6), rng.integers(2, 26)
        gains, lam, nu = rng.gamma(2.0, size=(m, steps)), rng.dirichlet(np.ones(m)), rng.dirichlet(np.ones(steps))
        plan = ot.bregman.sinkhorn_log(lam, nu, -renyi.normalized(gains), tau, stopThr=1e-12, numItermax=100_000)
        np.testing.assert_allclose(sinkhorn.project(gains, lam, nu, tau, tol=1e-12).weights, plan, atol=1e-9)


def test_the_minimum_is_the_minimum() -> None:
    """No feasible direction lowers the objective of Eq. ot-form."""
    rng = np.random.default_rng(5)
    gains = rng.gamma(2.0, size=(3, 6))
    weights = sinkhorn.project(gains, [1, 2, 3]).weights

    def objective(plan: np.ndarray) -> float:
        return float((-renyi.normalized(gains) * plan + plan * np.log(plan)).sum())

    for _ in range(50):
        move = rng.normal(size=weights.shape)
        move = move - move.mean(0) - move.mean(1, keepdims=True) + move.mean()
        assert objective(weights + 1e-3 * weights.min() * move) > objective(weights)


def test_a_flat_kernel_is_static() -> None:
    weights = sinkhorn.project(np.full((3, 8), 0.7), [1, 2, 5]).weights
    np.testing.assert_allclose(weights, sinkhorn.static([1, 2, 5], 8), atol=1e-12)
    np.testing.assert_allclose(weights[:, 0], np.array([1, 2, 5]) / 8 / 8)


def test_a_zero_budget_gives_a_zero_row() -> None:
    for tau in (1.0, 0.01):
        result = sinkhorn.project(np.random.default_rng(0).random((3, 5)), [1, 0, 2], tau=tau)
        assert result.converged
        np.testing.assert_array_equal(result.weights[1], 0.0)


def test_many_budgets_and_many_gains_are_the_single_solves() -> None:
    rng = np.random.default_rng(2)
    budgets, stack = rng.dirichlet(np.ones(3), 40), rng.gamma(2.0, size=(40, 3, 9))
    shared = sinkhorn.project_many(stack[0], budgets)
    own = sinkhorn.project_many(stack, budgets)
    one = sinkhorn.project_many(stack, budgets[:1])
    for j in range(40):
        np.testing.assert_allclose(shared.weights[j], sinkhorn.project(stack[0], budgets[j]).weights, atol=1e-8)
        np.testing.assert_allclose(own.weights[j], sinkhorn.project(stack[j], budgets[j]).weights, atol=1e-8)
        np.testing.assert_allclose(one.weights[j], sinkhorn.project(stack[j], budgets[0]).weights, atol=1e-8)
    assert shared.converged.all()
    assert shared.row_error.shape == shared.column_error.shape == shared.iterations.shape == (40,)


def test_too_few_iterations_warn_and_say_so() -> None:
    gains = np.random.default_rng(0).gamma(2.0, size=(4, 25))
    with pytest.warns(ConvergenceWarning, match="2 iterations.*raise max_iter"):
        result = sinkhorn.project(gains, [1, 1, 1, 2], max_iter=2)
    assert not result.converged
    assert result.iterations == 2
    assert result.row_error > 1e-9
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sinkhorn.project(gains, [1, 1, 1, 2]).converged


def vertices(lam: np.ndarray, nu: np.ndarray) -> list[np.ndarray]:
    """All basic feasible plans: m+T−1 cells whose marginal equations have one solution."""
    m, steps = len(lam), len(nu)
    equations = np.vstack([np.kron(np.eye(m), np.ones(steps)), np.kron(np.ones(m), np.eye(steps))])[:-1]
    right = np.concatenate([lam, nu])[:-1]
    plans = []
    for cells in itertools.combinations(range(m * steps), m + steps - 1):
        basis = equations[:, cells]
        if abs(np.linalg.det(basis)) < 1e-9:
            continue
        plan = np.zeros(m * steps)
        plan[list(cells)] = np.linalg.solve(basis, right)
        if (plan >= -1e-12).all():
            plans.append(plan.reshape(m, steps))
    return plans


@pytest.mark.parametrize(("m", "steps"), [(2, 3), (3, 3), (2, 5), (3, 4)])
def test_hard_finds_the_best_vertex(m: int, steps: int) -> None:
    rng = np.random.default_rng(m * 10 + steps)
    for _ in range(3):
        gains, lam = rng.random((m, steps)), rng.dirichlet(np.ones(m))
        nu = np.full(steps, 1 / steps)
        best = max((plan * renyi.normalized(gains)).sum() for plan in vertices(lam, nu))
        plan = sinkhorn.hard(gains, lam)
        np.testing.assert_allclose((plan * renyi.normalized(gains)).sum(), best, atol=1e-12)
        np.testing.assert_allclose(plan.sum(1), lam, atol=1e-12)
        np.testing.assert_allclose(plan.sum(0), nu, atol=1e-12)
        assert (plan > 1e-12).sum() <= m + steps - 1  # a vertex


def test_hard_takes_column_marginals() -> None:
    nu = np.array([0.5, 0.3, 0.2])
    plan = sinkhorn.hard(np.random.default_rng(0).random((2, 3)), [1, 1], columns=nu)
    np.testing.assert_allclose(plan.sum(0), nu, atol=1e-12)


def test_row_and_shared() -> None:
    gains = np.random.default_rng(4).random((3, 6))
    row = sinkhorn.row(gains, [1, 1, 2])
    kernel = np.exp(gains / gains.mean(1, keepdims=True))
    np.testing.assert_allclose(row, np.array([[0.25], [0.25], [0.5]]) * kernel / kernel.sum(1, keepdims=True))
    shared = sinkhorn.shared([0.0, 1.0, 3.0], [1, 3])
    np.testing.assert_allclose(shared, [[0, 0.0625, 0.1875], [0, 0.1875, 0.5625]])


@pytest.mark.parametrize(
    ("gains", "budget", "words"),
    [
        (np.ones((2, 3)), [1, -1], "budget must be non-negative"),
        (np.ones((2, 3)), [0, 0], "not all zero"),
        (np.ones((2, 3)), [1, 2, 3], "budget must have 2 numbers"),
        (np.ones(3), [1], "one problem has gains \\(m, T\\)"),
        (np.ones((2, 3)), [[1, 1], [9, 1]], "project_many solves several"),
        (np.full((2, 3), np.nan), [1, 1], "finite"),
    ],
)
def test_bad_input_is_named(gains: np.ndarray, budget: list[float], words: str) -> None:
    with pytest.raises(RecastError, match=words):
        sinkhorn.project(gains, budget)


def test_bad_parameters_are_named() -> None:
    with pytest.raises(RecastError, match="tau must be a positive number, not 0"):
        sinkhorn.project(np.ones((1, 2)), [1], tau=0.0)
    with pytest.raises(RecastError, match="columns must have 2"):
        sinkhorn.project(np.ones((1, 2)), [1], columns=[1, 1, 1])
    with pytest.raises(RecastError, match="budget must be numbers, not array"):
        sinkhorn.project(np.ones((1, 2)), ["x"])


def test_batches_must_match() -> None:
    with pytest.raises(RecastError, match="5 gains need as many budgets, or one, not 4"):
        sinkhorn.project_many(np.ones((5, 2, 3)), np.ones((4, 2)))
    for budget in ([[1, 2], [3, 4]], []):
        with pytest.raises(RecastError, match="budget must have at least one number, in one row"):
            sinkhorn.static(budget, 3)
    with pytest.raises(RecastError, match="curve must be numbers"):
        sinkhorn.shared(["a"], [1])


def test_closed_columns_stay_empty_and_do_no_harm() -> None:
    result = sinkhorn.project(np.eye(25)[[3, 17]], [1, 23], columns=[1] * 24 + [0])
    assert result.converged
    np.testing.assert_array_equal(result.weights[:, -1], 0.0)
    np.testing.assert_allclose(result.weights.sum(0)[:-1], 1 / 24, atol=1e-9)


def test_more_iterations_never_give_a_worse_coupling() -> None:
    rng = np.random.default_rng(0)
    problems = (
        (rng.gamma(2.0, size=(4, 25)), [1, 1, 1, 2]),
        (np.eye(25)[[3, 17]], [1, 24]),
        (np.eye(10)[[3, 7]], [1, 9]),
    )
    for gains, budget in problems:
        errors = []
        for limit in (1, 2, 5, 50, 100, 102, 105, 1000):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)
                errors.append(sinkhorn.project(gains, budget, max_iter=limit).row_error)
        sweeps, newton = errors[:5], errors[5:]
        assert sweeps == sorted(sweeps, reverse=True), errors
        assert max(newton) <= sweeps[-1], errors
        assert newton[-1] < 1e-9


def test_huge_budgets_do_not_overflow() -> None:
    np.testing.assert_allclose(sinkhorn.simplex([1e308, 1e308, 0], 3, "budget"), [0.5, 0.5, 0])


@given(st.integers(0, 2**32 - 1))
def test_masses_are_the_base_measure_of_every_alternative(seed: int) -> None:
    rng = np.random.default_rng(seed)
    gains, lam, nu = rng.gamma(2.0, size=(3, 7)), rng.dirichlet(np.ones(3)), rng.dirichlet(np.ones(7))
    nu[rng.integers(7)] = 0.0
    share, kernel = nu / nu.sum(), np.exp(renyi.normalized(gains))
    np.testing.assert_allclose(sinkhorn.static(lam, 7, nu), np.outer(lam, share), rtol=1e-12)
    each = lam[:, None] * share * kernel / (kernel @ share)[:, None]
    np.testing.assert_allclose(sinkhorn.row(gains, lam, nu), each, rtol=1e-9)
    np.testing.assert_allclose(
        sinkhorn.shared(gains[0], lam, 5 * nu), np.outer(lam, share * gains[0] / (share @ gains[0])), rtol=1e-9
    )
    for made in (sinkhorn.row(gains, lam, nu), sinkhorn.shared(gains[0], lam, nu), sinkhorn.hard(gains, lam, nu)):
        np.testing.assert_allclose(made.sum(1), lam, atol=1e-9)
        assert (made[:, nu == 0] == 0).all()
    np.testing.assert_allclose(sinkhorn.hard(gains, lam, nu).sum(0), share, atol=1e-9)
    ones = np.ones(7)
    np.testing.assert_allclose(sinkhorn.row(gains, lam, ones), sinkhorn.row(gains, lam), rtol=1e-12)
    np.testing.assert_allclose(sinkhorn.shared(gains[0], lam, ones), sinkhorn.shared(gains[0], lam), rtol=1e-12)
    np.testing.assert_allclose(sinkhorn.static(lam, 7, ones), sinkhorn.static(lam, 7), rtol=1e-12)


def test_with_fixed_columns_the_projection_does_not_depend_on_the_base_measure() -> None:
    """KL to ν_t·K and KL to K differ by a constant on U(λ, ν): POT's plan of the scaled kernel is ours."""
    rng = np.random.default_rng(7)
    gains, lam, nu = rng.gamma(2.0, size=(3, 8)), rng.dirichlet(np.ones(3)), rng.dirichlet(np.ones(8))
    cost = -(renyi.normalized(gains) + np.log(nu))
    plan = ot.bregman.sinkhorn_log(lam, nu, cost, 1.0, stopThr=1e-12, numItermax=100_000)
    np.testing.assert_allclose(sinkhorn.project(gains, lam, nu, tol=1e-12).weights, plan, atol=1e-9)


def test_a_schedule_without_mass_is_named() -> None:
    with pytest.raises(RecastError, match="curve times columns must be non-negative, finite and not all zero"):
        sinkhorn.shared([0.0, 1.0], [1, 1], [1.0, 0.0])


@pytest.mark.parametrize("small", [1e-6, 1e-10, 1e-15])
@pytest.mark.parametrize("seed", range(5))
def test_a_very_small_mass_is_shared_out_too(small: float, seed: int) -> None:
    """Its column is that of the same problem with a mass which the linear program can see."""
    rng = np.random.default_rng(seed)
    gains, nu = rng.gamma(0.5, size=(4, 10)), rng.gamma(1.0, size=10)
    nu[0] = small * nu.sum()
    made = sinkhorn.hard(gains, [1, 2, 1, 0], nu)
    np.testing.assert_allclose(made.sum(0)[0], nu[0] / nu.sum(), rtol=1e-6)
    np.testing.assert_allclose(made.sum(1), [0.25, 0.5, 0.25, 0], atol=1e-8)
    seen = nu.copy()
    seen[0] = 1e-5 * nu.sum()
    np.testing.assert_array_equal(made[:, 0] > 0, sinkhorn.hard(gains, [1, 2, 1, 0], seen)[:, 0] > 0)
    soft = sinkhorn.project(gains, [1, 2, 1, 0], nu).weights
    np.testing.assert_allclose(soft.sum(0)[0], nu[0] / nu.sum(), rtol=1e-6)
