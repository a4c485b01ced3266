"""Evaluated runs side by side: pooled means, wins over matched pairs, Pareto verdicts, ablation, and how sure it is.

A run is one method at one budget and seed. Two runs of the same budget and seed are a matched pair: the same prompts,
the same start noise, another W.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from recast.errors import RecastError
from recast.evaluate import Budget

Array = NDArray[np.float64]
AGGREGATE = "aggregate"
Dominance = Literal["first", "second", "mixed", "equal"]


@dataclass(frozen=True)
class Run:
    """Means of one policy's scores; `values` (rewards × images) where single images are known."""

    method: str
    budget: Budget
    seed: int
    means: Mapping[str, float]
    values: Mapping[str, Array] | None = None

    @property
    def aggregate(self) -> float:
        """Σ λ_i r_i with λ as the user wrote it: the paper's Aggregate r."""
        return float(sum(weight * self.means[name] for name, weight in self.budget))

    def mean(self, name: str) -> float:
        """Of one reward, or of the aggregate."""
        return self.aggregate if name == AGGREGATE else float(self.means[name])

    def column(self, name: str) -> Array:
        """Scores of single images, or their aggregate."""
        if self.values is None:
            raise RecastError(f"the run {self.method}, seed {self.seed}, has means only: single images are not known")
        if name != AGGREGATE:
            return self.values[name]
        return np.asarray(sum(weight * self.values[reward] for reward, weight in self.budget), dtype=np.float64)


def of(runs: Sequence[Run], method: str) -> list[Run]:
    """The runs of one method, by budget and seed."""
    return sorted((run for run in runs if run.method == method), key=lambda run: (run.budget, run.seed))


def pairs(runs: Sequence[Run], first: str, second: str) -> list[tuple[Run, Run]]:
    """Runs of two methods at the same budget and seed."""
    others = {(run.budget, run.seed): run for run in of(runs, second)}
    return [(run, others[run.budget, run.seed]) for run in of(runs, first) if (run.budget, run.seed) in others]


@dataclass(frozen=True)
class Pooled:
    """Mean of the seed-level means, and the standard deviation over seeds (NaN for a single one)."""

    mean: float
    std: float


def pool(runs: Sequence[Run], name: str) -> Pooled:
    """One method's entry of Tab. trainreward: budgets are averaged within a seed, then seeds among themselves."""
    if not runs:
        return Pooled(np.nan, np.nan)
    budgets = {seed: sorted(run.budget for run in runs if run.seed == seed) for seed in {run.seed for run in runs}}
    if len(set(map(tuple, budgets.values()))) > 1:
        raise RecastError("the seeds were run at different budgets, so their means cannot be compared: complete them")
    seeds = [np.mean([run.mean(name) for run in runs if run.seed == seed]) for seed in sorted(budgets)]
    return Pooled(float(np.mean(seeds)), float(np.std(seeds, ddof=1)) if len(seeds) > 1 else np.nan)


def wins(matched: Sequence[tuple[Run, Run]], name: str) -> tuple[int, int]:
    """In how many matched pairs the first is strictly higher, and how many pairs there are."""
    return sum(first.mean(name) > second.mean(name) for first, second in matched), len(matched)


def pareto(first: Mapping[str, float], second: Mapping[str, float], names: Sequence[str]) -> Dominance:
    """App. D: who is at least as high on every reward and higher on one; mixed if neither is, equal if all agree."""
    differences = [first[name] - second[name] for name in names]
    if all(each == 0 for each in differences):
        return "equal"
    if all(each >= 0 for each in differences):
        return "first"
    return "second" if all(each <= 0 for each in differences) else "mixed"


def by_budget(runs: Sequence[Run], method: str, names: Sequence[str]) -> dict[Budget, dict[str, Pooled]]:
    """A method's entries of the per-budget tables: mean and standard deviation over seeds, by budget."""
    budgets = sorted({run.budget for run in of(runs, method)})
    chosen = {budget: [run for run in of(runs, method) if run.budget == budget] for budget in budgets}
    return {budget: {name: pool(found, name) for name in (AGGREGATE, *names)} for budget, found in chosen.items()}


def decompose(runs: Sequence[Run], methods: Sequence[str] = ("static", "row", "sinkhorn")) -> list[float]:
    """What each step of the ablation adds to the aggregate, averaged over the budgets that all methods have."""
    shared = set.intersection(*({(run.budget, run.seed) for run in of(runs, method)} for method in methods))
    if not shared:
        raise RecastError(f"no budget and seed was run with all of {', '.join(methods)}")
    levels = [
        np.mean([run.aggregate for run in of(runs, method) if (run.budget, run.seed) in shared]) for method in methods
    ]
    return [float(later - earlier) for earlier, later in zip(levels[:-1], levels[1:], strict=True)]


@dataclass(frozen=True)
class Difference:
    """Mean of first − second, its 95 % interval, and the sign test's p over matched pairs."""

    mean: float
    low: float
    high: float
    p: float


def difference(matched: Sequence[tuple[Run, Run]], name: str, draws: int = 2000, seed: int = 0) -> Difference:
    """How sure first − second is: prompts are drawn anew, the same ones in every pair and for both of it.

    The interval is over prompts, for these very runs; that another training run would come out differently shows in
    the standard deviation over seeds. The sign test leaves ties out.
    """
    from scipy.stats import binomtest

    gaps = np.stack([first.column(name) - second.column(name) for first, second in matched])  # (pairs, images)
    applies = ~np.isnan(gaps)
    totals, counts = np.where(applies, gaps, 0.0).sum(0), applies.sum(0)
    chosen = np.random.default_rng(seed).integers(gaps.shape[1], size=(draws, gaps.shape[1]))
    means = totals[chosen].sum(1) / np.maximum(counts[chosen].sum(1), 1)
    low, high = np.quantile(means, (0.025, 0.975))
    higher = sum(first.mean(name) > second.mean(name) for first, second in matched)
    lower = sum(first.mean(name) < second.mean(name) for first, second in matched)
    p = binomtest(higher, higher + lower).pvalue if higher + lower else 1.0
    return Difference(float(totals.sum() / max(counts.sum(), 1)), float(low), float(high), float(p))


def hacking(runs: Sequence[Run], held_out: Sequence[str]) -> list[str]:
    """A sentence for each method whose training rewards rise above the base's while a held-out judge falls below."""
    reference = {run.seed: run for run in of(runs, "base")}
    if not reference:
        return []
    base = reference[min(reference)]
    sentences = []
    for method in sorted({run.method for run in runs} - {"base"}):
        found = of(runs, method)
        # The base was not trained: at every budget it is itself, weighed by that budget.
        matched = [(run, Run("base", run.budget, run.seed, base.means, base.values)) for run in found]
        up = difference(matched, AGGREGATE)
        if up.low <= 0:
            continue
        for judge in held_out:
            down = difference(matched, judge)
            if down.high < 0:
                sentences.append(
                    f"{method} raises its training rewards by {up.mean:.3g} over the base while the held-out {judge} "
                    f"falls by {-down.mean:.3g} ({down.low:.3g} to {down.high:.3g}): look at the images"
                )
    return sentences
