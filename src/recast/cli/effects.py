"""Tables of measured gradients for the terminal."""

from __future__ import annotations

import numpy as np
from rich.table import Table

from recast.core.advice import SIZES
from recast.core.effects import Effects
from recast.core.weights import WeightMatrix

__all__ = ["budget_table", "efficiency_table", "levels_table"]


def levels_table(found: Effects) -> Table:
    """One row per level: its effect, and the signal-to-noise ratio of every reward's gradient."""
    title = f"gradients before training: effect of a level, signal-to-noise with {found.batch:,} images per update"
    table = Table(title=title, title_justify="left")
    for header in ("t", "σ", "effect", *found.rewards):
        table.add_column(header, justify="right", overflow="fold")
    for t, row in enumerate(found.snr().T):
        numbers = (f"{found.sigmas[t + 1]:.3f}", f"{found.effect[t]:.1%}", *(f"{value:.2f}" for value in row))
        table.add_row(str(t + 1), *numbers)
    return table


def budget_table(found: Effects, weights: WeightMatrix, static: WeightMatrix) -> Table:
    """One row per reward: the budget asked for, and realized under static and under W."""
    compared = {"static": static} | ({} if weights.method == "static" else {weights.method: weights})
    table = Table(title="budget (realized: weighted by the effects of the levels)", title_justify="left")
    table.add_column("reward")
    for header in ("asked", *(f"realized, {name}" for name in compared)):
        table.add_column(header, justify="right")
    realized = [found.realized(each) for each in compared.values()]
    for i, name in enumerate(found.rewards):
        shares = (f"{values[i]:.1%} ± {errors[i]:.1%}" for values, errors in realized)
        table.add_row(name, f"{weights.budget[i]:.1%}", *shares)
    return table


def efficiency_table(found: Effects, weights: WeightMatrix) -> Table:
    """One row per number of images: expected cosines of the updates of static and W with the noiseless static one."""
    table = Table(title="expected cosine with the noiseless update of static", title_justify="left")
    timed = weights.method != "static"
    for header in ("images per update", "static", *((weights.method, "difference", "of it timing") if timed else ())):
        table.add_column(header, justify="right")
    for size in SIZES:
        images = max(1, round(size * found.batch))
        shown = [found.static(weights, images), *([found.efficiency(weights, images)] if timed else [])]
        cells = ["-" if np.isnan(value) else f"{value:.3f}" for value in shown]
        gains = [found.gain(weights, images), found.timing(weights, images)] if timed else []
        differences = ["-" if np.isnan(gain) else f"{gain:+.1%} ± {error:.1%}" for gain, error in gains]
        table.add_row(f"{images:,}", *cells, *differences)
    return table
