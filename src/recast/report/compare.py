"""Statistics of evaluated runs: pooled means, wins over matched pairs, Pareto dominance, ablation and certainty.

A run is one method at one budget and seed. Two runs at the same budget and seed are a matched pair: the same prompts
and start noise, another W.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from recast.errors import RecastError
from recast.evaluate import Budget, Scores

__all__ = [
    "AGGREGATE",
    "Difference",
    "Dominance",
    "Pooled",
    "Run",
    "by_budget",
    "decompose",
    "difference",
    "hacking",
    "of",
    "pairs",
    "pareto",
    "pool",
    "seed_difference",
    "wins",
]

AGGREGATE = "aggregate"
Dominance = Literal["first", "second", "mixed", "equal"]
_Array = NDArray[np.float64]


@dataclass(frozen=True)
class Run:
    """The scores of one policy: the mean of every reward and, if known, the scores of single images.

    `Run.from_scores` makes one of each policy that `recast.evaluate.find` returns.

    Parameters
    ----------
    method : str
        The method of the weight matrix, such as "sinkhorn" or "static"; "base" for the untrained policy.
    budget : tuple of (str, float)
        λ by reward, as the user wrote it.
    seed : int
        The seed of the training.
    means : mapping of str to float
        The mean score of every reward, trained or held out.
    values : mapping of str to ndarray, shape (images,), optional
        The scores of single images, which `difference` needs; NaN where a reward does not apply.
    prompts : tuple of str, (images,), optional
        The prompt of every image; by default every image counts as a prompt of its own.

    Examples
    --------
    >>> from recast.report import Run
    >>> run = Run("static", (("clip", 1.0), ("ocr", 2.0)), 0, {"clip": 0.25, "ocr": 0.5})
    >>> run.aggregate
    1.25
    """

    method: str
    budget: Budget
    seed: int
    means: Mapping[str, float]
    values: Mapping[str, _Array] | None = None
    prompts: tuple[str, ...] | None = None

    @classmethod
    def from_scores(cls, scores: Scores) -> Run:
        """The run of an evaluated policy, with the scores of its images."""
        values = dict(zip(scores.rewards, scores.values, strict=True))
        prompts = tuple(image["prompt"] for image in scores.images)
        return cls(scores.method, tuple(scores.budget.items()), scores.seed, scores.means(), values, prompts)

    @property
    def aggregate(self) -> float:
        """Σ λ_i r_i with λ as the user wrote it: the paper's Aggregate r."""
        return float(sum(weight * self.means[name] for name, weight in self.budget))

    def mean(self, name: str) -> float:
        """The mean of one reward, or of the aggregate."""
        return self.aggregate if name == AGGREGATE else float(self.means[name])

    def column(self, name: str) -> _Array:
        """The scores of single images by one reward, or their aggregate, (images,)."""
        if self.values is None:
            raise RecastError(f"the run {self.method}, seed {self.seed}, has no scores of single images, only means")
        if name != AGGREGATE:
            return self.values[name]
        return np.asarray(sum(weight * self.values[reward] for reward, weight in self.budget), dtype=np.float64)

    def prompt_numbers(self, images: int) -> NDArray[np.int64]:
        """The number of every image's prompt, in the order of their first images."""
        first: dict[str, int] = {}
        texts = range(images) if self.prompts is None else self.prompts
        return np.array([first.setdefault(str(text), len(first)) for text in texts])


def of(runs: Sequence[Run], method: str) -> list[Run]:
    """The runs of one method, by budget and seed."""
    return sorted((run for run in runs if run.method == method), key=lambda run: (run.budget, run.seed))


def pairs(runs: Sequence[Run], first: str, second: str) -> list[tuple[Run, Run]]:
    """The matched pairs of two methods: runs at the same budget and seed.

    Parameters
    ----------
    runs : sequence of Run
        Runs of any methods.
    first, second : str
        The two methods.

    Returns
    -------
    list of (Run, Run)
        In the order of budgets and seeds; empty if no budget and seed has both methods.

    Examples
    --------
    >>> from recast.report import Run, pairs
    >>> runs = [Run(method, (("ocr", 1.0),), 7, {"ocr": 0.5}) for method in ("static", "sinkhorn", "row")]
    >>> [(one.method, other.method, one.seed) for one, other in pairs(runs, "sinkhorn", "static")]
    [('sinkhorn', 'static', 7)]
    """
    others = {(run.budget, run.seed): run for run in of(runs, second)}
    return [(run, others[run.budget, run.seed]) for run in of(runs, first) if (run.budget, run.seed) in others]


@dataclass(frozen=True)
class Pooled:
    """Mean of the seed-level means, and the standard deviation over seeds (NaN for a single one)."""

    mean: float
    std: float


def pool(runs: Sequence[Run], name: str) -> Pooled:
    """The entry of one method in Tab. trainreward: the mean over budgets within each seed, then over seeds.

    Parameters
    ----------
    runs : sequence of Run
        The runs of one method.
    name : str
        A reward, or "aggregate".

    Returns
    -------
    Pooled
        Mean and standard deviation over seeds; NaN without runs.

    Raises
    ------
    RecastError
        If the seeds were run at different budgets.

    Examples
    --------
    >>> from recast.report import Run, pool
    >>> pool([Run("static", (("ocr", 1.0),), seed, {"ocr": 0.5 + seed}) for seed in (0, 2)], "ocr")
    Pooled(mean=1.5, std=1.4142135623730951)
    """
    if not runs:
        return Pooled(np.nan, np.nan)
    budgets = {seed: sorted(run.budget for run in runs if run.seed == seed) for seed in {run.seed for run in runs}}
    if len(set(map(tuple, budgets.values()))) > 1:
        raise RecastError("the seeds were run at different budgets, so their means cannot be compared: complete them")
    seeds = [np.mean([run.mean(name) for run in runs if run.seed == seed]) for seed in sorted(budgets)]
    return Pooled(float(np.mean(seeds)), float(np.std(seeds, ddof=1)) if len(seeds) > 1 else np.nan)


def seed_difference(matched: Sequence[tuple[Run, Run]], name: str) -> Pooled:
    """The mean of first − second over matched pairs, and how much it varies from seed to seed.

    This is the paper's +0.053 ± 0.049: the differences are averaged over the budgets of a seed, and the standard
    deviation (n − 1) is that of the seed-level differences. Because the pairs share seeds, it can be larger or smaller
    than the standard deviations of the two methods suggest.

    Parameters
    ----------
    matched : sequence of (Run, Run)
        Matched pairs (`pairs`).
    name : str
        A reward, or "aggregate".

    Returns
    -------
    Pooled
        Mean and standard deviation over seeds; NaN without pairs.

    Raises
    ------
    RecastError
        If the seeds were run at different budgets.

    Examples
    --------
    >>> from recast.report import Run, seed_difference
    >>> budget = (("ocr", 1.0),)
    >>> found = [(Run("sinkhorn", budget, s, {"ocr": 0.5 + s}), Run("static", budget, s, {"ocr": 0.5})) for s in (0, 2)]
    >>> seed_difference(found, "ocr")
    Pooled(mean=1.0, std=1.4142135623730951)
    """
    gaps = [
        Run("difference", first.budget, first.seed, {each: first.means[each] - second.means[each] for each in names})
        for first, second in matched
        for names in [first.means.keys() & second.means.keys()]
    ]
    return pool(gaps, name)


def wins(matched: Sequence[tuple[Run, Run]], name: str) -> tuple[int, int]:
    """The number of matched pairs in which the first run is strictly higher, and the number of pairs."""
    return sum(first.mean(name) > second.mean(name) for first, second in matched), len(matched)


def pareto(first: Mapping[str, float], second: Mapping[str, float], names: Sequence[str]) -> Dominance:
    """Which of two runs Pareto-dominates the other (App. D).

    Parameters
    ----------
    first, second : mapping of str to float
        Mean scores by reward.
    names : sequence of str
        The rewards to compare.

    Returns
    -------
    {"first", "second", "mixed", "equal"}
        The run that is at least as high on every reward and higher on one; "equal" if all scores agree, else "mixed".

    Examples
    --------
    >>> from recast.report import pareto
    >>> pareto({"clip": 0.3, "ocr": 0.9}, {"clip": 0.3, "ocr": 0.8}, ["clip", "ocr"])
    'first'
    """
    differences = [first[name] - second[name] for name in names]
    if all(each == 0 for each in differences):
        return "equal"
    if all(each >= 0 for each in differences):
        return "first"
    return "second" if all(each <= 0 for each in differences) else "mixed"


def by_budget(runs: Sequence[Run], method: str, names: Sequence[str]) -> dict[Budget, dict[str, Pooled]]:
    """The entries of one method in the per-budget tables: mean and standard deviation over seeds, by budget."""
    budgets = sorted({run.budget for run in of(runs, method)})
    chosen = {budget: [run for run in of(runs, method) if run.budget == budget] for budget in budgets}
    return {budget: {name: pool(found, name) for name in (AGGREGATE, *names)} for budget, found in chosen.items()}


def decompose(runs: Sequence[Run], methods: Sequence[str] = ("static", "row", "sinkhorn")) -> list[float]:
    """The change of the aggregate at each step of the ablation, averaged over the budgets that all methods have."""
    shared = set.intersection(*({(run.budget, run.seed) for run in of(runs, method)} for method in methods))
    if not shared:
        raise RecastError(f"no budget and seed was run with all of {', '.join(methods)}: run the missing ones")
    levels = [
        np.mean([run.aggregate for run in of(runs, method) if (run.budget, run.seed) in shared]) for method in methods
    ]
    return [float(later - earlier) for earlier, later in zip(levels[:-1], levels[1:], strict=True)]


@dataclass(frozen=True)
class Difference:
    """Mean of first − second, its 95 % interval over prompts, and the p-value of a sign test over matched pairs."""

    mean: float
    low: float
    high: float
    p: float


def difference(matched: Sequence[tuple[Run, Run]], name: str, draws: int = 2000, seed: int = 0) -> Difference:
    """The mean difference of matched pairs with a paired bootstrap over prompts and a sign test.

    The interval is over prompts, for the given runs; the variation between training runs is the standard deviation
    over seeds (`pool`). The sign test leaves ties out.

    Parameters
    ----------
    matched : sequence of (Run, Run)
        Matched pairs with the scores of single images (`pairs`).
    name : str
        A reward, or "aggregate".
    draws : int, default 2000
        Bootstrap samples; each one has the same prompts in all pairs.
    seed : int, default 0
        Of the bootstrap.

    Returns
    -------
    Difference

    Raises
    ------
    RecastError
        If a run has means only.

    Examples
    --------
    >>> import numpy as np
    >>> from recast.report import Run, difference
    >>> scores = np.array([0.1, 0.5, 0.3])
    >>> one, other = (Run("x", (("ocr", 1.0),), 0, {"ocr": s.mean()}, {"ocr": s}) for s in (scores + 0.25, scores))
    >>> found = difference([(one, other)], "ocr")
    >>> round(found.mean, 6), round(found.low, 6), round(found.high, 6), found.p
    (0.25, 0.25, 0.25, 1.0)
    """
    from scipy.stats import binomtest

    gaps = np.stack([first.column(name) - second.column(name) for first, second in matched])  # (pairs, images)
    applies = ~np.isnan(gaps)
    number = matched[0][0].prompt_numbers(gaps.shape[1])  # images of one prompt are drawn together
    totals = np.bincount(number, np.where(applies, gaps, 0.0).sum(0))
    counts = np.bincount(number, applies.sum(0))
    chosen = np.random.default_rng(seed).integers(len(totals), size=(draws, len(totals)))
    means = totals[chosen].sum(1) / np.maximum(counts[chosen].sum(1), 1)
    low, high = np.quantile(means, (0.025, 0.975))
    higher = sum(first.mean(name) > second.mean(name) for first, second in matched)
    lower = sum(first.mean(name) < second.mean(name) for first, second in matched)
    p = binomtest(higher, higher + lower).pvalue if higher + lower else 1.0
    return Difference(float(totals.sum() / max(counts.sum(), 1)), float(low), float(high), float(p))


def hacking(runs: Sequence[Run], held_out: Sequence[str]) -> list[str]:
    """A sentence for each method whose training rewards rise above the base's while a held-out reward falls below."""
    reference = {run.seed: run for run in of(runs, "base")}
    if not reference:
        return []
    base = reference[min(reference)]
    sentences = []
    for method in sorted({run.method for run in runs} - {"base"}):
        found = of(runs, method)
        # The base is the same at every budget, but its aggregate is weighted by that budget.
        matched = [(run, Run("base", run.budget, run.seed, base.means, base.values, base.prompts)) for run in found]
        up = difference(matched, AGGREGATE)
        if up.low <= 0:
            continue
        for reward in held_out:
            down = difference(matched, reward)
            if down.high < 0:
                sentences.append(
                    f"{method} raises its training rewards by {up.mean:.3g} over the base, but the held-out reward "
                    f"{reward} falls by {-down.mean:.3g} (95 % {down.low:.3g} to {down.high:.3g}). This may be reward "
                    "hacking: look at the images."
                )
    return sentences
