"""Rewards and prompts in, one advantage per slot out: all that a trainer needs of W."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from recast.core.advantage import Mode, Spread, advantages, by_sigma
from recast.core.arrays import namespace
from recast.core.weights import WeightMatrix
from recast.errors import GridWarning, RecastError

__all__ = ["Mixer", "levels"]

_ENOUGH = 20
"""Lookups per step of W after which a step that was never hit is reported; drawn at random, it would be with e⁻²⁰."""


class Mixer:
    """Advantages of a trainer's samples at its own slots, from their rewards, their prompts and W.

    Parameters
    ----------
    weights : WeightMatrix or path
        W, or the weights.json that `recast weigh` writes.
    mode : {"step", "shared", "reward"}, default "step"
        How rewards are brought to one scale; see `recast.core.advantage`.
    spread : {"batch", "group"}, default "batch"
        Whether standard deviations are taken over all samples or within each prompt's group.
    strict : bool, default True
        Refuse noise levels that are not steps of W (`WeightMatrix.check`). False takes the nearest step, for a
        trainer that draws levels continuously.

    Examples
    --------
    >>> W = WeightMatrix(("clip", "ocr"), [0, 0.5, 1], [[0.4, 0.1], [0.1, 0.4]], [0.5, 0.5])
    >>> mixer = Mixer(W)
    >>> rewards = {"ocr": [0.0, 1.0, 0.5, 0.5], "clip": [1.0, 0.0, 0.2, 0.6]}
    >>> mixer(rewards, groups=["cat", "cat", "dog", "dog"], sigmas=[1.0, 0.5]).round(2).tolist()
    [[-1.4, 1.23], [1.4, -1.23], [-0.19, -0.66], [0.19, 0.66]]
    """

    def __init__(
        self, weights: WeightMatrix | str | Path, mode: Mode = "step", spread: Spread = "batch", strict: bool = True
    ) -> None:
        self.weights = weights if isinstance(weights, WeightMatrix) else WeightMatrix.load(weights)
        self.mode, self.spread, self.strict = mode, spread, strict
        self._hits = np.zeros(self.weights.steps, dtype=np.int64)
        self._told = False

    @classmethod
    def from_environment(cls, mode: Mode = "step", spread: Spread = "batch", strict: bool = True) -> Mixer:
        """A mixer for the W whose path is in RECAST_WEIGHTS; RECAST_NORMALIZE, if set, is its mode."""
        path = os.environ.get("RECAST_WEIGHTS")
        if not path:
            raise RecastError("RECAST_WEIGHTS is not set: set it to the path of the weights.json to train with")
        return cls(path, cast(Mode, os.environ.get("RECAST_NORMALIZE") or mode), spread, strict)

    def __call__(self, rewards: Any, groups: Any, sigmas: Any) -> Any:
        """Advantages (B, k) of every sample at each of its slots: `table`, then `slots`."""
        return self.slots(self.table(rewards, groups), sigmas)

    def table(self, rewards: Any, groups: Any, spread: Spread | None = None) -> Any:
        """Advantages (B, T) of every sample at every step of W, the cleanest first.

        Parameters
        ----------
        rewards : mapping of names to (B,), or array-like or tensor (B, m)
            Scores of all samples, of all processes, in the order of `weights.rewards` if they have no names. NaN: the
            reward does not apply to the sample. Names that W does not have are left out.
        groups : sequence or tensor, (B,)
            The prompt of each sample: the text, or any number.
        spread : {"batch", "group"}, optional
            Instead of the mixer's own.

        Returns
        -------
        ndarray or tensor, (B, T)
            In float64.

        Raises
        ------
        RecastError
            If a reward of W is missing, or a shape is wrong.
        """
        scores = self._scores(rewards)
        xp = namespace(scores)
        names = groups.cpu().numpy() if namespace(groups) is not np else np.asarray(groups)
        if names.shape != (scores.shape[0],):
            raise RecastError(f"groups must have one entry per sample, ({scores.shape[0]},), not {names.shape}")
        numbers = np.unique(names, return_inverse=True)[1].reshape(-1)
        members = numbers if xp is np else xp.as_tensor(numbers, device=scores.device)
        return advantages(scores, members, self.weights, self.mode, spread or self.spread)

    def slots(self, table: Any, sigmas: Any) -> Any:
        """Entries (B, k) of a table (B, T) at the slots of a trainer, each found by its noise level.

        Parameters
        ----------
        table : array-like or tensor, (B, T)
            As `table` returns it, its rows in any order.
        sigmas : array-like or tensor, (B, k) or (k,)
            The noise level of each slot of these samples, in any order.

        Returns
        -------
        ndarray or tensor, (B, k)
            In the dtype of `table`.

        Raises
        ------
        RecastError
            If a shape is wrong, or a level is not a step of W (`strict`).
        """
        xp = namespace(table)
        values = table if xp is not np else np.asarray(table)
        if values.ndim != 2 or values.shape[1] != self.weights.steps:
            raise RecastError(
                f"the table must have one column per step of W, (samples, {self.weights.steps}), "
                f"not {tuple(values.shape)}: it is what Mixer.table returns"
            )
        at = np.asarray(sigmas, dtype=np.float64) if xp is np else xp.as_tensor(sigmas, device=values.device)
        at = xp.broadcast_to(at, (values.shape[0], at.shape[0])) if at.ndim == 1 else at
        if at.ndim != 2 or at.shape[0] != values.shape[0]:
            raise RecastError(f"sigmas must have the shape ({values.shape[0]}, slots), not {tuple(at.shape)}")
        found = by_sigma(values, self.weights, at, strict=self.strict)
        self._count(self.weights.columns(at))
        return found

    @property
    def unused(self) -> tuple[int, ...]:
        """Columns of W that no slot has hit so far; their share of the budget trains nothing."""
        return tuple(np.flatnonzero(self._hits == 0).tolist())

    def _count(self, columns: Any) -> None:
        plain = columns if isinstance(columns, np.ndarray) else columns.cpu().numpy()
        self._hits += np.bincount(plain.reshape(-1), minlength=self._hits.size)
        if not self._told and self._hits.sum() >= _ENOUGH * self._hits.size:
            self._told = True
            if self.unused:
                names = ", ".join(f"{self.weights.sigmas[column + 1]:.4g}" for column in self.unused)
                lost = float(self.weights.nu[list(self.unused)].sum())
                message = f"no slot has the noise level {names}: {lost:.0%} of W trains nothing"
                warnings.warn(message, GridWarning, stacklevel=4)

    def _scores(self, rewards: Any) -> Any:
        """Scores (B, m) in the order of W's rewards."""
        if not isinstance(rewards, Mapping):
            return rewards if namespace(rewards) is not np else np.asarray(rewards, dtype=np.float64)
        missing = [name for name in self.weights.rewards if name not in rewards]
        if missing:
            raise RecastError(
                f"no scores for {', '.join(missing)}, which W needs; the trainer has {', '.join(map(str, rewards))}"
            )
        columns = [rewards[name] for name in self.weights.rewards]
        xp = namespace(columns[0])
        if xp is np:
            return np.stack([np.asarray(column, dtype=np.float64) for column in columns], 1)
        return xp.stack([column.double() for column in columns], 1)


def levels(timesteps: Any) -> Any:
    """Noise levels σ of timesteps on the scale of 0 to 1000; levels between 0 and 1 are returned as they are.

    Examples
    --------
    >>> levels(np.array([1000.0, 250.0])).tolist(), levels(np.array([1.0, 0.25])).tolist()
    ([1.0, 0.25], [1.0, 0.25])
    """
    values = timesteps if namespace(timesteps) is not np else np.asarray(timesteps, dtype=np.float64)
    return values / 1000 if float(values.max()) > 1 else values
