"""The stage `weigh`: gain curves and a budget to a weight matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from recast.core import renyi, sinkhorn
from recast.core.curves import GainCurves
from recast.core.weights import METHODS, Method, WeightMatrix
from recast.errors import RecastError

if TYPE_CHECKING:
    from recast.config import Recipe

Array = NDArray[np.float64]


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
    """W for `budget` (any positive scale), a mapping by reward name or one number per curve.

    Methods: `sinkhorn` (Alg. 3), `static` (λ_i/T), `row` (no column constraint), `hard` (the transport
    LP), `shared` (one schedule `curve` (T,) for all rewards; by default the budget-weighted mean of
    their normalised gains), and the controls `reversed` and `shuffled`: the Sinkhorn W with its columns
    in another order. `tau` and `columns` are the temperature and ν of the Sinkhorn problem. `shrink`
    draws unreliable curves towards the static case (`GainCurves.shrunk`; needs `D_prompts`). A reward in
    the budget that has no curve gets log K = 0, its full budget spread by the shared column factors.

    >>> curves = GainCurves(("clip", "ocr"), [0, 0.5, 1], [[0.4, 0.3, 0.0], [0.9, 0.8, 0.0]])
    >>> weigh(curves, {"clip": 1, "ocr": 1}).matrix.round(3).tolist()
    [[0.285, 0.215], [0.215, 0.285]]
    """
    if method not in METHODS:
        raise RecastError(f"unknown method {method!r}: choose one of {', '.join(METHODS)}")
    _refuse_unread(method, tau=tau != 1, columns=columns is not None, curve=curve is not None)
    names, lam = _resolve(curves, budget)
    if method != "static" and not set(names) & set(curves.rewards):
        raise RecastError(
            f"none of {', '.join(names)} has a gain curve (the curves are {', '.join(curves.rewards)}): "
            "there is nothing to weigh by; method 'static' needs no curve"
        )
    measured = curves.shrunk() if shrink else curves.gains
    gains = np.zeros((len(names), curves.steps))
    for i, name in enumerate(names):
        if name in curves.rewards:
            gains[i] = measured[curves.rewards.index(name)]
    info: dict[str, Any] = {"alpha": curves.alpha, "curves": dict(curves.provenance)}
    info |= {} if method == "static" else {"shrink": shrink}
    info["without_gain"] = [name for name, row in zip(names, gains, strict=True) if not renyi.normalized(row).any()]
    if method == "static":
        matrix = sinkhorn.static(lam, curves.steps)
    elif method == "row":
        matrix = sinkhorn.row(gains, lam)
    elif method == "hard":
        matrix = sinkhorn.hard(gains, lam, columns)
    elif method == "shared":
        schedule = lam @ renyi.normalized(gains) if curve is None else curve
        matrix = sinkhorn.shared(schedule, lam)
    else:
        solved = sinkhorn.project(gains, lam, columns, tau)
        info |= {"tau": tau, "iterations": solved.iterations, "converged": solved.converged}
        info |= {"row_error": solved.row_error, "column_error": solved.column_error}
        matrix = solved.weights[:, _order(method, curves.steps, seed)]
    return WeightMatrix(names, curves.sigmas, matrix, lam, method, info)


def _refuse_unread(method: Method, **given: bool) -> None:
    """An error for an option that the method would not read."""
    entropic = ("sinkhorn", "reversed", "shuffled")
    readers = {"tau": entropic, "columns": (*entropic, "hard"), "curve": ("shared",)}
    for option, was_given in given.items():
        if was_given and method not in readers[option]:
            raise RecastError(f"{option} has no meaning for method {method!r}, only for {', '.join(readers[option])}")


def _resolve(curves: GainCurves, budget: Mapping[str, float] | Sequence[float]) -> tuple[tuple[str, ...], Array]:
    """Names and normalised λ of the rewards in the budget."""
    if isinstance(budget, Mapping):
        names, values = tuple(budget), list(budget.values())
    else:
        names, values = curves.rewards, list(budget)
        if len(values) != len(names):
            raise RecastError(
                f"the budget has {len(values)} numbers for {len(names)} curves ({', '.join(names)}): name them"
            )
    if not names:
        raise RecastError(f"the budget is empty: give at least one of {', '.join(curves.rewards)}")
    return names, sinkhorn.simplex(values, len(names), "budget")


def _order(method: Method, steps: int, seed: int) -> NDArray[np.int64]:
    """Which column of the Sinkhorn W stands where."""
    straight = np.arange(steps)
    if method == "reversed":
        return straight[::-1]
    if method == "shuffled" and steps > 1:
        rng = np.random.default_rng(seed)
        while (order := rng.permutation(steps)).tolist() == straight.tolist():
            pass  # the identity would be no control
        return order
    return straight


def static(budget: Mapping[str, float], sigmas: ArrayLike) -> WeightMatrix:
    """The static W of a budget on a grid (T+1,): λ_i / T at every step. It needs no curves."""
    names, lam = tuple(budget), sinkhorn.simplex(list(budget.values()), len(budget), "budget")
    return WeightMatrix(names, sigmas, sinkhorn.static(lam, np.size(sigmas) - 1), lam, "static")


def weigh_recipe(recipe: Recipe, curves: GainCurves) -> WeightMatrix:
    """W by the recipe's budget and method."""
    settings = recipe.weigh
    budget = recipe.budget or dict.fromkeys(curves.rewards, 1.0)
    return weigh(curves, budget, settings.method, tau=settings.tau, shrink=settings.shrink, seed=settings.seed)


def save(recipe: Recipe, weights: WeightMatrix, out: Path) -> Path:
    """Write RUN/weights.json and the recipe it came from; returns the path of W."""
    recipe.save(out / "recipe.yaml")
    return weights.save(out / "weights.json")
