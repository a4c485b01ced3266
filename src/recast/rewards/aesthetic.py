"""Aesthetic: LAION's predictor of ratings, a chain of linear layers over CLIP ViT-L/14 image embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from recast.rewards import catalog, checkpoints, clip
from recast.rewards.base import Images, as_tensor

__all__ = ["Aesthetic", "head"]


def head(width: int) -> nn.Sequential:
    """Five linear layers under their published numbers, with dropouts and without activations between them."""
    layers = [nn.Linear(width, 1024), nn.Dropout(0.2), nn.Linear(1024, 128), nn.Dropout(0.2), nn.Linear(128, 64)]
    return nn.Sequential(*layers, nn.Dropout(0.1), nn.Linear(64, 16), nn.Linear(16, 1))


class Aesthetic:
    """Aesthetic rating of about 1 to 10, independent of the prompt.

    `checkpoint` is the published .pth file: a path, or an address from which it is downloaded once.
    """

    def __init__(
        self,
        model: str | Path = catalog.CLIP_L14,
        checkpoint: str | Path = catalog.AESTHETIC,
        device: str = "auto",
        dtype: str = "float32",
        batch_size: int = 64,
        offload: bool = False,
    ) -> None:
        self.batch_size = clip.check_batch("aesthetic", batch_size)
        self.clip, self.pixels = clip.load("aesthetic", model, device=device, dtype=dtype, offload=offload)
        self.head = _load_head(checkpoint, self.clip.model.config.projection_dim).to(self.clip.device)

    @torch.no_grad()
    def __call__(
        self, images: Images, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]] | None = None
    ) -> NDArray[np.float64]:
        """One rating per image."""
        features = self.clip.images(as_tensor(images, prompts), self.pixels, self.batch_size)
        return clip.finite("the aesthetic predictor", self.head(features)[:, 0]).cpu().double().numpy()


def _load_head(source: str | Path, width: int) -> nn.Sequential:
    with checkpoints.loading("aesthetic predictor", source):
        state = checkpoints.read(checkpoints.find(source, catalog.AESTHETIC_FILE))
        made = head(width).eval().requires_grad_(False)
        checkpoints.fill(made, {name.removeprefix("layers."): value for name, value in state.items()})
    return made
