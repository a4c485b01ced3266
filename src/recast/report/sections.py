"""The tables of the report: pooled, by budget, the ablation, and differences with intervals."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from recast.core.weights import METHODS, control_of
from recast.evaluate import Budget
from recast.report import compare
from recast.report.compare import AGGREGATE, Pooled, Run
from recast.report.render import Cell, Table

__all__ = ["ablation", "budget_name", "by_budget", "cell", "certainty", "methods", "pooled", "rank", "shown"]

_ORDER = ("base", "static", *(method for method in METHODS if method != "static"))
_NAMES = {"sinkhorn": "ReCAST", "row": "no-Sink"}
"""Methods with another name in tables than in recipes."""


def methods(runs: Sequence[Run]) -> list[str]:
    """The methods of some runs, in the order of the tables."""
    return sorted({run.method for run in runs}, key=rank)


def rank(method: str) -> tuple[int, str]:
    """The place of a method in the tables, as a key for sorting."""
    return (_ORDER.index(method) if method in _ORDER else len(_ORDER), method)


def shown(method: str) -> str:
    """A method's name in a table.

    >>> shown("sinkhorn"), shown("reversed"), shown("matched-reversed")
    ('ReCAST', 'reversed', 'reversed (matched)')
    """
    base, order = control_of(method)
    name = _NAMES.get(base, base)
    return name if not order else order if base == "sinkhorn" else f"{order} ({name})"


def budget_name(budget: Budget) -> str:
    """A budget such as (1, 2, 1), in the order of the rewards."""
    return "(" + ", ".join(f"{weight:g}" for _, weight in budget) + ")"


def _digits(numbers: Sequence[float]) -> int:
    """Decimal places: three, or two for a reward on a larger scale, as the paper has it for HPSv3."""
    known = [abs(number) for number in numbers if np.isfinite(number)]
    return 2 if known and max(known) >= 7 else 3


def cell(entry: Pooled, places: int, bold: bool = False, sign: str = "") -> Cell:
    """A cell with a mean, with its sign if `sign` is "+", and its standard deviation over seeds."""
    if not np.isfinite(entry.mean):
        return Cell("-")
    spread = "" if np.isnan(entry.std) else f"{entry.std:.{places}f}"
    mean = round(entry.mean, places) + 0.0  # no "-0.000"
    return Cell(f"{mean:{sign}.{places}f}", spread, bold)


def pooled(runs: Sequence[Run], rewards: Sequence[str], title: str, name: str, aggregate: bool = True) -> Table:
    """Tab. trainreward: every method's mean of the seed-level means, and ReCAST's difference to static and wins."""
    found = methods(runs)
    matched = compare.pairs(runs, "sinkhorn", "static")
    rows = []
    for reward in ([AGGREGATE] if aggregate else []) + list(rewards):
        entries = {method: _entry(runs, method, reward) for method in found}
        places = _digits([entry.mean for entry in entries.values()])
        best = _best(entries, places)
        cells = [cell(entries[method], places, method in best) for method in found]
        gap = cell(compare.seed_difference(matched, reward), places, sign="+")
        won, count = compare.wins(matched, reward)
        rows.append((Cell("aggregate r" if reward == AGGREGATE else reward), *cells, gap, Cell(f"{won}/{count}")))
    seeds = len({run.seed for run in runs if run.method != "base"})
    budgets = len({run.budget for run in runs if run.method != "base"})
    note = (
        f"Mean of the seed-level means ± the standard deviation over seeds ({seeds} seeds, {budgets} budgets). The "
        "column ReCAST − static is the mean of the seed-level differences of matched (budget, seed) pairs ± their "
        "standard deviation over seeds, and win counts the pairs in which ReCAST is above static. The better of the "
        "two is bold, or both if they agree."
    )
    return Table(name, title, ("reward", *map(shown, found), "ReCAST − static", "win"), tuple(rows), (note,))


def _entry(runs: Sequence[Run], method: str, reward: str) -> Pooled:
    """One entry of the pooled table; the aggregate of the base is averaged over the budgets of the other methods."""
    found = compare.of(runs, method)
    if method != "base" or reward != AGGREGATE:
        return compare.pool(found, reward) if method != "base" else Pooled(found[0].mean(reward), np.nan)
    budgets = sorted({run.budget for run in runs if run.method != "base"}) or [found[0].budget]
    sums = [Run("base", budget, 0, found[0].means).aggregate for budget in budgets]
    return Pooled(float(np.mean(sums)), np.nan)


def _best(entries: dict[str, Pooled], places: int) -> set[str]:
    """The better of static and ReCAST at the printed precision; both if they agree."""
    if not {"static", "sinkhorn"} <= entries.keys():
        return set()
    static, ours = (round(entries[method].mean, places) for method in ("static", "sinkhorn"))
    return {"static", "sinkhorn"} if static == ours else {"static"} if static > ours else {"sinkhorn"}


def by_budget(runs: Sequence[Run], rewards: Sequence[str], title: str, name: str, aggregate: bool = True) -> Table:
    """Tab. perlam: static and ReCAST at each budget, the better in bold, and the Pareto dominance of App. D."""
    columns = ([AGGREGATE] if aggregate else []) + list(rewards)
    tables = {method: compare.by_budget(runs, method, rewards) for method in ("static", "sinkhorn")}
    rows = []
    for budget in (each for each in tables["static"] if each in tables["sinkhorn"]):
        static, ours = (tables[method][budget] for method in ("static", "sinkhorn"))
        means = [{reward: table[reward].mean for reward in rewards} for table in (ours, static)]
        dominance = compare.pareto(means[0], means[1], rewards)
        words = {"first": "ReCAST ≻ static", "second": "static ≻ ReCAST"}.get(dominance, dominance)
        for method, table in (("static", static), ("sinkhorn", ours)):
            cells = []
            for reward in columns:
                places = _digits([static[reward].mean, ours[reward].mean])
                best = _best({"static": static[reward], "sinkhorn": ours[reward]}, places)
                cells.append(cell(table[reward], places, best == {method}))  # neither if the two agree
            first = budget_name(budget) if method == "static" else ""
            rows.append((Cell(first), Cell(shown(method)), *cells, Cell(words if method == "static" else "")))
    header = ("λ", "method", *("aggregate r" if each == AGGREGATE else each for each in columns), "Pareto")
    return Table(name, title, header, tuple(rows))


def ablation(runs: Sequence[Run]) -> Table | None:
    """Tab. sinkhorn-ablation: the aggregate at each budget, and the parts of kernel and projection; needs `row`."""
    order = ("static", "row", "sinkhorn")
    if not all(compare.of(runs, method) for method in order):
        return None
    tables = {method: compare.by_budget(runs, method, ()) for method in order}
    budgets = [each for each in tables["static"] if all(each in table for table in tables.values())]
    rows = []
    for method in order:
        means = [tables[method][budget][AGGREGATE].mean for budget in budgets]
        tops = [max(tables[each][budget][AGGREGATE].mean for each in order) for budget in budgets]
        cells = [Cell(f"{mean:.4f}", bold=mean == top) for mean, top in zip(means, tops, strict=True)]
        rows.append((Cell(shown(method)), *cells, Cell(f"{np.mean(means):.4f}")))
    kernel, projection = compare.decompose(runs)
    note = (
        f"Of ReCAST's {kernel + projection:+.3f} over static, the adaptive kernel alone contributes {kernel:+.3f} "
        f"and the Sinkhorn projection {projection:+.3f}."
    )
    header = ("method", *map(budget_name, budgets), "mean")
    return Table("ablation", "Ablation of the Sinkhorn projection (aggregate r)", header, tuple(rows), (note,))


def certainty(runs: Sequence[Run], rewards: Sequence[str], against: str = "static") -> Table | None:
    """Differences to static with 95 % intervals over prompts and a sign test over matched pairs (beyond the paper)."""
    rows = []
    for method in methods(runs):
        matched = compare.pairs(runs, method, against)
        if method in ("base", against) or not matched or matched[0][0].values is None:
            continue
        for reward in (AGGREGATE, *rewards):
            found = compare.difference(matched, reward)
            won, count = compare.wins(matched, reward)
            name = "aggregate r" if reward == AGGREGATE else reward
            interval = f"{found.low:+.4f} to {found.high:+.4f}"
            sure = found.low > 0 or found.high < 0
            cells = (
                Cell(f"{found.mean:+.4f}", bold=sure),
                Cell(interval),
                Cell(f"{won}/{count}"),
                Cell(f"{found.p:.3f}"),
            )
            rows.append((Cell(shown(method)), Cell(name), *cells))
    if not rows:
        return None
    notes = (
        "The interval is a paired bootstrap over prompts, for these runs. The sign test is over matched (budget, seed) "
        "pairs, without ties. A difference is bold if its interval excludes 0.",
    )
    header = ("method", "reward", f"− {shown(against)}", "95 % interval", "win", "p (sign test)")
    return Table("certainty", f"Differences to {shown(against)} and their certainty", header, tuple(rows), notes)
