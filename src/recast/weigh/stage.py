"""The stage `weigh`: from gain curves and a budget to the weight matrix W."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from recast import lock
from recast.core import matched, renyi, schedule, sinkhorn
from recast.core.arrays import Array
from recast.core.curves import GainCurves
from recast.core.effects import Effects
from recast.core.weights import ENTROPIC, METHODS, Method, WeightMatrix, control_of
from recast.errors import RecastError

if TYPE_CHECKING:
    from recast.config import Recipe

__all__ = ["columns_of", "effects_of", "masses", "order_of", "save", "static", "weigh", "weigh_recipe"]

_DOCTOR = "run recast doctor RECIPE --gradients --out"


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
        `sinkhorn` (Alg. 3), `static` (λ_i ν_t), `row` (no column constraint), `matched` (each step shared out by gain,
        no row constraint), `hard` (the transport problem), `shared` (one schedule for all rewards), or a control: the
        method on gains in another order, `reversed` and `shuffled` for `sinkhorn`, `row-reversed` and so on for others.
    tau, columns : float, default 1.0, and array-like, shape (T,), optional
        Temperature of the Sinkhorn problem, and ν, the mass of each step; uniform by default. `mix` takes W/ν.
    curve : array-like, shape (T,), optional
        Schedule of `shared` and its controls; by default the budget-weighted mean of the normalized gains.
    shrink : bool, default False
        Whether unreliable curves are drawn towards the static case (`GainCurves.shrunk`; needs `D_prompts`).
    seed : int, default 0
        Seed of the order of shuffled steps.

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
    _check_options(method, tau=tau != 1, curve=curve is not None)
    nu = masses(columns, curves.steps)
    weights = static(_by_name(curves, budget), curves.sigmas, nu)
    gains = _gains(curves, weights.rewards, method, shrink)
    silent = [name for name, shape in zip(weights.rewards, renyi.normalized(gains), strict=True) if not shape.any()]
    info: dict[str, Any] = {"alpha": curves.alpha, "curves": dict(curves.provenance)}
    info |= {"without_gain": silent} if method == "static" else {"shrink": shrink, "without_gain": silent}
    if method == "static":
        return replace(weights, info=info)
    floor = _floors(curves, weights.rewards) if control_of(method)[0] == "matched" else None
    matrix, report = _solve(gains, weights.budget, method, tau, nu, curve, floor, seed)
    return replace(weights, matrix=matrix, method=method, info=info | report)


def static(budget: Mapping[str, float], sigmas: ArrayLike, columns: ArrayLike | None = None) -> WeightMatrix:
    """The static W of a budget, λ_i ν_t; it needs no curves.

    Parameters
    ----------
    budget : mapping from reward to float
        λ, on any scale.
    sigmas : array-like, shape (T+1,)
        The grid, from 0 to 1.
    columns : array-like, shape (T,), optional
        ν, on any scale; uniform by default. The factors of `WeightMatrix.mix` are λ for any ν.

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
    nu = masses(columns, levels.size - 1)
    return WeightMatrix(tuple(budget), levels, sinkhorn.static(lam, levels.size - 1, nu), lam, "static", nu=nu)


def masses(columns: ArrayLike | None, steps: int, name: str = "columns") -> Array | None:
    """ν (T,) with sum 1, or None if it is uniform; an error that names `name` if the numbers do not fit T steps."""
    if columns is None:
        return None
    given = np.atleast_1d(np.asarray(columns, dtype=object))
    if given.shape != (steps,):
        has = f"{given.size} number{'s' * (given.size != 1)}" if given.ndim == 1 else f"the shape {given.shape}"
        raise RecastError(f"{name} has {has}, but W has {steps} steps: give one number per step, the cleanest first")
    nu = sinkhorn.masses(columns, steps, name)
    return None if (nu == nu[0]).all() else nu


def columns_of(recipe: Recipe, sigmas: ArrayLike, effects: Effects | None = None) -> Array | None:
    """ν (T,) by a recipe's `weigh.columns`, or None if it is uniform.

    Parameters
    ----------
    recipe : Recipe
        Its setting `weigh.columns`.
    sigmas : array-like, shape (T+1,)
        The grid of W.
    effects : Effects, optional
        What `weigh.columns: effect` needs, on the same grid.

    Returns
    -------
    ndarray, shape (T,), or None

    Raises
    ------
    RecastError
        If effects are needed and missing or on another grid, or the numbers do not fit the grid.
    """
    levels, asked = schedule.grid(sigmas), recipe.weigh.columns
    if asked == "uniform":
        return None
    if asked != "effect":
        return masses(asked, levels.size - 1, "weigh.columns")
    if effects is None:
        raise RecastError(f"weigh.columns = effect needs the effects of the levels: {_DOCTOR} RUN")
    if not schedule.same(effects.sigmas, levels):
        raise RecastError(
            f"the effects were measured at T = {len(effects.sigmas) - 1} from σ = {effects.sigmas[1]:.4g}, but W has "
            f"{levels.size - 1} steps from {levels[1]:.4g}: {_DOCTOR} RUN with the steps of W"
        )
    return masses(effects.effect, levels.size - 1, "the effects")


def effects_of(recipe: Recipe, out: Path) -> Effects | None:
    """The effects in a run folder if `weigh.columns` is `effect`, else None; an error if they are needed and missing.

    Parameters
    ----------
    recipe : Recipe
        Its setting `weigh.columns`.
    out : Path
        The run folder.

    Returns
    -------
    Effects or None
        Those of `out`/effects.json, at the recipe's images per update.

    Raises
    ------
    RecastError
        If the file is needed and missing or damaged.
    """
    if recipe.weigh.columns != "effect":
        return None
    path = out / "effects.json"
    if not path.is_file():
        raise RecastError(f"weigh.columns = effect needs {path}, which does not exist: {_DOCTOR} {out}")
    found, train = Effects.load(path), recipe.train  # as in recast.train.gradients, whose file serves any batch
    return replace(found, batch=train.batch, levels=train.levels(found.steps), normalize=train.normalize)


def weigh_recipe(recipe: Recipe, curves: GainCurves, effects: Effects | None = None) -> WeightMatrix:
    """W by a recipe's budget and the settings of its section `weigh`.

    Parameters
    ----------
    recipe : Recipe
        Its budget and the settings of `weigh`; an empty budget is 1 for every curve.
    curves : GainCurves
        Curves of the rewards.
    effects : Effects, optional
        The effects of the levels, which `weigh.columns: effect` needs (`effects_of`).

    Returns
    -------
    WeightMatrix
        W, as `weigh` returns it, with the origin of ν in `info` if it is `effect`.

    Raises
    ------
    RecastError
        As in `weigh` and `columns_of`.

    Examples
    --------
    >>> from recast.config import Recipe
    >>> curves = GainCurves(("clip", "ocr"), [0, 0.5, 1], [[0.4, 0.3, 0.0], [0.9, 0.8, 0.0]])
    >>> weigh_recipe(Recipe(weigh={"method": "static"}), curves).matrix.tolist()
    [[0.25, 0.25], [0.25, 0.25]]
    """
    settings = recipe.weigh
    budget = recipe.weigh.budget or dict.fromkeys(curves.rewards, 1.0)  # the curves may have others than the recipe
    columns = columns_of(recipe, curves.sigmas, effects)
    options: dict[str, Any] = {"tau": settings.tau, "shrink": settings.shrink, "seed": settings.seed}
    weights = weigh(curves, budget, settings.method, columns=columns, **options)
    return replace(weights, info={**weights.info, "columns": "effect"}) if settings.columns == "effect" else weights


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
        If a file cannot be written, or another process is weighing in the folder.
    """
    with lock.alone(out / ".weigh.lock", f"weighing in {out}"):
        recipe.save(out / "recipe.yaml")
        return weights.save(out / "weights.json")


def _check_options(method: Method, **given: bool) -> None:
    """Raise for an unknown method, or for an option that the method does not use."""
    if method not in METHODS:
        raise RecastError(f"unknown method {method!r}: choose one of {', '.join(METHODS)}")
    readers = {"tau": ENTROPIC, "curve": tuple(name for name in METHODS if control_of(name)[0] == "shared")}
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


def _floors(curves: GainCurves, names: tuple[str, ...]) -> Array:
    """The floor of each named reward (m,); that of a reward without a curve is not used."""
    measured = dict(zip(curves.rewards, matched.floors(curves), strict=True))
    return np.array([measured.get(name, matched.FLOOR) for name in names])


def _solve(
    gains: Array,
    lam: Array,
    method: Method,
    tau: float,
    columns: Array | None,
    curve: ArrayLike | None,
    floor: Array | None,
    seed: int,
) -> tuple[Array, dict[str, Any]]:
    """W (m, T) by one of the methods that need gains, and what the solver reports."""
    base, order = control_of(method)[0], order_of(method, gains.shape[1], seed)
    if columns is not None:
        gains = gains[:, order]
        curve = None if curve is None else sinkhorn.simplex(curve, order.size, "curve")[order]
    matrix, report = _solve_base(gains, lam, base, tau, columns, curve, floor)
    # With uniform ν, the W of turned gains is the turned W, and this way to the last bit.
    return matrix[:, order] if columns is None else matrix, report


def _solve_base(
    gains: Array,
    lam: Array,
    method: str,
    tau: float,
    columns: Array | None,
    curve: ArrayLike | None,
    floor: Array | None,
) -> tuple[Array, dict[str, Any]]:
    """W (m, T) by a method that is no control, and what the solver reports."""
    if floor is not None:
        return matched.matched(gains, lam, columns, floor), {"floor": floor.tolist()}
    if method == "row":
        return sinkhorn.row(gains, lam, columns), {}
    if method == "hard":
        return sinkhorn.hard(gains, lam, columns), {}
    if method == "shared":
        return sinkhorn.shared(lam @ renyi.normalized(gains) if curve is None else curve, lam, columns), {}
    solved = sinkhorn.project(gains, lam, columns, tau)
    report = {"tau": tau, "iterations": solved.iterations, "converged": solved.converged}
    report |= {"row_error": solved.row_error, "column_error": solved.column_error}
    return solved.weights, report


def order_of(method: str, steps: int, seed: int = 0) -> NDArray[np.int64]:
    """The order (T,) in which a method takes the steps of the gains; a control's is not their own.

    Examples
    --------
    >>> order_of("sinkhorn", 3).tolist(), order_of("row-reversed", 3).tolist(), order_of("shuffled", 3).tolist()
    ([0, 1, 2], [2, 1, 0], [2, 0, 1])
    """
    straight, turned = np.arange(steps), control_of(method)[1]
    if turned == "reversed":
        return straight[::-1]
    if turned == "shuffled" and steps > 1:
        rng = np.random.default_rng(seed)
        while (order := rng.permutation(steps)).tolist() == straight.tolist():
            pass  # the identity would not be a control
        return order
    return straight
