"""How much of itself the old policy keeps after an epoch, by DiffusionNFT's schedules."""

from __future__ import annotations

from recast.errors import RecastError

SCHEDULES = {0: (0, 0.0, 0.0), 1: (0, 0.001, 0.5), 2: (75, 0.0075, 0.999)}
"""Optimizer steps before it rises from 0, its rise a step, and its limit."""


def old_decay(step: int, kind: int) -> float:
    """d in old ← d·old + (1−d)·θ after `step` optimizer steps.

    The paper's `decay_type=1` is this schedule of kind 1; its learning rate is constant.

    >>> old_decay(100, 0), old_decay(100, 1), old_decay(1000, 1), old_decay(74, 2), old_decay(175, 2)
    (0.0, 0.1, 0.5, 0.0, 0.75)
    """
    if kind not in SCHEDULES:
        raise RecastError(f"unknown decay {kind!r}: choose one of {', '.join(map(str, SCHEDULES))}")
    flat, rise, limit = SCHEDULES[kind]
    return 0.0 if step < flat else min((step - flat) * rise, limit)
