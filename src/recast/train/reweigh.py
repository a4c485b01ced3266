"""Beyond the paper: curves at the policy as it is now, and W from them (train.reweigh_every)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate.utils import gather_object

from recast.config import Recipe
from recast.core.weights import WeightMatrix
from recast.estimate import stage, worlds
from recast.estimate.shards import Shard
from recast.weigh import weigh


def reweigh(recipe: Recipe, out: Path, trainer: Any) -> WeightMatrix:
    """W of the same rewards, budget and method, from rollouts of the old policy; its curves go to RUN/reweighed."""
    world = worlds.ImageWorld(recipe, out, policy=trainer.policy)
    accelerator, weights = trainer.accelerator, trainer.weights
    found = []
    with trainer.adapters.using("old"):
        for name in world.names[accelerator.process_index :: accelerator.num_processes]:
            scored = stage.sample_prompt(recipe, world, name).score(world.scorer(name))
            found.append((name, Shard(scored.scores, scored.evaluations)))
    shards = dict(gather_object(found))
    curves = stage.make_curves(recipe, world, world.names, [shards[name] for name in world.names])
    if accelerator.is_main_process:
        curves.save(out / "reweighed" / f"epoch-{trainer.position.epoch:05d}" / "gains.json")
    budget = dict(zip(weights.rewards, weights.budget.tolist(), strict=True))
    settings = recipe.weigh
    return weigh(curves, budget, weights.method, tau=settings.tau, shrink=settings.shrink, seed=settings.seed)
