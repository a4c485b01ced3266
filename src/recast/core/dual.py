"""The Sinkhorn problem of one budget by Newton's method on its dual, for budgets on which sweeps are slow."""

from __future__ import annotations

import math

import numpy as np

from recast.core.arrays import Array

__all__ = ["newton"]


def newton(log_kernel: Array, lam: Array, nu: Array, tol: float, limit: int) -> tuple[Array, int]:
    """W (m, T) for one budget, by damped Newton steps on the dual in m unknowns.

    Sweeps contract as slowly as 1 − e^{−T} if a budget nearly equals the mass of a set of columns. The dual
    Σ_t ν_t log Σ_i exp(log K + f_i) − Σ λ_i f_i is convex and smooth, so Newton converges in a few steps.
    A sharp kernel is approached through flatter ones; each solution is the start of the next.
    """
    halvings = max(0, math.ceil(math.log2(max(float(np.ptp(log_kernel)), 1.0) / 10.0)))
    f, taken = np.log(lam), 0
    for flatness in range(halvings, -1, -1):
        f, more = _newton_at(log_kernel / 2**flatness, lam, nu, f, tol, limit - taken)
        taken += more
        f = f if flatness == 0 else 2 * f
    return _coupling(log_kernel, f, nu), taken


def _newton_at(log_kernel: Array, lam: Array, nu: Array, f: Array, tol: float, limit: int) -> tuple[Array, int]:
    """Row potentials f = log a (m,) of one kernel, and the number of steps until the rows were met."""

    def dual(f: Array) -> float:
        return float(nu @ np.logaddexp.reduce(log_kernel + f[:, None], axis=0) - lam @ f)

    value = dual(f)
    for taken in range(limit):
        weights = _coupling(log_kernel, f, nu)
        sums = weights.sum(axis=1)
        if np.abs(sums - lam).max() < 0.5 * tol:
            return f, taken
        hessian = np.diag(sums) - (weights / nu) @ weights.T
        # The dual is constant along (1, …, 1): fix that direction, and damp the others slightly.
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
        else:  # no descent in floating point: one sweep of Alg. 3 instead
            f = f + np.log(lam) - np.log(np.maximum(sums, 1e-300))
            value = dual(f)
    return f, limit


def _coupling(log_kernel: Array, f: Array, nu: Array) -> Array:
    """W = exp(log K + f_i + g_t), with g such that the columns are exact."""
    scores = log_kernel + f[:, None]
    return np.asarray(nu * np.exp(scores - np.logaddexp.reduce(scores, axis=0)))
