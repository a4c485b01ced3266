"""WeightMatrix: what `recast weigh` leaves and a trainer reads."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from recast.core import artifact, schedule
from recast.core.curves import check_names, numbers
from recast.errors import RecastError

Array = NDArray[np.float64]
FORMAT = "recast.weights"
Method = Literal["sinkhorn", "static", "row", "hard", "shared", "reversed", "shuffled"]
METHODS: tuple[Method, ...] = get_args(Method)
"""How W can be made from curves and a budget; see `recast.weigh`."""


@dataclass(frozen=True, init=False, eq=False)
class WeightMatrix:
    """W (m, T): how much of its budget each reward spends at each step.

    Rows are `rewards` and sum to `budget`; column j is the step t = j+1, which starts at σ_t. `info` has
    what the solver reported.
    """

    rewards: tuple[str, ...]
    sigmas: Array
    matrix: Array
    budget: Array
    method: str
    info: Mapping[str, Any]

    def __init__(
        self,
        rewards: Sequence[str],
        sigmas: ArrayLike,
        matrix: ArrayLike,
        budget: ArrayLike,
        method: str = "sinkhorn",
        info: Mapping[str, Any] | None = None,
    ) -> None:
        put = object.__setattr__  # the dataclass is frozen; this is its constructor
        put(self, "rewards", check_names(rewards))
        put(self, "sigmas", schedule.grid(sigmas))
        put(self, "matrix", numbers(matrix, "W"))
        put(self, "budget", numbers(budget, "the budget"))
        put(self, "method", method)
        put(self, "info", dict(info or {}))
        self._check()

    def _check(self) -> None:
        shape = (len(self.rewards), self.sigmas.size - 1)
        if self.matrix.shape != shape or self.budget.shape != shape[:1]:
            raise RecastError(
                f"W must have the shape (rewards, steps) = {shape} and the budget {shape[:1]}, "
                f"not {self.matrix.shape} and {self.budget.shape}"
            )
        if not (np.isfinite(self.matrix).all() and (self.matrix >= 0).all()):
            raise RecastError("W must be finite and non-negative")
        off = float(np.abs(self.matrix.sum(axis=1) - self.budget).max())
        if off > 1e-6:
            raise RecastError(f"the rows of W must sum to the budget, but one is off by {off:.3g}")

    @property
    def steps(self) -> int:
        """T."""
        return self.sigmas.size - 1

    def columns(self, sigmas: Any) -> Any:
        """Column of W for each σ, in the shape of `sigmas`: the step whose start σ_t is nearest."""
        xp = _namespace(sigmas)
        # In float64 whatever came in: bfloat16 edges between levels would misplace some.
        levels = sigmas.to(xp.float64) if xp is not np else np.asarray(sigmas, dtype=np.float64)
        inside = (levels >= 0) & (levels <= 1)
        if not bool(inside.all()):
            raise RecastError(f"sigmas must lie between 0 and 1, but one is {float(levels[~inside].reshape(-1)[0]):g}")
        starts = self.sigmas[1:]
        between = (starts[1:] + starts[:-1]) / 2
        return xp.searchsorted(_like(between, levels), levels)

    def mix(self, rewards: Any, sigmas: Any = None) -> Any:
        """r_t = Σ_i T·W[i,t]·r_i (Eq. two-level-master): rewards (B, m) to (B, T).

        With `sigmas` (B, k), each slot's own noise level in any order, to (B, k) instead: trainers
        shuffle timesteps per sample, and a slot is not a step. NaN in `rewards` means that the reward
        does not apply: it drops out and the others' weights are scaled up to the column's total (by their
        budgets where the column has no weight for them, and to NaN where no reward applies). NumPy
        in, NumPy out; torch in, torch out, on the same device.
        """
        xp = _namespace(rewards)
        values: Any = rewards if xp is not np else np.asarray(rewards, dtype=np.float64)
        if values.ndim != 2 or values.shape[1] != len(self.rewards):
            raise RecastError(
                f"rewards must have the shape (batch, {len(self.rewards)}), one column each for "
                f"{', '.join(self.rewards)}, not {tuple(values.shape)}"
            )
        if xp is not np and not values.is_floating_point():
            values = values.to(xp.get_default_dtype())
        weights = _like(self.matrix * self.steps, values)
        if sigmas is None:
            return self._mix(values, weights, xp)
        columns = self.columns(np.asarray(sigmas) if xp is np else xp.as_tensor(sigmas, device=values.device))
        if columns.ndim != 2 or columns.shape[0] != values.shape[0]:
            raise RecastError(f"sigmas must have the shape ({values.shape[0]}, slots), not {tuple(columns.shape)}")
        mixed = self._mix(values, weights, xp)
        return xp.take_along_axis(mixed, columns, 1) if xp is np else mixed.gather(1, columns)

    def _mix(self, values: Any, weights: Any, xp: Any) -> Any:
        applies = values == values  # false for NaN
        known = xp.where(applies, values, xp.zeros_like(values))
        mixed = known @ weights
        if bool(applies.all()):
            return mixed
        ones = xp.where(applies, xp.ones_like(values), xp.zeros_like(values))
        nothing = xp.full_like(mixed, float("nan"))
        present = ones @ weights
        # A column may give all its weight to rewards that do not apply: there the budget decides.
        budget = _like(self.budget, values)[:, None]
        shares = ones @ budget
        by_budget = xp.where(shares > 0, known @ budget / xp.where(shares > 0, shares, xp.ones_like(shares)), nothing)
        by_column = mixed / xp.where(present > 0, present, xp.ones_like(present))
        return weights.sum(0) * xp.where(present > 0, by_column, by_budget)

    def save(self, path: str | Path) -> Path:
        """Write `weights.json`, atomically."""
        fields = {
            "rewards": self.rewards,
            "method": self.method,
            "budget": self.budget,
            "sigmas": self.sigmas,
            "matrix": self.matrix,
            "info": self.info,
        }
        return artifact.write(path, FORMAT, fields)

    @classmethod
    def load(cls, path: str | Path) -> WeightMatrix:
        """Read `weights.json`; a wrong, truncated or inconsistent file is an error that names it."""
        content = artifact.read(path, FORMAT)
        try:
            return cls(
                rewards=artifact.field(content, "rewards", path),
                sigmas=artifact.array(content, "sigmas", path, 1),
                matrix=artifact.array(content, "matrix", path, 2),
                budget=artifact.array(content, "budget", path, 1),
                method=str(artifact.field(content, "method", path)),
                info=artifact.mapping(content, "info", path),
            )
        except (RecastError, TypeError, ValueError) as error:
            raise RecastError(str(error) if str(path) in str(error) else f"{path}: {error}") from error


def _namespace(values: Any) -> Any:
    """`torch` for a tensor, else `numpy`; torch is never imported for someone who has no tensor."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(values, torch.Tensor) else np


def _like(array: Array, values: Any) -> Any:
    """`array` as the same kind of object as `values`, with its dtype and device."""
    if isinstance(values, np.ndarray):
        return array
    return sys.modules["torch"].as_tensor(array, dtype=values.dtype, device=values.device)
