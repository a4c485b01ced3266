"""Comparisons of two sets of gain curves: how similar they are, and how much gain is left."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recast.core import schedule
from recast.core.curves import GainCurves
from recast.errors import RecastError

__all__ = ["Comparison", "Remaining", "compare", "remaining"]


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
        If the grids differ or no reward is in both.

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
        If no reward is in both.

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


def _common(a: GainCurves, b: GainCurves) -> list[str]:
    names = [name for name in a.rewards if name in b.rewards]
    if not names:
        raise RecastError(
            f"the two curves have no reward in common: {', '.join(a.rewards)} against {', '.join(b.rewards)}"
        )
    return names


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator > 0 else float("nan")
