"""Tables and pictures of pairwise verdicts: win rates as in the paper, and how far the judge can be trusted."""

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

SHOWN = 12
"""Decisive wins on the page, and pairs drawn at random beside them."""


def names(verdicts: Verdicts) -> tuple[str, str]:
    """What the two runs are called; two of one method are told apart."""
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
    """Two tables for every two methods that were compared."""
    made, seen = [], Counter[str]()
    for group in groups(verdicts):
        for table in (win_rates(group), trust(group)):
            seen[table.name] += 1  # another judge of the same two
            made.append(replace(table, name=f"{table.name}-{seen[table.name]}") if seen[table.name] > 1 else table)
    return made


def sentences(verdicts: Sequence[Verdicts]) -> list[str]:
    """What the judge says of every two methods, whichever way it goes."""
    found = []
    for group in groups(verdicts):
        pairs = sum(len(each.indices) for each in group)
        (first, second), (low, high), rate = names(group[0]), interval(group), mean_rate(group)
        verdict = f"has no sure preference between {first} and {second}"
        if low > 0.5 or high < 0.5:
            verdict = f"prefers {first} to {second}" if low > 0.5 else f"prefers {second} to {first}"
        numbers = f"win rate of {first} {rate:.3f} (95 % {low:.3f} to {high:.3f}) in {pairs} pairs"
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
        f"Orderings won by {first}, of two for every pair; 0.5 is parity. Faithfulness and aesthetics: of "
        "those decided. The interval is a bootstrap over prompts; bold: it does not hold 0.5.",
    )
    header = ("win rate", *map(budget_name, budgets), "mean", "95 % interval")
    slug = f"judged-{group[0].first}-{group[0].second}"
    return Table(slug, f"Pairwise judge {group[0].model}: {first} against {second}", header, tuple(rows), notes)


def _cell(rates: Sequence[float]) -> Cell:
    spread = float(np.std(rates, ddof=1)) if len(rates) > 1 else float("nan")
    return cell(Pooled(float(np.mean(rates)), spread), 4)


def _number(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.4f}"


def trust(group: Sequence[Verdicts]) -> Table:
    """What the paper's table does not say: pairs left out, consistency, position bias, contradictions, sure wins."""
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
        "Consistent: pairs with the same winner in both orders. First shown: orderings won by the response shown "
        "first, 0.5 without position bias. Contradictions: the score favours the response not called better. Decided: "
        "orderings with a winner in faithfulness / aesthetics. Decisive: both orders won with scores 6 and 1, no "
        f"aspect against it; {first} / {second}." + (f" {pending} pairs have not been asked yet." if pending else ""),
    )
    header = ("λ", "seed", "pairs", "dropped", "overall, 95 %", "consistent", "first shown", "contradictions")
    name = f"judge-{group[0].first}-{group[0].second}"
    title = f"How far the judge {group[0].model} can be trusted: {first} against {second}"
    return Table(name, title, (*header, "decided", "decisive"), tuple(rows), notes)


def sample(group: Sequence[Verdicts], most: int = SHOWN, seed: int = 0) -> dict[str, list[tuple[Verdicts, int]]]:
    """Decisive wins of the first and of the second method, and as many as of the more frequent at random."""
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
