"""Bytes that every stage writes."""

from __future__ import annotations

from recast.config import Recipe
from recast.plan.counts import Counts
from recast.plan.network import Network

__all__ = ["estimate", "evaluate", "propose", "train"]


def propose(recipe: Recipe, network: Network, prompts: int) -> dict[str, int]:
    """Proposals, as large as images without compression: a PNG of a photograph takes half of it or more."""
    height, width = network.policy.image_size
    if recipe.propose.source == "openai" and recipe.propose.size.count("x") == 1:
        sides = recipe.propose.size.split("x")
        height, width = (int(side) if side.isdigit() else 1024 for side in sides)
    return {"proposals": prompts * recipe.estimate.samples * 3 * height * width}


def estimate(recipe: Recipe, prompts: int) -> dict[str, int]:
    """Shards: a float64 score per reward, level and rollout."""
    settings = recipe.estimate
    paths = settings.samples * settings.rollouts * (settings.noisings if settings.estimator == "coupled" else 1)
    return {"shards": prompts * 8 * len(recipe.rewards) * (settings.steps + 1) * paths}


def train(recipe: Recipe, adapter: int) -> dict[str, int]:
    """Checkpoints of three adapters and the optimizer, one more than are kept while writing; the final adapter."""
    moments = 2 if recipe.train.optimizer == "adamw" else 0.5
    return {"checkpoints": round((recipe.train.keep + 1) * (3 + moments) * adapter), "adapter": adapter}


def evaluate(network: Network, found: Counts) -> dict[str, int]:
    """Images, as large as without compression."""
    height, width = network.policy.image_size
    images = max(found.scored.values(), default=0)
    return {"images": images * 3 * height * width}
