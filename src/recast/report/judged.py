"""Tables and image samples of pairwise verdicts: win rates as in the paper, and the reliability of the judge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from recast.evaluate import Budget
from recast.judge import ASPECTS, OVERALL, SUBSCORES, Verdicts, interval, mean_rate
from recast.report.compare import Pooled
from recast.report.render import Cell, Table
from recast.report.sections import budget_name, cell, shown

__all__ = ["SHOWN", "groups", "names", "sample", "sentences", "tables", "win_rates"]

SHOWN = 12
"""Decisive wins per method on the page, and the most random pairs beside them."""


def names(verdicts: Verdicts) -> tuple[str, str]:
    """The names of the two runs in tables, made distinct if both are of the same method."""
    first, second = shown(verdicts.first), shown(verdicts.second)
    return (first, second) if first != second else (f"{first}, first", f"{second}, second")


def groups(verdicts: Sequence[Verdicts]) -> list[list[Verdicts]]:
    """Comparisons of the same two methods by the same judge, each group in the order of budgets and seeds."""
    found: dict[tuple[str, ...], list[Verdicts]] = {}
    for each in sorted(verdicts, key=lambda each: (each.budget, each.seed)):
        if each.indices:
            found.setdefault((each.first, each.second, each.model, each.rubric), []).append(each)
    return [found[key] for key in sorted(found)]


def tables(verdicts: Sequence[Verdicts]) -> list[Table]:
    """Two tables per pair of methods that were compared."""
    made, seen = [], Counter[str]()
    for group in groups(verdicts):
        for table in (win_rates(group), _reliability(group)):
            seen[table.name] += 1  # another judge compared the same methods
            made.append(replace(table, name=f"{table.name}-{seen[table.name]}") if seen[table.name] > 1 else table)
    return made


def sentences(verdicts: Sequence[Verdicts]) -> list[str]:
    """One sentence per pair of methods: which one the judge prefers, if any."""
    found = []
    for group in groups(verdicts):
        pairs = sum(len(each.indices) for each in group)
        (first, second), (low, high), rate = names(group[0]), interval(group), mean_rate(group)
        verdict = f"has no clear preference between {first} and {second}"
        if low > 0.5 or high < 0.5:
            verdict = f"prefers {first} to {second}" if low > 0.5 else f"prefers {second} to {first}"
        numbers = f"the win rate of {first} is {rate:.3f} (95 % {low:.3f} to {high:.3f}) over {pairs} pairs"
        found.append(f"The pairwise judge {group[0].model} {verdict}: {numbers}.")
    return found


def win_rates(group: Sequence[Verdicts]) -> Table:
    """Tab. MMRBv2: the first method's win rates by budget, and their mean with an interval over prompts."""
    first, second = names(group[0])
    budgets: dict[Budget, list[Verdicts]] = {}
    for each in group:
        budgets.setdefault(each.budget, []).append(each)
    rows = []
    for aspect in ASPECTS:
        found = {budget: [each.rate(aspect) for each in some] for budget, some in budgets.items()}
        cells = [_cell(rates) for rates in found.values()]
        low, high = interval(group, aspect)
        mean, sure = mean_rate(group, aspect), low > 0.5 or high < 0.5
        rows.append((Cell(aspect), *cells, Cell(_number(mean), bold=sure), Cell(f"{_number(low)} to {_number(high)}")))
    notes = (
        f"Share of orderings won by {first}; every pair is shown in both orders, and 0.5 is parity. Faithfulness and "
        "aesthetics count decided orderings only. The interval is a bootstrap over prompts; a mean is bold if its "
        "interval excludes 0.5.",
    )
    header = ("win rate", *map(budget_name, budgets), "mean", "95 % interval")
    slug = f"judged-{group[0].first}-{group[0].second}"
    return Table(slug, f"Pairwise judge {group[0].model}: {first} against {second}", header, tuple(rows), notes)


def _cell(rates: Sequence[float]) -> Cell:
    spread = float(np.std(rates, ddof=1)) if len(rates) > 1 else float("nan")
    return cell(Pooled(float(np.mean(rates)), spread), 4)


def _number(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.4f}"


def _reliability(group: Sequence[Verdicts]) -> Table:
    """Beyond the paper's table: dropped pairs, consistency, position bias, contradictions and decisive wins."""
    first, second = names(group[0])
    rows = []
    for each in group:
        won, lost = len(each.decisive()), len(each.decisive(second=True))
        decided = [f"{(~np.isnan(each.won[aspect])).mean():.2f}" for aspect in SUBSCORES]
        low, high = interval([each], OVERALL)
        rows.append(
            (
                Cell(budget_name(each.budget)),
                Cell(str(each.seed)),
                Cell(str(len(each.indices))),
                Cell(str(each.dropped)),
                Cell(f"{_number(low)} to {_number(high)}"),
                Cell(f"{each.consistency:.3f}"),
                Cell(f"{each.position_bias:.3f}"),
                Cell(str(each.contradictions)),
                Cell(" / ".join(decided)),
                Cell(f"{won} / {lost}"),
            )
        )
    pending = sum(each.pending for each in group)
    notes = (
        "Consistent: share of pairs with the same winner in both orders. First shown: share of orderings won by the "
        "response shown first, 0.5 without position bias. Contradictions: orderings whose score favours the response "
        "that was not called better. Decided: share of orderings with a winner in faithfulness / aesthetics. Decisive: "
        "pairs won in both orders with scores 6 and 1 and not contradicted by an aspect, by "
        f"{first} / {second}." + (f" {pending} pairs have not been judged yet." if pending else ""),
    )
    header = ("λ", "seed", "pairs", "dropped", "overall, 95 %", "consistent", "first shown", "contradictions")
    name = f"judge-{group[0].first}-{group[0].second}"
    title = f"Reliability of the judge {group[0].model}: {first} against {second}"
    return Table(name, title, (*header, "decided", "decisive"), tuple(rows), notes)


def sample(group: Sequence[Verdicts], most: int = SHOWN, seed: int = 0) -> dict[str, list[tuple[Verdicts, int]]]:
    """Decisive wins of the first and of the second method, and random pairs, as many as of the more frequent kind."""
    rng = np.random.default_rng(seed)
    everything = [(each, row) for each in group for row in range(len(each.indices))]
    won = [(each, row) for each in group for row in each.decisive()]
    lost = [(each, row) for each in group for row in each.decisive(second=True)]
    size = min(most, max(len(won), len(lost)))
    drawn = {"first": won, "second": lost, "random": everything}
    return {
        name: [pool[k] for k in sorted(rng.permutation(len(pool))[: size if name == "random" else most])]
        for name, pool in drawn.items()
    }
