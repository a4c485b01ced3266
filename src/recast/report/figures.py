"""Figures, drawn with matplotlib; the same input gives the same files."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from recast.core import schedule
from recast.core.comparison import Overlay
from recast.core.curves import GainCurves
from recast.core.matched import factor_intervals
from recast.core.weights import WeightMatrix
from recast.errors import RecastError
from recast.report import compare, sections
from recast.report.compare import Run
from recast.weigh import weigh

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

__all__ = [
    "COLORS",
    "contact_sheet",
    "differences_figure",
    "drift_figure",
    "gain_figure",
    "overlay_figure",
    "panels_figure",
    "save",
]

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette, distinguishable with any color vision."""
_PANELS = {
    "D": "$D_{i,t}$",
    "gains": r"gain $\Delta D_{i,t}$",
    "normalized": "mean-normalized gain",
    "W": r"W at uniform $\lambda$",
}
_STEPS = "step t  (1 clean … T noise)"


def gain_figure(
    curves: GainCurves,
    weights: WeightMatrix,
    truth: GainCurves | None = None,
    true_weights: WeightMatrix | None = None,
) -> Figure:
    """The paper's three panels: gain, mean-normalized gain and W, with 95 % bands over prompts.

    A reward has the same color in all panels. Its static weight λ_i/T is dashed, and the exact curves are dotted.

    Parameters
    ----------
    curves : GainCurves
        Bands are drawn if it has curves per prompt.
    weights : WeightMatrix
        W of these curves; it may contain rewards without a curve.
    truth : GainCurves, optional
        The exact curves, on the same grid.
    true_weights : WeightMatrix, optional
        W of the exact curves.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    RecastError
        If `truth` is on another grid.

    Examples
    --------
    >>> import recast
    >>> from recast.report import gain_figure
    >>> curves = recast.GainCurves(("clip", "ocr"), [0, 0.5, 1], [[0.4, 0.3, 0.0], [0.9, 0.2, 0.0]])
    >>> figure = gain_figure(curves, recast.weigh(curves, {"clip": 1, "ocr": 2}))
    >>> [axes.get_title() for axes in figure.axes][1:]
    ['mean-normalized gain', 'W (sinkhorn); dashed: static']
    """
    from matplotlib.figure import Figure

    if truth is not None and not schedule.same(truth.sigmas, curves.sigmas):
        raise RecastError(
            f"the truth (T = {truth.steps}) and the curves (T = {curves.steps}) lie on different grids: resample one"
        )
    colors = _colors(dict.fromkeys((*curves.rewards, *weights.rewards)))
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    _draw_gains(left, middle, colors, curves, truth)
    _draw_weights(right, colors, curves, weights, true_weights)
    for axes in (left, middle, right):
        axes.set_xlabel(_STEPS)
        _tidy(axes)
        axes.set_ylim(bottom=0)
    without = [name for name in weights.rewards if name not in curves.rewards]
    _legend(left, {f"{name} (no curve)": colors[name] for name in without}, exact=truth is not None)
    return figure


def overlay_figure(overlay: Overlay, weights: WeightMatrix) -> Figure:
    """Fig. renyi-omega: curves of different grids in three panels over t/T, from clean (left) to noise (right).

    Rewards that were resampled onto the grid are dashed. The static weights λ_i/T are dotted.

    Parameters
    ----------
    overlay : Overlay
        Curves on one grid (`recast.core.comparison.overlay`); bands are drawn if they have curves per prompt.
    weights : WeightMatrix
        W on that grid, of all rewards or some of them.

    Returns
    -------
    matplotlib.figure.Figure
    """
    from matplotlib.figure import Figure

    curves = overlay.curves
    colors = _colors(dict.fromkeys((*curves.rewards, *weights.rewards)))
    figure, (unit, unit_name) = Figure(figsize=(11, 3.6), layout="constrained"), _unit(weights)
    bands = curves.intervals() if curves.D_prompts is not None else {}
    panels = (
        ("gain $\\Delta D_{i,t}$ per step of this grid", curves.rewards, curves.gains, bands.get("gains")),
        (_PANELS["normalized"], curves.rewards, curves.normalized(), bands.get("normalized")),
        (f"{unit_name} ({weights.method}); dotted: static", weights.rewards, *_weights(curves, weights)),
    )
    for axes, (title, names, rows, band) in zip(figure.subplots(1, 3), panels, strict=True):
        _lines(axes, colors, names, rows, band, 1 / curves.steps, curves.steps, overlay.resampled)
        axes.set(title=title, xlabel="t/T  (clean … noise)", xlim=(0, 1.02), ylim=(0, None))
        axes.spines[["top", "right"]].set_visible(False)
    for name, share in zip(weights.rewards, weights.budget, strict=True):
        figure.axes[2].axhline(share * unit, color=colors[name], linewidth=0.7, linestyle=":", zorder=0)
    native = dict(zip(curves.rewards, overlay.native, strict=True))
    handles = {str(line.get_label()): line for axes in figure.axes for line in axes.lines if line.get_label() in colors}
    labels = [_native_label(name, native.get(name), name in overlay.resampled) for name in handles]
    columns = max(1, min(7, 180 // (max(map(len, labels)) + 4)))  # so that long names are not cut
    figure.legend(handles.values(), labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)
    return figure


def _native_label(name: str, steps: int | None, resampled: bool) -> str:
    if steps is None:
        return f"{name} (no curve)"
    return f"{name} (from T = {steps})" if resampled else f"{name} (T = {steps})"


def _legend(axes: Axes, further: Mapping[str, str], exact: bool) -> None:
    """The legend of the drawn lines, of further labels by color, and of the dotted lines."""
    for label, color in further.items():
        axes.plot([], [], color=color, label=label)
    if exact:
        axes.plot([], [], color="0.4", linestyle=":", label="exact")
    axes.legend(frameon=False, fontsize=8)


def _draw_gains(
    left: Axes, right: Axes, colors: Mapping[str, str], curves: GainCurves, truth: GainCurves | None
) -> None:
    """The panels of the gains and of the mean-normalized gains."""
    bands = curves.intervals() if curves.D_prompts is not None else {}
    for axes, key in ((left, "gains"), (right, "normalized")):
        rows, *exact = (c.gains if key == "gains" else c.normalized() for c in (curves, truth) if c is not None)
        _lines(axes, colors, curves.rewards, rows, bands.get(key))
        if truth is not None:
            _dotted(axes, colors, truth.rewards, exact[0])
        axes.set_title(_PANELS[key])


def _draw_weights(
    axes: Axes, colors: Mapping[str, str], curves: GainCurves, weights: WeightMatrix, truth: WeightMatrix | None
) -> None:
    """The panel of W, with the static weights."""
    unit, unit_name = _unit(weights)
    _lines(axes, colors, weights.rewards, *_weights(curves, weights))
    if truth is not None:
        _dotted(axes, colors, truth.rewards, truth.factors * unit)
    for name, share in zip(weights.rewards, weights.budget, strict=True):
        axes.axhline(share * unit, color=colors[name], linewidth=0.7, linestyle="--", alpha=0.5, zorder=0)
    axes.set_title(f"{unit_name} ({weights.method}); dashed: static")


def panels_figure(runs: Mapping[str, GainCurves], columns: Sequence[str] = tuple(_PANELS)) -> Figure:
    """One row of panels per run, with the columns of the paper's App. B: D, gain, normalized gain and W.

    D is shifted to 0 at pure noise; it is not a sum of the clipped gains. Bands are 95 % over prompts.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * len(columns), 2.6 * len(runs)), layout="constrained")
    grid = figure.subplots(len(runs), len(columns), squeeze=False)
    for line, (title, curves) in zip(grid, runs.items(), strict=True):
        colors = _colors(curves.rewards)
        bands = curves.intervals() if curves.D_prompts is not None else {}
        weights = weigh(curves, dict.fromkeys(curves.rewards, 1.0))
        rows = {
            "D": (curves.D - curves.D[:, -1:], bands.get("D"), 0),
            "gains": (curves.gains, bands.get("gains"), 1),
            "normalized": (curves.normalized(), bands.get("normalized"), 1),
            "W": (*_weights(curves, weights), 1),
        }
        for axes, column in zip(line, columns, strict=True):
            values, band, start = rows[column]
            _lines(axes, colors, curves.rewards, values, band, start)
            if column == "D":
                axes.axhline(0, color="0.7", linewidth=0.7, zorder=0)
        line[0].set_ylabel(title)
    for axes, column in zip(grid[0], columns, strict=True):
        axes.set_title(_PANELS[column])
    for axes in grid.flat:
        _tidy(axes)
    for axes in grid[-1]:
        axes.set_xlabel(_STEPS)
    grid[0, 0].legend(frameon=False, fontsize=8)
    return figure


def drift_figure(base: GainCurves, trained: GainCurves, titles: tuple[str, str]) -> Figure:
    """D at two policies on a shared vertical axis; the inset shows the second one at its own scale (App. B.5)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    inset = right.inset_axes((0.45, 0.4, 0.52, 0.55))
    colors = _colors(base.rewards)
    for axes, curves in ((left, base), (right, trained), (inset, trained)):
        _lines(axes, colors, curves.rewards, curves.D - curves.D[:, -1:], start=0)
        axes.spines[["top", "right"]].set_visible(False)
    for axes, title in ((left, titles[0]), (right, titles[1])):
        axes.set_title(title)
        axes.set_xlabel(_STEPS)
    inset.tick_params(labelsize=7)
    left.set_ylabel(_PANELS["D"])
    left.legend(frameon=False, fontsize=8)
    return figure


def differences_figure(runs: Sequence[Run], rewards: Sequence[str], against: str = "static") -> Figure | None:
    """One panel per reward with every method's difference to `against`; None if there is no matched pair.

    Every dot is a matched (budget, seed) pair, colored by its budget. The bar is the mean with two standard errors
    over the pairs.
    """
    from matplotlib.figure import Figure

    methods = [name for name in sections.methods(runs) if name != against and compare.pairs(runs, name, against)]
    if not methods:
        return None
    panels = (compare.AGGREGATE, *rewards)
    budgets = sorted({run.budget for run in compare.of(runs, against)})
    figure = Figure(figsize=(2.6 * min(len(panels), 3), 2.7 * -(-len(panels) // 3)), layout="constrained")
    grid = list(figure.subplots(-(-len(panels) // 3), min(len(panels), 3), squeeze=False).flat)
    for axes, reward in zip(grid, panels, strict=False):
        axes.axhline(0, color="0.6", linewidth=0.8, zorder=0)
        for x, method in enumerate(methods):
            matched = compare.pairs(runs, method, against)
            gaps = np.array([one.mean(reward) - other.mean(reward) for one, other in matched])
            for k, ((run, _), gap) in enumerate(zip(matched, gaps, strict=True)):
                aside = 0.5 * ((k + 0.5) / len(gaps) - 0.5)
                axes.plot(x + aside, gap, ".", color=COLORS[budgets.index(run.budget) % len(COLORS)], markersize=5)
            error = 2 * gaps.std(ddof=1) / np.sqrt(len(gaps)) if len(gaps) > 1 else 0.0
            axes.errorbar(x + 0.38, gaps.mean(), error, fmt="_", color="black", capsize=2, linewidth=1)
        axes.set_xticks(range(len(methods)), [sections.shown(name) for name in methods], fontsize=8, rotation=20)
        axes.set_title("aggregate r" if reward == compare.AGGREGATE else reward, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    figure.supylabel(f"difference to {sections.shown(against)}", fontsize=9)
    for k, budget in enumerate(budgets):
        figure.axes[0].plot([], [], ".", color=COLORS[k % len(COLORS)], label=sections.budget_name(budget))
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=8, title="λ", title_fontsize=8)
    return figure


def contact_sheet(prompts: Sequence[str], rows: Mapping[str, Tensor], notes: Sequence[str] = ()) -> Figure:
    """One column per prompt and one line per entry of `rows`, images (B, 3, H, W) in [0, 1], with notes below."""
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
    """Write a figure to files without dates or versions inside.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
        The figure.
    stem : Path
        Path of the files without the suffix; its folder is created.
    kinds : sequence of str, default ("png", "pdf")
        Suffixes of the files to write.

    Returns
    -------
    list of Path
        The written files.

    Raises
    ------
    RecastError
        If a file cannot be written.

    Examples
    --------
    >>> import tempfile
    >>> from matplotlib.figure import Figure
    >>> from recast.report import figures
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     [path.name for path in figures.save(Figure(), Path(folder) / "gains")]
    ['gains.png', 'gains.pdf']
    """
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


def _colors(names: Iterable[str]) -> dict[str, str]:
    return {name: COLORS[i % len(COLORS)] for i, name in enumerate(names)}


def _tidy(axes: Axes) -> None:
    """Whole steps on the horizontal axis, and no frame above and to the right."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)


def _unit(weights: WeightMatrix) -> tuple[float, str]:
    """The unit of the factors in a figure and its name: for uniform ν the factors are drawn as W, T times smaller."""
    return (1 / weights.steps, "W") if weights.uniform else (1.0, "W/ν")


def _weights(curves: GainCurves, weights: WeightMatrix) -> tuple[np.ndarray, np.ndarray | None]:
    """W in its unit, and its 95 % interval if its method and the curves have one."""
    band, unit = factor_intervals(curves, weights), _unit(weights)[0]
    rows = weights.matrix if weights.uniform else weights.factors
    return rows, None if band is None else band * unit


def _lines(
    axes: Axes,
    colors: Mapping[str, str],
    names: Sequence[str],
    rows: np.ndarray,
    band: np.ndarray | None = None,
    start: float = 1,
    per_unit: int = 1,
    dashed: Collection[str] = (),
) -> None:
    """One line per row from `start` on, with `per_unit` steps per unit of the horizontal axis."""
    steps = start + np.arange(rows.shape[1]) / per_unit
    for i, name in enumerate(names):
        style = "--" if name in dashed else "-"
        axes.plot(steps, rows[i], style, color=colors[name], label=name, marker="o", markersize=2.5, linewidth=1.3)
        if band is not None:
            axes.fill_between(steps, band[0, i], band[1, i], color=colors[name], alpha=0.15, linewidth=0)


def _dotted(axes: Axes, colors: Mapping[str, str], names: Sequence[str], rows: np.ndarray) -> None:
    for name, row in zip(names, rows, strict=True):
        axes.plot(np.arange(1, rows.shape[1] + 1), row, color=colors[name], linestyle=":", linewidth=1.5)
