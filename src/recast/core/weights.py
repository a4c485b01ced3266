"""WeightMatrix: the output of `recast weigh` and the input of a trainer."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from recast.core import artifact, schedule, sinkhorn
from recast.core.arrays import Array, check_names, like, namespace, numbers
from recast.core.methods import ENTROPIC, METHODS, Method, control_of
from recast.core.steps import Match, match
from recast.errors import RecastError

__all__ = ["ENTROPIC", "METHODS", "Method", "WeightMatrix", "control_of"]

_FORMAT = "recast.weights"
_AGAIN = "run recast weigh again, or correct the field"
_WITH_NU = 2  # the version of a file whose ν is not uniform


@dataclass(frozen=True, init=False, eq=False)
class WeightMatrix:
    """W (m, T): how each reward's budget is distributed over the denoising steps.

    Parameters
    ----------
    rewards : sequence of str
        Names of the m rewards, the rows of W.
    sigmas : array-like, shape (T+1,)
        The grid, from 0 (clean) to 1 (noise). Column j is the step t = j+1, which starts at σ_t.
    matrix : array-like, shape (m, T)
        W, non-negative. Its rows sum to `budget`; for `matched` and its controls, its columns sum to ν.
    budget : array-like, shape (m,)
        λ, which sums to 1.
    method : str, default "sinkhorn"
        How W was computed; see `recast.weigh`.
    info : mapping, optional
        What the solver reported; stored with W.
    nu : array-like, shape (T,), optional
        ν, the mass of each step on any scale, stored with sum 1; uniform by default.

    Raises
    ------
    RecastError
        If the shapes disagree, W is negative or not finite, a row (a column, for `matched`) has another sum than it
        should, or W has weight at a step where ν is 0.

    Examples
    --------
    >>> W = WeightMatrix(["clip", "ocr"], [0, 0.5, 1], [[0.375, 0.125], [0.125, 0.375]], [0.5, 0.5])
    >>> W.steps, W.matrix.sum(axis=0).tolist()
    (2, [0.5, 0.5])
    """

    rewards: tuple[str, ...]
    sigmas: Array
    matrix: Array
    budget: Array
    method: str
    info: Mapping[str, Any]
    nu: Array

    def __init__(
        self,
        rewards: Sequence[str],
        sigmas: ArrayLike,
        matrix: ArrayLike,
        budget: ArrayLike,
        method: str = "sinkhorn",
        info: Mapping[str, Any] | None = None,
        nu: ArrayLike | None = None,
    ) -> None:
        put = object.__setattr__  # the dataclass is frozen
        put(self, "rewards", check_names(rewards))
        put(self, "sigmas", schedule.grid(sigmas))
        put(self, "matrix", numbers(matrix, "W"))
        put(self, "budget", numbers(budget, "the budget"))
        put(self, "method", method)
        put(self, "info", dict(info or {}))
        put(self, "nu", sinkhorn.masses(nu, self.sigmas.size - 1, "nu"))
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
        wrong = f"the budget must be shares that sum to 1, not {self.budget.tolist()}"
        if not (np.isfinite(self.budget).all() and (self.budget >= 0).all()):
            raise RecastError(wrong)
        matched = control_of(self.method)[0] == "matched"
        sums, wanted = (self.matrix.sum(0), self.nu) if matched else (self.matrix.sum(1), self.budget)
        off = float(np.abs(sums - wanted).max())
        if off > 1e-6:
            what = "columns of W by method 'matched' must sum to nu" if matched else "rows of W must sum to the budget"
            raise RecastError(f"the {what}, but one is off by {off:.3g}")
        if abs(self.budget.sum() - 1) > 1e-6:
            raise RecastError(wrong)
        if (self.matrix.max(axis=0)[self.nu == 0] > 1e-9).any():
            raise RecastError("W must be 0 at the steps where nu is 0: there is no mass to share out")

    @property
    def steps(self) -> int:
        """T."""
        return self.sigmas.size - 1

    @property
    def uniform(self) -> bool:
        """Whether every step has the same mass, ν = 1/T."""
        return bool((self.nu == self.nu[0]).all())

    @property
    def factors(self) -> Array:
        """W[i,t] / ν_t (m, T), by which `mix` multiplies the rewards: T·W for uniform ν, and λ_i where ν_t is 0.

        Examples
        --------
        >>> WeightMatrix(["ocr"], [0, 0.5, 1], [[0.5, 0.5]], [1.0], nu=[1, 3]).factors.round(3).tolist()
        [[2.0, 0.667]]
        """
        if self.uniform:
            return self.matrix * self.steps
        static = np.repeat(self.budget[:, None], self.steps, axis=1)
        return np.asarray(np.divide(self.matrix, self.nu, out=static, where=self.nu > 0))

    def realized(self, effect: ArrayLike | None = None) -> Array:
        """The budget realized (m,): each reward's share of Σ_t e_t · `factors`, if advantage at step t acts by e_t.

        Parameters
        ----------
        effect : array-like, shape (T,), optional
            e, on any scale, for example `recast.core.effects.Effects.effect`; by default ν.

        Returns
        -------
        ndarray, shape (m,)
            Shares that sum to 1: λ for every W whose rows sum to λ, at e = ν.

        Raises
        ------
        RecastError
            If `effect` does not have T non-negative numbers, or acts only where W has no weight.

        Examples
        --------
        >>> W = WeightMatrix(["clip", "ocr"], [0, 0.5, 1], [[0.375, 0.125], [0.125, 0.375]], [0.5, 0.5])
        >>> W.realized().tolist(), W.realized([3, 1]).round(3).tolist()
        ([0.5, 0.5], [0.625, 0.375])
        """
        each = self.nu if effect is None else sinkhorn.simplex(effect, self.steps, "effect")
        return sinkhorn.simplex(self.factors @ each, None, "the effect of W")

    def columns(self, sigmas: Any) -> Any:
        """Column of W for each noise level: the step whose start σ_t is nearest.

        Parameters
        ----------
        sigmas : array-like or tensor, any shape
            Noise levels between 0 and 1.

        Returns
        -------
        ndarray or tensor of int, in the shape of `sigmas`
            Columns 0..T−1, a tensor on the same device if `sigmas` is one.

        Raises
        ------
        RecastError
            If a level is not between 0 and 1.

        Examples
        --------
        >>> W = WeightMatrix(["ocr"], [0, 0.5, 1], [[0.25, 0.75]], [1.0])
        >>> W.columns([1.0, 0.5, 0.1]).tolist()
        [1, 0, 0]
        """
        xp = namespace(sigmas)
        # In float64: the midpoints between levels, rounded to bfloat16, would misplace some.
        levels = sigmas.to(xp.float64) if xp is not np else np.asarray(sigmas, dtype=np.float64)
        inside = (levels >= 0) & (levels <= 1)
        if not bool(inside.all()):
            raise RecastError(f"sigmas must lie between 0 and 1, but one is {float(levels[~inside].reshape(-1)[0]):g}")
        starts = self.sigmas[1:]
        between = (starts[1:] + starts[:-1]) / 2
        return xp.searchsorted(like(between, levels), levels)

    def check(self, sigmas: Any) -> Match:
        """Whether the levels of a trainer are the steps of W: an error if one is not near a step, else what was hit.

        Parameters
        ----------
        sigmas : array-like or tensor, any shape
            The noise levels that a trainer trains, such as `timesteps / 1000`.

        Returns
        -------
        Match
            The largest distance to a step, and the columns that no level hits; see `recast.core.steps.match`.

        Raises
        ------
        RecastError
            If a level is farther from every step than `recast.core.steps.tolerances` allows. W belongs to another
            grid then, and `mix` would take a wrong column without an error.

        Examples
        --------
        >>> W = WeightMatrix(["ocr"], [0, 0.5, 1], [[0.25, 0.75]], [1.0])
        >>> W.check([[1.0, 0.9995]]).unused
        (0,)
        """
        return match(self.sigmas, sigmas)

    def mix(self, rewards: Any, sigmas: Any = None, strict: bool = False) -> Any:
        """r_t = Σ_i (W[i,t]/ν_t)·r_i: rewards (B, m) to (B, T), or to (B, k) at given levels.

        For uniform ν this is Σ_i T·W[i,t]·r_i (Eq. two-level-master).

        Parameters
        ----------
        rewards : array-like or tensor, shape (B, m)
            Rewards of B samples. NaN means that the reward does not apply: the weights of the others are scaled to
            the column's total, in proportion to their budgets if the column has no weight for any of them.
        sigmas : array-like or tensor, shape (B, k), optional
            Noise level of each of a sample's k timesteps, in any order. Trainers shuffle timesteps per sample, so
            that a timestep's position does not identify its step; it is looked up by its level.
        strict : bool, default False
            Refuse levels that are not steps of W (`check`), instead of taking the nearest step.

        Returns
        -------
        ndarray or tensor, shape (B, T) or (B, k)
            Mixed rewards; NaN where no reward applies. A tensor in gives a tensor on the same device.

        Raises
        ------
        RecastError
            If a shape is wrong, a level is not between 0 and 1, or `strict` and a level is not a step.

        Examples
        --------
        >>> W = WeightMatrix(["clip", "ocr"], [0, 0.5, 1], [[0.375, 0.125], [0.125, 0.375]], [0.5, 0.5])
        >>> W.mix([[1.0, 0.0], [float("nan"), 1.0]]).tolist()
        [[0.75, 0.25], [1.0, 1.0]]
        >>> W.mix([[1.0, 0.0]], sigmas=[[1.0, 0.5]]).tolist()
        [[0.25, 0.75]]
        """
        values, xp = self._values(rewards)
        if sigmas is None:
            return self._weighted(values, operator.matmul, xp)
        if strict:
            self.check(sigmas)
        columns = self.columns(np.asarray(sigmas) if xp is np else xp.as_tensor(sigmas, device=values.device))
        if columns.ndim != 2 or columns.shape[0] != values.shape[0]:
            raise RecastError(f"sigmas must have the shape ({values.shape[0]}, slots), not {tuple(columns.shape)}")
        mixed = self._weighted(values, operator.matmul, xp)
        return xp.take_along_axis(mixed, columns, 1) if xp is np else mixed.gather(1, columns)

    def terms(self, rewards: Any) -> Any:
        """Contribution of each reward to `mix`: rewards (B, m) to (B, m, T), whose sum over m is the mix.

        Parameters
        ----------
        rewards : array-like or tensor, shape (B, m)
            Rewards of B samples; NaN where a reward does not apply.

        Returns
        -------
        ndarray or tensor, shape (B, m, T)
            Rewards times the weights that `mix` gives them. A reward that does not apply contributes 0; all
            contributions are NaN where no reward applies.

        Raises
        ------
        RecastError
            If the shape is wrong.

        Examples
        --------
        >>> W = WeightMatrix(["clip", "ocr"], [0, 0.5, 1], [[0.375, 0.125], [0.125, 0.375]], [0.5, 0.5])
        >>> W.terms([[1.0, 2.0]]).tolist()
        [[[0.75, 0.25], [0.5, 1.5]]]
        """
        values, xp = self._values(rewards)
        return self._weighted(values, lambda each, weights: each[..., None] * weights, xp)

    def _values(self, rewards: Any) -> tuple[Any, Any]:
        """Rewards (B, m) as floating-point numbers, and the namespace they belong to."""
        xp = namespace(rewards)
        values: Any = rewards if xp is not np else np.asarray(rewards, dtype=np.float64)
        if values.ndim != 2 or values.shape[1] != len(self.rewards):
            raise RecastError(
                f"rewards must have the shape (batch, {len(self.rewards)}), one column each for "
                f"{', '.join(self.rewards)}, not {tuple(values.shape)}"
            )
        if xp is not np and not values.is_floating_point():
            values = values.to(xp.get_default_dtype())
        return values, xp

    def _weighted(self, values: Any, product: Callable[[Any, Any], Any], xp: Any) -> Any:
        """`product` of rewards (B, m) and `factors` (m, T), with the weights of missing rewards given to the others.

        The product is a matmul for the mix (B, T), and keeps the axis m for its terms (B, m, T).
        """
        weights = like(self.factors, values)
        applies = values == values  # false for NaN
        known = xp.where(applies, values, xp.zeros_like(values))
        weighted = product(known, weights)
        if bool(applies.all()):
            return weighted
        ones = xp.where(applies, xp.ones_like(values), xp.zeros_like(values))
        nothing = xp.full_like(weighted, float("nan"))
        # If a column gives all its weight to rewards that do not apply, the others share it by their budgets.
        budget = like(self.budget, values)[:, None]
        present, shares = ones @ weights, ones @ budget
        if weighted.ndim == 3:
            present, shares = present[:, None], shares[:, None]
        divisor = xp.where(shares > 0, shares, xp.ones_like(shares))
        by_budget = xp.where(shares > 0, product(known, budget) / divisor, nothing)
        by_column = weighted / xp.where(present > 0, present, xp.ones_like(present))
        return weights.sum(0) * xp.where(present > 0, by_column, by_budget)

    def save(self, path: str | Path) -> Path:
        """Write W as JSON, atomically, and return the path.

        A file with ν has version 2, so that releases that would mix it by T·W refuse it.

        Examples
        --------
        >>> import tempfile
        >>> W = WeightMatrix(["ocr"], [0, 0.5, 1], [[0.25, 0.75]], [1.0])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     WeightMatrix.load(W.save(f"{folder}/weights.json")).matrix.tolist()
        [[0.25, 0.75]]
        """
        from recast.core import records, strict  # pydantic, which `import recast` does without

        fields: dict[str, Any] = {
            "rewards": self.rewards,
            "method": self.method,
            "budget": self.budget,
            "sigmas": self.sigmas,
            "matrix": self.matrix,
            "info": self.info,
        }
        if self.uniform:
            return strict.write(path, _FORMAT, records.Weights, fields)
        return strict.write(path, _FORMAT, records.Weights, fields | {"nu": self.nu}, version=_WITH_NU)

    @classmethod
    def load(cls, path: str | Path) -> WeightMatrix:
        """Read a file that `save` wrote; a RecastError names it if it is truncated, inconsistent or another format."""
        from recast.core import records, strict  # pydantic, which `import recast` does without

        content = strict.read(path, _FORMAT, records.Weights, _AGAIN, newest=_WITH_NU, checked=False)
        if ("nu" in content) != (content["version"] == _WITH_NU):
            raise RecastError(
                f"{path}: the field nu belongs to version {_WITH_NU} of the format, and only to it: {_AGAIN}"
            )
        try:
            found = cls(
                rewards=content["rewards"],
                sigmas=content["sigmas"],
                matrix=content["matrix"],
                budget=content["budget"],
                method=content["method"],
                info=content.get("info", {}),
                nu=content.get("nu"),
            )
        except RecastError as error:
            raise RecastError(f"{path}: {error}") from error
        artifact.verify(content, path)
        return found
