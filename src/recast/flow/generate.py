"""Images of a policy for a list of prompts, with one seed per image."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recast.errors import RecastError
from recast.flow import sampling
from recast.flow.policy import Policy, Velocity, conditioned

__all__ = ["TILE", "batched", "generate", "start_noise"]

TILE = 16
"""Velocity calls have a multiple of this many rows, so that a row's bits do not depend on how a batch is split."""


@torch.no_grad()
def generate(
    policy: Policy,
    prompts: Sequence[str],
    seeds: Sequence[int],
    *,
    steps: int,
    method: sampling.Method = "dpm2",
    batch: int = 64,
) -> Tensor:
    """Images (B, 3, H, W) in [0, 1] on the CPU, one per prompt and seed, along the flow ODE.

    Parameters
    ----------
    policy : Policy
        The model.
    prompts : sequence of str
        B prompts.
    seeds : sequence of int
        B seeds. The initial noise of an image depends on its seed only, as in diffusers with one generator per image.
    steps : int
        T.
    method : {"dpm2", "euler"}, default "dpm2"
        Sampler; see `recast.flow.sampling.sample`.
    batch : int, default 64
        Number of images sampled together.

    Raises
    ------
    RecastError
        If there are no prompts, not as many seeds, or the method is stochastic; if an image is not finite.

    Examples
    --------
    >>> from recast import config
    >>> from recast.flow import families
    >>> policy = families.load(config.policy(model="shapes"))
    >>> tuple(generate(policy, ["a red circle", "a blue square"], [0, 1], steps=2).shape)
    (2, 3, 64, 64)
    """
    if isinstance(prompts, str) or not prompts:
        raise RecastError(f"prompts must be a list of at least one prompt, not {prompts!r}")
    if len(prompts) != len(seeds):
        raise RecastError(f"{len(prompts)} prompts need as many seeds, not {len(seeds)}")
    if method not in sampling.DETERMINISTIC:
        raise RecastError(
            f"images are sampled along the flow ODE, by {' or '.join(sampling.DETERMINISTIC)}, not {method!r}"
        )
    sigmas = policy.sigmas(steps)
    images = []
    for start in range(0, len(prompts), batch):
        condition = policy.condition(prompts[start : start + batch])
        x = start_noise(policy.latent_shape, seeds[start : start + batch]).to(policy.device)
        latents = sampling.sample(conditioned(policy, condition), x, sigmas, method=method)
        images.append(policy.decode(latents).cpu())  # a thousand images at 1024² are 12 GB
        _require_finite(latents, images[-1], prompts[start : start + batch])
    return torch.cat(images)


def _require_finite(latents: Tensor, images: Tensor, prompts: Sequence[str]) -> None:
    """Raise if a latent or an image is not finite; as a file it would be black."""
    for values, what in ((latents, "a latent"), (images, "an image")):
        good = values.isfinite().flatten(1).all(1).tolist()
        if not all(good):
            raise RecastError(
                f"the policy makes {what} that is not finite for the prompt {prompts[good.index(False)]!r}: its "
                "parameters or its adapter are broken, or policy.dtype has too small a range"
            )


def start_noise(shape: Sequence[int], seeds: Sequence[int]) -> Tensor:
    """Gaussian noise (B, *shape) on the CPU, each row from its own seed.

    >>> start_noise((2,), [7, 7, 8])[0].equal(start_noise((2,), [8, 7])[1])
    True
    """
    generator = torch.Generator()
    return torch.stack([torch.randn(tuple(shape), generator=generator.manual_seed(int(seed))) for seed in seeds])


def batched(velocity: Velocity, size: int) -> Velocity:
    """The same velocity, called with at most `size` rows, padded to a multiple of `TILE` rows."""

    def call(x: Tensor, sigma: float) -> Tensor:
        found = []
        for part in x.split(size):
            short = -len(part) % TILE
            padded = torch.cat([part, part[-1:].expand(short, *part.shape[1:])]) if short else part
            found.append(velocity(padded, sigma)[: len(part)])
        return torch.cat(found)

    return call
