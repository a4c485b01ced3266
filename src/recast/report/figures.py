"""Figures, drawn with matplotlib; the same input gives the same bytes."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from recast.core import schedule
from recast.core.curves import GainCurves
from recast.core.weights import WeightMatrix
from recast.errors import RecastError
from recast.weigh import weigh

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette, distinguishable with any colour vision."""


def gain_figure(
    curves: GainCurves,
    weights: WeightMatrix,
    truth: GainCurves | None = None,
    true_weights: WeightMatrix | None = None,
) -> Figure:
    """The paper's three panels: gain, mean-normalised gain, W; bands are 95 % over prompts.

    A reward has one colour in all panels. Its static weight λ_i/T is dashed; the truth, where it is
    known, dotted.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    if truth is not None and not schedule.same(truth.sigmas, curves.sigmas):
        raise RecastError(
            f"the truth (T = {truth.steps}) and the curves (T = {curves.steps}) lie on different grids: resample one"
        )
    colors = {
        name: COLORS[i % len(COLORS)] for i, name in enumerate(dict.fromkeys((*curves.rewards, *weights.rewards)))
    }
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    bands = curves.intervals() if curves.D_prompts is not None else {}
    for axes, key, title in ((left, "gains", r"gain $\Delta D_{i,t}$"), (middle, "normalized", "mean-normalised gain")):
        rows, *exact = (c.gains if key == "gains" else c.normalized() for c in (curves, truth) if c is not None)
        _lines(axes, colors, curves.rewards, rows, bands.get(key))
        if truth is not None:
            _dotted(axes, colors, truth.rewards, exact[0])
        axes.set_title(title)
    _lines(right, colors, weights.rewards, weights.matrix, _weight_band(curves, weights))
    if true_weights is not None:
        _dotted(right, colors, true_weights.rewards, true_weights.matrix)
    for name, share in zip(weights.rewards, weights.budget, strict=True):
        right.axhline(share / weights.steps, color=colors[name], linewidth=0.7, linestyle="--", alpha=0.5, zorder=0)
    right.set_title(f"W ({weights.method}); dashed: static")
    for axes in (left, middle, right):
        axes.set_xlabel("step t  (1 clean … T noise)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    for name in weights.rewards:
        if name not in curves.rewards:
            left.plot([], [], color=colors[name], label=f"{name} (no curve)")
    if truth is not None:
        left.plot([], [], color="0.4", linestyle=":", label="exact")
    left.legend(frameon=False, fontsize=8)
    return figure


def sampling_figure(runs: Mapping[str, GainCurves]) -> Figure:
    """The paper's comparison of sampling distributions: D, gain, normalised gain and W, one line of panels a run.

    D is shifted to 0 at pure noise; it is not a sum of the clipped gains. W is at a uniform budget.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(13, 2.7 * len(runs)), layout="constrained")
    grid = figure.subplots(len(runs), 4, squeeze=False)
    for line, (title, curves) in zip(grid, runs.items(), strict=True):
        colors = dict(zip(curves.rewards, COLORS, strict=False))
        bands = curves.intervals() if curves.D_prompts is not None else {}
        weights = weigh(curves, dict.fromkeys(curves.rewards, 1.0))
        for name, row in zip(curves.rewards, curves.D, strict=True):
            line[0].plot(range(curves.steps + 1), row - row[-1], color=colors[name], label=name, linewidth=1.3)
        _lines(line[1], colors, curves.rewards, curves.gains, bands.get("gains"))
        _lines(line[2], colors, curves.rewards, curves.normalized(), bands.get("normalized"))
        _lines(line[3], colors, weights.rewards, weights.matrix, _weight_band(curves, weights))
        line[0].set_ylabel(title)
        line[0].axhline(0, color="0.7", linewidth=0.7, zorder=0)
    for axes, name in zip(grid[0], ("$D_{i,t}$", r"gain $\Delta D_{i,t}$", "mean-normalised gain", "W"), strict=True):
        axes.set_title(name)
    for axes in grid.flat:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[-1]:
        axes.set_xlabel("step t  (1 clean … T noise)")
    grid[0, 0].legend(frameon=False, fontsize=8)
    return figure


def contact_sheet(prompts: Sequence[str], rows: Mapping[str, Tensor], notes: Sequence[str] = ()) -> Figure:
    """One column a prompt, one line of images (B, 3, H, W) in [0, 1] a row; `notes` stand below the last."""
    from matplotlib.figure import Figure

    per_line = min(len(prompts), 8)
    lines = -(-len(prompts) // per_line)
    figure = Figure(figsize=(1.5 * per_line + 0.5, lines * (1.55 * len(rows) + 0.75)), layout="constrained")
    grid = figure.subplots(lines * len(rows), per_line, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for k, prompt in enumerate(prompts):
        line, column = divmod(k, per_line)
        for r, (name, images) in enumerate(rows.items()):
            axes = grid[line * len(rows) + r, column]
            axes.imshow(images[k].clamp(0, 1).permute(1, 2, 0).cpu().numpy(), interpolation="nearest")
            axes.set_axis_on()
            axes.set(xticks=[], yticks=[])
            if r == 0:
                axes.set_title("\n".join(textwrap.wrap(prompt, 22)), fontsize=7)
            if column == 0:
                axes.set_ylabel(name, fontsize=8)
            if notes and r == len(rows) - 1:
                axes.set_xlabel(notes[k], fontsize=7)
    return figure


def save(figure: Figure, stem: Path, kinds: Sequence[str] = ("png", "pdf")) -> list[Path]:
    """Write the figure as `stem`.png and .pdf, without dates or versions inside."""
    metadata = {"png": {"Software": None}, "pdf": {"CreationDate": None, "Creator": None, "Producer": None}}
    paths = []
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        for kind in kinds:
            path = stem.parent / f"{stem.name}.{kind}"
            temporary = stem.parent / f".{stem.name}.tmp.{kind}"
            figure.savefig(temporary, dpi=150, metadata=metadata.get(kind, {}))
            temporary.replace(path)
            paths.append(path)
    except OSError as error:
        raise RecastError(f"{stem}: the figure cannot be written: {error.strerror or error}") from error
    return paths


def _weight_band(curves: GainCurves, weights: WeightMatrix) -> np.ndarray | None:
    """The interval of W, where it is the plain Sinkhorn W of exactly these curves."""
    plain = weights.method == "sinkhorn" and not weights.info.get("shrink")
    if curves.D_prompts is None or not plain or not set(weights.rewards) <= set(curves.rewards):
        return None
    return curves.select(weights.rewards).weight_intervals(weights.budget, tau=float(weights.info.get("tau", 1.0)))


def _lines(
    axes: Axes, colors: dict[str, str], names: Sequence[str], rows: np.ndarray, band: np.ndarray | None = None
) -> None:
    steps = np.arange(1, rows.shape[1] + 1)
    for i, name in enumerate(names):
        axes.plot(steps, rows[i], color=colors[name], label=name, marker="o", markersize=2.5, linewidth=1.3)
        if band is not None:
            axes.fill_between(steps, band[0, i], band[1, i], color=colors[name], alpha=0.15, linewidth=0)


def _dotted(axes: Axes, colors: dict[str, str], names: Sequence[str], rows: np.ndarray) -> None:
    for name, row in zip(names, rows, strict=True):
        axes.plot(np.arange(1, rows.shape[1] + 1), row, color=colors[name], linestyle=":", linewidth=1.5)
