"""The interface of a policy: prompt encoding, a velocity field, and conversion between latents and images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from recast.errors import RecastError

__all__ = ["Condition", "Policy", "Velocity", "conditioned", "padded"]


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
    """Encoded prompts, as named tensors of one row per prompt.

    Parameters
    ----------
    tensors : mapping of str to Tensor
        What the family's network takes, such as token embeddings, pooled embeddings or a mask, each of shape (n, ...).
    guidance : float, default 1.0
        The recipe's `guidance`, as the family understands it.
    empty : mapping of str to Tensor, optional
        The same for the empty prompt, each of shape (1, ...), if guidance needs it.

    Examples
    --------
    >>> import torch
    >>> condition = Condition({"embeds": torch.zeros(2, 5, 8), "pooled": torch.zeros(2, 4)})
    >>> len(condition), len(condition.rows([0, 0, 1])), len(condition.rows([1]).expand(6))
    (2, 3, 6)
    """

    tensors: Mapping[str, Tensor]
    guidance: float = 1.0
    empty: Mapping[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def rows(self, index: Tensor | slice | list[int]) -> Condition:
        """The condition of the prompts at `index`, which may repeat; as a tensor, it is best on the CPU."""
        places = {tensor.device: _moved(index, tensor.device) for tensor in self.tensors.values()}
        return replace(self, tensors={name: tensor[places[tensor.device]] for name, tensor in self.tensors.items()})

    def expand(self, count: int) -> Condition:
        """One row per sample, of the empty prompt too: a single prompt is repeated, several must be `count`."""
        if all(len(tensor) == count for tensor in (*self.tensors.values(), *self.empty.values())):
            return self
        if len(self) not in (1, count):
            raise RecastError(
                f"{count} samples cannot be conditioned on {len(self)} prompts: give one prompt, or one per sample"
            )
        return replace(self, tensors=_repeated(self.tensors, count), empty=_repeated(self.empty, count))

    @cached_property
    def both(self) -> dict[str, Tensor]:
        """The rows of the empty prompt, then those of the prompts; shorter token sequences are padded by 0."""
        pairs = {name: [tensor, self.tensors[name]] for name, tensor in self.empty.items()}
        return {name: torch.cat(padded(pair, 1)) for name, pair in pairs.items()}

    def to(self, device: str | torch.device, but: Sequence[str] = ()) -> Condition:
        """The condition on another device, but for the tensors named in `but`."""
        moved = (
            {name: tensor if name in but else tensor.to(device) for name, tensor in each.items()}
            for each in (self.tensors, self.empty)
        )
        return replace(self, tensors=next(moved), empty=next(moved))


def _moved(index: Tensor | slice | list[int], device: torch.device) -> Tensor | slice | list[int]:
    return index.to(device) if isinstance(index, Tensor) else index


def _repeated(tensors: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """Tensors of one row with that row repeated, contiguous, because a linear layer is slow on expanded views."""
    return {name: tensor.expand(count, *tensor.shape[1:]).contiguous() for name, tensor in tensors.items()}


class Policy(Protocol):
    """A text-to-image model with a rectified-flow velocity, as all stages use it.

    `recast.flow.families.load` returns one. `recast.flow.pipeline.PipelinePolicy` implements it for diffusers pipelines
    except for what differs between families.

    Attributes
    ----------
    device : torch.device
        Where latents, conditions and the network are.
    image_size : tuple of int
        Height and width of the images in pixels.
    network : Module
        The transformer, which gets the adapters.
    model : callable
        What `velocity` calls: the network, or the wrapper that a trainer has put around it.
    targets : str
        Regular expression of the names of the modules in `network` that get adapters.

    Examples
    --------
    >>> import torch
    >>> from recast import config
    >>> from recast.flow import families
    >>> policy = families.load(config.policy(model="shapes"))
    >>> policy.latent_shape, [round(sigma, 3) for sigma in policy.sigmas(2)]
    ((40, 4, 4), [0.0, 0.1, 1.0])
    >>> tuple(policy.decode(torch.zeros(1, *policy.latent_shape)).shape)
    (1, 3, 64, 64)
    """

    device: torch.device
    image_size: tuple[int, int]
    network: Any
    model: Any
    targets: str

    @property
    def row_bytes(self) -> int:
        """Approximate size of one sample's activations in a velocity call."""
        ...

    @property
    def identity(self) -> Mapping[str, Any]:
        """What the policy is, for the provenance of results."""
        ...

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Shape of one image's latents, of any rank."""
        ...

    def sigmas(self, steps: int) -> list[float]:
        """σ_0 < … < σ_T of the model's own scheduler for T = `steps`."""
        ...

    def condition(self, prompts: Sequence[str]) -> Condition:
        """The encoded prompts, one row per prompt."""
        ...

    def velocity(self, x: Tensor, sigma: float | Tensor, condition: Condition) -> Tensor:
        """v at latents `x` (B, ...) and noise level `sigma`, one for all samples or one per sample (B,)."""
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Images (B, 3, H, W) in [0, 1] of latents (B, ...)."""
        ...

    def encode(self, images: Tensor) -> Tensor:
        """Latents (B, ...) of images (B, 3, H, W) in [0, 1], scaled as the velocity expects them."""
        ...


def padded(column: Sequence[Tensor], axis: int) -> list[Tensor]:
    """Tensors as long as the longest one along an axis, which they may not have."""
    if column[0].ndim <= axis:
        return list(column)
    longest = max(each.shape[axis] for each in column)
    sizes = [[*each.shape[:axis], longest - each.shape[axis], *each.shape[axis + 1 :]] for each in column]
    return [
        torch.cat([each, each.new_zeros(size)], axis) if size[axis] else each
        for each, size in zip(column, sizes, strict=True)
    ]


def conditioned(policy: Policy, condition: Condition) -> Velocity:
    """The policy's velocity for one condition, as samplers and the estimator call it."""
    expanded: dict[int, Condition] = {}

    def velocity(x: Tensor, sigma: float) -> Tensor:
        if len(x) not in expanded:  # once for all steps
            expanded.clear()
            expanded[len(x)] = condition.expand(len(x))
        return policy.velocity(x, sigma, expanded[len(x)])

    return velocity
