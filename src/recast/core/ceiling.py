"""The most that any W could gain by timing: the W with the largest expected cosine that realizes the budget."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from recast.core import sinkhorn
from recast.core.arrays import Array
from recast.core.effects import Effects
from recast.core.weights import WeightMatrix
from recast.errors import RecastError

__all__ = ["best_weights", "ceiling"]


def ceiling(found: Effects, budget: ArrayLike, images: float | None = None) -> float:
    """Relative gain of `best_weights` over static: an upper limit for timing.

    It is optimistic, since the same gradients choose W and predict its gain; with few images measured it exceeds what
    any W can reach.

    Examples
    --------
    >>> g = np.random.default_rng(0).normal(np.eye(4)[:, None], 3.0, (32, 4, 400, 4)).mean(axis=2)  # Q, n, parameters
    >>> found = Effects.measured(("a", "b"), [0, 0.5, 1], np.einsum("qap,rbp->qrab", g, g), 400, batch=9, levels=2)
    >>> bool(ceiling(found, [1, 1]) >= 0)
    True
    """
    asked = sinkhorn.simplex(budget, len(found.rewards), "budget")
    return found.gain(best_weights(found, asked, images), images, asked)[0]


def best_weights(found: Effects, budget: ArrayLike, images: float | None = None) -> WeightMatrix:
    """The W with uniform columns that realizes the budget and whose update is expected closest to the noiseless static.

    The cosine sᵀGf / √(sᵀGs · fᵀMf), M = G + C/N, is maximized over factors f ≥ 0 whose columns have the same sum and
    whose rows, weighted by the effects of the levels, have sums in the ratio of the budget. With sᵀGf = 1 this is a
    convex quadratic program, which SLSQP of SciPy solves. If the rewards are not normalized one by one, the factors
    are those of standardized rewards all the same.

    Parameters
    ----------
    found : Effects
        The measured gradients.
    budget : array-like, shape (m,)
        λ, on any scale.
    images : float, optional
        Images per update N; by default the recipe's batch.

    Returns
    -------
    WeightMatrix
        Its realized budget is λ; the sums of its rows are not.

    Raises
    ------
    RecastError
        If the images measured are too few to see a signal of static.
    """
    from scipy.optimize import minimize

    size, steps = len(found.rewards), found.steps
    asked = sinkhorn.simplex(budget, size, "budget")
    static = np.repeat(asked[:, None], steps, axis=1).ravel()
    pull = found.signal @ static
    if not static @ pull > 0:
        raise RecastError("the images measured are too few to see the gradient of static: measure more with --prompts")
    metric = _positive(found.signal + found.noise / (images or found.batch))
    equal = _constraints(size, steps, found.effect, asked)
    made = minimize(
        lambda y: (y @ metric @ y / 2, metric @ y),
        static / (static @ pull),
        jac=True,
        method="SLSQP",
        bounds=[(0, None)] * static.size,
        constraints=[
            {"type": "eq", "fun": lambda y: pull @ y - 1, "jac": lambda _: pull},
            {"type": "eq", "fun": lambda y: equal @ y, "jac": lambda _: equal},
        ],
        options={"maxiter": 500, "ftol": 1e-12},
    )
    factors = np.maximum(made.x, 0).reshape(size, steps)
    factors /= factors.sum(axis=0)
    matrix = factors / steps
    return WeightMatrix(found.rewards, found.sigmas, matrix, matrix.sum(axis=1), "static")


def _constraints(size: int, steps: int, effect: Array, budget: Array) -> Array:
    """Rows that vanish on f: columns have the first one's sum, and realized shares are the budget's."""
    columns = np.zeros((steps - 1, size, steps))
    for t in range(1, steps):
        columns[t - 1, :, t], columns[t - 1, :, 0] = 1, -1
    shares = np.zeros((size - 1, size, steps))
    for i in range(size - 1):  # the last follows from the others
        shares[i] = -budget[i] * effect
        shares[i, i] += effect
    return np.concatenate([columns, shares]).reshape(-1, size * steps)


def _positive(table: Array) -> Array:
    """The nearest symmetric matrix without negative eigenvalues; estimates of few images have some."""
    values, vectors = np.linalg.eigh((table + table.T) / 2)
    return np.asarray((vectors * np.maximum(values, 1e-9 * values.max())) @ vectors.T)
