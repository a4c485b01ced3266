"""`recast estimate`: gain curves by rollouts, the estimators behind them, and the shards that hold the rollouts."""

from recast.estimate.curves import at_orders, from_rollouts
from recast.estimate.estimators import Sampled, Scorer, coupled, paper
from recast.estimate.rollout import ESTIMATORS, Estimator, rollouts, sample
from recast.estimate.shards import Rollouts
from recast.estimate.stage import sample_prompt
from recast.estimate.worlds import ImageWorld

__all__ = [
    "ESTIMATORS",
    "Estimator",
    "ImageWorld",
    "Rollouts",
    "Sampled",
    "Scorer",
    "at_orders",
    "coupled",
    "from_rollouts",
    "paper",
    "rollouts",
    "sample",
    "sample_prompt",
]
