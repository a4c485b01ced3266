"""Random Gaussian mixtures that stand for prompts, each with a mode-level, a mixed and a fine reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recast.config import MIXTURE_REWARDS
from recast.flow.mixture import GaussianMixture, TiltReward

__all__ = ["REWARDS", "MixturePrompt", "exact_mu", "mixture_prompt"]

REWARDS = MIXTURE_REWARDS
_DETAIL = 4  # number of coordinates with fine detail
_POOR = 0.1  # value of the modes that are wrong for the prompt


@dataclass(frozen=True)
class MixturePrompt:
    """One prompt's policy π_old, its rewards in the order of `REWARDS`, and the proposal π⁺."""

    policy: GaussianMixture
    rewards: tuple[TiltReward, ...]
    proposal: GaussianMixture


def mixture_prompt(dimension: int, modes: int, seed: int) -> MixturePrompt:
    """A seeded mixture: unit-scale modes of width 0.1 to 0.4, of which a third are right for the prompt.

    The reward `mode` depends on the mode only, which is decided at the noisy end; `fine` on the position inside any
    mode, in the first few coordinates, which is decided at the clean end; `mixed` on both. The proposal is stronger
    than the policy in both respects and perfect in neither, like an external generator.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    means = normal(modes, dimension)
    variances = (0.1 + 0.3 * torch.rand(modes, dimension, generator=generator, dtype=torch.float64)) ** 2
    policy = GaussianMixture((0.5 * normal(modes)).softmax(0), means, variances)
    values = torch.full((modes,), _POOR, dtype=torch.float64)
    values[torch.randperm(modes, generator=generator)[: max(1, modes // 3)]] = 1.0
    centers = means + 0.5 * normal(modes, dimension) * variances.sqrt()
    precisions = torch.zeros_like(variances)
    precisions[:, :_DETAIL] = 1 / variances[:, :_DETAIL]
    mixed = TiltReward(policy, values.sqrt(), centers, precisions / 2)
    rewards = (
        TiltReward(policy, values, centers, torch.zeros_like(precisions)),
        mixed,
        TiltReward(policy, torch.ones_like(values), centers, precisions),
    )
    return MixturePrompt(policy, rewards, mixed.positive())


def exact_mu(
    prompt: MixturePrompt, clean: Tensor, sigmas: Sequence[float], noisings: int, seed: int
) -> NDArray[np.float64]:
    """Exact conditional rewards (m, T+1, N·noisings) at noised proposals, which rollouts estimate."""
    generator = torch.Generator().manual_seed(seed)
    levels = []
    for sigma in sigmas:
        half = torch.randn((noisings + 1) // 2, *clean.shape, generator=generator, dtype=clean.dtype)
        noise = torch.cat([half, -half])[:noisings]
        x = ((1 - sigma) * clean + sigma * noise).flatten(0, 1)
        levels.append(torch.stack([reward.conditional(x, sigma) for reward in prompt.rewards]))
    return torch.stack(levels, dim=1).numpy()
