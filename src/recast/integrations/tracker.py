"""What the lines call that `recast integrate` inserts into a script: a table of advantages, and its slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from recast.errors import RecastError
from recast.integrations.mixer import Mixer, levels

__all__ = ["slots", "table"]


_made: list[int] = []
"""The number of samples in the last table, to tell a script that makes its advantages in another way."""


def table(prompts: Sequence[str], rewards: Mapping[str, Any], global_std: bool) -> Any:
    """Advantages (B, T) of all processes' samples, instead of those of the trainer's tracker.

    Parameters
    ----------
    prompts : sequence of str, (B,)
        The prompt of each sample.
    rewards : mapping of names to arrays, (B,)
        Every reward of W by its name; others are left out. A score of −10, which these trainers use for "does not
        apply", is taken as NaN.
    global_std : bool
        The tracker's setting: standard deviations over all samples, or within each prompt.

    Returns
    -------
    ndarray, (B, T)
        In float64, one column per step of W.
    """
    scores = {name: np.asarray(values, dtype=np.float64) for name, values in rewards.items()}
    scores = {name: np.where(values == -10, np.nan, values) for name, values in scores.items()}
    found = _mixer().table(scores, prompts, "batch" if global_std else "group")
    _made[:] = [found.shape[0]]
    return found


def slots(advantages: Any, timesteps: Any) -> Any:
    """Advantages (B, k) at the trainer's slots, from a table (B, T), by the noise level of each slot."""
    if not _made:
        raise RecastError("no table of advantages was made: set per_prompt_stat_tracking = True in the configuration")
    return _mixer().slots(advantages, levels(timesteps))


@cache
def _mixer() -> Mixer:
    return Mixer.from_environment()
