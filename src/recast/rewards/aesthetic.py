"""Aesthetic: LAION's predictor of ratings, a linear chain over CLIP ViT-L/14 image embeddings."""

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


def head(width: int) -> nn.Sequential:
    """Five linear layers, the published numbering kept: between them dropouts only, no activation."""
    layers = [nn.Linear(width, 1024), nn.Dropout(0.2), nn.Linear(1024, 128), nn.Dropout(0.2), nn.Linear(128, 64)]
    return nn.Sequential(*layers, nn.Dropout(0.1), nn.Linear(64, 16), nn.Linear(16, 1))


class Aesthetic:
    """Ratings of about 1 to 10; prompts do not matter.

    `weights` is the published .pth, as a path or the address it is fetched from once.
    """

    def __init__(
        self,
        model: str | Path = catalog.CLIP_L14,
        weights: str | Path = catalog.AESTHETIC,
        device: str = "auto",
        dtype: str = "float32",
        batch_size: int = 64,
        offload: bool = False,
    ) -> None:
        self.batch_size = clip.check_batch("aesthetic", batch_size)
        self.clip, self.pixels = clip.load("aesthetic", model, device=device, dtype=dtype, offload=offload)
        self.head = _head(weights, self.clip.model.config.projection_dim).to(self.clip.device)

    @torch.no_grad()
    def __call__(
        self, images: Images, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]] | None = None
    ) -> NDArray[np.float64]:
        """One rating an image."""
        features = self.clip.images(as_tensor(images, prompts), self.pixels, self.batch_size)
        return clip.finite("the aesthetic predictor", self.head(features)[:, 0]).double().cpu().numpy()


def _head(source: str | Path, width: int) -> nn.Sequential:
    with checkpoints.loading("aesthetic predictor", source):
        state = checkpoints.read(checkpoints.find(source, catalog.AESTHETIC_FILE))
        made = head(width).eval().requires_grad_(False)
        checkpoints.fill(made, {name.removeprefix("layers."): value for name, value in state.items()})
    return made
