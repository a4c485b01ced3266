"""`recast estimate`: gain curves by rollouts, the estimators behind them, and the shards that hold the rollouts."""

from recast.estimate.curves import at_orders, from_rollouts
from recast.estimate.estimators import Sampled, Scorer, coupled, paper
from recast.estimate.rollout import ESTIMATORS, Estimator, rollouts, sample
from recast.estimate.shards import Rollouts
from recast.estimate.stage import paper_evaluations, rows_per_prompt, sample_prompt
from recast.estimate.worlds import SCORED, ImageWorld, rows_within

__all__ = [
    "ESTIMATORS",
    "SCORED",
    "Estimator",
    "ImageWorld",
    "Rollouts",
    "Sampled",
    "Scorer",
    "at_orders",
    "coupled",
    "from_rollouts",
    "paper",
    "paper_evaluations",
    "rollouts",
    "rows_per_prompt",
    "rows_within",
    "sample",
    "sample_prompt",
]
