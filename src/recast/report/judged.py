"""Tables and image samples of pairwise verdicts: win rates as in the paper, and the reliability of the judge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from recast.evaluate import Budget, Scores
from recast.judge import ASPECTS, OVERALL, SUBSCORES, Verdicts, interval, mean_rate
from recast.report.compare import Pooled
from recast.report.render import Cell, Table
from recast.report.sections import budget_name, cell, rank, shown

__all__ = [
    "PER_BUDGET",
    "Row",
    "Where",
    "decisive",
    "groups",
    "located",
    "names",
    "sample",
    "selection",
    "sentences",
    "sides",
    "tables",
    "win_rates",
]

PER_BUDGET = 2
"""Decisive wins of a method that are shown per budget, as in the galleries of App. G."""
Where = Mapping[tuple[str, Budget, int], Scores]
"""The run of a method, budget and seed."""
Row = tuple[Verdicts, int]
"""A judged pair: the verdicts of its comparison, and its row there."""


def names(verdicts: Verdicts) -> tuple[str, str]:
    """The names of the two runs in tables, made distinct if both are of the same method."""
    first, second = shown(verdicts.first), shown(verdicts.second)
    return (first, second) if first != second else (f"{first}, first", f"{second}, second")


def sides(verdicts: Verdicts) -> tuple[int, int]:
    """Which run is shown on the left and which on the right, 0 the first and 1 the second: the baseline is left."""
    left = min((1, 0), key=lambda run: rank((verdicts.first, verdicts.second)[run]))
    return left, 1 - left


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


def located(verdicts: Sequence[Verdicts], policies: Sequence[Scores]) -> list[tuple[list[Verdicts], Where]]:
    """Groups of comparisons whose images are known, each with the run of every method, budget and seed."""
    where = {(each.method, tuple(each.budget.items()), each.seed): each for each in policies}
    base = [policy for policy in policies if policy.method == "base"]
    where |= {("base", each.budget, each.seed): policy for policy in base for each in verdicts}
    found: list[tuple[list[Verdicts], Where]] = []
    for group in groups(verdicts):
        known = [each for each in group if all((m, each.budget, each.seed) in where for m in (each.first, each.second))]
        if known:
            found.append((known, where))
    return found


def decisive(group: Sequence[Verdicts], second: bool = False, most: int = PER_BUDGET) -> dict[Budget, list[Row]]:
    """By budget, the first decisive wins of a method in the order of image number and seed, one per prompt.

    A prompt that is shown at an earlier budget comes last. The paper's were selected from all decisive wins by a
    reviewer; here no image is looked at.
    """
    found: dict[Budget, list[Row]] = {}
    shown_prompts: set[str] = set()
    for budget in dict.fromkeys(each.budget for each in group):
        won = [(each, row) for each in group if each.budget == budget for row in each.decisive(second)]
        won.sort(key=lambda pair: (pair[0].indices[pair[1]], pair[0].seed))
        by_prompt: dict[str, Row] = {}
        for each, row in won:
            by_prompt.setdefault(each.prompts[row], (each, row))
        chosen = sorted(by_prompt, key=shown_prompts.__contains__)[:most]
        found[budget] = [by_prompt[prompt] for prompt in chosen]
        shown_prompts |= set(chosen)
    return found


def selection(group: Sequence[Verdicts], second: bool = False) -> str:
    """How the decisive wins that are shown were selected, and which budgets have fewer."""
    winner = names(group[0])[second]
    count = sum(len(each.decisive(second)) for each in group)
    pairs = sum(len(each.indices) for each in group)
    text = (
        f"Selected by the judge, not typical: {count} of {pairs} pairs were won by {winner} in both orders with scores "
        "6 and 1, and no aspect contradicts it."
    )
    if count:
        text += (
            f" Shown are the first {PER_BUDGET} of each budget by image number, with different prompts as far as "
            "possible; nobody looked at them to choose, whereas the paper's were chosen by a reviewer."
        )
    few = {budget: len(rows) for budget, rows in decisive(group, second).items() if len(rows) < PER_BUDGET}
    if count and few:
        text += " Fewer: " + ", ".join(f"λ {budget_name(b)} has {number or 'none'}" for b, number in few.items()) + "."
    return text


def sample(group: Sequence[Verdicts], seed: int = 0) -> dict[str, list[Row]]:
    """Decisive wins of the first and of the second method, and random pairs, as many as of the more frequent kind."""
    won, lost = ([pair for rows in decisive(group, side).values() for pair in rows] for side in (False, True))
    everything = [(each, row) for each in group for row in range(len(each.indices))]
    drawn = np.random.default_rng(seed).permutation(len(everything))[: max(len(won), len(lost))]
    return {"first": won, "second": lost, "random": [everything[k] for k in sorted(drawn)]}
