"""The stage `weigh`: from gain curves and a budget to the weight matrix W."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from recast.core import renyi, schedule, sinkhorn
from recast.core.arrays import Array
from recast.core.curves import GainCurves
from recast.core.weights import ENTROPIC, METHODS, Method, WeightMatrix
from recast.errors import RecastError

if TYPE_CHECKING:
    from recast.config import Recipe

__all__ = ["save", "static", "weigh", "weigh_recipe"]


def weigh(
    curves: GainCurves,
    budget: Mapping[str, float] | Sequence[float],
    method: Method = "sinkhorn",
    *,
    tau: float = 1.0,
    columns: ArrayLike | None = None,
    curve: ArrayLike | None = None,
    shrink: bool = False,
    seed: int = 0,
) -> WeightMatrix:
    """W for a budget, from gain curves.

    Parameters
    ----------
    curves : GainCurves
        Curves of the rewards. A reward in the budget that has no curve has log K = 0.
    budget : mapping from reward to float, or sequence of float, shape (m,)
        λ, on any scale; a sequence has one number per curve.
    method : str, default "sinkhorn"
        `sinkhorn` (Alg. 3), `static` (λ_i/T), `row` (no column constraint), `hard` (the transport problem), `shared`
        (one schedule for all rewards), or the controls `reversed` and `shuffled` (the columns of the Sinkhorn W in
        another order).
    tau, columns : float, default 1.0, and array-like, shape (T,), optional
        Temperature and column sums ν of the Sinkhorn problem; uniform ν by default.
    curve : array-like, shape (T,), optional
        Schedule of `shared`; by default the budget-weighted mean of the normalized gains.
    shrink : bool, default False
        Whether unreliable curves are drawn towards the static case (`GainCurves.shrunk`; needs `D_prompts`).
    seed : int, default 0
        Seed of `shuffled`.

    Returns
    -------
    WeightMatrix
        W (m, T), with rows in the order of the budget and what the solver reported in `info`.

    Raises
    ------
    RecastError
        If the budget or method is invalid, no reward has a curve, or an option does not apply to the method.

    Examples
    --------
    >>> curves = GainCurves(("clip", "ocr"), [0, 0.5, 1], [[0.4, 0.3, 0.0], [0.9, 0.8, 0.0]])
    >>> weigh(curves, {"clip": 1, "ocr": 1}).matrix.round(3).tolist()
    [[0.285, 0.215], [0.215, 0.285]]
    """
    _check_options(method, tau=tau != 1, columns=columns is not None, curve=curve is not None)
    weights = static(_by_name(curves, budget), curves.sigmas)
    gains = _gains(curves, weights.rewards, method, shrink)
    info: dict[str, Any] = {"alpha": curves.alpha, "curves": dict(curves.provenance)}
    info |= {} if method == "static" else {"shrink": shrink}
    shapes = zip(weights.rewards, renyi.normalized(gains), strict=True)
    info["without_gain"] = [name for name, shape in shapes if not shape.any()]
    if method == "static":
        return replace(weights, info=info)
    matrix, report = _solve(gains, weights.budget, method, tau, columns, curve, seed)
    return replace(weights, matrix=matrix, method=method, info=info | report)


def static(budget: Mapping[str, float], sigmas: ArrayLike) -> WeightMatrix:
    """The static W of a budget, λ_i / T at every step; it needs no curves.

    Parameters
    ----------
    budget : mapping from reward to float
        λ, on any scale.
    sigmas : array-like, shape (T+1,)
        The grid, from 0 to 1.

    Returns
    -------
    WeightMatrix
        W, with the method "static".

    Raises
    ------
    RecastError
        If the budget or the grid is invalid.

    Examples
    --------
    >>> static({"clip": 1, "ocr": 3}, [0, 0.5, 1]).matrix.tolist()
    [[0.125, 0.125], [0.375, 0.375]]
    """
    levels = schedule.grid(sigmas)
    lam = sinkhorn.simplex(list(budget.values()), len(budget), "budget")
    return WeightMatrix(tuple(budget), levels, sinkhorn.static(lam, levels.size - 1), lam, "static")


def weigh_recipe(recipe: Recipe, curves: GainCurves) -> WeightMatrix:
    """W by a recipe's budget and the settings of its section `weigh`.

    Parameters
    ----------
    recipe : Recipe
        Its budget and the settings of `weigh`; an empty budget is 1 for every curve.
    curves : GainCurves
        Curves of the rewards.

    Returns
    -------
    WeightMatrix
        W, as `weigh` returns it.

    Raises
    ------
    RecastError
        As in `weigh`.

    Examples
    --------
    >>> from recast.config import Recipe
    >>> curves = GainCurves(("clip", "ocr"), [0, 0.5, 1], [[0.4, 0.3, 0.0], [0.9, 0.8, 0.0]])
    >>> weigh_recipe(Recipe(weigh={"method": "static"}), curves).matrix.tolist()
    [[0.25, 0.25], [0.25, 0.25]]
    """
    settings = recipe.weigh
    budget = recipe.weigh.budget or dict.fromkeys(curves.rewards, 1.0)  # the curves may have others than the recipe
    return weigh(curves, budget, settings.method, tau=settings.tau, shrink=settings.shrink, seed=settings.seed)


def save(recipe: Recipe, weights: WeightMatrix, out: Path) -> Path:
    """Write W and the recipe it was computed with to a run folder.

    Parameters
    ----------
    recipe : Recipe
        Written to `out`/recipe.yaml.
    weights : WeightMatrix
        Written to `out`/weights.json.
    out : Path
        The run folder; created if necessary.

    Returns
    -------
    Path
        The path of W.

    Raises
    ------
    RecastError
        If a file cannot be written.
    """
    recipe.save(out / "recipe.yaml")
    return weights.save(out / "weights.json")


def _check_options(method: Method, **given: bool) -> None:
    """Raise for an unknown method, or for an option that the method does not use."""
    if method not in METHODS:
        raise RecastError(f"unknown method {method!r}: choose one of {', '.join(METHODS)}")
    readers = {"tau": ENTROPIC, "columns": (*ENTROPIC, "hard"), "curve": ("shared",)}
    for option, was_given in given.items():
        if was_given and method not in readers[option]:
            raise RecastError(f"{option} has no meaning for method {method!r}, only for {', '.join(readers[option])}")


def _by_name(curves: GainCurves, budget: Mapping[str, float] | Sequence[float]) -> Mapping[str, float]:
    """The budget as a mapping by reward name."""
    if not isinstance(budget, Mapping):
        values = list(budget)
        if len(values) != len(curves.rewards):
            raise RecastError(
                f"the budget has {len(values)} numbers for {len(curves.rewards)} curves "
                f"({', '.join(curves.rewards)}): give a mapping by reward name"
            )
        budget = dict(zip(curves.rewards, values, strict=True))
    if not budget:
        raise RecastError(f"the budget is empty: give at least one of {', '.join(curves.rewards)}")
    return budget


def _gains(curves: GainCurves, names: tuple[str, ...], method: Method, shrink: bool) -> Array:
    """Gains (m, T) of the named rewards, 0 for those that have no curve."""
    if method != "static" and not set(names) & set(curves.rewards):
        raise RecastError(
            f"none of {', '.join(names)} has a gain curve (the curves are {', '.join(curves.rewards)}); "
            "only method 'static' needs no curve"
        )
    measured = curves.shrunk() if shrink else curves.gains
    gains = np.zeros((len(names), curves.steps))
    for i, name in enumerate(names):
        if name in curves.rewards:
            gains[i] = measured[curves.rewards.index(name)]
    return gains


def _solve(
    gains: Array, lam: Array, method: Method, tau: float, columns: ArrayLike | None, curve: ArrayLike | None, seed: int
) -> tuple[Array, dict[str, Any]]:
    """W (m, T) by one of the methods that need gains, and what the solver reports."""
    if method == "row":
        return sinkhorn.row(gains, lam), {}
    if method == "hard":
        return sinkhorn.hard(gains, lam, columns), {}
    if method == "shared":
        return sinkhorn.shared(lam @ renyi.normalized(gains) if curve is None else curve, lam), {}
    solved = sinkhorn.project(gains, lam, columns, tau)
    report = {"tau": tau, "iterations": solved.iterations, "converged": solved.converged}
    report |= {"row_error": solved.row_error, "column_error": solved.column_error}
    return solved.weights[:, _order(method, gains.shape[1], seed)], report


def _order(method: Method, steps: int, seed: int) -> NDArray[np.int64]:
    """Order of the columns of the Sinkhorn W."""
    straight = np.arange(steps)
    if method == "reversed":
        return straight[::-1]
    if method == "shuffled" and steps > 1:
        rng = np.random.default_rng(seed)
        while (order := rng.permutation(steps)).tolist() == straight.tolist():
            pass  # the identity would not be a control
        return order
    return straight
