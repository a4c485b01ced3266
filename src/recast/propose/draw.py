"""Proposals that are made locally, by the renderer of the shapes world or by the policy itself."""

from __future__ import annotations

from typing import Any

import torch

from recast import identity, images
from recast.config import Recipe
from recast.errors import RecastError
from recast.flow import families, sampling
from recast.flow.policy import conditioned
from recast.progress import Progress
from recast.prompts import Row
from recast.propose.store import Store
from recast.shapes import render

__all__ = ["draw"]


def draw(recipe: Recipe, rows: dict[str, Row], kept: Store, missing: list[tuple[str, int]], progress: Progress) -> None:
    """Store images of the renderer, or of the policy by the sampler that its rollouts use."""
    policy = families.load(recipe.policy) if recipe.propose.source == "policy" else None
    for prompt, number in progress(missing, "making proposals", len(missing)):
        seed = identity.seed_of(recipe.propose.seed, prompt, number)
        if policy is None:
            if "include" not in rows[prompt]:
                raise RecastError(
                    f"the renderer draws prompts of the shapes world only, not {prompt!r}: set another propose.source"
                )
            image = render.render([rows[prompt]], seed)[0]
        else:
            image = policy.decode(_posterior_sample(policy, recipe, prompt, seed))[0]
        kept.add(prompt, number, images.to_png(image))


def _posterior_sample(policy: Any, recipe: Recipe, prompt: str, seed: int) -> Any:
    """One sample of π_old, x_0 | x_1, by the sampler and the levels of the recipe's rollouts.

    By another sampler, the images would follow another law than the rollouts, and D would not be monotone for that
    reason alone.
    """
    settings, random = recipe.estimate, torch.Generator().manual_seed(seed)
    condition = policy.condition([prompt])
    grid = policy.sigmas(settings.steps)

    def noise(_level: int = 0) -> torch.Tensor:
        return torch.randn(1, *policy.latent_shape, generator=random).to(policy.device)

    if settings.estimator == "paper":
        method, levels = settings.sampler or "ancestral", grid
    else:
        method, levels = "ancestral2", [*sampling.rollout_levels(grid, settings.spacing), grid[-1]]
    step_noise = None if method in sampling.DETERMINISTIC else noise
    with torch.no_grad():
        return sampling.sample(conditioned(policy, condition), noise(), levels, method=method, noise=step_noise)
