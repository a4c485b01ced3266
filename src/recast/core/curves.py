"""GainCurves: what `recast estimate` leaves and `recast weigh` reads, and comparisons of two of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from recast.core import artifact, renyi, schedule, sinkhorn
from recast.errors import RecastError

Array = NDArray[np.float64]
FORMAT = "recast.gains"


@dataclass(frozen=True, init=False, eq=False)
class GainCurves:
    """Cumulative discriminability D (m, T+1) of m rewards on the grid `sigmas` (T+1,).

    `D` is known up to a constant per reward, which cancels in `gains`. `D_prompts` (P, m, T+1), where
    given, holds every prompt's own D (NaN where a reward does not apply) and gives intervals.
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
        put = object.__setattr__  # the dataclass is frozen; this is its constructor
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
            if not np.isfinite(row).all():
                raise RecastError(f"D of the reward {name!r} is not finite: leave a reward without a curve out")
        if self.D_prompts is not None and (self.D_prompts.ndim != 3 or self.D_prompts.shape[1:] != shape):
            raise RecastError(f"D_prompts must have the shape (prompts, *{shape}), not {self.D_prompts.shape}")
        if self.D_prompts is not None and len(self.D_prompts) == 0:
            raise RecastError("D_prompts has no prompts: leave it out where there are none")
        if self.D_prompts is not None and self.aggregate == "prompt-mean":
            mean = renyi.mean_over_prompts(self.D_prompts)
            if not np.allclose(mean, self.D, rtol=0, atol=1e-6):
                raise RecastError("D is not the mean of D_prompts over prompts, as aggregate='prompt-mean' says")
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
        """Curves from conditional rewards μ (P, m, T+1, N): Phase 3 of Alg. 1, over all prompts."""
        D, per_prompt = renyi.aggregate(renyi.moments(mu, alpha, self_rollout), alpha, aggregate)
        return cls(rewards, sigmas, D, alpha, per_prompt, aggregate, provenance)

    @property
    def steps(self) -> int:
        """T."""
        return self.sigmas.size - 1

    @property
    def gains(self) -> Array:
        """Clipped per-step gains ΔD (m, T), column j = step t = j+1."""
        return renyi.gains(self.D)

    @property
    def total(self) -> Array:
        """Total gain Σ_t ΔD of each reward (m,), from clipped gains as in the paper's tables."""
        return renyi.total_gain(self.D)

    def normalized(self) -> Array:
        """Mean-normalised gains (m, T) (Eq. gain-bar)."""
        return renyi.normalized(self.gains)

    def resample(self, sigmas: ArrayLike) -> GainCurves:
        """The same curves on another grid: D is interpolated over σ, so D_0 − D_T is kept exactly."""
        target = schedule.grid(sigmas)

        def onto(rows: Array) -> Array:
            flat = rows.reshape(-1, rows.shape[-1])
            return np.stack([np.interp(target, self.sigmas, row) for row in flat]).reshape(*rows.shape[:-1], -1)

        per_prompt = None if self.D_prompts is None else onto(self.D_prompts)
        return replace(self, sigmas=target, D=onto(self.D), D_prompts=per_prompt)

    def select(self, rewards: Sequence[str]) -> GainCurves:
        """The curves of the named rewards, in that order."""
        missing = [name for name in rewards if name not in self.rewards]
        if missing:
            raise RecastError(f"no curve for {', '.join(missing)}; the curves are {', '.join(self.rewards)}")
        rows = [self.rewards.index(name) for name in rewards]
        per_prompt = None if self.D_prompts is None else self.D_prompts[:, rows]
        return replace(self, rewards=tuple(rewards), D=self.D[rows], D_prompts=per_prompt)

    def bootstrap(self, resamples: int = 1000, seed: int = 0) -> Array:
        """D (R, m, T+1) of `resamples` draws of the prompts with replacement."""
        if self.D_prompts is None:
            raise RecastError("intervals need D_prompts, the curves of the single prompts; this file has none")
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
        """Percentile intervals over prompts, each (2, m, ...): `D` (as D − D_T), `gains`, `normalized`."""
        draws = self.bootstrap(resamples, seed)
        steps = renyi.gains(draws)
        return {
            "D": percentiles(draws - draws[..., -1:], level),
            "gains": percentiles(steps, level),
            "normalized": percentiles(renyi.normalized(steps), level),
        }

    def weight_intervals(
        self, budget: ArrayLike, tau: float = 1.0, level: float = 0.95, resamples: int = 1000, seed: int = 0
    ) -> Array:
        """Percentile interval (2, m, T) of the Sinkhorn W over resampled prompts."""
        steps = renyi.gains(self.bootstrap(resamples, seed))
        steps = steps[np.isfinite(steps).all(axis=(1, 2))]  # draws in which every reward has a prompt
        budgets = np.atleast_2d(np.asarray(budget, dtype=np.float64))
        return percentiles(sinkhorn.project_many(steps, budgets, tau=tau).weights, level)

    def reliability(self, resamples: int = 1000, seed: int = 0) -> Array:
        """Share (m,) of each curve's variance over steps that is not noise, in [0, 1]. Beyond the paper.

        1 − (variance over resampled prompts, mean over steps) / (variance over steps), of the gains before
        clipping, which would hide half of the noise.
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
        """Mean-normalised gains (m, T), each curve's deviation from 1 scaled by its reliability.

        A flat, noisy or headroom-less curve falls back to the static case, which is the paper's own limit
        for flat curves. A curve without gain stays 0.
        """
        shape = self.normalized()
        scaled = 1 + self.reliability()[:, None] * (shape - 1)
        return np.where(shape.any(axis=1, keepdims=True), scaled, 0.0)

    def save(self, path: str | Path) -> Path:
        """Write `gains.json`, atomically; gains and intervals are written for other readers."""
        fields: dict[str, Any] = {
            "rewards": self.rewards,
            "alpha": self.alpha,
            "aggregate": self.aggregate,
            "provenance": self.provenance,
            "sigmas": self.sigmas,
            "D": self.D,
            "gains": self.gains,
        }
        if self.D_prompts is not None:
            fields |= {"gains_interval_95": self.intervals()["gains"], "D_prompts": self.D_prompts}
        return artifact.write(path, FORMAT, fields)

    @classmethod
    def load(cls, path: str | Path) -> GainCurves:
        """Read `gains.json`; a wrong, truncated or inconsistent file is an error that names it."""
        content = artifact.read(path, FORMAT)
        try:
            curves = cls(
                rewards=artifact.field(content, "rewards", path),
                sigmas=artifact.array(content, "sigmas", path, 1),
                D=artifact.array(content, "D", path, 2),
                alpha=float(artifact.array(content, "alpha", path, 0)),
                D_prompts=artifact.array(content, "D_prompts", path, 3) if "D_prompts" in content else None,
                aggregate=content.get("aggregate", "prompt-mean"),
                provenance=artifact.mapping(content, "provenance", path),
            )
        except (RecastError, TypeError, ValueError) as error:
            raise RecastError(str(error) if str(path) in str(error) else f"{path}: {error}") from error
        if "gains" in content:
            written = artifact.array(content, "gains", path, 2)
            if written.shape != curves.gains.shape or not np.allclose(written, curves.gains, rtol=0, atol=1e-9):
                raise RecastError(f"{path}: its gains are not the differences of its D; the file was edited by hand")
        return curves


@dataclass(frozen=True)
class Comparison:
    """One reward's row of the paper's surrogate-sensitivity table."""

    reward: str
    pearson: float
    spearman: float
    peaks: tuple[int, int]
    total_ratio: float


@dataclass(frozen=True)
class Remaining:
    """One reward's row of the paper's curve-drift table; the last row, `all`, sums them."""

    reward: str
    base: float
    now: float
    ratio: float


def compare(a: GainCurves, b: GainCurves) -> list[Comparison]:
    """Row by row over the rewards both have: how alike two gain curves are (App. B.4).

    Correlations are over the T steps; peaks are argmax steps t (1 = clean); the total-gain ratio is b's
    over a's. NaN where a curve is constant or without gain.
    """
    from scipy import stats  # half a second to import, and only needed here

    names = _common(a, b)
    if not schedule.same(a.sigmas, b.sigmas):
        raise RecastError(
            f"the two curves lie on different grids (T = {a.steps} and {b.steps}): resample one onto the other first"
        )
    first, second = a.select(names), b.select(names)
    rows = []
    for i, name in enumerate(names):
        x, y = first.gains[i], second.gains[i]
        varies = a.steps > 1 and np.ptp(x) > 0 and np.ptp(y) > 0
        rows.append(
            Comparison(
                reward=name,
                pearson=float(stats.pearsonr(x, y).statistic) if varies else float("nan"),
                spearman=float(stats.spearmanr(x, y).statistic) if varies else float("nan"),
                peaks=(int(x.argmax()) + 1, int(y.argmax()) + 1),
                total_ratio=_ratio(float(second.total[i]), float(first.total[i])),
            )
        )
    return rows


def remaining(base: GainCurves, now: GainCurves) -> list[Remaining]:
    """How much of each reward's total gain is left at another policy, and of their sum (App. B.5)."""
    names = _common(base, now)
    before, after = base.select(names).total, now.select(names).total
    rows = [
        Remaining(name, float(old), float(new), _ratio(float(new), float(old)))
        for name, old, new in zip(names, before, after, strict=True)
    ]
    total_before, total_after = float(before.sum()), float(after.sum())
    return [*rows, Remaining("all", total_before, total_after, _ratio(total_after, total_before))]


def check_names(names: Sequence[str]) -> tuple[str, ...]:
    """Reward names as a tuple; an error for none, a repeated one or one that is not text."""
    result = tuple(names) if isinstance(names, (list, tuple)) else ()
    if not result or not all(isinstance(name, str) and name for name in result):
        raise RecastError(f"rewards must be a list of names, not {names!r:.200}")
    if len(set(result)) != len(result):
        raise RecastError(f"reward names must differ, but they are {', '.join(result)}")
    return result


def numbers(values: ArrayLike, name: str) -> Array:
    """A float64 copy of `values`; an error that names them if they are no rectangular array of numbers."""
    try:
        return np.array(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise RecastError(f"{name} must be a rectangular array of numbers: {error}") from error


def percentiles(draws: Array, level: float) -> Array:
    """Central interval of the given level over the first axis: (R, ...) to (2, ...)."""
    if not 0 < level < 1:
        raise RecastError(f"an interval's level must lie between 0 and 1, not {level:g}")
    return np.asarray(np.nanpercentile(draws, [50 * (1 - level), 50 * (1 + level)], axis=0))


def _common(a: GainCurves, b: GainCurves) -> list[str]:
    names = [name for name in a.rewards if name in b.rewards]
    if not names:
        raise RecastError(
            f"the two curves have no reward in common: {', '.join(a.rewards)} against {', '.join(b.rewards)}"
        )
    return names


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator > 0 else float("nan")
