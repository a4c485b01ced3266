"""From gains to weights: the Sinkhorn projection of Alg. 3, and the alternatives to it.

All of them take a budget λ (m,) and give W (m, T) whose rows sum to λ/Σλ. The columns sum to 1/T for
`static`, to 1/T or ν/Σν for `project` and `hard`; `row` and `shared` leave them free.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from recast.core import renyi
from recast.errors import ConvergenceWarning, RecastError

Array = NDArray[np.float64]

SWEEPS = 100
"""Sweeps of Alg. 3 before Newton takes over; the paper needs fewer at m <= 4, T <= 25."""

_WIDEST = 300.0  # range of log K up to which products of exponentials stay inside float64


@dataclass(frozen=True)
class Projection:
    """W and how it was reached: sweeps (and Newton steps) taken, and the largest marginal errors."""

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
    """W* = argmin over U(λ, ν) of KL(W ‖ exp(ΔD̄ / τ)) (Eq. sinkhorn-opt), from gains (m, T).

    `columns` is ν (default 1/T each). Gains are clipped at 0 and mean-normalised first, as Alg. 3
    does; a row without gain gets log K = 0. Warns when a marginal is off by more than `tol` after
    `max_iter` iterations.

    >>> project([[1.0, 1.0], [1.0, 1.0]], budget=[1, 3]).weights.tolist()  # flat: λ_i / T
    [[0.125, 0.125], [0.375, 0.375]]
    """
    if np.ndim(gains) != 2 or np.ndim(budget) != 1:
        raise RecastError(
            f"one problem has gains (m, T) and a budget (m,), not the shapes {np.shape(gains)} and {np.shape(budget)}; "
            "project_many solves several"
        )
    batch = project_many(gains, np.asarray(budget)[None], columns, tau, tol, max_iter)
    return Projection(
        weights=batch.weights[0],
        iterations=int(batch.iterations[0]),
        row_error=float(batch.row_error[0]),
        column_error=float(batch.column_error[0]),
        converged=bool(batch.converged[0]),
    )


def project_many(
    gains: ArrayLike,
    budgets: ArrayLike,
    columns: ArrayLike | None = None,
    tau: float = 1.0,
    tol: float = 1e-9,
    max_iter: int = 1000,
) -> Projections:
    """One `project` for each row of `budgets` (B, m), solved together.

    `gains` is one (m, T) for all of them, or (B, m, T); one budget (1, m) also serves many gains.
    """
    for name, value in (("tau", tau), ("tol", tol), ("max_iter", max_iter)):
        if not 0 < value < math.inf:
            raise RecastError(f"{name} must be a positive number, not {value:g}")
    log_kernel = _kernel(gains, ndims=(2, 3)) / tau
    m, steps = log_kernel.shape[-2:]
    rows = simplex(np.atleast_2d(budgets), m, "budget", ndim=2)
    nu = np.full(steps, 1.0 / steps) if columns is None else simplex(columns, steps, "columns")
    if log_kernel.ndim == 3:
        if len(rows) not in (1, len(log_kernel)):
            raise RecastError(f"{len(log_kernel)} gains need as many budgets, or one, not {len(rows)}")
        rows = np.broadcast_to(rows, log_kernel.shape[:2])
    open_columns = nu > 0
    if open_columns.all():
        solved = _solve(log_kernel, rows, nu, tol, max_iter)
    else:
        solved = _solve(log_kernel[..., open_columns], rows, nu[open_columns], tol, max_iter)
        weights = np.zeros((len(rows), m, steps))
        weights[..., open_columns] = solved.weights
        solved = replace(solved, weights=weights)
    if not solved.converged.all():
        warnings.warn(
            f"Sinkhorn did not converge in {max_iter} iterations for {int((~solved.converged).sum())} of {len(rows)} "
            f"budgets (largest row error {solved.row_error.max():.2g}, tolerance {tol:g}): raise max_iter, tau or tol",
            ConvergenceWarning,
            stacklevel=3,
        )
    return solved


def _solve(log_kernel: Array, rows: Array, nu: Array, tol: float, max_iter: int) -> Projections:
    """Sweeps for all budgets together, then Newton for those that need it; every ν_t > 0."""
    m, steps = log_kernel.shape[-2:]
    if log_kernel.max() - log_kernel.min() <= _WIDEST:
        weights, sweeps = _sweeps(log_kernel, rows, nu, tol, min(max_iter, SWEEPS))
    else:
        weights, sweeps = np.zeros((len(rows), m, steps)), 0
    iterations = np.full(len(rows), sweeps, dtype=np.int64)
    row_error = np.abs(np.einsum("bit->bi", weights) - rows).max(axis=-1)
    for j in np.flatnonzero(row_error >= tol) if max_iter > sweeps else ():
        kernel = log_kernel if log_kernel.ndim == 2 else log_kernel[j]
        used = rows[j] > 0
        plan, more = _newton(kernel[used], rows[j][used], nu, tol, max_iter - sweeps)
        iterations[j] += more
        error = np.abs(plan.sum(axis=-1) - rows[j][used]).max()
        if error < row_error[j]:
            weights[j] = 0.0
            weights[j, used], row_error[j] = plan, error
    column_error = np.abs(np.einsum("bit->bt", weights) - nu).max(axis=-1)
    converged = (row_error < tol) & (column_error < tol)
    return Projections(weights, iterations, row_error, column_error, converged)


def static(budget: ArrayLike, steps: int) -> Array:
    """W_{i,t} = λ_i / T: every reward counts the same at every step (the baseline)."""
    weights = simplex(budget, None, "budget")
    return np.repeat(weights[:, None] / steps, steps, axis=1)


def row(gains: ArrayLike, budget: ArrayLike) -> Array:
    """W_{i,t} = λ_i K_{i,t} / Σ_s K_{i,s}: the kernel without the column constraint (Sec. 4.5)."""
    log_kernel = _kernel(gains)
    lam = simplex(budget, len(log_kernel), "budget")
    return np.exp(log_kernel - np.logaddexp.reduce(log_kernel, axis=1, keepdims=True)) * lam[:, None]


def hard(gains: ArrayLike, budget: ArrayLike, columns: ArrayLike | None = None) -> Array:
    """A vertex of U(λ, ν) with the largest Σ W·ΔD̄: the transport LP without entropy (App. C.2)."""
    from scipy.optimize import linprog  # slow to import, and only needed here

    log_kernel = _kernel(gains)
    m, steps = log_kernel.shape
    lam = simplex(budget, m, "budget")
    nu = np.full(steps, 1.0 / steps) if columns is None else simplex(columns, steps, "columns")
    marginals = np.vstack([np.kron(np.eye(m), np.ones(steps)), np.kron(np.ones(m), np.eye(steps))])
    solution = linprog(
        -log_kernel.ravel(), A_eq=marginals, b_eq=np.concatenate([lam, nu]), bounds=(0, None), method="highs-ds"
    )
    if solution.x is None:
        raise RecastError(f"the transport problem of method 'hard' was not solved: {solution.message}")
    return np.asarray(solution.x, dtype=np.float64).reshape(m, steps)


def shared(curve: ArrayLike, budget: ArrayLike) -> Array:
    """W_{i,t} = λ_i c_t / Σ_s c_s: one reward-agnostic schedule c (T,) for all rewards.

    This is how noise-aware weightings such as TempFlow's can be compared on equal terms.
    """
    return np.outer(simplex(budget, None, "budget"), simplex(curve, None, "curve"))


def simplex(values: ArrayLike, size: int | None, name: str, ndim: int = 1) -> Array:
    """`values` (size,) or (B, size) divided by their sum; an error that names `name` if they cannot be."""
    try:
        array: Array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise RecastError(f"{name} must be numbers, not {values!r:.200}") from error
    if array.ndim != ndim or array.size == 0 or (size is not None and array.shape[-1] != size):
        wanted = f"{size} numbers" if size is not None else "one row of numbers"
        raise RecastError(f"{name} must have {wanted}, not the shape {array.shape}")
    largest = array.max(axis=-1, keepdims=True)
    if not (np.isfinite(array).all() and (array >= 0).all() and (largest > 0).all()):
        raise RecastError(f"{name} must be non-negative, finite and not all zero, not {array.tolist()!s:.200}")
    scaled = array / largest  # so that the sum cannot overflow
    return np.asarray(scaled / scaled.sum(axis=-1, keepdims=True))


def _kernel(gains: ArrayLike, ndims: tuple[int, ...] = (2,)) -> Array:
    """log K = mean-normalised clipped gains (Eq. kernel)."""
    steps = np.asarray(gains, dtype=np.float64)
    if steps.ndim not in ndims or 0 in steps.shape:
        raise RecastError(f"gains must have the shape (rewards, steps), not {steps.shape}")
    if not np.isfinite(steps).all():
        raise RecastError("gains must be finite: a NaN or infinite gain has no place in W")
    return renyi.normalized(np.maximum(steps, 0.0))


def _sweeps(log_kernel: Array, rows: Array, nu: Array, tol: float, limit: int) -> tuple[Array, int]:
    """W (B, m, T) and the sweeps it took, by the iteration of Alg. 3 (Eq. sinkhorn-iter).

    Its log-sum-exps are products with exp(log K − max) here: the same numbers without an exponential
    per entry and sweep, valid while the kernel's range stays inside float64.
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
        # The columns are exact here, so the rows are all that is left to check.
        if sweep == limit or np.abs(row_factors * sums - rows).max() < 0.5 * tol:
            break
        np.divide(rows, sums, out=row_factors)
    factors = "bi,it,bt->bit" if together else "bi,bit,bt->bit"
    return np.einsum(factors, row_factors, kernel, column_factors), sweep


def _newton(log_kernel: Array, lam: Array, nu: Array, tol: float, limit: int) -> tuple[Array, int]:
    """W (m, T) for one budget, by damped Newton steps on the dual in m unknowns.

    Sweeps contract as slowly as 1 − e^{−T} where a budget nearly equals a set of columns; the dual
    Σ_t ν_t log Σ_i exp(log K + f_i) − Σ λ_i f_i is convex and smooth, so Newton finishes in a few steps.
    A sharp kernel is approached through flatter ones, each solution starting the next.
    """
    halvings = max(0, math.ceil(math.log2(max(float(np.ptp(log_kernel)), 1.0) / 10.0)))
    f, taken = np.log(lam), 0
    for flatness in range(halvings, -1, -1):
        f, more = _newton_at(log_kernel / 2**flatness, lam, nu, f, tol, limit - taken)
        taken += more
        f = f if flatness == 0 else 2 * f
    return _plan(log_kernel, f, nu), taken


def _newton_at(log_kernel: Array, lam: Array, nu: Array, f: Array, tol: float, limit: int) -> tuple[Array, int]:
    """Row potentials f = log a (m,) of one kernel, and the steps it took to meet the rows."""

    def dual(f: Array) -> float:
        return float(nu @ np.logaddexp.reduce(log_kernel + f[:, None], axis=0) - lam @ f)

    value = dual(f)
    for taken in range(limit):
        weights = _plan(log_kernel, f, nu)
        sums = weights.sum(axis=1)
        if np.abs(sums - lam).max() < 0.5 * tol:
            return f, taken
        hessian = np.diag(sums) - (weights / nu) @ weights.T
        # The dual does not change along (1, …, 1): pin that direction, and damp the rest by a hair.
        pinned = hessian + np.full_like(hessian, 1 / len(lam)) + 1e-14 * np.eye(len(lam))
        step = np.linalg.solve(pinned, lam - sums)
        slope = float((lam - sums) @ step)
        scale = min(1.0, 20.0 / max(float(np.abs(step).max()), 1e-300))
        while scale > 1e-6:
            trial = dual(f + scale * step)
            if trial <= value - 1e-4 * scale * slope + 1e-14 * abs(value):
                f, value = f + scale * step, trial
                break
            scale *= 0.5
        else:  # no descent in floating point: one plain sweep of Alg. 3 instead
            f = f + np.log(lam) - np.log(np.maximum(sums, 1e-300))
            value = dual(f)
    return f, limit


def _plan(log_kernel: Array, f: Array, nu: Array) -> Array:
    """W = exp(log K + f_i + g_t), with g such that the columns are exact."""
    scores = log_kernel + f[:, None]
    return np.asarray(nu * np.exp(scores - np.logaddexp.reduce(scores, axis=0)))
