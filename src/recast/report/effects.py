"""Measured gradients in the report: a table, a section of the page and a figure; only if there is an effects.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from recast.core import schedule
from recast.core.advice import advice
from recast.core.effects import Effects
from recast.core.weights import WeightMatrix
from recast.report import sections
from recast.report.figures import COLORS
from recast.report.render import Cell, Table
from recast.weigh import static

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["data", "figure", "locate", "table", "weights_of"]

_SPAN = np.array([2.0**k for k in range(-4, 7)])
"""Multiples of the batch at which efficiencies are drawn."""


def locate(folders: Sequence[Path]) -> Effects | None:
    """The first effects.json in or beside the folders."""
    for folder in folders:
        for place in (folder, folder.parent):
            if (place / "effects.json").is_file():
                return Effects.load(place / "effects.json")
    return None


def weights_of(found: Effects, folders: Sequence[Path], budget: Mapping[str, float]) -> dict[str, WeightMatrix]:
    """Static, and W of every other method among run folders, at the given budget and on the grid of the effects."""
    shares = {name: float(budget.get(name, 0.0)) for name in found.rewards}
    if sum(shares.values()) <= 0:
        return {}
    made = {"static": static(shares, found.sigmas)}
    for path in (folder / "weights.json" for folder in folders):
        each = WeightMatrix.load(path) if path.is_file() else None
        if each is None or each.rewards != found.rewards or not schedule.same(each.sigmas, found.sigmas):
            continue
        if np.allclose(each.budget, made["static"].budget):
            made.setdefault(each.method, each)
    return dict(sorted(made.items(), key=lambda item: sections.rank(item[0])))


def table(found: Effects, weights: Mapping[str, WeightMatrix]) -> Table:
    """One row per method: the budget realized, the expected cosine of its update, and its break-even with static."""
    rows = []
    for name, each in weights.items():
        realized, errors = found.realized(each)
        shares = [Cell(f"{100 * a:.1f} %", f"{100 * b:.1f}") for a, b in zip(realized, errors, strict=True)]
        compared = [Cell(_number(found.efficiency(each))), Cell("-"), Cell("-"), Cell("-")]
        if name != "static" and np.isfinite(found.gain(each)[0]):
            limit = found.break_even(each, found.even(each))
            compared[1:] = [_difference(*found.gain(each)), _difference(*found.timing(each)), Cell(_images(limit))]
        rows.append((Cell(sections.shown(name)), *shares, *compared))
    measured = found.images * len(found.own)
    note = (
        f"From the gradients of {measured:,} images before training (recast doctor --gradients). The budget realized "
        "weighs each step by its effect on the parameters. The cosine is that of an update on "
        f"{found.batch:,} images with the noiseless update of static, followed by its relative difference to static's "
        "(± the jackknife standard error), and by the part of timing: the difference to the static W that realizes the "
        "same budget, which the method is expected to exceed below the break-even number of images per update."
    )
    header = ("method", *(f"{name}, realized" for name in found.rewards), "cosine", "− static", "timing", "break-even")
    return Table("gradients", "Predicted before training", header, tuple(rows), (note,))


def _difference(gain: float, error: float) -> Cell:
    return Cell(f"{100 * gain:+.1f} %", f"{100 * error:.1f}" if np.isfinite(error) else "")


def _number(value: float) -> str:
    return f"{value:.3f}" if np.isfinite(value) else "-"


def _images(limit: float) -> str:
    """A break-even as text.

    >>> _images(0.0), _images(1234.0), _images(float("inf"))
    ('never better', '1,234', 'always better')
    """
    return "never better" if limit < 1 else "always better" if np.isinf(limit) else f"{limit:,.0f}"


def data(found: Effects, weights: Mapping[str, WeightMatrix]) -> dict[str, Any]:
    """What the page draws."""
    images = _SPAN * found.batch
    lines = [(sections.shown(name), [found.efficiency(each, n) for n in images]) for name, each in weights.items()]
    said = [sentence for each in weights.values() for sentence in advice(found, each)]
    return {
        "rewards": list(found.rewards),
        "snr": found.snr().tolist(),
        "effect": found.effect.tolist(),
        "batch": found.batch,
        "images": np.log2(images).tolist(),
        "lines": [{"method": name, "cosines": _known(values)} for name, values in lines],
        "sentences": list(dict.fromkeys(said)),
    }


def _known(values: Sequence[float]) -> list[float | None]:
    return [float(value) if np.isfinite(value) else None for value in values]


def figure(found: Effects, weights: Mapping[str, WeightMatrix]) -> Figure:
    """Three panels: signal-to-noise by reward and step, the effect of each step, and cosines over images per update."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(10.5, 2.9), layout="constrained")
    heat, bars, cosines = made.subplots(1, 3)
    steps = np.arange(1, found.steps + 1)
    image = heat.imshow(
        found.snr(), aspect="auto", cmap="viridis", extent=(0.5, found.steps + 0.5, len(found.rewards), 0)
    )
    heat.set_yticks(np.arange(len(found.rewards)) + 0.5, found.rewards, fontsize=8)
    heat.set_title(f"signal-to-noise, {found.batch:,} images per update", fontsize=9)
    made.colorbar(image, ax=heat)
    bars.bar(steps, found.effect, color="0.5")
    bars.set_title("effect of a step on the parameters", fontsize=9)
    for axes in (heat, bars):
        axes.set_xlabel("step t  (1 clean … T noise)", fontsize=9)
    images = _SPAN * found.batch
    for (name, each), color in zip(weights.items(), COLORS * (1 + len(weights) // len(COLORS)), strict=False):
        values = [found.efficiency(each, n) for n in images]
        cosines.plot(images, values, color=color, label=sections.shown(name), linewidth=1.3)
    cosines.axvline(found.batch, color="0.6", linestyle=":", linewidth=1)
    cosines.set_xscale("log", base=2)
    cosines.set_xlabel("images per update (dotted: the recipe's)", fontsize=9)
    cosines.set_title("cosine with the noiseless static update", fontsize=9)
    cosines.legend(frameon=False, fontsize=8)
    for axes in (bars, cosines):
        axes.spines[["top", "right"]].set_visible(False)
    return made
