"""`recast report`: from folders of evaluated runs to tables in four formats, a figure and the page."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recast import evaluate, judge, lock
from recast.core import artifact
from recast.core.curves import GainCurves
from recast.core.weights import WeightMatrix
from recast.errors import RecastError
from recast.evaluate import Scores
from recast.judge import Verdicts
from recast.report import compare, effects, figures, gallery, judged, page, render, sections
from recast.report.compare import AGGREGATE, Run
from recast.report.render import Table

__all__ = ["Report", "report", "sentence"]


@dataclass(frozen=True)
class Report:
    """The result of a comparison: a summary in sentences, warnings, the tables, and the path of the page."""

    found: str
    alarms: tuple[str, ...]
    tables: tuple[Table, ...]
    page: Path


def report(folders: Sequence[Path], out: Path) -> Report:
    """Compare evaluated runs; write tables, a figure and one self-contained web page.

    Parameters
    ----------
    folders : sequence of Path
        Runs, or folders that contain runs; also folders of verdicts that were written elsewhere.
    out : Path
        The folder for report.md, report.tex, tables/*.csv, index.html and, with matplotlib, differences.png and .pdf,
        with measured gradients (effects.json) gradients.png and .pdf, and for judged runs with decisive wins
        decisive-WINNER-LOSER.png and .pdf.

    Returns
    -------
    Report

    Raises
    ------
    RecastError
        If there is no evaluated run, or the runs cannot be compared (`recast.evaluate.find`).

    Examples
    --------
    >>> from pathlib import Path
    >>> from recast.report import report
    >>> report([Path("nowhere")], Path("report"))
    Traceback (most recent call last):
        ...
    recast.errors.RecastError: nowhere is not a folder of runs: name folders that recast evaluate has written
    """
    policies = evaluate.find(_with_runs(folders))
    verdicts = _verdicts(folders, policies)
    runs = [Run.from_scores(policy) for policy in policies]
    trained, held_out = policies[0].trained, policies[0].held_out
    found = " ".join([sentence(runs, held_out), *judged.sentences(verdicts)])
    alarms = tuple(compare.hacking(runs, held_out))
    measured = effects.locate(_places(folders, policies))
    weights = {} if measured is None else effects.weights_of(measured, _places((), policies), _budget(policies))
    predicted = [effects.table(measured, weights)] if measured is not None and weights else []
    tables = (*_tables(runs, trained, held_out), *predicted, *judged.tables(verdicts))
    made = Report(found, alarms, tables, out / "index.html")
    gradients = None if measured is None else effects.data(measured, weights)
    text = _page(made, folders, policies, verdicts, gradients)
    with lock.alone(out / ".lock", f"writing a report in {out}"):
        _write(made, text, out)
        if importlib.util.find_spec("matplotlib") is not None:
            _draw(runs, (*trained, *held_out), out)
            if measured is not None and weights:
                figures.save(effects.figure(measured, weights), out / "gradients")
            for name, figure in gallery.decisive_figures(verdicts, policies).items():
                figures.save(figure, out / name)
    return made


def _with_runs(folders: Sequence[Path]) -> list[Path]:
    """The folders to search for runs: those that contain only verdicts are left out."""
    found = [folder for folder in folders if evaluate.locate(folder) or not _judged(folder)]
    if not found:
        raise RecastError("the folders contain only verdicts: name the runs that were judged as well")
    return found


def _verdicts(folders: Sequence[Path], policies: Sequence[Scores]) -> list[Verdicts]:
    """All verdicts below the folders or in the runs, except those about images that have changed since."""
    places = {place.resolve(): None for folder in folders for place in _judged(folder)}
    for policy in policies:
        places |= {path.parent.resolve(): None for path in policy.folder.parent.glob("verdicts/*/verdicts.jsonl")}
    policies_by = {(each.method, tuple(each.budget.items()), each.seed): each for each in policies}
    now = {key: each.images_hash() for key, each in policies_by.items()}
    found = []
    for place in sorted(places):
        verdicts = judge.load(place)
        keys = [(method, verdicts.budget, verdicts.seed) for method in (verdicts.first, verdicts.second)]
        if any(now.get(key, images) != images for key, images in zip(keys, verdicts.images, strict=True)):
            warnings.warn(
                f"the verdicts in {place} are about images that have changed since and are left out: run recast judge "
                "again",
                stacklevel=3,
            )
        else:
            _require_prompts(verdicts, [policies_by[key] for key in keys if key in policies_by], place)
            found.append(verdicts)
    return found


def _require_prompts(verdicts: Verdicts, policies: Sequence[Scores], place: Path) -> None:
    """Raise if a verdict is about another prompt or seed than the images with its number."""
    for policy in policies:
        images = dict(enumerate(policy.prompts_and_seeds))
        seeds = verdicts.seeds or [images.get(index, ("", 0))[1] for index in verdicts.indices]
        for index, *about in zip(verdicts.indices, verdicts.prompts, seeds, strict=True):
            if images.get(index) != tuple(about):
                raise RecastError(
                    f"{place} has a verdict on image {index}, but that of {policy.run} has another prompt or seed"
                )


def _judged(folder: Path) -> list[Path]:
    """The folders of verdicts below a folder."""
    found = (path.parent for path in folder.glob("**/verdicts.jsonl") if (path.parent / "manifest.json").is_file())
    return [path for path in found if ".stale-" not in str(path)]


def sentence(runs: Sequence[Run], held_out: Sequence[str]) -> str:
    """A summary of ReCAST against static, whichever is better."""
    matched = compare.pairs(runs, "sinkhorn", "static")
    if not matched:
        names = ", ".join(map(sections.shown, sections.methods(runs)))
        return f"There is no matched pair of ReCAST and static; the runs are {names}."
    ours, static = (compare.pool([pair[k] for pair in matched], AGGREGATE) for k in (0, 1))
    gap = compare.difference(matched, AGGREGATE)
    won, count = compare.wins(matched, AGGREGATE)
    spread = compare.seed_difference(matched, AGGREGATE).std
    over_seeds = "" if np.isnan(spread) else f" ± {spread:.3f} over seeds"
    verdict = "is above" if gap.low > 0 else "is below" if gap.high < 0 else "ties with"
    text = (
        f"ReCAST {verdict} static on the training rewards: aggregate {ours.mean:.3f} against {static.mean:.3f} "
        f"({gap.mean:+.3f}{over_seeds}, 95 % {gap.low:+.3f} to {gap.high:+.3f} over prompts), {won} of {count} matched "
        "pairs won"
    )
    changes = [f"{reward} {compare.difference(matched, reward).mean:+.3f}" for reward in held_out]
    text += f"; held-out rewards: {', '.join(changes)}" if changes else ""
    return text + (". With so few pairs, another seed may reverse the result." if count < 3 else ".")


def _tables(runs: Sequence[Run], trained: Sequence[str], held_out: Sequence[str]) -> list[Table]:
    """All tables that the runs allow."""
    tables = [sections.pooled(runs, trained, "Training rewards on held-out prompts", "trained")]
    if held_out:
        tables.append(sections.pooled(runs, held_out, "Held-out rewards", "held-out", aggregate=False))
    if compare.pairs(runs, "sinkhorn", "static"):
        tables.append(sections.by_budget(runs, trained, "Training rewards by budget", "trained-by-budget"))
        if held_out:
            title = "Held-out rewards by budget"
            tables.append(sections.by_budget(runs, held_out, title, "held-out-by-budget", aggregate=False))
    further = (sections.ablation(runs), sections.certainty(runs, (*trained, *held_out)))
    return tables + [table for table in further if table is not None]


def _budget(policies: Sequence[Scores]) -> Mapping[str, float]:
    """λ of the first trained policy."""
    return next((policy.budget for policy in policies if policy.method != "base"), policies[0].budget)


def _places(folders: Sequence[Path], policies: Sequence[Scores]) -> list[Path]:
    """The given folders, and those of the runs."""
    return [*folders, *(policy.folder.parent for policy in policies)]


def _page(
    made: Report,
    folders: Sequence[Path],
    policies: Sequence[Scores],
    verdicts: Sequence[Verdicts],
    gradients: Mapping[str, Any] | None = None,
) -> str:
    """The web page as text."""
    budget, curves = _budget(policies), _curves(_places(folders, policies))
    shown = _gallery(policies)
    pairs = page.judged_pairs(verdicts, policies) if shown else []
    weights, training = _weights(policies), _training(policies)
    return page.page(made.found, made.alarms, made.tables, curves, budget, training, shown, pairs, weights, gradients)


def _weights(policies: Sequence[Scores]) -> WeightMatrix | None:
    """W of the first run that has a temperature, or else of the first run that has a W."""
    paths = [policy.folder.parent / "weights.json" for policy in policies if policy.method != "base"]
    found = [WeightMatrix.load(path) for path in paths if path.is_file()]
    return next((each for each in found if "tau" in each.info), found[0] if found else None)


def _curves(folders: Sequence[Path]) -> GainCurves | None:
    """The first gain curves in or beside the folders."""
    for folder in folders:
        for place in (folder, folder.parent):
            if (place / "gains.json").is_file():
                return GainCurves.load(place / "gains.json")
    return None


def _gallery(policies: Sequence[Scores]) -> list[Scores]:
    """The base and one run of each method at one budget and seed, in the order of the tables."""
    if importlib.util.find_spec("PIL") is None:
        warnings.warn("the page has no images without Pillow: pip install 'recast-diffusion[plot]'", stacklevel=4)
        return []
    keys = [(tuple(each.budget.items()), each.seed) for each in policies if each.method != "base"]
    chosen = max(keys, key=lambda key: (keys.count(key), -keys.index(key)), default=None)
    shown = [p for p in policies if p.method == "base" or (tuple(p.budget.items()), p.seed) == chosen]
    order = sections.methods([Run.from_scores(policy) for policy in shown])
    return sorted(shown, key=lambda policy: order.index(policy.method))


def _training(policies: Sequence[Scores]) -> list[dict[str, Any]]:
    """Rewards over epochs of every run with metrics."""
    from recast.core import records, strict  # pydantic, which `recast --help` does without

    found = []
    for policy in policies:
        path = policy.folder.parent / "metrics.jsonl"
        if policy.method == "base" or not path.is_file():
            continue
        # Before the rows, since a training that still runs adds a row first.
        saved = [int(each.name[6:11]) for each in path.parent.glob("checkpoints/epoch-[0-9][0-9][0-9][0-9][0-9]*")]
        rows = strict.read_rows(records.Epoch, path, "recast train")
        if max(saved, default=0) > (last := rows[-1]["epoch"] if rows else 0):
            raise RecastError(
                f"{path} ends with epoch {last}, but the checkpoints with {max(saved)}: move the log away"
            )
        names = [key for key in rows[0] if key.startswith("reward/")] if rows else []
        columns = {name.removeprefix("reward/"): [row.get(name) for row in rows] for name in names}
        method = sections.shown(policy.method)
        found.append({"method": method, "seed": policy.seed, "epochs": [r["epoch"] for r in rows], "rewards": columns})
    return found


def _write(made: Report, text: str, out: Path) -> None:
    """The page, and the tables in Markdown, LaTeX and CSV."""
    artifact.write_text(made.page, text)
    markdown = [f"{made.found}\n", *made.alarms, *map(render.markdown, made.tables)]
    artifact.write_text(out / "report.md", "\n".join(markdown))
    artifact.write_text(out / "report.tex", "\n".join(map(render.latex, made.tables)))
    for table in made.tables:
        artifact.write_text(out / "tables" / f"{table.name}.csv", render.comma_separated(table))


def _draw(runs: Sequence[Run], rewards: Sequence[str], out: Path) -> None:
    """differences.png and .pdf, if there is a matched pair."""
    figure = figures.differences_figure([run for run in runs if run.method != "base"], rewards)
    if figure is not None:
        figures.save(figure, out / "differences")
