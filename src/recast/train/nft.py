"""DiffusionNFT's loss (App. A.1): one velocity that fits good samples forwards and bad ones backwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

__all__ = ["Form", "Terms", "loss"]

Form = Literal["x0", "velocity"]
_FLOOR = 1e-5  # smallest self-normalizing weight


@dataclass(frozen=True)
class Terms:
    """The loss of every sample (B,) and its terms; the mean of `total` is minimized."""

    positive: Tensor
    negative: Tensor
    policy: Tensor
    kl: Tensor

    @property
    def total(self) -> Tensor:
        """Policy loss plus KL term, one per sample."""
        return self.policy + self.kl


def loss(
    v: Tensor,
    v_old: Tensor,
    x_0: Tensor,
    noise: Tensor,
    sigma: Tensor,
    r: Tensor,
    *,
    beta: float = 0.1,
    form: Form = "x0",
    clip: float = 5.0,
    v_base: Tensor | None = None,
    kl_weight: float = 0.0,
) -> Terms:
    """DiffusionNFT's loss at x_t = (1 − σ) x_0 + σ ε (Eq. nft-loss), one value per sample.

    Parameters
    ----------
    v, v_old : Tensor, (B, ...)
        Velocities of the trained and of the old policy at x_t; `v_old` gets no gradient.
    x_0, noise : Tensor, (B, ...)
        The clean sample and the noise ε.
    sigma, r : Tensor, (B,)
        Noise level, and optimality in [0, 1] (`advantage.optimality`).
    beta : float, default 0.1
        v⁺ = (1−β) v_old + β v and v⁻ = (1+β) v_old − β v are fitted to ε − x_0 with weights r and 1 − r.
    form : {"x0", "velocity"}, default "x0"
        "velocity" is Eq. (nft-loss), whose optimum is v_old + (2/β) Δ. "x0" is DiffusionNFT's own form: it compares
        x̂_0 = x_t − σ v^± with x_0, divides each square by the mean of |x̂_0 − x_0|, taken as a constant, and
        multiplies by `clip`/β.
    clip : float, default 5.0
        The clip of the advantages behind `r`; only the form "x0" uses it.
    v_base : Tensor, (B, ...), optional
        The base model's velocity at x_t; gets no gradient.
    kl_weight : float, default 0.0
        The weight of the squared distance to the base's velocity, DiffusionNFT's KL term (the paper has none).

    Returns
    -------
    Terms
        `positive`, `negative`, `policy`, `kl` and `total`, each (B,).

    Examples
    --------
    >>> import torch
    >>> one, level = torch.ones(1, 2), torch.tensor([0.5])
    >>> loss(0.5 * one, 0 * one, 0 * one, one, level, torch.tensor([1.0]), v_base=0 * one, kl_weight=2.0).kl
    tensor([0.5000])
    """
    target, v_old = noise - x_0, v_old.detach()
    errors = [target - (1 - beta) * v_old - beta * v, target - (1 + beta) * v_old + beta * v]
    positive, negative = _squares(errors, sigma.to(x_0.dtype), form)
    policy = r * positive + (1 - r) * negative
    if form == "x0":
        policy = policy * (clip / beta)
    distance = _mean((v - v_base.detach()) ** 2) if v_base is not None else v.new_zeros(len(v))
    return Terms(positive, negative, policy, kl_weight * distance)


def _squares(errors: list[Tensor], sigma: Tensor, form: Form) -> list[Tensor]:
    """Mean squares (B,) of the errors of v^±, or of their x̂_0 divided by its own mean error."""
    if form == "velocity":
        return [_mean(error**2) for error in errors]
    level = sigma.reshape(-1, *(1 for _ in errors[0].shape[1:]))
    scaled = [level * error for error in errors]  # x̂_0 − x_0 = σ (ε − x_0 − v^±)
    return [_mean(error**2) / _mean(error.detach().abs()).clamp(min=_FLOOR) for error in scaled]


def _mean(values: Tensor) -> Tensor:
    return values.flatten(1).mean(1)
