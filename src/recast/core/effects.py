"""Effects: signal and noise of every reward's gradient at every noise level, and what they predict for W.

The gradient of DiffusionNFT's loss is linear in the advantage: with the advantage Σ_i f[i,t]·a_i of standardized
rewards a_i, an update is Σ_{i,t} f[i,t]·g[i,t], where g[i,t] is the gradient at level t with the advantage a_i alone.
The second moments of the g[i,t] decide how close an update with any W on any number of images is to the noiseless one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from recast.core import artifact, schedule
from recast.core.arrays import Array, check_names, numbers
from recast.core.weights import WeightMatrix
from recast.errors import RecastError

__all__ = ["FEWEST", "Effects", "Normalization"]

_FORMAT = "recast.effects"
_AGAIN = "run recast doctor --gradients again"
Normalization = Literal["step", "shared", "reward"]
FEWEST = 4
"""Fewest splits: the errors come from leaving out one at a time, and each signal from at least two others."""
_LIMITS = np.geomspace(1, 1e7, 281)
"""Images per update at which a gain is compared with its error, for the interval of the break-even."""


@dataclass(frozen=True, eq=False)
class Effects:
    """Inner products of the gradients g[i,t] of Q splits of the images, which have independent prompts.

    Parameters
    ----------
    rewards : tuple of str
        Names of the m rewards.
    sigmas : ndarray, shape (T+1,)
        The grid.
    own : ndarray, shape (Q, n, n)
        Inner products ⟨g_a, g_b⟩ within each split, with n = m·T and a = (i, t) in the order of a raveled (m, T) array.
    cross : ndarray, shape (Q, n, n)
        The mean over the other splits of the symmetrized inner products of each split with another.
    images : int
        Images per split.
    batch, levels : int
        Images per optimizer step of the training in question, and the number of levels at which it trains an image.
    normalize : {"step", "shared", "reward"}
        How that training brings rewards to one scale (`train.normalize`).
    scales : ndarray, shape (m,)
        Standard deviations within groups, by which the rewards were divided.
    covariance : ndarray, shape (m, m)
        Covariance of the mixed rewards, whose root is the divisor of `step`.
    settings : mapping
        What the measurement depends on, by dotted names.

    Raises
    ------
    RecastError
        If shapes disagree, there are fewer than four splits, or a number is not finite or not positive.

    Examples
    --------
    >>> g = np.random.default_rng(0).normal([3.0, 1.0], 1.0, (8, 100, 2)).transpose(0, 2, 1)  # Q, n, parameters
    >>> found = Effects.measured(("ocr",), [0, 0.5, 1], np.einsum("qap,rbp->qrab", g, g), 4, batch=32, levels=2)
    >>> found.signal.round(-2).tolist(), found.noise.diagonal().round(-2).tolist()
    ([[900.0, 300.0], [300.0, 100.0]], [400.0, 400.0])
    """

    rewards: tuple[str, ...]
    sigmas: Array
    own: Array
    cross: Array
    images: int
    batch: int
    levels: int
    normalize: Normalization
    scales: Array
    covariance: Array
    settings: Mapping[str, Any]

    def __post_init__(self) -> None:
        put = object.__setattr__  # the dataclass is frozen
        put(self, "rewards", check_names(self.rewards))
        put(self, "sigmas", schedule.grid(self.sigmas))
        for name in ("own", "cross", "scales", "covariance"):
            put(self, name, numbers(getattr(self, name), name))
            if not np.isfinite(getattr(self, name)).all():
                raise RecastError(f"{name} of the gradients must be finite")
        put(self, "settings", dict(self.settings))
        size, count = len(self.rewards), len(self.rewards) * self.steps
        if self.own.ndim != 3 or len(self.own) < FEWEST:
            raise RecastError(f"gradients need at least {FEWEST} splits, but own has the shape {self.own.shape}")
        shapes = {"own": (len(self.own), count, count), "scales": (size,), "covariance": (size, size)}
        for name, shape in (shapes | {"cross": shapes["own"]}).items():
            if getattr(self, name).shape != shape:
                raise RecastError(f"{name} must have the shape {shape}, not {getattr(self, name).shape}")
        if min(self.images, self.batch) < 1 or not 1 <= self.levels <= self.steps:
            raise RecastError(
                f"images = {self.images} and batch = {self.batch} must be positive, and levels = {self.levels} between "
                f"1 and T = {self.steps}"
            )
        if self.normalize not in get_args(Normalization):
            raise RecastError(f"unknown normalization {self.normalize!r}: choose step, shared or reward")

    @classmethod
    def measured(
        cls,
        rewards: tuple[str, ...],
        sigmas: ArrayLike,
        products: ArrayLike,
        images: int,
        *,
        batch: int,
        levels: int,
        normalize: Normalization = "reward",
        scales: ArrayLike | None = None,
        covariance: ArrayLike | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> Effects:
        """Effects from the inner products (Q, Q, n, n) of the gradients of all splits; see the class for the others.

        By default the rewards are uncorrelated with standard deviation 1.
        """
        table = numbers(products, "products")
        if table.ndim != 4 or len(table) < FEWEST or table.shape[0] != table.shape[1]:
            raise RecastError(f"products must have the shape (Q, Q, n, n) with Q ≥ {FEWEST}, not {table.shape}")
        each = np.arange(len(table))
        own, rows = table[each, each], table.sum(axis=1)
        cross = ((rows + rows.transpose(0, 2, 1)) / 2 - own) / (len(table) - 1)
        size = len(rewards)
        return cls(
            rewards=rewards,
            sigmas=np.asarray(sigmas, dtype=np.float64),
            own=own,
            cross=cross,
            images=images,
            batch=batch,
            levels=levels,
            normalize=normalize,
            scales=np.ones(size) if scales is None else np.asarray(scales, dtype=np.float64),
            covariance=np.eye(size) if covariance is None else np.asarray(covariance, dtype=np.float64),
            settings=settings or {},
        )

    @property
    def steps(self) -> int:
        """T."""
        return self.sigmas.size - 1

    @property
    def signal(self) -> Array:
        """Unbiased estimates (n, n) of the inner products of the expected gradients, from different splits."""
        return np.asarray(self.cross.mean(axis=0))

    @property
    def noise(self) -> Array:
        """Covariances (n, n) of the gradients of one image, summed over parameters; those of N images are 1/N of it.

        If an image is trained at `levels` < T levels drawn at random, each gradient counts T/levels times as much where
        it is drawn, and the covariance includes that of the draw.
        """
        whole = self.images * (self.own.mean(axis=0) - self.signal) + self.signal
        return np.asarray(self._drawn * whole - self.signal)

    @property
    def _drawn(self) -> Array:
        """E[1_t·1_u] / (E 1_t · E 1_u) (n, n) for the levels t, u of two entries; 1_t: an image is trained at t."""
        steps, count = self.steps, self.levels
        apart = 1.0 if steps == 1 else steps * (count - 1) / (count * (steps - 1))
        table = np.where(np.eye(steps, dtype=bool), steps / count, apart)
        return np.tile(table, (len(self.rewards), len(self.rewards)))

    def snr(self, images: float | None = None) -> Array:
        """Signal-to-noise ratio (m, T) of each reward's gradient at each level for an update on so many images.

        The norm of the expected gradient over the root mean square norm of its error; 0 if the estimated signal is
        negative. By default for the recipe's `batch`.
        """
        noise = np.maximum(self.noise.diagonal(), np.finfo(float).tiny) / (images or self.batch)
        return np.sqrt(np.maximum(self.signal.diagonal(), 0) / noise).reshape(len(self.rewards), -1)

    @property
    def effect(self) -> Array:
        """Effect (T,) of each level, with sum 1: the norm of its gradient for an update on `batch` images.

        The root mean square over the rewards, signal and noise together.
        """
        return np.asarray(self._effects()[0])

    def _effects(self) -> Array:
        """The effect (Q+1, T): of all splits, then without each."""
        diagonal = [np.diagonal(table, axis1=1, axis2=2) for table in (self.own, self.cross)]
        own, signal = _without(diagonal[0]), _without(diagonal[1], 2)
        drawn = self.steps / self.levels
        noise = drawn * (self.images * (own - signal) + signal) - signal
        squares = np.maximum(signal, 0) + np.maximum(noise, 0) / self.batch
        found = np.sqrt(squares.reshape(len(squares), len(self.rewards), -1).mean(axis=1))
        found = np.maximum(found, 1e-9 * found.max(axis=1, keepdims=True))
        total = found.sum(axis=1, keepdims=True)
        return np.where(total > 0, found / np.where(total > 0, total, 1), 1 / self.steps)

    def realized(self, weights: WeightMatrix) -> tuple[Array, Array]:
        """The budget (m,) that the parameters get under W, and its standard error.

        Factors of the standardized rewards, weighted by the effects of the levels. With normalize = "reward" this is
        `W.realized(effect)`.
        """
        factors = self._factors(weights, weights.factors).reshape(len(self.rewards), -1)
        found = np.stack([(factors * effect).sum(axis=1) for effect in self._effects()])
        found /= found.sum(axis=1, keepdims=True)
        return found[0], _error(found)

    def even(self, weights: WeightMatrix) -> Array:
        """The budget (m,) with which static realizes the same budget as W: what of W is not timing."""
        shares = self.realized(weights)[0] / (1.0 if self.normalize == "reward" else self.scales)
        return np.asarray(shares / shares.sum())

    def efficiency(self, weights: WeightMatrix, images: float | None = None, budget: ArrayLike | None = None) -> float:
        """Expected cosine between W's update on so many images and the noiseless update of the static W.

        sᵀGf / √(sᵀGs · (fᵀGf + fᵀCf/N)), with f and s the factors of W and of static, G the signal and C the noise. By
        default for the recipe's `batch`, and for the static W of the budget asked for, not of another `budget` (m,).
        NaN if the images are too few to see any signal.
        """
        return float(self._cosines(weights, images, budget)[0, 1])

    def static(self, weights: WeightMatrix, images: float | None = None, budget: ArrayLike | None = None) -> float:
        """Efficiency of the static W itself."""
        return float(self._cosines(weights, images, budget)[0, 0])

    def gain(
        self, weights: WeightMatrix, images: float | None = None, budget: ArrayLike | None = None
    ) -> tuple[float, float]:
        """Relative difference of the efficiencies of W and static, and its standard error (jackknife over splits)."""
        found = self._cosines(weights, images, budget)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = found[:, 1] / found[:, 0] - 1
        return float(ratio[0]), float(_error(ratio))

    def timing(self, weights: WeightMatrix, images: float | None = None) -> tuple[float, float]:
        """The gain over the static W that realizes the same budget (`even`), and its standard error.

        A W with other shares than the budget asked for may gain by favoring rewards with clear gradients, as static
        could; this is what remains.
        """
        return self.gain(weights, images, self.even(weights))

    def clear(self, weights: WeightMatrix) -> bool:
        """Whether the squared norm of static's expected update exceeds twice its standard error."""
        found = self._forms(weights)[0][:, 0, 0]
        return bool(found[0] > 2 * _error(found))

    def break_even(self, weights: WeightMatrix, budget: ArrayLike | None = None) -> float:
        """Images per update below which W's update is closer to the noiseless static one than static's own.

        N* = (c²·n_s − n_W) / (1 − c²), with c the cosine of the two noiseless updates and n = fᵀCf / fᵀGf, the images
        at which signal and noise are equal. 0 if static is never worse, ∞ if W is always better, NaN without a signal.
        With the `budget` of `even` it is that of timing alone.
        """
        signal, noise = (table[0] for table in self._forms(weights, budget))
        if not signal[0, 0] > 0:
            return np.nan
        cosine = max(signal[0, 1], 0) ** 2 / (signal[0, 0] * signal[1, 1]) if signal[1, 1] > 0 else 0.0
        worth = cosine * noise[0, 0] / signal[0, 0] - (noise[1, 1] / signal[1, 1] if signal[1, 1] > 0 else np.inf)
        if not worth > 1e-9 * abs(noise[0, 0] / signal[0, 0]):
            return 0.0
        return float(worth / (1 - cosine)) if cosine < 1 - 1e-12 else np.inf

    def break_even_interval(self, weights: WeightMatrix, budget: ArrayLike | None = None) -> tuple[float, float]:
        """Images per update up to which W is better, and from which static is, by more than two standard errors.

        0 and ∞ if there are none.
        """
        with np.errstate(invalid="ignore"):
            found = np.array([self.gain(weights, images, budget) for images in _LIMITS])
            better, worse = found[:, 0] > 2 * found[:, 1], found[:, 0] < -2 * found[:, 1]
        return float(_LIMITS[better].max(initial=0)), float(_LIMITS[worse].min(initial=np.inf))

    def _factors(self, weights: WeightMatrix, factors: Array) -> Array:
        """The factors (n,) of standardized rewards, up to a common one, as `advantage.contributions` applies them."""
        if weights.rewards != self.rewards or not schedule.same(weights.sigmas, self.sigmas):
            raise RecastError(
                f"W is for {', '.join(weights.rewards)} at T = {weights.steps}, but the gradients were measured for "
                f"{', '.join(self.rewards)} at T = {self.steps}: use W of the same rewards and grid"
            )
        if self.normalize == "reward":
            return factors.ravel()
        scaled = factors * self.scales[:, None]
        if self.normalize == "step":
            spread = np.sqrt(np.einsum("it,ij,jt->t", factors, self.covariance, factors))
            scaled = scaled / np.where(spread > 0, spread, 1)
        return np.asarray(scaled.ravel())

    def _forms(self, weights: WeightMatrix, budget: ArrayLike | None = None) -> tuple[Array, Array]:
        """Signal and noise (Q+1, 2, 2) of static (0) and W (1): of all splits, then without each."""
        asked = weights.budget if budget is None else numbers(budget, "the budget")
        static = np.repeat(asked[:, None], self.steps, axis=1)
        both = np.stack([self._factors(weights, each) for each in (static, weights.factors)])
        drawn = self._drawn
        own, cross = (both @ (drawn * table) @ both.T for table in (self.own, self.cross))
        signal = _without(both @ self.cross @ both.T, 2)
        own, cross = _without(own), _without(cross, 2)
        return _bounded(signal), self.images * (own - cross) + cross - signal

    def _cosines(self, weights: WeightMatrix, images: float | None, budget: ArrayLike | None) -> Array:
        """Efficiencies (Q+1, 2) of static and W: of all splits, then without each; NaN where there is no signal."""
        signal, noise = self._forms(weights, budget)
        squares = np.diagonal(signal + noise / (images or self.batch), axis1=1, axis2=2)
        with np.errstate(divide="ignore", invalid="ignore"):
            found = signal[:, 0] / np.sqrt(np.where(signal[:, :1, 0] > 0, signal[:, :1, 0], np.nan) * squares)
        return np.clip(found, -1, 1)

    def save(self, path: str | Path) -> Path:
        """Write the effects as JSON, atomically, and return the path; of symmetric tables one half is stored."""
        from recast.core import records, strict  # pydantic, which `import recast` does without

        half = np.triu_indices(self.own.shape[1])
        names = ("rewards", "sigmas", "images", "batch", "levels", "normalize", "scales", "covariance", "settings")
        fields = {name: getattr(self, name) for name in names} | {"effect": self.effect, "snr": self.snr()}
        fields |= {"own": self.own[:, half[0], half[1]], "cross": self.cross[:, half[0], half[1]]}
        return strict.write(path, _FORMAT, records.Effects, fields)

    @classmethod
    def load(cls, path: str | Path) -> Effects:
        """Read a file that `save` wrote; a RecastError names it if it is truncated, inconsistent or another format."""
        from recast.core import records, strict  # pydantic, which `import recast` does without

        content = strict.read(path, _FORMAT, records.Effects, _AGAIN, checked=False)
        try:
            rewards = check_names(content["rewards"])
            size = len(rewards) * (len(content["sigmas"]) - 1)
            found = cls(
                rewards=rewards,
                sigmas=content["sigmas"],
                own=_unpacked(content["own"], size),
                cross=_unpacked(content["cross"], size),
                images=content["images"],
                batch=content["batch"],
                levels=content["levels"],
                normalize=content["normalize"],
                scales=content["scales"],
                covariance=content["covariance"],
                settings=content.get("settings", {}),
            )
        except RecastError as error:
            raise RecastError(f"{path}: {error}") from error
        artifact.verify(content, path)
        return found


def _without(values: Array, order: int = 1) -> Array:
    """The mean over splits (axis 0), followed by the means without each split.

    With `order` 2 an entry is the mean over a split's pairs with the others, and a pair drops out with either split.
    """
    count, mean = len(values), values.mean(axis=0)
    return np.concatenate([mean[None], (count * mean - order * values) / (count - order)])


def _error(replicates: Array) -> Array:
    """Jackknife standard error from an estimate followed by the estimates without each split; ∞ if one is missing."""
    others = replicates[1:]
    spread = np.sqrt((len(others) - 1) * np.mean((others - others.mean(axis=0)) ** 2, axis=0))
    return np.asarray(np.where(np.isfinite(spread), spread, np.inf))


def _bounded(signal: Array) -> Array:
    """Signals (…, 2, 2) whose last entry is raised to the least that Cauchy and Schwarz allow."""
    first = signal[..., 0, 0]
    least = np.where(first > 0, signal[..., 0, 1] ** 2 / np.where(first > 0, first, 1), 0)
    found = signal.copy()
    found[..., 1, 1] = np.maximum(found[..., 1, 1], least)
    return np.asarray(found)


def _unpacked(values: ArrayLike, size: int) -> Array:
    """Symmetric tables (Q, size, size) from their upper triangles (Q, ·)."""
    rows, columns = np.triu_indices(max(size, 0))
    halves = numbers(values, "the table of products")
    if halves.shape[1:] != rows.shape:
        raise RecastError(f"a table of {size} gradients has {rows.size} products, not the shape {halves.shape[1:]}")
    tables = np.empty((len(halves), size, size))
    tables[:, rows, columns] = tables[:, columns, rows] = halves
    return tables
