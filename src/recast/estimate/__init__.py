"""Gain curves by rollouts: the estimators, and the stage that runs them over prompts and survives a kill."""

from recast.estimate.rollout import (
    ESTIMATORS,
    Estimator,
    Rollouts,
    Sampled,
    Scorer,
    coupled,
    paper,
    planned_evaluations,
    rollout_levels,
    rollouts,
    sample,
)

__all__ = [
    "ESTIMATORS",
    "Estimator",
    "Rollouts",
    "Sampled",
    "Scorer",
    "coupled",
    "paper",
    "planned_evaluations",
    "rollout_levels",
    "rollouts",
    "sample",
]
