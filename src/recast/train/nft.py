"""DiffusionNFT's loss (App. A.1): one velocity that fits good samples forwards and bad ones backwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Form = Literal["x0", "velocity"]
FLOOR = 1e-5
"""Smallest self-normalising weight."""


@dataclass(frozen=True)
class Terms:
    """The loss of every sample (B,) and what it is made of; `total` is what is minimised, on average."""

    positive: Tensor
    negative: Tensor
    policy: Tensor
    penalty: Tensor

    @property
    def total(self) -> Tensor:
        """Policy loss and penalty, a sample each."""
        return self.policy + self.penalty


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
    penalty: float = 0.0,
) -> Terms:
    """The loss at x_t = (1 − σ) x_0 + σ ε, where `r` (B,) in [0, 1] says how good each sample is.

    v⁺ = (1−β) v_old + β v and v⁻ = (1+β) v_old − β v are drawn to the sample's velocity ε − x_0, with weights r and
    1 − r. `velocity` is Eq. (nft-loss) itself, whose optimum is v_old + (2/β) Δ. `x0`, DiffusionNFT's own form,
    compares x̂_0 = x_t − σ v^± with x_0, divides each square by the sample's mean |x̂_0 − x_0| (taken as a constant),
    and multiplies by `clip`/β. `penalty` times the mean square of v − v_base is added where a `v_base` is given.
    """
    v_old = v_old.detach()
    target = noise - x_0
    errors = (target - (1 - beta) * v_old - beta * v, target - (1 + beta) * v_old + beta * v)
    if form == "x0":
        level = sigma.reshape(-1, *(1 for _ in x_0.shape[1:])).to(x_0.dtype)
        scaled = [level * error for error in errors]  # x̂_0 − x_0 = σ (ε − x_0 − v^±)
        positive, negative = (_mean(error**2) / _mean(error.detach().abs()).clamp(min=FLOOR) for error in scaled)
        policy = (r * positive + (1 - r) * negative) * (clip / beta)
    else:
        positive, negative = (_mean(error**2) for error in errors)
        policy = r * positive + (1 - r) * negative
    away = _mean((v - v_base.detach()) ** 2) if v_base is not None else v.new_zeros(len(v))
    return Terms(positive, negative, policy, penalty * away)


def _mean(values: Tensor) -> Tensor:
    return values.flatten(1).mean(1)
