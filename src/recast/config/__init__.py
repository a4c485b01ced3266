"""Recipes: typed, frozen settings of every stage, from YAML and `key=value` overrides."""

from recast.config.recipe import RENAMED, Recipe, load, load_run, options, policy
from recast.config.sections import (
    GENERATORS,
    MIXTURE_REWARDS,
    EstimateConfig,
    EvaluateConfig,
    PolicyConfig,
    PromptsConfig,
    ProposeConfig,
    RunConfig,
    SweepConfig,
    WeighConfig,
    WorldConfig,
)
from recast.config.training import TrainConfig

__all__ = [
    "GENERATORS",
    "MIXTURE_REWARDS",
    "RENAMED",
    "EstimateConfig",
    "EvaluateConfig",
    "PolicyConfig",
    "PromptsConfig",
    "ProposeConfig",
    "Recipe",
    "RunConfig",
    "SweepConfig",
    "TrainConfig",
    "WeighConfig",
    "WorldConfig",
    "load",
    "load_run",
    "options",
    "policy",
]
