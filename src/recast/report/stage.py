"""`recast report`: from run folders to tables in four forms, and the page."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recast import evaluate, judge
from recast.core import artifact
from recast.core.curves import GainCurves
from recast.errors import RecastError
from recast.evaluate import Scores
from recast.judge import Verdicts
from recast.report import compare, figures, judged, page, render, sections
from recast.report.compare import AGGREGATE, Run
from recast.report.render import Table


@dataclass(frozen=True)
class Report:
    """What was found: one sentence, warnings, the tables, and where the page is."""

    found: str
    alarms: tuple[str, ...]
    tables: tuple[Table, ...]
    page: Path


def report(folders: Sequence[Path], out: Path) -> Report:
    """Tables (report.md, report.tex, CSV), differences.png and index.html in `out`, from evaluated runs.

    A folder is a run, or holds runs; the same prompts and seeds must have been scored in all of them.
    """
    policies = evaluate.find(_with_runs(folders))
    runs = [as_run(policy) for policy in policies]
    trained, held_out = policies[0].trained, policies[0].held_out
    verdicts = _verdicts(folders, policies)
    tables = build(runs, trained, held_out) + judged.tables(verdicts)
    alarms = tuple(compare.hacking(runs, held_out))
    found = " ".join([sentence(runs, held_out), *judged.sentences(verdicts)])
    budget = next((dict(run.budget) for run in runs if run.method != "base"), dict(runs[0].budget))
    curves = _curves([*folders, *(policy.folder.parent for policy in policies)])
    shown = _pictures(policies)
    pairs = page.judged_pairs(verdicts, policies) if shown else []
    text = page.page(found, alarms, tables, curves, budget, _training(policies), shown, pairs)
    path = artifact.write_text(out / "index.html", text)
    artifact.write_text(out / "report.md", "\n".join([f"{found}\n", *alarms, *map(render.markdown, tables)]))
    artifact.write_text(out / "report.tex", "\n".join(map(render.latex, tables)))
    if importlib.util.find_spec("matplotlib") is not None:
        _draw(runs, (*trained, *held_out), out)
    for table in tables:
        artifact.write_text(out / "tables" / f"{table.name}.csv", render.comma_separated(table))
    return Report(found, alarms, tuple(tables), path)


def _draw(runs: Sequence[Run], rewards: Sequence[str], out: Path) -> None:
    """differences.png and .pdf, where two runs can be compared."""
    figure = figures.differences_figure([run for run in runs if run.method != "base"], rewards)
    if figure is not None:
        figures.save(figure, out / "differences")


def _with_runs(folders: Sequence[Path]) -> list[Path]:
    """The folders to look for runs in: a folder that holds verdicts only is not one."""
    found = [folder for folder in folders if evaluate.locate(folder) or not _judged(folder)]
    if not found:
        raise RecastError("the folders hold verdicts only: name the runs that were judged as well")
    return found


def as_run(policy: Scores) -> Run:
    """A policy's scores as the comparison takes them."""
    values = dict(zip(policy.rewards, policy.values, strict=True))
    return Run(policy.method, tuple(policy.budget.items()), policy.seed, policy.means(), values)


def build(runs: Sequence[Run], trained: Sequence[str], held_out: Sequence[str]) -> list[Table]:
    """All tables that these runs allow."""
    tables = [sections.pooled(runs, trained, "Training rewards on held-out prompts", "trained")]
    if held_out:
        tables.append(sections.pooled(runs, held_out, "Held-out judges", "held-out", aggregate=False))
    if compare.pairs(runs, "sinkhorn", "static"):
        tables.append(sections.by_budget(runs, trained, "Training rewards by budget", "trained-by-budget"))
        if held_out:
            title = "Held-out judges by budget"
            tables.append(sections.by_budget(runs, held_out, title, "held-out-by-budget", aggregate=False))
    further = (sections.ablation(runs), sections.certainty(runs, (*trained, *held_out)))
    return tables + [table for table in further if table is not None]


def sentence(runs: Sequence[Run], held_out: Sequence[str]) -> str:
    """What the runs say, whichever way it goes."""
    matched = compare.pairs(runs, "sinkhorn", "static")
    if not matched:
        names = ", ".join(map(sections.shown, sections.methods(runs)))
        return f"{len(runs)} runs ({names}); there is no matched pair of ReCAST and static to compare."
    ours, static = (compare.pool([pair[k] for pair in matched], AGGREGATE) for k in (0, 1))
    gap = compare.difference(matched, AGGREGATE)
    won, count = compare.wins(matched, AGGREGATE)
    verdict = "is above" if gap.low > 0 else "is below" if gap.high < 0 else "ties with"
    text = (
        f"ReCAST {verdict} static on the training rewards: aggregate {ours.mean:.3f} against {static.mean:.3f} "
        f"({gap.mean:+.3f}, 95 % {gap.low:+.3f} to {gap.high:+.3f} over prompts), {won} of {count} matched pairs won"
    )
    judges = [f"{judge} {compare.difference(matched, judge).mean:+.3f}" for judge in held_out]
    text += f"; held-out judges: {', '.join(judges)}" if judges else ""
    return text + (". Few pairs: another seed may turn it." if count < 3 else ".")


def _curves(folders: Sequence[Path]) -> GainCurves | None:
    for folder in folders:
        for place in (folder, folder.parent):
            if (place / "gains.json").is_file():
                return GainCurves.load(place / "gains.json")
    return None


def _verdicts(folders: Sequence[Path], policies: Sequence[Scores]) -> list[Verdicts]:
    """Every comparison that has been judged, below the folders or beside the policies, of the images that are there."""
    places = {place.resolve(): None for folder in folders for place in _judged(folder)}
    for policy in policies:
        places |= {path.parent.resolve(): None for path in policy.folder.parent.glob("verdicts/*/verdicts.jsonl")}
    now = {(each.method, tuple(each.budget.items()), each.seed): each.images_hash() for each in policies}
    found = []
    for place in sorted(places):
        verdicts = judge.load(place)
        keys = [(method, verdicts.budget, verdicts.seed) for method in (verdicts.first, verdicts.second)]
        if any(now.get(key, images) != images for key, images in zip(keys, verdicts.images, strict=True)):
            warnings.warn(f"{place} judged other images than are there now: left out; judge again", stacklevel=3)
        else:
            found.append(verdicts)
    return found


def _judged(folder: Path) -> list[Path]:
    """The folders of verdicts below one."""
    found = (path.parent for path in folder.glob("**/verdicts.jsonl") if (path.parent / "manifest.json").is_file())
    return [path for path in found if ".stale-" not in str(path)]


def _training(policies: Sequence[Scores]) -> list[dict[str, Any]]:
    """Rewards over epochs of every run that left metrics."""
    found = []
    for policy in policies:
        path = policy.folder.parent / "metrics.jsonl"
        if policy.method == "base" or not path.is_file():
            continue
        rows = artifact.read_rows(path, "recast train")
        names = [key for key in rows[0] if key.startswith("reward/")] if rows else []
        columns = {name.removeprefix("reward/"): [_finite(row.get(name)) for row in rows] for name in names}
        method = sections.shown(policy.method)
        found.append({"method": method, "seed": policy.seed, "epochs": [r["epoch"] for r in rows], "rewards": columns})
    return found


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and np.isfinite(value) else None


def _pictures(policies: Sequence[Scores]) -> list[Scores]:
    """The base and one run of each method at one budget and seed, in the tables' order."""
    if importlib.util.find_spec("PIL") is None:
        warnings.warn("the page has no pictures without pillow: pip install 'recast-diffusion[plot]'", stacklevel=3)
        return []
    keys = [(tuple(each.budget.items()), each.seed) for each in policies if each.method != "base"]
    chosen = max(keys, key=lambda key: (keys.count(key), -keys.index(key)), default=None)
    shown = [p for p in policies if p.method == "base" or (tuple(p.budget.items()), p.seed) == chosen]
    order = sections.methods([as_run(policy) for policy in shown])
    return sorted(shown, key=lambda policy: order.index(policy.method))
