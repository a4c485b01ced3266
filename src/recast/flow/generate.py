"""Images of a policy for a list of prompts, each from its own seed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recast.errors import RecastError
from recast.flow import sampling
from recast.flow.policy import Policy, conditioned


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
    """Images (B, 3, H, W) in [0, 1] on the CPU, one a prompt and seed, along the flow ODE.

    The start noise of an image is that of its seed alone, as in diffusers with one generator an image.
    """
    if isinstance(prompts, str) or not prompts:
        raise RecastError(f"prompts are a list of at least one, not {prompts!r}")
    if len(prompts) != len(seeds):
        raise RecastError(f"{len(prompts)} prompts need as many seeds, not {len(seeds)}")
    if method not in sampling.DETERMINISTIC:
        raise RecastError(
            f"images are made along the flow ODE, by {' or '.join(sampling.DETERMINISTIC)}, not {method!r}"
        )
    sigmas = policy.sigmas(steps)
    shape = (1, *policy.latent_shape)
    images = []
    for start in range(0, len(prompts), batch):
        condition = policy.condition(prompts[start : start + batch])
        noise = [
            torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds[start : start + batch]
        ]
        x = torch.cat(noise).to(condition.embeds.device)
        latents = sampling.sample(conditioned(policy, condition), x, sigmas, method=method)
        images.append(policy.decode(latents).cpu())  # a thousand images at 1024² are 12 GB
    return torch.cat(images)
