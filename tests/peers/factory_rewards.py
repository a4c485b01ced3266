"""Rewards for Flow-Factory, by dotted path; imported inside its process only."""

from typing import Any

import loops
import numpy as np
import torch


def model(name: str) -> Any:
    """A pointwise reward model of Flow-Factory that has the scores of `loops`."""
    from flow_factory.rewards.abc import PointwiseRewardModel, RewardModelOutput

    class Reward(PointwiseRewardModel):
        def __call__(self, prompt: Any, image: Any = None, **_: Any) -> Any:
            pixels = torch.stack([torch.as_tensor(np.asarray(each).copy()).float() / 255 for each in image])
            return RewardModelOutput(rewards=torch.tensor(loops.scores(pixels, prompt)[name]), extra_info={})

    return Reward


def __getattr__(name: str) -> Any:
    if name in loops.NAMES:
        return model(name)
    raise AttributeError(name)
