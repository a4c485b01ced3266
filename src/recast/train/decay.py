"""DiffusionNFT's schedules for the decay of the old policy."""

from __future__ import annotations

from recast.errors import RecastError

__all__ = ["old_decay"]

_SCHEDULES = {0: (0, 0.0, 0.0), 1: (0, 0.001, 0.5), 2: (75, 0.0075, 0.999)}
"""Optimizer steps before the decay rises from 0, its increase per step, and its limit."""


def old_decay(step: int, kind: int) -> float:
    """d in old ← d·old + (1−d)·θ after `step` optimizer steps.

    The paper's `decay_type=1` is this schedule of kind 1; its learning rate is constant.

    >>> old_decay(100, 0), old_decay(100, 1), old_decay(1000, 1), old_decay(74, 2), old_decay(175, 2)
    (0.0, 0.1, 0.5, 0.0, 0.75)
    """
    if kind not in _SCHEDULES:
        raise RecastError(f"unknown train.decay {kind!r}: choose one of {', '.join(map(str, _SCHEDULES))}")
    flat, rise, limit = _SCHEDULES[kind]
    return 0.0 if step < flat else min((step - flat) * rise, limit)
