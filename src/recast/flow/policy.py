"""The interface of a policy: prompt encoding, a velocity field, and conversion between latents and images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from recast.errors import RecastError

__all__ = ["Condition", "Policy", "Velocity", "conditioned"]


class Velocity(Protocol):
    """A rectified-flow velocity field that is already conditioned on its prompt.

    It is called with a batch `x` (B, ...) and one noise level `sigma` in [0, 1] for the whole batch, and returns
    v = E[ε − x_0 | x_σ = x] in the shape of `x` (Eq. fm-loss). Each row of the result depends on that row of `x` only.

    Examples
    --------
    Data concentrated at 0 have x_σ = σ ε, so v = x / σ, and the flow leads to 0:

    >>> import torch
    >>> from recast.flow import sampling
    >>> def velocity(x, sigma):
    ...     return x / sigma
    >>> sampling.sample(velocity, torch.ones(2, 3), [0.0, 0.5, 1.0]).abs().max().item()
    0.0
    """

    def __call__(self, x: Tensor, sigma: float) -> Tensor:
        """Velocity of every row of `x` at noise level `sigma`."""
        ...


@dataclass(frozen=True)
class Condition:
    """Encoded prompts, one row per prompt.

    Parameters
    ----------
    embeds : Tensor, shape (n, tokens, d)
        Token embeddings.
    pooled : Tensor, shape (n, p)
        Pooled embeddings.
    guidance : float, default 1.0
        Scale of classifier-free guidance; 1 is none.
    empty_embeds, empty_pooled : Tensor, shape (1, tokens, d) and (1, p), optional
        Embeddings of the empty prompt, needed for guidance above 1.

    Examples
    --------
    >>> import torch
    >>> condition = Condition(torch.zeros(2, 5, 8), torch.zeros(2, 4))
    >>> len(condition), len(condition.rows([0, 0, 1])), len(condition.rows([1]).expand(6))
    (2, 3, 6)
    """

    embeds: Tensor
    pooled: Tensor
    guidance: float = 1.0
    empty_embeds: Tensor | None = None
    empty_pooled: Tensor | None = None

    def __len__(self) -> int:
        return len(self.embeds)

    def rows(self, index: Tensor | slice | list[int]) -> Condition:
        """The condition of the prompts at `index`, which may repeat."""
        return replace(self, embeds=self.embeds[index], pooled=self.pooled[index])

    def expand(self, count: int) -> Condition:
        """One row per sample: a single prompt is repeated, several must be `count`."""
        if len(self) == count:
            return self
        if len(self) != 1:
            raise RecastError(
                f"{count} samples cannot be conditioned on {len(self)} prompts: give one prompt, or one per sample"
            )
        return replace(self, embeds=self.embeds.expand(count, -1, -1), pooled=self.pooled.expand(count, -1))


class Policy(Protocol):
    """A text-to-image model with a rectified-flow velocity.

    `recast.flow.sd3.SD3Policy` is the implementation for Stable Diffusion 3.

    Examples
    --------
    >>> import torch
    >>> from recast import config
    >>> from recast.flow import sd3
    >>> policy = sd3.load(config.policy(model="shapes"))
    >>> policy.latent_shape, [round(sigma, 3) for sigma in policy.sigmas(2)]
    ((40, 4, 4), [0.0, 0.1, 1.0])
    >>> tuple(policy.decode(torch.zeros(1, *policy.latent_shape)).shape)
    (1, 3, 64, 64)
    """

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of one image's latents."""
        ...

    def sigmas(self, steps: int) -> list[float]:
        """σ_0 = 0 < … < σ_T = 1 of the model's own scheduler for T = `steps`."""
        ...

    def condition(self, prompts: Sequence[str]) -> Condition:
        """The encoded prompts, one row per prompt."""
        ...

    def velocity(self, x: Tensor, sigma: float | Tensor, condition: Condition) -> Tensor:
        """v at latents `x` (B, c, h, w) and noise level `sigma`, one for all samples or one per sample (B,)."""
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Images (B, 3, H, W) in [0, 1] of latents (B, c, h, w)."""
        ...

    def encode(self, images: Tensor) -> Tensor:
        """Latents (B, c, h, w) of images (B, 3, H, W) in [0, 1], scaled as the velocity expects them."""
        ...


def conditioned(policy: Policy, condition: Condition) -> Velocity:
    """The policy's velocity for one condition, as samplers and the estimator call it."""
    latest = condition

    def velocity(x: Tensor, sigma: float) -> Tensor:
        nonlocal latest
        if len(latest) != len(x):  # once for all steps, and contiguous: a linear layer is slow on expanded views
            rows = condition.expand(len(x))
            latest = replace(rows, embeds=rows.embeds.contiguous(), pooled=rows.pooled.contiguous())
        return policy.velocity(x, sigma, latest)

    return velocity
