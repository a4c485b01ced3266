"""Figures, drawn with matplotlib; the same input gives the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from recast.core.curves import GainCurves
from recast.core.weights import WeightMatrix
from recast.errors import RecastError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette, distinguishable with any colour vision."""


def gain_figure(curves: GainCurves, weights: WeightMatrix, truth: GainCurves | None = None) -> Figure:
    """The paper's three panels: gain, mean-normalised gain, W; bands are 95 % over prompts.

    `truth`, where it is known, is drawn dotted.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    bands = curves.intervals() if curves.D_prompts is not None else {}
    exact = (None, None) if truth is None else (truth.gains, truth.normalized())
    _lines(left, curves.rewards, curves.gains, bands.get("gains"), exact[0])
    left.set_title(r"gain $\Delta D_{i,t}$")
    _lines(middle, curves.rewards, curves.normalized(), bands.get("normalized"), exact[1])
    middle.set_title("mean-normalised gain")
    band = None
    if bands and weights.method == "sinkhorn" and weights.rewards == curves.rewards:
        band = curves.weight_intervals(weights.budget, tau=float(weights.info.get("tau", 1.0)))
    _lines(right, weights.rewards, weights.matrix, band)
    right.set_title(f"W ({weights.method})")
    right.axhline(1 / weights.steps / len(weights.rewards), color="0.6", linewidth=0.8, linestyle="--", zorder=0)
    for axes in (left, middle, right):
        axes.set_xlabel("step t  (1 clean … T noise)")
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    if truth is not None:
        left.plot([], [], color="0.4", linestyle=":", label="exact")
    left.legend(frameon=False, fontsize=8)
    return figure


def save(figure: Figure, stem: Path, kinds: Sequence[str] = ("png", "pdf")) -> list[Path]:
    """Write the figure as `stem`.png and .pdf, without dates or versions inside."""
    import matplotlib

    metadata = {"png": {"Software": None}, "pdf": {"CreationDate": None, "Creator": None, "Producer": None}}
    paths = []
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        with matplotlib.rc_context({"svg.hashsalt": "recast"}):
            for kind in kinds:
                path = stem.parent / f"{stem.name}.{kind}"
                temporary = stem.parent / f".{stem.name}.tmp.{kind}"
                figure.savefig(temporary, dpi=150, metadata=metadata.get(kind, {}))
                temporary.replace(path)
                paths.append(path)
    except OSError as error:
        raise RecastError(f"{stem}: the figure cannot be written: {error.strerror or error}") from error
    return paths


def _lines(
    axes: Axes, names: Sequence[str], rows: np.ndarray, band: np.ndarray | None = None, exact: np.ndarray | None = None
) -> None:
    steps = np.arange(1, rows.shape[1] + 1)
    for i, name in enumerate(names):
        color = COLORS[i % len(COLORS)]
        axes.plot(steps, rows[i], color=color, label=name, marker="o", markersize=2.5, linewidth=1.3)
        if band is not None:
            axes.fill_between(steps, band[0, i], band[1, i], color=color, alpha=0.15, linewidth=0)
        if exact is not None:
            axes.plot(steps, exact[i], color=color, linestyle=":", linewidth=1.5)
