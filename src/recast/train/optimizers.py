"""The optimizer of the adapters: AdamW, or AdamW with moments in 8 bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import Parameter

from recast import objects
from recast.config import TrainConfig

__all__ = ["make"]


def make(settings: TrainConfig, parameters: Sequence[Parameter]) -> torch.optim.Optimizer:
    """The optimizer that `train.optimizer` names; a RecastError if its library is not installed."""
    kind = torch.optim.AdamW
    if settings.optimizer == "adamw8bit":
        kind = objects.library("bitsandbytes", "train.optimizer = adamw8bit", "adamw").optim.AdamW8bit
    return kind(
        parameters,
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
    )
