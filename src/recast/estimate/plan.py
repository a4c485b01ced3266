"""The cost of `recast estimate` before it is run: counts from the recipe, seconds from a short measurement."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from recast.config import Recipe
from recast.estimate import worlds
from recast.estimate.stage import evaluations_per_prompt, paper_evaluations
from recast.flow.generate import TILE

__all__ = ["Plan", "plan"]


@dataclass(frozen=True)
class Plan:
    """Counts over all prompts, seconds on this device with one process, and the evaluations of Alg. 1 at K = 16."""

    prompts: int
    evaluations: int
    images: int
    reward_calls: int
    seconds: float
    paper_evaluations: int


def plan(recipe: Recipe, out: Path) -> Plan:
    """The cost of a recipe; its proposals need not exist yet."""
    settings = recipe.estimate
    world = worlds.open_world(recipe, out, proposed=False)
    count, steps = len(world.names), settings.steps
    paths = settings.noisings if settings.estimator == "coupled" else 1
    evaluations = count * evaluations_per_prompt(recipe, world.sigmas)
    images = count * settings.samples * (1 + steps * paths * settings.rollouts)
    name = world.names[0]
    x = torch.randn(TILE, *world.shape, dtype=world.dtype)
    velocity, score = world.velocity(name), world.scorer(name)
    with torch.no_grad():
        per_step = _seconds(lambda: velocity(x, 0.5)) / len(x)
        per_image = _seconds(lambda: score(x)) / len(x)
    return Plan(
        count,
        evaluations,
        images,
        images * len(world.rewards),
        evaluations * per_step + images * per_image,
        paper_evaluations(recipe, count),
    )


def _seconds(call: Callable[[], object]) -> float:
    """The fastest of three calls, after one to warm up."""
    call()
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return min(times)
