"""What verdicts add up to: win rates over both orders, how sure they are, and how far the judge can be trusted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recast.core import artifact
from recast.errors import RecastError
from recast.evaluate import Budget

FORMAT, SUMMARY_FORMAT = "recast.verdicts", "recast.verdicts.summary"
OVERALL = "overall"
SUBSCORES = ("faithfulness", "aesthetics")
"""The criteria that have win rates of their own."""
ASPECTS = (OVERALL, *SUBSCORES)
DRAWS = 2000
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Verdicts:
    """One comparison of two runs: arrays over judged pairs × orders, in order 0 the first run shown as A.

    `won[aspect]` is 1 where the first run won, 0 where the second did, NaN where nobody did. Dropped pairs had a call
    that never gave an answer; pending ones have not been asked yet.
    """

    first: str
    second: str
    budget: Budget
    seed: int
    indices: tuple[int, ...]
    prompts: tuple[str, ...]
    won: Mapping[str, Array]
    scores: Array
    dropped: int = 0
    pending: int = 0
    folder: Path | None = None
    images: tuple[str, str] = ("", "")
    """Hashes of what decides the two runs' images (`Scores.images_hash`)."""
    model: str = ""
    rubric: str = ""

    def rate(self, aspect: str = OVERALL) -> float:
        """Orderings won by the first run among those decided; NaN without any."""
        won = self.won[aspect]
        decided = ~np.isnan(won)
        return float(won[decided].mean()) if decided.any() else float("nan")

    @property
    def shown_first(self) -> Array:
        """1 where the response shown as A won."""
        won = self.won[OVERALL]
        return np.stack([won[:, 0], 1 - won[:, 1]], axis=1)

    @property
    def position_bias(self) -> float:
        """How often the response shown first wins: 0.5 for a judge that does not care."""
        return float(self.shown_first.mean()) if len(self.indices) else float("nan")

    @property
    def consistency(self) -> float:
        """The share of pairs with the same winner in both orders."""
        won = self.won[OVERALL]
        return float((won[:, 0] == won[:, 1]).mean()) if len(self.indices) else float("nan")

    @property
    def contradictions(self) -> int:
        """Orderings whose score favours the response that was not called better."""
        return int(((self.scores >= 4) != (self.shown_first == 1)).sum())

    def decisive(self, second: bool = False) -> list[int]:
        """Rows where one run wins both orders with extreme scores (6 as A, 1 as B) and no aspect says otherwise."""
        side, extremes = (0.0, (1, 6)) if second else (1.0, (6, 1))
        sure = (self.won[OVERALL] == side).all(1) & (self.scores == extremes).all(1)
        for aspect in SUBSCORES:
            sure &= ~(self.won[aspect] == 1 - side).any(1)
        return [int(k) for k in np.flatnonzero(sure)]


def shares(comparisons: Sequence[Verdicts]) -> Array:
    """What each comparison counts in a mean: budgets alike, and the seeds of a budget alike."""
    budgets = [each.budget for each in comparisons]
    return np.array([1 / budgets.count(budget) / len(set(budgets)) for budget in budgets])


def mean_rate(comparisons: Sequence[Verdicts], aspect: str = OVERALL) -> float:
    """The mean win rate over budgets, each the mean over its seeds."""
    return float(shares(comparisons) @ np.array([each.rate(aspect) for each in comparisons]))


def interval(comparisons: Sequence[Verdicts], aspect: str = OVERALL, seed: int = 0) -> tuple[float, float]:
    """95 % interval of `mean_rate`: prompts are drawn anew, the same ones in all comparisons."""
    prompts = sorted({prompt for each in comparisons for prompt in each.prompts})
    if not prompts:
        return float("nan"), float("nan")
    number = {prompt: k for k, prompt in enumerate(prompts)}
    wins, counts = np.zeros((2, len(comparisons), len(prompts)))
    for row, each in enumerate(comparisons):
        place = [number[prompt] for prompt in each.prompts]
        np.add.at(wins[row], place, np.nansum(each.won[aspect], axis=1))
        np.add.at(counts[row], place, (~np.isnan(each.won[aspect])).sum(1))
    draws = np.random.default_rng(seed).multinomial(len(prompts), np.full(len(prompts), 1 / len(prompts)), DRAWS)
    decided = draws @ counts.T
    rates = np.divide(draws @ wins.T, decided, out=np.full(decided.shape, np.nan), where=decided > 0)
    whole = rates[~np.isnan(rates).any(1)] @ shares(comparisons)  # a draw without any decided ordering says nothing
    low, high = np.quantile(whole, (0.025, 0.975)) if len(whole) else (np.nan, np.nan)
    return float(low), float(high)


def summary(verdicts: Verdicts) -> dict[str, Any]:
    """All numbers of one comparison."""
    rates = {aspect: [verdicts.rate(aspect), *interval([verdicts], aspect)] for aspect in ASPECTS}
    decided = {aspect: int((~np.isnan(verdicts.won[aspect])).sum()) for aspect in ASPECTS}
    return {
        "pairs": len(verdicts.indices),
        "dropped": verdicts.dropped,
        "pending": verdicts.pending,
        "win_rate": rates,
        "decided": decided,
        "consistency": verdicts.consistency,
        "position_bias": verdicts.position_bias,
        "contradictions": verdicts.contradictions,
        "decisive": {"first": len(verdicts.decisive()), "second": len(verdicts.decisive(second=True))},
    }


def save(folder: Path, verdicts: Verdicts, rows: Sequence[Mapping[str, Any]], spent: Mapping[str, Any]) -> None:
    """verdicts.jsonl, a row a pair, and summary.json with the numbers and what they cost."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    artifact.write_bytes(folder / "verdicts.jsonl", text.encode("utf-8", "replace"))
    artifact.write(folder / "summary.json", SUMMARY_FORMAT, {**summary(verdicts), **spent})


def from_rows(manifest: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], folder: Path | None = None) -> Verdicts:
    """Of a comparison's manifest and its rows."""
    judged = [row for row in rows if row["status"] == "judged"]
    shape = (len(judged), 2)
    orders = [order for row in judged for order in row["orders"]]
    won = {aspect: np.array([o["won"][aspect] for o in orders], np.float64).reshape(shape) for aspect in ASPECTS}
    scores = np.array([order["score"] for order in orders], np.float64).reshape(shape)
    status = [row["status"] for row in rows]
    return Verdicts(
        manifest["first"]["method"],
        manifest["second"]["method"],
        tuple(manifest["first"]["budget"].items()),
        manifest["first"]["seed"],
        tuple(row["index"] for row in judged),
        tuple(row["prompt"] for row in judged),
        won,
        scores,
        status.count("dropped"),
        status.count("pending"),
        folder,
        (manifest["first"].get("images", ""), manifest["second"].get("images", "")),
        str(manifest.get("model", "")),
        str(manifest.get("rubric", "")),
    )


def load(folder: Path) -> Verdicts:
    """A comparison as `recast judge` left it."""
    manifest = artifact.read(folder / "manifest.json", FORMAT)
    rows = artifact.read_rows(folder / "verdicts.jsonl", "recast judge")
    try:
        return from_rows(manifest, rows, folder)
    except (KeyError, TypeError, ValueError) as error:
        raise RecastError(f"{folder / 'verdicts.jsonl'}: a row is damaged ({error}): run recast judge again") from error
