"""Statistics of pairwise verdicts: win rates over both orders, their intervals, and how reliable the judge is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recast.core import artifact
from recast.evaluate import Budget

__all__ = [
    "ASPECTS",
    "FORMAT",
    "OVERALL",
    "SUBSCORES",
    "Verdicts",
    "from_rows",
    "interval",
    "load",
    "mean_rate",
    "save",
    "summary",
]

FORMAT = "recast.verdicts"
OVERALL = "overall"
SUBSCORES = ("faithfulness", "aesthetics")
"""The criteria with separate win rates."""
ASPECTS = (OVERALL, *SUBSCORES)
_SUMMARY_FORMAT = "recast.verdicts.summary"
_DRAWS = 2000
_Array = NDArray[np.float64]


@dataclass(frozen=True)
class Verdicts:
    """The verdicts of one comparison of two runs, each pair of images judged in both presentation orders.

    Parameters
    ----------
    first, second : str
        The methods of the two runs.
    budget : tuple of (str, float)
        λ by reward, of the first run.
    seed : int
        The training seed of the first run.
    indices, prompts : tuple, (pairs,)
        Number and prompt of the judged images.
    won : mapping of str to ndarray, shape (pairs, 2)
        By aspect, 1 where the first run won, 0 where the second run won, NaN where the judge did not decide. In
        column 0 the first run was shown as A, in column 1 as B.
    scores : ndarray, shape (pairs, 2)
        The judge's scores, from 6 (A is much better) to 1 (B is much better).
    dropped, pending : int, default 0
        Pairs left out because a call never gave a readable answer, and pairs that have not been judged yet.
    folder : Path, optional
        Where the verdicts were read from.
    images : tuple of (str, str)
        Hashes of what decides the two runs' images (`Scores.images_hash`).
    model, rubric : str
        The judge, and the hash of its rubric.
    seeds : tuple of int
        Seeds of the judged images, if known.

    Examples
    --------
    The first run wins the first pair in both orders; in the second pair the image shown as A wins.

    >>> import numpy as np
    >>> from recast.judge import ASPECTS, Verdicts
    >>> won = np.array([[1.0, 1.0], [1.0, 0.0]])
    >>> found = Verdicts("sinkhorn", "static", (("ocr", 1.0),), 0, (0, 1), ("a cat", "a dog"),
    ...                  dict.fromkeys(ASPECTS, won), np.array([[6.0, 1.0], [4.0, 4.0]]))
    >>> found.rate(), found.consistency, found.position_bias
    (0.75, 0.5, 0.75)
    """

    first: str
    second: str
    budget: Budget
    seed: int
    indices: tuple[int, ...]
    prompts: tuple[str, ...]
    won: Mapping[str, _Array]
    scores: _Array
    dropped: int = 0
    pending: int = 0
    folder: Path | None = None
    images: tuple[str, str] = ("", "")
    model: str = ""
    rubric: str = ""
    seeds: tuple[int, ...] = ()

    def rate(self, aspect: str = OVERALL) -> float:
        """Share of decided orderings that the first run won; NaN if none is decided."""
        won = self.won[aspect]
        decided = ~np.isnan(won)
        return float(won[decided].mean()) if decided.any() else float("nan")

    @property
    def shown_first(self) -> _Array:
        """1 where the response shown as A won, (pairs, 2)."""
        won = self.won[OVERALL]
        return np.stack([won[:, 0], 1 - won[:, 1]], axis=1)

    @property
    def position_bias(self) -> float:
        """Share of orderings won by the response shown first; 0.5 without position bias."""
        return float(self.shown_first.mean()) if len(self.indices) else float("nan")

    @property
    def consistency(self) -> float:
        """Share of pairs with the same winner in both orders."""
        won = self.won[OVERALL]
        return float((won[:, 0] == won[:, 1]).mean()) if len(self.indices) else float("nan")

    @property
    def contradictions(self) -> int:
        """Number of orderings whose score favours the response that was not called better."""
        return int(((self.scores >= 4) != (self.shown_first == 1)).sum())

    def decisive(self, second: bool = False) -> list[int]:
        """Rows where one run wins both orders with extreme scores (6 as A, 1 as B) and no aspect contradicts it."""
        side, extremes = (0.0, (1, 6)) if second else (1.0, (6, 1))
        sure = (self.won[OVERALL] == side).all(1) & (self.scores == extremes).all(1)
        for aspect in SUBSCORES:
            sure &= ~(self.won[aspect] == 1 - side).any(1)
        return [int(k) for k in np.flatnonzero(sure)]


def _shares(comparisons: Sequence[Verdicts]) -> _Array:
    """The weight of each comparison in a mean: equal for budgets, and equal for the seeds of a budget."""
    budgets = [each.budget for each in comparisons]
    return np.array([1 / budgets.count(budget) / len(set(budgets)) for budget in budgets])


def mean_rate(comparisons: Sequence[Verdicts], aspect: str = OVERALL) -> float:
    """The mean win rate over budgets, each the mean over its seeds."""
    return float(_shares(comparisons) @ np.array([each.rate(aspect) for each in comparisons]))


def interval(comparisons: Sequence[Verdicts], aspect: str = OVERALL, seed: int = 0) -> tuple[float, float]:
    """95 % interval of `mean_rate` by a bootstrap over prompts, the same draws in all comparisons."""
    prompts = sorted({prompt for each in comparisons for prompt in each.prompts})
    if not prompts:
        return float("nan"), float("nan")
    number = {prompt: k for k, prompt in enumerate(prompts)}
    wins, counts = np.zeros((2, len(comparisons), len(prompts)))
    for row, each in enumerate(comparisons):
        place = [number[prompt] for prompt in each.prompts]
        np.add.at(wins[row], place, np.nansum(each.won[aspect], axis=1))
        np.add.at(counts[row], place, (~np.isnan(each.won[aspect])).sum(1))
    draws = np.random.default_rng(seed).multinomial(len(prompts), np.full(len(prompts), 1 / len(prompts)), _DRAWS)
    decided = draws @ counts.T
    rates = np.divide(draws @ wins.T, decided, out=np.full(decided.shape, np.nan), where=decided > 0)
    whole = rates[~np.isnan(rates).any(1)] @ _shares(comparisons)  # draws without a decided ordering are left out
    low, high = np.quantile(whole, (0.025, 0.975)) if len(whole) else (np.nan, np.nan)
    return float(low), float(high)


def summary(verdicts: Verdicts) -> dict[str, Any]:
    """All statistics of one comparison, as summary.json holds them."""
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
    """Write verdicts.jsonl with one row per pair, and summary.json with the statistics and the cost."""
    from recast.core import strict  # pydantic, which `recast --help` does without
    from recast.judge import written

    path = folder / "verdicts.jsonl"
    artifact.write_text(path, strict.lines(written.Row, rows, path))
    strict.write(folder / "summary.json", _SUMMARY_FORMAT, written.Summary, {**summary(verdicts), **spent})


def from_rows(manifest: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], folder: Path | None = None) -> Verdicts:
    """The verdicts in a comparison's manifest and rows."""
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
        tuple(row["seed"] for row in judged),
    )


def load(folder: Path) -> Verdicts:
    """Read a comparison that `recast judge` has written.

    Parameters
    ----------
    folder : Path
        A folder with manifest.json and verdicts.jsonl, such as RUN/verdicts/OTHER.

    Returns
    -------
    Verdicts

    Raises
    ------
    RecastError
        If a file is missing or damaged.

    Examples
    --------
    >>> from pathlib import Path
    >>> from recast import judge
    >>> judge.load(Path("nowhere"))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    recast.errors.RecastError: nowhere/manifest.json...
    """
    from recast.core import strict  # pydantic, which `recast --help` does without
    from recast.judge import written

    manifest = written.read_manifest(folder / "manifest.json", FORMAT)
    rows = strict.read_rows(written.Row, folder / "verdicts.jsonl", "recast judge")
    path = folder / "summary.json"
    found = strict.read(path, _SUMMARY_FORMAT, written.Summary, "run recast judge again") if path.is_file() else {}
    written.check_rows(rows, folder / "verdicts.jsonl", found)
    return from_rows(manifest, rows, folder)
