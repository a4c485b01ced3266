"""GainCurves: the output of `recast estimate` and the input of `recast weigh`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from recast.core import artifact, renyi, schedule, sinkhorn
from recast.core.arrays import Array, check_names, numbers
from recast.errors import RecastError

__all__ = ["GainCurves"]

_FORMAT = "recast.gains"
_AGAIN = "run recast estimate again, or correct the field"


@dataclass(frozen=True, init=False, eq=False)
class GainCurves:
    """Cumulative discriminability D of m rewards on a grid of T+1 noise levels.

    Parameters
    ----------
    rewards : sequence of str
        Names of the m rewards.
    sigmas : array-like, shape (T+1,)
        The grid, from 0 (clean) to 1 (noise).
    D : array-like, shape (m, T+1)
        Discriminability at each level, up to a constant per reward, which cancels in `gains`.
    alpha : float, default 2.0
        Rényi order.
    D_prompts : array-like, shape (P, m, T+1), optional
        D of each prompt, NaN where a reward does not apply; needed for intervals.
    aggregate : {"prompt-mean", "pooled"}, default "prompt-mean"
        How D was computed from the prompts; see `recast.core.renyi.aggregate`.
    provenance : mapping, optional
        What the curves were measured from; stored with them.

    Raises
    ------
    RecastError
        If the shapes disagree, `D` is not finite, or `D` is not the mean of `D_prompts` for "prompt-mean".

    Examples
    --------
    >>> curves = GainCurves(["clip", "ocr"], [0, 0.5, 1], [[0.5, 0.25, 0.0], [1.0, 0.25, 0.0]])
    >>> curves.gains.tolist()
    [[0.25, 0.25], [0.75, 0.25]]
    >>> curves.steps, curves.total.tolist()
    (2, [0.5, 1.0])
    """

    rewards: tuple[str, ...]
    sigmas: Array
    D: Array
    alpha: float
    D_prompts: Array | None
    aggregate: renyi.Aggregation
    provenance: Mapping[str, Any]

    def __init__(
        self,
        rewards: Sequence[str],
        sigmas: ArrayLike,
        D: ArrayLike,
        alpha: float = 2.0,
        D_prompts: ArrayLike | None = None,
        aggregate: renyi.Aggregation = "prompt-mean",
        provenance: Mapping[str, Any] | None = None,
    ) -> None:
        put = object.__setattr__  # the dataclass is frozen
        put(self, "rewards", check_names(rewards))
        put(self, "sigmas", schedule.grid(sigmas))
        put(self, "D", numbers(D, "D"))
        put(self, "alpha", renyi.check_alpha(alpha))
        put(self, "D_prompts", None if D_prompts is None else numbers(D_prompts, "D_prompts"))
        put(self, "aggregate", aggregate)
        put(self, "provenance", dict(provenance or {}))
        self._check()

    def _check(self) -> None:
        shape = (len(self.rewards), self.sigmas.size)
        if self.D.shape != shape:
            raise RecastError(f"D must have the shape (rewards, levels) = {shape}, not {self.D.shape}")
        for name, row in zip(self.rewards, self.D, strict=True):
            if not (np.abs(row) < 1e100).all():
                raise RecastError(
                    f"D of the reward {name!r} is not finite or absurd: leave out a reward without a curve"
                )
        if self.D_prompts is not None and (self.D_prompts.ndim != 3 or self.D_prompts.shape[1:] != shape):
            raise RecastError(f"D_prompts must have the shape (prompts, *{shape}), not {self.D_prompts.shape}")
        if self.D_prompts is not None and len(self.D_prompts) == 0:
            raise RecastError("D_prompts has no prompts: leave it out or give at least one")
        if self.D_prompts is not None and self.aggregate == "prompt-mean":
            mean = renyi.mean_over_prompts(self.D_prompts)
            if not np.allclose(mean, self.D, rtol=0, atol=1e-6):
                raise RecastError("D is not the mean of D_prompts over prompts, as aggregate='prompt-mean' requires")
        if self.aggregate not in get_args(renyi.Aggregation):
            raise RecastError(f"unknown aggregation {self.aggregate!r}: choose 'prompt-mean' or 'pooled'")

    @classmethod
    def from_mu(
        cls,
        rewards: Sequence[str],
        sigmas: ArrayLike,
        mu: ArrayLike,
        alpha: float = 2.0,
        aggregate: renyi.Aggregation = "prompt-mean",
        self_rollout: bool = False,
        provenance: Mapping[str, Any] | None = None,
    ) -> GainCurves:
        """Curves from conditional rewards: Phase 3 of Alg. 1, over all prompts.

        Parameters
        ----------
        mu : array-like, shape (P, m, T+1, N)
            Conditional rewards μ of N samples per prompt, non-negative; NaN where a reward does not apply.
        self_rollout : bool, default False
            Whether the samples come from π_old itself (App. B.3); see `recast.core.renyi.moments`.
        rewards, sigmas, alpha, aggregate, provenance
            As in the constructor.

        Examples
        --------
        >>> mu = [[[[0.6, 1.0], [0.3, 0.7], [0.5, 0.5]]]]  # one prompt, one reward, three levels, two samples
        >>> GainCurves.from_mu(["ocr"], [0, 0.5, 1], mu).gains.round(3).tolist()
        [[0.47, 0.0]]
        """
        D, per_prompt = renyi.aggregate(renyi.moments(mu, alpha, self_rollout), alpha, aggregate)
        return cls(rewards, sigmas, D, alpha, per_prompt, aggregate, provenance)

    @property
    def steps(self) -> int:
        """T."""
        return self.sigmas.size - 1

    @property
    def gains(self) -> Array:
        """Clipped gains ΔD (m, T); column j is the step t = j+1."""
        return renyi.gains(self.D)

    @property
    def total(self) -> Array:
        """Total gain Σ_t ΔD of each reward (m,), from clipped gains as in the paper's tables."""
        return renyi.total_gain(self.D)

    def normalized(self) -> Array:
        """Gains divided by their mean over the steps (m, T) (Eq. gain-bar).

        Examples
        --------
        >>> GainCurves(["ocr"], [0, 0.5, 1], [[1.0, 0.25, 0.0]]).normalized().tolist()
        [[1.5, 0.5]]
        """
        return renyi.normalized(self.gains)

    def demand(self, budget: ArrayLike | None = None) -> Array:
        """The aggregate demand Σ_i λ_i ΔD̄_i,t of each step (T,) (Sec. 3.5).

        Parameters
        ----------
        budget : array-like, shape (m,), optional
            λ, on any scale; uniform by default. A reward without gain takes its share of λ and demands nothing.

        Examples
        --------
        >>> curves = GainCurves(["clip", "ocr"], [0, 0.5, 1], [[1.0, 0.5, 0.0], [1.0, 0.25, 0.0]])
        >>> curves.demand().tolist(), curves.demand([1, 3]).tolist()
        ([1.25, 0.75], [1.375, 0.625])
        """
        share = np.ones(len(self.rewards)) if budget is None else budget
        return np.asarray(sinkhorn.simplex(share, len(self.rewards), "budget") @ self.normalized())

    def demand_ratio(self, budget: ArrayLike | None = None) -> float:
        """Largest over smallest demand of the steps 2 ≤ t ≤ T: the factor by which the paper says demand varies.

        The cleanest step, t = 1, is left out, as in Sec. 3.5.

        Parameters
        ----------
        budget : array-like, shape (m,), optional
            As in `demand`.

        Returns
        -------
        float
            At least 1; infinite if a step has no demand while another has some, NaN if none has any or T = 1.

        Examples
        --------
        >>> GainCurves(["ocr"], [0, 0.1, 0.5, 1], [[1.5, 1.25, 0.25, 0.0]]).demand_ratio()
        4.0
        """
        steps = self.demand(budget)[1:]
        if not steps.any():
            return float("nan")
        return float(steps.max() / steps.min()) if steps.min() > 0 else float("inf")

    def resample(self, sigmas: ArrayLike, over: Literal["sigma", "step"] = "sigma") -> GainCurves:
        """The same curves on another grid; D is interpolated linearly, so D_0 − D_T is kept exactly.

        Parameters
        ----------
        sigmas : array-like, shape (T'+1,)
            The new grid, from 0 to 1.
        over : {"sigma", "step"}, default "sigma"
            The coordinate of the interpolation: the noise level, or t/T as on the horizontal axis of Fig. renyi-omega.
            The two differ if the grids place the same σ at different t/T, as shifted grids do.

        Examples
        --------
        >>> curves = GainCurves(["ocr"], [0, 1], [[1.0, 0.0]])
        >>> curves.resample([0, 0.25, 1]).gains.tolist(), curves.resample([0, 0.25, 1], over="step").gains.tolist()
        ([[0.25, 0.75]], [[0.5, 0.5]])
        """
        target = schedule.grid(sigmas)
        if over not in ("sigma", "step"):
            raise RecastError(f"curves are resampled over 'sigma' or 'step', not {over!r}")
        new, old = (levels if over == "sigma" else np.linspace(0, 1, levels.size) for levels in (target, self.sigmas))

        def onto(rows: Array) -> Array:
            flat = rows.reshape(-1, rows.shape[-1])
            return np.stack([np.interp(new, old, row) for row in flat]).reshape(*rows.shape[:-1], -1)

        per_prompt = None if self.D_prompts is None else onto(self.D_prompts)
        return replace(self, sigmas=target, D=onto(self.D), D_prompts=per_prompt)

    def select(self, rewards: Sequence[str]) -> GainCurves:
        """The curves of the named rewards, in that order; a RecastError if one has no curve.

        Examples
        --------
        >>> curves = GainCurves(["clip", "ocr"], [0, 1], [[0.5, 0.0], [1.0, 0.0]])
        >>> curves.select(["ocr"]).total.tolist()
        [1.0]
        """
        missing = [name for name in rewards if name not in self.rewards]
        if missing:
            raise RecastError(f"no curve for {', '.join(missing)}; the curves are {', '.join(self.rewards)}")
        rows = [self.rewards.index(name) for name in rewards]
        per_prompt = None if self.D_prompts is None else self.D_prompts[:, rows]
        return replace(self, rewards=tuple(rewards), D=self.D[rows], D_prompts=per_prompt)

    def bootstrap(self, resamples: int = 1000, seed: int = 0) -> Array:
        """D (R, m, T+1) of R = `resamples` draws of the prompts with replacement; needs `D_prompts`.

        Examples
        --------
        >>> per_prompt = [[[0.4, 0.0]], [[0.6, 0.0]]]
        >>> curves = GainCurves(["ocr"], [0, 1], [[0.5, 0.0]], D_prompts=per_prompt)
        >>> curves.bootstrap(resamples=100).shape
        (100, 1, 2)
        """
        if self.D_prompts is None:
            raise RecastError("intervals need D_prompts, the curves of the single prompts, which these curves lack")
        prompts = len(self.D_prompts)
        rng = np.random.default_rng(seed)
        counts = rng.multinomial(prompts, np.full(prompts, 1 / prompts), size=resamples).astype(np.float64)
        pooled = self.aggregate == "pooled"
        values = np.exp((self.alpha - 1) * self.D_prompts) if pooled else self.D_prompts
        applies = ~np.isnan(values)
        weight = np.tensordot(counts, applies.astype(np.float64), axes=1)
        total = np.tensordot(counts, np.where(applies, values, 0.0), axes=1)
        mean = np.divide(total, weight, out=np.full_like(total, np.nan), where=weight > 0)
        return renyi.log_of_moments(mean, self.alpha) if pooled else mean

    def intervals(self, level: float = 0.95, resamples: int = 1000, seed: int = 0) -> dict[str, Array]:
        """Percentile intervals over resampled prompts; needs `D_prompts`.

        Parameters
        ----------
        level : float, default 0.95
            Coverage, between 0 and 1.
        resamples, seed : int
            Number of bootstrap draws, and their seed.

        Returns
        -------
        dict of ndarray
            Lower and upper ends of `D` (2, m, T+1), taken relative to D_T, and of `gains` and `normalized` (2, m, T).

        Examples
        --------
        >>> per_prompt = [[[0.4, 0.0]], [[0.6, 0.0]]]
        >>> curves = GainCurves(["ocr"], [0, 1], [[0.5, 0.0]], D_prompts=per_prompt)
        >>> curves.intervals()["gains"].round(3).tolist()
        [[[0.4]], [[0.6]]]
        """
        draws = self.bootstrap(resamples, seed)
        steps = renyi.gains(draws)
        return {
            "D": _percentiles(draws - draws[..., -1:], level),
            "gains": _percentiles(steps, level),
            "normalized": _percentiles(renyi.normalized(steps), level),
        }

    def weight_intervals(
        self, budget: ArrayLike, tau: float = 1.0, level: float = 0.95, resamples: int = 1000, seed: int = 0
    ) -> Array:
        """Percentile interval (2, m, T) of the Sinkhorn W over resampled prompts; needs `D_prompts`.

        Parameters
        ----------
        budget : array-like, shape (m,)
            λ, on any scale.
        tau : float, default 1.0
            Temperature of the Sinkhorn problem.
        level, resamples, seed
            As in `intervals`.
        """
        steps = renyi.gains(self.bootstrap(resamples, seed))
        steps = steps[np.isfinite(steps).all(axis=(1, 2))]  # draws in which every reward has a prompt
        budgets = np.atleast_2d(np.asarray(budget, dtype=np.float64))
        return _percentiles(sinkhorn.project_many(steps, budgets, tau=tau).weights, level)

    def reliability(self, resamples: int = 1000, seed: int = 0) -> Array:
        """Share (m,) of each curve's variance over steps that is not noise, in [0, 1]. Beyond the paper.

        1 − (variance over resampled prompts, averaged over steps) / (variance over steps), of the gains before
        clipping, which would hide half of the noise. Needs `D_prompts` of at least two prompts.
        """
        draws = renyi.gains(self.bootstrap(resamples, seed), clip=False)
        if self.D_prompts is None or len(self.D_prompts) < 2:
            raise RecastError("the reliability of a curve needs at least two prompts")
        prompts = len(self.D_prompts)  # resampling P prompts shows (P−1)/P of their variance
        noise = np.nanvar(draws, axis=0).mean(axis=1) * prompts / (prompts - 1)
        shape = renyi.gains(self.D, clip=False).var(axis=1)
        share: Array = 1 - np.divide(noise, shape, out=np.ones_like(noise), where=shape > 0)
        return np.clip(share, 0.0, 1.0)

    def shrunk(self) -> Array:
        """Normalized gains (m, T), with each curve's deviation from 1 multiplied by its reliability.

        A curve that is mostly noise thus approaches the static case, which is the paper's limit for flat curves.
        A curve without gain stays 0.
        """
        shape = self.normalized()
        scaled = 1 + self.reliability()[:, None] * (shape - 1)
        return np.where(shape.any(axis=1, keepdims=True), scaled, 0.0)

    def save(self, path: str | Path) -> Path:
        """Write the curves as JSON, atomically, and return the path.

        The gains and their 95 % intervals are written too, for other readers of the file.

        Examples
        --------
        >>> import tempfile
        >>> curves = GainCurves(["ocr"], [0, 1], [[1.0, 0.0]])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     GainCurves.load(curves.save(f"{folder}/gains.json")).rewards
        ('ocr',)
        """
        from recast.core import records, strict  # pydantic, which `import recast` does without

        names = ("rewards", "alpha", "aggregate", "provenance", "sigmas", "D", "gains")
        fields: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.D_prompts is not None:
            fields |= {"gains_interval_95": self.intervals()["gains"], "D_prompts": self.D_prompts}
        return strict.write(path, _FORMAT, records.Gains, fields)

    @classmethod
    def load(cls, path: str | Path) -> GainCurves:
        """Read a file that `save` wrote; a RecastError names it if it is truncated, inconsistent or another format."""
        from recast.core import records, strict  # pydantic, which `import recast` does without

        content = strict.read(path, _FORMAT, records.Gains, _AGAIN, checked=False)
        try:
            curves = cls(
                rewards=content["rewards"],
                sigmas=content["sigmas"],
                D=content["D"],
                alpha=float(content["alpha"]),
                D_prompts=content.get("D_prompts"),
                aggregate=content.get("aggregate", "prompt-mean"),
                provenance=content.get("provenance", {}),
            )
            written = numbers(content.get("gains", curves.gains), "gains")
        except RecastError as error:
            raise RecastError(f"{path}: {error}") from error
        if written.shape != curves.gains.shape or not np.allclose(written, curves.gains, rtol=0, atol=1e-9):
            raise RecastError(f"{path}: its gains are not the differences of its D; the file was edited by hand")
        artifact.verify(content, path)
        return curves


def _percentiles(draws: Array, level: float) -> Array:
    """Central interval of the given level over the first axis: (R, ...) to (2, ...)."""
    if not 0 < level < 1:
        raise RecastError(f"an interval's level must lie between 0 and 1, not {level:g}")
    return np.asarray(np.nanpercentile(draws, [50 * (1 - level), 50 * (1 + level)], axis=0))
