"""Beyond the paper: curves at the policy as it is now, and W from them (train.reweigh_every)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object

from recast.config import Recipe
from recast.core import schedule
from recast.core.weights import WeightMatrix
from recast.errors import RecastError
from recast.estimate import stage, worlds
from recast.estimate.shards import Shard
from recast.train.trainer import StoppedError
from recast.weigh import weigh


def reweigh(recipe: Recipe, out: Path, trainer: Any) -> WeightMatrix:
    """W of the same rewards, budget and method, from rollouts of the old policy; its curves go to RUN/reweighed."""
    accelerator, weights = trainer.accelerator, trainer.weights
    found: list[tuple[str, Shard]] = []
    failure: RecastError | None = None
    try:
        world = worlds.ImageWorld(recipe, out, policy=trainer.policy, judges=trainer.judges)
        _check(world.sigmas, trainer.sigmas)
        with torch.no_grad(), trainer.adapters.using("old"):
            for name in world.names[accelerator.process_index :: accelerator.num_processes]:
                scored = stage.sample_prompt(recipe, world, name).score(world.scorer(name))
                found.append((name, Shard(scored.scores, scored.evaluations)))
    except RecastError as error:
        failure = error
    if trainer.anywhere(failure is not None):
        raise StoppedError(str(failure or "another process could not measure its curves"))
    shards = dict(gather_object(found))
    curves = stage.make_curves(recipe, world, world.names, [shards[name] for name in world.names])
    if accelerator.is_main_process:
        curves.save(out / "reweighed" / f"epoch-{trainer.position.epoch:05d}" / "gains.json")
    budget = dict(zip(weights.rewards, weights.budget.tolist(), strict=True))
    settings = recipe.weigh
    return weigh(curves, budget, weights.method, tau=settings.tau, shrink=settings.shrink, seed=settings.seed)


def _check(measured: list[float], trained: list[float]) -> None:
    if not schedule.same(measured, trained):
        raise RecastError(f"curves at T = {len(measured) - 1} do not fit training at T = {len(trained) - 1}")
