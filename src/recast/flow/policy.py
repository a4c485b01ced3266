"""What a policy is: prompts to conditions, a velocity, and the way between latents and images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from recast.errors import RecastError


class Velocity(Protocol):
    """A rectified-flow velocity field, already conditioned on its prompt.

    Called with a batch `x` of any shape `(B, ...)` and one noise level `sigma` in [0, 1] for the
    whole batch; returns v = E[ε − x_0 | x_σ = x] in the shape of `x` (Eq. fm-loss). The batch may be
    of any size and order, and each row's answer depends on that row alone.
    """

    def __call__(self, x: Tensor, sigma: float) -> Tensor:
        """Velocity of every row of `x` at noise level `sigma`."""
        ...


@dataclass(frozen=True)
class Condition:
    """Prompts as the model reads them: `embeds` (n, tokens, d) and `pooled` (n, p), one row a prompt.

    `empty_embeds` and `empty_pooled` (1, ...) stand for the empty prompt and are there when `guidance` is above 1.
    """

    embeds: Tensor
    pooled: Tensor
    guidance: float = 1.0
    empty_embeds: Tensor | None = None
    empty_pooled: Tensor | None = None

    def __len__(self) -> int:
        return len(self.embeds)

    def rows(self, index: Tensor | slice | list[int]) -> Condition:
        """The condition of some of the prompts, in the order of `index`; repeats are allowed."""
        return replace(self, embeds=self.embeds[index], pooled=self.pooled[index])

    def expand(self, count: int) -> Condition:
        """One row per sample: a single prompt serves any number of samples, several serve one each."""
        if len(self) == count:
            return self
        if len(self) != 1:
            raise RecastError(
                f"{count} samples cannot be conditioned on {len(self)} prompts: give one, or one a sample"
            )
        return replace(self, embeds=self.embeds.expand(count, -1, -1), pooled=self.pooled.expand(count, -1))


class Policy(Protocol):
    """A text-to-image model with a rectified-flow velocity."""

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of one image's latents."""
        ...

    def sigmas(self, steps: int) -> list[float]:
        """σ_0 = 0 < … < σ_T = 1 of the model's own scheduler for T = `steps`."""
        ...

    def condition(self, prompts: Sequence[str]) -> Condition:
        """The prompts encoded, one row each."""
        ...

    def velocity(self, x: Tensor, sigma: float | Tensor, condition: Condition) -> Tensor:
        """v at latents `x` (B, c, h, w) and noise level `sigma`, one for all or one a sample (B,)."""
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Images (B, 3, H, W) in [0, 1]."""
        ...

    def encode(self, images: Tensor) -> Tensor:
        """Latents of images in [0, 1], scaled as the velocity expects them."""
        ...


def conditioned(policy: Policy, condition: Condition) -> Velocity:
    """The policy's velocity for one condition: what samplers and the estimator call."""
    latest = condition

    def velocity(x: Tensor, sigma: float) -> Tensor:
        nonlocal latest
        if len(latest) != len(x):  # once for all steps, and in memory: a linear layer is slow on repeated views
            rows = condition.expand(len(x))
            latest = replace(rows, embeds=rows.embeds.contiguous(), pooled=rows.pooled.contiguous())
        return policy.velocity(x, sigma, latest)

    return velocity
