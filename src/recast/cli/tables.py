"""Tables for the terminal."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table
from rich.text import Text

from recast.core import renyi
from recast.core.comparison import Comparison, Remaining, excursions
from recast.core.curves import GainCurves
from recast.core.weights import WeightMatrix, control_of

if TYPE_CHECKING:
    from recast.report.render import Table as ReportTable

__all__ = [
    "ASCII_SHADES",
    "SHADES",
    "check_table",
    "comparison_table",
    "correlation_table",
    "doctor_table",
    "excursions_table",
    "heatmap",
    "notes",
    "orders_table",
    "plan_table",
    "remaining_table",
    "report_table",
    "rewards_table",
    "running_table",
    "scores_table",
    "versions_table",
    "weights_table",
]

SHADES, ASCII_SHADES = " ░▒▓█", " .:*#"
LITTLE_GAIN = 0.02
"""Total gain below which a curve is mostly noise; a reward that starts near its ceiling measured 0.009."""
_LEFT = "it receives the column mass that the other rewards leave"
_WITHOUT = {"matched": "it counts as equally informative at every step"}
"""What happens to a reward without a curve, by method."""


def weights_table(weights: WeightMatrix, curves: GainCurves) -> Table:
    """One row per reward: budget, the one that `matched` realizes, total gain, and the steps of the peaks."""
    masses = "" if weights.uniform else ", steps by their effect" if "columns" in weights.info else ", steps by ν"
    table = Table(title=f"W by {weights.method}, T = {weights.steps}{masses}", title_justify="left")
    odds = control_of(weights.method)[0] == "matched"
    peak_of = "W" if weights.uniform else "W/ν"
    for header in (
        "reward",
        "budget",
        *(["realized"] if odds else []),
        "total gain",
        "gain peaks at t",
        f"{peak_of} peaks at t",
    ):
        table.add_column(header, justify="left" if header == "reward" else "right", overflow="fold")
    for i, name in enumerate(weights.rewards):
        total, peak = "-", "-"
        if name in curves.rewards:
            row = curves.rewards.index(name)
            total, peak = f"{curves.total[row]:.4g}", str(int(curves.gains[row].argmax()) + 1)
        top = str(int(weights.factors[i].argmax()) + 1)
        realized = [f"{weights.realized()[i]:.4g}"] if odds else []
        table.add_row(name, f"{weights.budget[i]:.4g}", *realized, total, peak, top)
    return table


def heatmap(weights: WeightMatrix, width: int = 80, shades: str = SHADES) -> list[Text]:
    """W relative to static, one line per reward and one cell per step: blank at 0, half at 1, full from 2 on.

    Shade and color carry the same information. Several steps share a cell if the terminal is too narrow.
    """
    label = min(max(len(name) for name in weights.rewards), width // 3)
    room = max(1, width - label - 2)
    cells = min(weights.steps, room)
    wide = 2 if 2 * cells <= min(room, 40) else 1
    lines = [Text(f"{'':{label}}  clean → noise   ({shades[2]} static weight, {shades[4]} twice that or more)")]
    for i, name in enumerate(weights.rewards):
        share = weights.factors[i] / max(weights.budget[i], 1e-300)
        line = Text(f"{name[:label]:{label}}  ")
        for part in np.array_split(np.clip(share / 2, 0, 1), cells):
            value = float(part.mean())
            blue = int(255 - 175 * value)
            line.append(shades[round(value * (len(shades) - 1))] * wide, style=f"rgb({blue},{blue},255)")
        lines.append(line)
    return lines


def notes(weights: WeightMatrix, curves: GainCurves) -> list[str]:
    """Caveats about W: rewards without a curve, and curves with hardly any gain."""
    said = []
    for name in weights.rewards:
        if name not in curves.rewards:
            close = difflib.get_close_matches(name, curves.rewards, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            said.append(f"{name} has no gain curve{hint}; {_WITHOUT.get(control_of(weights.method)[0], _LEFT)}")
            continue
        total = float(curves.total[curves.rewards.index(name)])
        if total <= renyi.ROUNDING:
            said.append(f"{name} has no gain at any step and is treated as a reward without a curve")
        elif total < LITTLE_GAIN:
            said.append(
                f"{name} has almost no gain (total {total:.2g} < {LITTLE_GAIN}); the shape of its row is mostly noise, "
                "because normalization scales every curve to mean 1"
            )
    return said


def running_table(curves: GainCurves) -> Table:
    """Curves while they are measured: total gain with its 95 % interval over prompts, and the step of the peak."""
    table = Table(title_justify="left")
    for header in ("reward", "total gain", "95 %", "peak t"):
        table.add_column(header, justify="left" if header == "reward" else "right")
    bands = curves.intervals()["gains"].sum(axis=-1) if curves.D_prompts is not None else None
    for i, name in enumerate(curves.rewards):
        interval = "-" if bands is None else f"{bands[0, i]:.3f} … {bands[1, i]:.3f}"
        table.add_row(name, f"{curves.total[i]:.3f}", interval, str(int(curves.gains[i].argmax()) + 1))
    return table


def orders_table(swept: Mapping[float, GainCurves]) -> Table:
    """The step where each reward's gain peaks at each order, and the normalized gain there."""
    rewards = next(iter(swept.values())).rewards
    table = Table(title="peak t (normalized gain there)", title_justify="left")
    for header in ("α", *rewards):
        table.add_column(header, justify="right")
    for order, curves in swept.items():
        rows = curves.normalized()
        table.add_row(f"{order:g}", *(f"{int(row.argmax()) + 1} ({row.max():.2f}×)" for row in rows))
    return table


def excursions_table(solved: Mapping[float, WeightMatrix]) -> Table:
    """The range of T·W/λ over the steps for each reward at each order, and over all rewards (App. B.2)."""
    rewards = next(iter(solved.values())).rewards
    table = Table(title="range of T·W/λ over the steps, at uniform λ (static: 1)", title_justify="left")
    for header in ("α", *rewards, "all"):
        table.add_column(header, justify="right")
    for order, weights in solved.items():
        spans = excursions(weights)
        ranges = [*spans, (spans[:, 0].min(), spans[:, 1].max())]
        table.add_row(f"{order:g}", *(f"{low:.2f} to {high:.2f}" for low, high in ranges))
    return table


def plan_table(facts: Mapping[str, Any]) -> Table:
    """The cost of a run, one line per quantity."""
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in facts.items():
        table.add_row(name, value if isinstance(value, str) else f"{value:,}")
    return table


def comparison_table(rows: Sequence[Comparison], first: str, second: str) -> Table:
    """The paper's surrogate-sensitivity table."""
    table = Table(title=f"{first} → {second}", title_justify="left")
    for header in ("reward", "Pearson r", "Spearman ρ", "peak t", "total gain"):
        table.add_column(header, justify="left" if header == "reward" else "right")
    for row in rows:
        peaks = f"{row.peaks[0]} → {row.peaks[1]}"
        table.add_row(row.reward, f"{row.pearson:.3f}", f"{row.spearman:.3f}", peaks, f"{row.total_ratio:.2f}×")
    return table


def remaining_table(rows: Sequence[Remaining], first: str, second: str) -> Table:
    """The paper's curve-drift table."""
    table = Table(title="total gain", title_justify="left")
    for header in ("reward", first, second, "remaining"):
        table.add_column(header, justify="left" if header == "reward" else "right")
    for row in rows:
        table.add_row(row.reward, f"{row.base:.3f}", f"{row.now:.3f}", f"{row.ratio:.2f}×", end_section=row is rows[-2])
    return table


def scores_table(scores: Any) -> Table:
    """One row per reward of an evaluated policy: mean, standard error of the mean, and where it applies."""
    table = Table(title=f"{scores.method} on {len(scores.images)} images", title_justify="left")
    for header in ("reward", "kind", "mean", "± s.e.", "applies"):
        table.add_column(header, justify="left" if header in ("reward", "kind") else "right")
    for name, values in zip(scores.rewards, scores.values, strict=True):
        known = values[~np.isnan(values)]
        mean, error = "-", "-"
        if len(known) > 1:
            mean, error = f"{known.mean():.4g}", f"{known.std(ddof=1) / len(known) ** 0.5:.2g}"
        kind = "trained" if name in scores.trained else "held out"
        table.add_row(name, kind, mean, error, f"{len(known) / len(values):.0%}")
    return table


def rewards_table(
    entries: Mapping[str, Any], missing: Mapping[str, Sequence[str]], measured: Mapping[str, Any]
) -> Table:
    """One row per reward: description, range, cost, and whether anything is missing on this machine."""
    table = Table(title="rewards", title_justify="left")
    for header in ("name", "what", "range", "GB", "images/s", "here"):
        right = header in ("GB", "images/s")
        table.add_column(header, no_wrap=right or header == "name", justify="right" if right else "left")
    for name, entry in entries.items():
        state = "incomplete" if missing[name] else "see below" if entry.remark else "ready"
        table.add_row(name, entry.what, entry.range, *_cost(measured.get(name)), state)
    return table


def _cost(found: Any) -> tuple[str, str]:
    """Memory of the parameters and at the peak, and speed; a reward that was not measured runs on a server."""
    if found is None:
        return "a server", "-"
    sizes = ("?" if size is None else f"{size / 1e9:.1f}" for size in (found.parameters, found.memory))
    speed = found.images_per_second
    return " / ".join(sizes), "?" if speed is None else f"{speed:.2g}" if speed < 100 else f"{speed:,.0f}"


def versions_table(rows: Sequence[tuple[str, str]]) -> Table:
    """One row per package, model or file that decides the scores of a reward."""
    table = Table(title="what decides its scores", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def check_table(outcomes: Sequence[Any]) -> Table:
    """One row per trial of a reward's self-test."""
    table = Table(title="trials", title_justify="left")
    for header in ("what must hold", "higher", "lower", "result"):
        table.add_column(header, justify="left" if header in ("what must hold", "result") else "right")
    for each in outcomes:
        table.add_row(each.what, f"{each.better:.4g}", f"{each.worse:.4g}", "holds" if each.passed else "WRONG")
    return table


def doctor_table(found: Any) -> Table:
    """One row per reward of a diagnosis: scale, spread, and its share of the advantage next to its budget."""
    title = "rewards before training (std: within groups; flat: groups with std 0; share: of the advantage's variance)"
    table = Table(title=title, title_justify="left")
    for header in ("reward", "applies", "mean", "range", "std", "flat", "budget", "share"):
        table.add_column(header, justify="left" if header == "reward" else "right", no_wrap=header == "reward")
    for k, name in enumerate(found.names):
        table.add_row(
            name,
            f"{found.applies[k]:.0%}",
            *("-" if found.applies[k] == 0 else text for text in _spread(found, k)),
            f"{found.budget[k]:.0%}",
            f"{found.share[k]:.0%}",
        )
    return table


def _spread(found: Any, k: int) -> tuple[str, ...]:
    scale = f"{found.low[k]:.2g} to {found.high[k]:.2g}"
    return f"{found.mean[k]:.3g}", scale, f"{found.group_std[k]:.2g}", f"{found.zero_std[k]:.0%}"


def correlation_table(names: Sequence[str], correlations: Any) -> Table:
    """Correlations of rewards within groups."""
    table = Table(title="correlation within groups", title_justify="left")
    table.add_column("", justify="left", overflow="fold")
    for name in names:
        table.add_column(name, justify="right", overflow="fold")
    for name, row in zip(names, correlations, strict=True):
        table.add_row(name, *("-" if value != value else f"{value:.2f}" for value in row))
    return table


def report_table(table: ReportTable) -> Table:
    """A table of the report, for a terminal."""
    made = Table(title=table.title, title_justify="left", caption="\n".join(table.notes) or None)
    made.caption_justify = "left"
    for k, name in enumerate(table.header):
        made.add_column(name, justify="left" if k == 0 else "right")
    for row in table.rows:
        cells = [Text(f"{cell.text} ±{cell.spread}" if cell.spread else cell.text) for cell in row]
        for cell, text in zip(row, cells, strict=True):
            text.stylize("bold" if cell.bold else "")
        made.add_row(*cells)
    return made
