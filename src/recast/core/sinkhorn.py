"""From gains to weights: the Sinkhorn projection of Alg. 3, and the alternatives to it.

All functions take a budget λ (m,) and return W (m, T) whose rows sum to λ/Σλ. The columns sum to 1/T or ν/Σν for
`static`, `project` and `hard`; `row` and `shared` do not constrain them, and have ν as their base measure.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from recast.core import dual, renyi
from recast.core.arrays import Array
from recast.errors import ConvergenceWarning, RecastError

__all__ = [
    "Projection",
    "Projections",
    "hard",
    "masses",
    "project",
    "project_many",
    "row",
    "shared",
    "simplex",
    "static",
]

_SWEEPS = 100  # sweeps of Alg. 3 before Newton takes over; the paper needs fewer at m <= 4, T <= 25
_WIDEST = 300.0  # range of log K up to which products of exponentials stay inside float64
_COLDEST = 1e-300  # the smallest temperature by which a kernel can be divided


@dataclass(frozen=True)
class Projection:
    """W (m, T) with the number of iterations (sweeps and Newton steps) and the largest marginal errors."""

    weights: Array
    iterations: int
    row_error: float
    column_error: float
    converged: bool


@dataclass(frozen=True)
class Projections:
    """The same for a batch: `weights` (B, m, T), everything else (B,)."""

    weights: Array
    iterations: NDArray[np.int64]
    row_error: Array
    column_error: Array
    converged: NDArray[np.bool_]


def project(
    gains: ArrayLike,
    budget: ArrayLike,
    columns: ArrayLike | None = None,
    tau: float = 1.0,
    tol: float = 1e-9,
    max_iter: int = 1000,
) -> Projection:
    """W* = argmin over U(λ, ν) of KL(W ‖ exp(ΔD̄ / τ)) (Eq. sinkhorn-opt).

    Parameters
    ----------
    gains : array-like, shape (m, T)
        Gains, clipped at 0 and normalized to mean 1 first, as in Alg. 3. A row without gain has log K = 0.
    budget : array-like, shape (m,)
        λ, non-negative, on any scale.
    columns : array-like, shape (T,), optional
        ν, on any scale; uniform by default.
    tau : float, default 1.0
        Temperature; W follows the gains more closely at a smaller one.
    tol : float, default 1e-9
        Largest permitted error of a row or column sum.
    max_iter : int, default 1000
        Limit on the number of iterations; a ConvergenceWarning is issued when it is reached.

    Returns
    -------
    Projection
        W, the number of iterations and the marginal errors.

    Raises
    ------
    RecastError
        If the shapes disagree or a number is out of range.

    Examples
    --------
    >>> project([[1.0, 1.0], [1.0, 1.0]], budget=[1, 3]).weights.tolist()  # flat curves: λ_i / T
    [[0.125, 0.125], [0.375, 0.375]]
    >>> project([[1.0, 0.0], [0.0, 1.0]], budget=[1, 1]).weights.round(3).tolist()
    [[0.44, 0.06], [0.06, 0.44]]
    """
    if np.ndim(gains) != 2 or np.ndim(budget) != 1:
        raise RecastError(
            f"one problem has gains (m, T) and a budget (m,), not the shapes {np.shape(gains)} and {np.shape(budget)}; "
            "project_many solves several"
        )
    batch = project_many(gains, np.asarray(budget)[None], columns, tau, tol, max_iter)
    errors = float(batch.row_error[0]), float(batch.column_error[0])
    return Projection(batch.weights[0], int(batch.iterations[0]), *errors, bool(batch.converged[0]))


def project_many(
    gains: ArrayLike,
    budgets: ArrayLike,
    columns: ArrayLike | None = None,
    tau: float = 1.0,
    tol: float = 1e-9,
    max_iter: int = 1000,
) -> Projections:
    """One `project` per row of `budgets`, solved together.

    Parameters
    ----------
    gains : array-like, shape (m, T) or (B, m, T)
        One set of gains for all budgets, or one per budget.
    budgets : array-like, shape (B, m)
        λ of each problem. A single budget (1, m) is used for all gains.
    columns, tau, tol, max_iter
        As in `project`, the same for all problems.

    Returns
    -------
    Projections
        W (B, m, T), and iterations and errors (B,).

    Raises
    ------
    RecastError
        If the shapes disagree or a number is out of range.

    Examples
    --------
    >>> project_many([[1.0, 0.0], [0.0, 1.0]], budgets=[[1, 1], [1, 3]]).weights.sum(axis=2).round(6).tolist()
    [[0.5, 0.5], [0.25, 0.75]]
    """
    for name, value in (("tau", tau), ("tol", tol), ("max_iter", max_iter)):
        if not 0 < value < math.inf:
            raise RecastError(f"{name} must be a positive number, not {value:g}")
    if tau < _COLDEST:
        raise RecastError(f"tau must be at least {_COLDEST:g}, not {tau:g}: the method hard is its limit")
    log_kernel = _kernel(gains, ndims=(2, 3)) / tau
    m, steps = log_kernel.shape[-2:]
    rows, nu = simplex(np.atleast_2d(budgets), m, "budget", ndim=2), masses(columns, steps)
    if log_kernel.ndim == 3:
        if len(rows) not in (1, len(log_kernel)):
            raise RecastError(f"{len(log_kernel)} gains need as many budgets, or one, not {len(rows)}")
        rows = np.broadcast_to(rows, log_kernel.shape[:2])
    solved = _solve_open(log_kernel, rows, nu, tol, max_iter)
    if not solved.converged.all():
        warnings.warn(
            f"Sinkhorn did not converge in {max_iter} iterations for {int((~solved.converged).sum())} of {len(rows)} "
            f"budgets (largest row error {solved.row_error.max():.2g}, tolerance {tol:g}): raise max_iter, tau or tol",
            ConvergenceWarning,
            stacklevel=3,
        )
    return solved


def static(budget: ArrayLike, steps: int, columns: ArrayLike | None = None) -> Array:
    """W_{i,t} = λ_i ν_t, by default λ_i / T: every reward has the same factor at every step (the baseline).

    Parameters
    ----------
    budget : array-like, shape (m,)
        λ, non-negative, on any scale.
    steps : int
        T.
    columns : array-like, shape (T,), optional
        ν, on any scale; uniform by default.

    Returns
    -------
    ndarray, shape (m, T)
        W.

    Examples
    --------
    >>> static([1, 3], steps=2).tolist()
    [[0.125, 0.125], [0.375, 0.375]]
    """
    weights = simplex(budget, None, "budget")
    if columns is None:
        return np.repeat(weights[:, None] / steps, steps, axis=1)
    return np.outer(weights, masses(columns, steps))


def row(gains: ArrayLike, budget: ArrayLike, columns: ArrayLike | None = None) -> Array:
    """W_{i,t} = λ_i ν_t K_{i,t} / Σ_s ν_s K_{i,s}: the kernel without the column constraint (Sec. 4.5).

    Parameters
    ----------
    gains : array-like, shape (m, T)
        Gains, clipped and normalized as in `project`.
    budget : array-like, shape (m,)
        λ, non-negative, on any scale.
    columns : array-like, shape (T,), optional
        ν, on any scale; uniform by default.

    Returns
    -------
    ndarray, shape (m, T)
        W; its columns need not sum to ν.

    Examples
    --------
    >>> row([[1.0, 0.0], [1.0, 1.0]], budget=[1, 1]).round(3).tolist()
    [[0.44, 0.06], [0.25, 0.25]]
    """
    log_kernel = _kernel(gains)
    lam = simplex(budget, len(log_kernel), "budget")
    if columns is not None:
        with np.errstate(divide="ignore"):  # log 0 at a step without mass, where W is 0
            log_kernel = log_kernel + np.log(masses(columns, log_kernel.shape[1]))
    return np.exp(log_kernel - np.logaddexp.reduce(log_kernel, axis=1, keepdims=True)) * lam[:, None]


def hard(gains: ArrayLike, budget: ArrayLike, columns: ArrayLike | None = None) -> Array:
    """A vertex of U(λ, ν) that maximizes Σ W·ΔD̄: the transport problem without entropy (App. C.2).

    Parameters
    ----------
    gains : array-like, shape (m, T)
        Gains, clipped and normalized as in `project`.
    budget : array-like, shape (m,)
        λ, non-negative, on any scale.
    columns : array-like, shape (T,), optional
        ν, on any scale; uniform by default.

    Returns
    -------
    ndarray, shape (m, T)
        W, with at most m + T − 1 positive entries.

    Examples
    --------
    >>> hard([[0.0, 1.0], [1.0, 0.0]], budget=[1, 1]).argmax(axis=1).tolist()
    [1, 0]
    """
    from scipy.optimize import linprog  # slow to import, and only needed here

    log_kernel = _kernel(gains)
    m, steps = log_kernel.shape
    lam, nu = simplex(budget, m, "budget"), masses(columns, steps)
    marginals = np.vstack([np.kron(np.eye(m), np.ones(steps)), np.kron(np.ones(m), np.eye(steps))])
    solution = linprog(
        -log_kernel.ravel(), A_eq=marginals, b_eq=np.concatenate([lam, nu]), bounds=(0, None), method="highs-ds"
    )
    if solution.x is None:
        raise RecastError(f"the transport problem of method 'hard' was not solved: {solution.message}")
    weights: Array = np.array(solution.x, dtype=np.float64).reshape(m, steps)
    # A mass below the precision of the program can be lost; the row potentials say which reward it belongs to.
    potentials = np.where(lam > 0, solution.eqlin.marginals[:m], -np.inf)
    for t in np.flatnonzero((nu > 0) & (weights.sum(axis=0) < 0.5 * nu)):
        weights[:, t] = np.where(np.arange(m) == (log_kernel[:, t] + potentials).argmax(), nu[t], 0.0)
    return weights


def shared(curve: ArrayLike, budget: ArrayLike, columns: ArrayLike | None = None) -> Array:
    """W_{i,t} = λ_i ν_t c_t / Σ_s ν_s c_s: one schedule c for all rewards.

    Parameters
    ----------
    curve : array-like, shape (T,)
        c, non-negative, on any scale; for example a noise-aware weighting such as TempFlow's.
    budget : array-like, shape (m,)
        λ, non-negative, on any scale.
    columns : array-like, shape (T,), optional
        ν, on any scale; uniform by default.

    Returns
    -------
    ndarray, shape (m, T)
        W.

    Examples
    --------
    >>> shared([1, 3], budget=[1, 1]).tolist()
    [[0.125, 0.375], [0.125, 0.375]]
    """
    schedule = simplex(curve, None, "curve")
    if columns is not None:
        schedule = simplex(schedule * masses(columns, schedule.size), None, "curve times columns")
    return np.outer(simplex(budget, None, "budget"), schedule)


def simplex(values: ArrayLike, size: int | None, name: str, ndim: int = 1) -> Array:
    """`values` (size,) or (B, size) divided by their sum; an error that names `name` if they are invalid."""
    try:
        array: Array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise RecastError(f"{name} must be numbers, not {values!r:.200}") from error
    if array.ndim != ndim or array.size == 0 or (size is not None and array.shape[-1] != size):
        wanted = f"{size} numbers" if size else "at least one number, in one row"
        raise RecastError(f"{name} must have {wanted}, not the shape {array.shape}")
    largest = array.max(axis=-1, keepdims=True)
    if not (np.isfinite(array).all() and (array >= 0).all() and (largest > 0).all()):
        raise RecastError(f"{name} must be non-negative, finite and not all zero, not {array.tolist()!s:.200}")
    scaled = array / largest  # so that the sum cannot overflow
    return np.asarray(scaled / scaled.sum(axis=-1, keepdims=True))


def masses(columns: ArrayLike | None, steps: int, name: str = "columns") -> Array:
    """ν (T,) with sum 1, uniform by default; numbers that have this sum already are kept bit for bit."""
    if columns is None:
        return np.full(steps, 1.0 / steps)
    nu = simplex(columns, steps, name)
    given: Array = np.array(columns, dtype=np.float64)
    return given if abs(given.sum() - 1) < 1e-12 else nu


def _kernel(gains: ArrayLike, ndims: tuple[int, ...] = (2,)) -> Array:
    """log K = normalized clipped gains (Eq. kernel)."""
    steps = np.asarray(gains, dtype=np.float64)
    if steps.ndim not in ndims or 0 in steps.shape:
        raise RecastError(f"gains must have the shape (rewards, steps), not {steps.shape}")
    if not np.isfinite(steps).all():
        raise RecastError("gains must be finite: W is not defined for a NaN or infinite gain")
    return renyi.normalized(np.maximum(steps, 0.0))


def _solve_open(log_kernel: Array, rows: Array, nu: Array, tol: float, max_iter: int) -> Projections:
    """The solution over the columns with ν_t > 0; W is 0 in the others."""
    used = nu > 0
    if used.all():
        return _solve(log_kernel, rows, nu, tol, max_iter)
    solved = _solve(log_kernel[..., used], rows, nu[used], tol, max_iter)
    weights = np.zeros((*rows.shape, nu.size))
    weights[..., used] = solved.weights
    return replace(solved, weights=weights)


def _solve(log_kernel: Array, rows: Array, nu: Array, tol: float, max_iter: int) -> Projections:
    """Sweeps for all budgets together, then Newton for those that have not converged; every ν_t > 0."""
    m, steps = log_kernel.shape[-2:]
    if log_kernel.max() - log_kernel.min() <= _WIDEST:
        weights, sweeps = _sweeps(log_kernel, rows, nu, tol, min(max_iter, _SWEEPS))
    else:
        weights, sweeps = np.zeros((len(rows), m, steps)), 0
    iterations = np.full(len(rows), sweeps, dtype=np.int64)
    row_error = np.abs(np.einsum("bit->bi", weights) - rows).max(axis=-1)
    for j in np.flatnonzero(row_error >= tol) if max_iter > sweeps else ():
        kernel = log_kernel if log_kernel.ndim == 2 else log_kernel[j]
        used = rows[j] > 0
        coupling, more = dual.newton(kernel[used], rows[j][used], nu, tol, max_iter - sweeps)
        iterations[j] += more
        error = np.abs(coupling.sum(axis=-1) - rows[j][used]).max()
        if error < row_error[j]:
            weights[j] = 0.0
            weights[j, used], row_error[j] = coupling, error
    column_error = np.abs(np.einsum("bit->bt", weights) - nu).max(axis=-1)
    converged = (row_error < tol) & (column_error < tol)
    return Projections(weights, iterations, row_error, column_error, converged)


def _sweeps(log_kernel: Array, rows: Array, nu: Array, tol: float, limit: int) -> tuple[Array, int]:
    """W (B, m, T) and the number of sweeps, by the iteration of Alg. 3 (Eq. sinkhorn-iter).

    Its log-sum-exps are computed as products with exp(log K − max), which avoids an exponential per entry and
    sweep and is valid while the kernel's range stays inside float64.
    """
    kernel = np.exp(log_kernel - log_kernel.max(axis=-1, keepdims=True))
    together = kernel.ndim == 2  # one kernel for all budgets
    transposed = np.ascontiguousarray(np.swapaxes(kernel, -1, -2))
    row_factors = rows / kernel.sum(axis=-1)
    column_factors, sums = np.empty((len(rows), nu.size)), np.empty_like(row_factors)
    for sweep in range(1, limit + 1):
        if together:
            np.matmul(row_factors, kernel, out=column_factors)
            np.divide(nu, column_factors, out=column_factors)
            np.matmul(column_factors, transposed, out=sums)
        else:
            column_factors = nu / (row_factors[:, None] @ kernel)[:, 0]
            sums = (column_factors[:, None] @ transposed)[:, 0]
        # The columns are exact here, so only the rows are checked.
        if sweep == limit or np.abs(row_factors * sums - rows).max() < 0.5 * tol:
            break
        np.divide(rows, sums, out=row_factors)
    factors = "bi,it,bt->bit" if together else "bi,bit,bt->bit"
    return np.einsum(factors, row_factors, kernel, column_factors), sweep
