"""Beyond the paper: gain curves at the current policy, and W from them (train.reweigh_every)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object

from recast import versions
from recast.config import Recipe
from recast.core import schedule
from recast.core.weights import WeightMatrix
from recast.errors import RecastError
from recast.estimate import ImageWorld, Rollouts, from_rollouts, sample_prompt
from recast.train.trainer import StoppedError
from recast.weigh import weigh

__all__ = ["reweigh"]


def reweigh(recipe: Recipe, out: Path, trainer: Any) -> WeightMatrix:
    """W of the same rewards, budget, method and ν, from rollouts of the old policy; curves go to RUN/reweighed."""
    accelerator, weights = trainer.accelerator, trainer.weights
    found: list[tuple[str, Rollouts]] = []
    failure: RecastError | None = None
    try:
        world = ImageWorld(recipe, out, policy=trainer.policy, models=trainer.models)
        _check(world.sigmas, trainer.sigmas)
        with torch.no_grad(), trainer.adapters.using("old"):
            mine = world.names[accelerator.process_index :: accelerator.num_processes]
            found = [(name, sample_prompt(recipe, world, name).score(world.scorer(name))) for name in mine]
    except RecastError as error:
        failure = error
    if trainer.anywhere(failure is not None):
        raise StoppedError(str(failure or "another process failed to estimate gain curves"))
    shards = dict(gather_object(found))
    rollouts, scored_by = [shards[name] for name in world.names], versions.of(recipe.rewards)
    curves = from_rollouts(recipe, world.sigmas, rollouts, trainer.models, scored_by=scored_by)
    if accelerator.is_main_process:
        curves.save(out / "reweighed" / f"epoch-{trainer.position.epoch:05d}" / "gains.json")
    budget = dict(zip(weights.rewards, weights.budget.tolist(), strict=True))
    settings = recipe.weigh
    options: dict[str, Any] = {"tau": settings.tau, "shrink": settings.shrink, "seed": settings.seed}
    return weigh(curves, budget, weights.method, columns=weights.nu, **options)


def _check(measured: list[float], trained: list[float]) -> None:
    if not schedule.same(measured, trained):
        steps = len(trained) - 1
        raise RecastError(
            f"curves at T = {len(measured) - 1} do not fit training at T = {steps}: set estimate.steps={steps}"
        )
