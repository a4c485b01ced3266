"""The web page: one self-contained HTML file that opens from disk without a network."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import numpy as np

from recast.core import renyi, schedule
from recast.core.curves import GainCurves
from recast.core.matched import floors
from recast.core.weights import METHODS, WeightMatrix, control_of
from recast.evaluate import Scores
from recast.judge import Verdicts
from recast.report import judged
from recast.report.render import Table, html
from recast.report.sections import budget_name, rank, shown
from recast.weigh import order_of, static

__all__ = ["judged_pairs", "page"]

_IMAGES = 96
"""Prompts in the gallery: the first ones, regardless of their scores."""
_SMALL, _SIDE, _QUALITY = 128, 384, 85
"""Images up to _SMALL pixels are embedded unchanged; larger ones as JPEGs of _SIDE pixels and this quality."""


def page(
    found: str,
    alarms: Sequence[str],
    tables: Sequence[Table],
    curves: GainCurves | None,
    budget: Mapping[str, float],
    training: Sequence[Mapping[str, Any]],
    gallery: Sequence[Scores],
    pairs: Sequence[Mapping[str, Any]] = (),
    weights: WeightMatrix | None = None,
    gradients: Mapping[str, Any] | None = None,
) -> str:
    """The page as text.

    Parameters
    ----------
    found : str
        The summary at the top.
    alarms : sequence of str
        Warnings below it.
    tables : sequence of Table
        The tables of results.
    curves : GainCurves or None
        The curves whose W the reader can solve for other budgets.
    budget : mapping of str to float
        λ at which the sliders start.
    training : sequence of mapping
        Per run its method, epochs and rewards over epochs.
    gallery : sequence of Scores
        The policies whose images are shown side by side.
    pairs : sequence of mapping
        Judged pairs (`judged_pairs`).
    weights : WeightMatrix, optional
        W of a run, whose ν, temperature and shrinkage the solver of the page takes over; uniform ν by default.
    gradients : mapping, optional
        Measured gradients and what they predict (`recast.report.effects.data`).
    """
    data = {
        "found": found,
        "alarms": list(alarms),
        "tables": [html(table) for table in tables],
        "curves": None if curves is None else _curves(curves, budget, weights),
        "training": list(training),
        "gallery": _gallery(gallery),
        "judged": list(pairs),
        "gradients": None if gradients is None else dict(gradients),
    }
    # Escaped, so that no prompt can end the script element or open a comment.
    text = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    template = (files("recast.report") / "data/page.html").read_text(encoding="utf-8")
    return template.replace("__DATA__", text)


def _curves(curves: GainCurves, budget: Mapping[str, float], weights: WeightMatrix | None) -> dict[str, Any]:
    """Gains with their bands, and what the page needs to solve W by every method but the linear program."""
    bands: dict[str, Any] = {}
    if curves.D_prompts is not None:
        intervals = curves.intervals()
        bands = {key: [side.tolist() for side in intervals[key]] for key in ("gains", "normalized")}
    if weights is None or not schedule.same(weights.sigmas, curves.sigmas):
        weights = static(dict.fromkeys(curves.rewards, 1.0), curves.sigmas)
    offered = [name for name in METHODS if control_of(name)[0] != "hard"]
    return {
        "rewards": list(curves.rewards),
        "gains": curves.gains.tolist(),
        "normalized": curves.normalized().tolist(),
        "bands": bands,
        "budget": [float(budget.get(name, 1.0)) for name in curves.rewards],
        "shape": renyi.normalized(curves.shrunk() if weights.info.get("shrink") else curves.gains).tolist(),
        "floors": floors(curves).tolist(),
        "nu": weights.nu.tolist(),
        "tau": float(weights.info.get("tau", 1.0)),
        "methods": [_method(name, curves.steps) for name in sorted(offered, key=rank)],
    }


def _method(name: str, steps: int) -> dict[str, Any]:
    """A method by its name, its label, the method behind a control and the order of the steps."""
    return {"name": name, "label": shown(name), "base": control_of(name)[0], "order": order_of(name, steps).tolist()}


def _gallery(policies: Sequence[Scores]) -> dict[str, Any]:
    """The images of every policy for the same prompts and seeds, with all scores."""
    if not policies:
        return {"methods": [], "rewards": [], "items": []}
    rewards = [name for name in policies[0].rewards if all(name in each.rewards for each in policies)]
    items = []
    for k, image in enumerate(policies[0].images[:_IMAGES]):
        scores, pictures = {}, {}
        for policy in policies:
            column = policy.values[[policy.rewards.index(name) for name in rewards], k]
            known = [None if np.isnan(value) else float(value) for value in column]
            scores[shown(policy.method)] = dict(zip(rewards, known, strict=True))
            pictures[shown(policy.method)] = _embedded(policy.picture(k))
        items.append({"prompt": image["prompt"], "seed": image["seed"], "scores": scores, "images": pictures})
    return {"methods": [shown(policy.method) for policy in policies], "rewards": rewards, "items": items}


def judged_pairs(verdicts: Sequence[Verdicts], policies: Sequence[Scores]) -> list[dict[str, Any]]:
    """For every two judged methods, the decisive wins of either one and a random sample, with the images."""
    found = []
    for group, where in judged.located(verdicts, policies):
        methods = judged.names(group[0])
        chosen = judged.sample(group)
        if not chosen["random"]:
            continue
        lists = {name: [_judged_pair(each, row, methods, where) for each, row in some] for name, some in chosen.items()}
        notes = [judged.selection(group, side) for side in (False, True)]
        pairs = sum(len(each.indices) for each in group)
        sides = judged.sides(group[0])
        found.append({"methods": list(methods), "sides": sides, "notes": notes, "pairs": pairs, **lists})
    return found


def _judged_pair(verdicts: Verdicts, row: int, names: tuple[str, str], where: judged.Where) -> dict[str, Any]:
    """Prompt, images and the verdicts in both orders of one pair."""
    number = verdicts.indices[row]
    runs = [where[method, verdicts.budget, verdicts.seed] for method in (verdicts.first, verdicts.second)]
    shown_images = [_embedded(run.picture(number)) for run in runs]
    won = [names[0] if value else names[1] for value in verdicts.won["overall"][row]]
    return {
        "prompt": verdicts.prompts[row],
        "images": shown_images,
        "note": f"λ {budget_name(verdicts.budget)}, seed {runs[0].images[number]['seed']}; "
        + "; ".join(f"order {k + 1}: {won[k]}, score {verdicts.scores[row, k]:g}" for k in (0, 1)),
    }


def _embedded(content: bytes) -> str:
    """An image file as a data URL, reduced if it is large."""
    from PIL import Image

    with Image.open(io.BytesIO(content)) as image:
        if max(image.size) <= _SMALL:
            return "data:image/png;base64," + base64.b64encode(content).decode()
        image = image.convert("RGB")
        image.thumbnail((_SIDE, _SIDE))
        file = io.BytesIO()
        image.save(file, "JPEG", quality=_QUALITY)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
