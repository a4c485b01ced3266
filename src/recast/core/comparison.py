"""Sets of gain curves side by side: how similar they are, how much gain is left, and several on one grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from recast.core import schedule
from recast.core.arrays import Array
from recast.core.curves import GainCurves
from recast.core.weights import WeightMatrix
from recast.errors import RecastError

__all__ = ["Comparison", "Overlay", "Remaining", "compare", "excursions", "overlay", "remaining", "require_one_version"]


@dataclass(frozen=True)
class Comparison:
    """One reward's row of the paper's surrogate-sensitivity table."""

    reward: str
    pearson: float
    spearman: float
    peaks: tuple[int, int]
    total_ratio: float


@dataclass(frozen=True)
class Remaining:
    """One reward's row of the paper's curve-drift table; the last row, `all`, is their sum."""

    reward: str
    base: float
    now: float
    ratio: float


@dataclass(frozen=True)
class Overlay:
    """Several sets of curves on one grid (`overlay`).

    Parameters
    ----------
    curves : GainCurves
        All rewards, on the grid of the first set.
    native : tuple of int, (m,)
        The T at which each reward was estimated.
    resampled : tuple of str
        The rewards that were brought from another grid.
    left_out : mapping of str to tuple of str
        By set, its rewards that are not in `curves` because an earlier set has them; only sets with such rewards.
    """

    curves: GainCurves
    native: tuple[int, ...]
    resampled: tuple[str, ...]
    left_out: Mapping[str, tuple[str, ...]]


def compare(a: GainCurves, b: GainCurves) -> list[Comparison]:
    """How similar two sets of gain curves are, one row per reward that both have (App. B.4).

    Parameters
    ----------
    a, b : GainCurves
        Curves on the same grid; use `GainCurves.resample` if the grids differ.

    Returns
    -------
    list of Comparison
        In the order of `a`: Pearson and Spearman correlations of the gains over the T steps, the steps t with the
        largest gain (1 is the cleanest), and the total gain of `b` over that of `a`. NaN where a curve is constant or
        without gain.

    Raises
    ------
    RecastError
        If the grids differ, no reward is in both, or a reward was scored by two versions of its model.

    Examples
    --------
    >>> a = GainCurves(["ocr"], [0, 0.4, 0.8, 1], [[0.9, 0.8, 0.2, 0.0]])
    >>> b = GainCurves(["ocr"], [0, 0.4, 0.8, 1], [[0.6, 0.5, 0.2, 0.0]])
    >>> compare(a, b)[0].peaks, round(compare(a, b)[0].total_ratio, 3)
    ((2, 2), 0.667)
    """
    from scipy import stats  # half a second to import, and only needed here

    names = _common(a, b)
    if not schedule.same(a.sigmas, b.sigmas):
        raise RecastError(
            f"the two curves lie on different grids (T = {a.steps} and {b.steps}): resample one onto the other first"
        )
    first, second = a.select(names), b.select(names)
    rows = []
    for i, name in enumerate(names):
        x, y = first.gains[i], second.gains[i]
        varies = a.steps > 1 and np.ptp(x) > 0 and np.ptp(y) > 0
        pearson = float(stats.pearsonr(x, y).statistic) if varies else float("nan")
        spearman = float(stats.spearmanr(x, y).statistic) if varies else float("nan")
        peaks = int(x.argmax()) + 1, int(y.argmax()) + 1
        rows.append(Comparison(name, pearson, spearman, peaks, _ratio(float(second.total[i]), float(first.total[i]))))
    return rows


def remaining(base: GainCurves, now: GainCurves) -> list[Remaining]:
    """How much of each reward's total gain is left at another policy, and of their sum (App. B.5).

    Parameters
    ----------
    base, now : GainCurves
        Curves of the base policy and of the current one; their grids may differ.

    Returns
    -------
    list of Remaining
        One row per reward that both have, in the order of `base`, and a last row `all` for the sum. The ratio is NaN
        where the base has no gain.

    Raises
    ------
    RecastError
        If no reward is in both, or a reward was scored by two versions of its model.

    Examples
    --------
    >>> base = GainCurves(["ocr"], [0, 0.5, 1], [[0.8, 0.6, 0.0]])
    >>> now = GainCurves(["ocr"], [0, 0.5, 1], [[0.2, 0.1, 0.0]])
    >>> [(row.reward, round(row.ratio, 3)) for row in remaining(base, now)]
    [('ocr', 0.25), ('all', 0.25)]
    """
    names = _common(base, now)
    before, after = base.select(names).total, now.select(names).total
    rows = [
        Remaining(name, float(old), float(new), _ratio(float(new), float(old)))
        for name, old, new in zip(names, before, after, strict=True)
    ]
    total_before, total_after = float(before.sum()), float(after.sum())
    return [*rows, Remaining("all", total_before, total_after, _ratio(total_after, total_before))]


def overlay(sets: Mapping[str, GainCurves]) -> Overlay:
    """Several sets of curves on the grid of the first one, as in Fig. renyi-omega.

    Curves of another grid are resampled over t/T (`GainCurves.resample`): D is interpolated, so each reward keeps its
    total gain, and its gain is per step of the first grid. A reward that several sets have is taken from the first of
    them: the curves of one reward on different prompts are different curves, and `compare` sets them side by side.

    Parameters
    ----------
    sets : mapping of str to GainCurves
        At least one set, by a name such as its file, all of the same Rényi order and aggregation.

    Returns
    -------
    Overlay
        Its curves have D of each prompt if all sets do; every prompt then counts for the rewards of its own set.

    Raises
    ------
    RecastError
        If there is no set, the orders or aggregations differ, or a set adds no reward.

    Examples
    --------
    >>> joint = GainCurves(["clip", "pick"], [0, 0.5, 1], [[0.4, 0.2, 0.0], [0.3, 0.1, 0.0]])
    >>> text = GainCurves(["pick", "ocr"], [0, 0.3, 0.6, 0.8, 1], [[0.4, 0.3, 0.2, 0.1, 0], [1, 0.9, 0.8, 0.2, 0]])
    >>> both = overlay({"joint.json": joint, "text.json": text})
    >>> both.curves.rewards, both.native, both.resampled, both.left_out
    (('clip', 'pick', 'ocr'), (2, 2, 4), ('ocr',), {'text.json': ('pick',)})
    >>> both.curves.gains[2].round(3).tolist()
    [0.2, 0.8]
    """
    if not sets:
        raise RecastError("an overlay needs at least one set of curves")
    _require_alike(sets)
    seen: set[str] = set()
    parts, left_out = [], {}
    for source, each in sets.items():
        names = [name for name in each.rewards if name not in seen]
        if not names:
            raise RecastError(f"{source} adds no reward to the overlay: the sets before it have all of its rewards")
        if len(names) < len(each.rewards):
            left_out[source] = tuple(name for name in each.rewards if name in seen)
        parts.append(each.select(names))
        seen |= set(names)
    grid = parts[0].sigmas
    return Overlay(
        _joined([each.resample(grid, over="step") for each in parts]),
        tuple(each.steps for each in parts for _ in each.rewards),
        tuple(name for each in parts if not schedule.same(each.sigmas, grid) for name in each.rewards),
        left_out,
    )


def _require_alike(sets: Mapping[str, GainCurves]) -> None:
    """Raise if one kernel cannot be made of the sets."""
    (first, model), *others = sets.items()
    for source, each in others:
        for what in ("alpha", "aggregate"):
            here, there = getattr(each, what), getattr(model, what)
            if here != there:
                raise RecastError(f"{source} has {what} = {here}, but {first} has {there}: estimate both with the same")


def _joined(parts: Sequence[GainCurves]) -> GainCurves:
    """Sets with different rewards on one grid as one; a prompt has NaN for the rewards of other sets."""
    rewards = tuple(name for each in parts for name in each.rewards)
    per_prompt = None
    known = [each.D_prompts for each in parts if each.D_prompts is not None]
    if len(known) == len(parts):
        per_prompt = np.full((sum(map(len, known)), len(rewards), parts[0].sigmas.size), np.nan)
        prompt = row = 0
        for rows in known:
            per_prompt[prompt : prompt + len(rows), row : row + rows.shape[1]] = rows
            prompt, row = prompt + len(rows), row + rows.shape[1]
    D = np.concatenate([each.D for each in parts])
    provenance = {"overlay": [dict(each.provenance) for each in parts]} if len(parts) > 1 else parts[0].provenance
    return replace(parts[0], rewards=rewards, D=D, D_prompts=per_prompt, provenance=provenance)


def excursions(weights: WeightMatrix) -> Array:
    """Smallest and largest factor over λ_i, T·W_i,t / λ_i for uniform ν, of each reward over the steps (m, 2).

    Static weighting has 1 at every step.

    At uniform λ this is W in units of 1/(mT), which App. B.2 reports over all rewards; NaN where λ_i is 0.

    Examples
    --------
    >>> W = WeightMatrix(("a", "b"), [0, 0.5, 1], [[0.4, 0.1], [0.1, 0.4]], [0.5, 0.5], "sinkhorn")
    >>> excursions(W).round(3).tolist()
    [[0.4, 1.6], [0.4, 1.6]]
    """
    share = weights.budget[:, None]
    factors = np.divide(weights.factors, share, out=np.full_like(weights.matrix, np.nan), where=share > 0)
    return np.stack([factors.min(axis=1), factors.max(axis=1)], axis=1)


def require_one_version(a: GainCurves, b: GainCurves) -> None:
    """Raise if a reward that both sets have was scored by two versions of its model.

    Parameters
    ----------
    a, b : GainCurves
        Curves; the versions are in their provenance, and curves of earlier releases have none.

    Raises
    ------
    RecastError
        If both sets record the versions of a reward and they differ.

    Examples
    --------
    >>> made = [{"versions": {"ocr": {"engine": f"rapidocr 3.{minor}.0"}}} for minor in (8, 9)]
    >>> a, b = (GainCurves(["ocr"], [0, 1], [[1.0, 0.0]], provenance=each) for each in made)
    >>> require_one_version(a, b)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    recast.errors.RecastError: ocr has engine = rapidocr 3.8.0 in one set of curves and rapidocr 3.9.0 in the other: ...
    """
    for name in (name for name in a.rewards if name in b.rewards):
        first, second = ((each.provenance.get("versions") or {}).get(name) or {} for each in (a, b))
        for key in sorted(first.keys() | second.keys()) if first and second else ():
            one, other = (each.get(key, "not recorded") for each in (first, second))
            if one != other:
                raise RecastError(
                    f"{name} has {key} = {one} in one set of curves and {other} in the other: scores of two versions "
                    "are not compared; estimate both with the same version"
                )


def _common(a: GainCurves, b: GainCurves) -> list[str]:
    names = [name for name in a.rewards if name in b.rewards]
    if not names:
        raise RecastError(
            f"the two curves have no reward in common: {', '.join(a.rewards)} against {', '.join(b.rewards)}"
        )
    require_one_version(a, b)
    return names


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator > 0 else float("nan")
