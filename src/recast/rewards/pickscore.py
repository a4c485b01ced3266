"""PickScore: a CLIP ViT-H/14 fine-tuned on preferences, (e^s / 26)·cos with its own logit scale s."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recast.rewards import catalog, clip
from recast.rewards.base import Images, as_tensor

__all__ = ["PickScore"]

_SCALE = 26.0
"""The constant of the RL codebases and of the paper: e^s is about 98.9, so scores are about 3.8·cos."""


class PickScore:
    """`yuvalkirstain/PickScore_v1` with the processor of the model it was fine-tuned from."""

    def __init__(
        self,
        model: str | Path = catalog.PICKSCORE,
        processor: str | Path = catalog.CLIP_H14,
        device: str = "auto",
        dtype: str = "float32",
        batch_size: int = 32,
        offload: bool = False,
    ) -> None:
        self.batch_size = clip.check_batch("pickscore", batch_size)
        self.clip, self.pixels = clip.load("pickscore", model, processor, device=device, dtype=dtype, offload=offload)
        self.scale = self.clip.scale / _SCALE

    def __call__(
        self, images: Images, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]] | None = None
    ) -> NDArray[np.float64]:
        """(e^s / 26)·cos for each image and its prompt."""
        found = self.clip.cosines(as_tensor(images, prompts), prompts, self.pixels, self.batch_size)
        return self.scale * found.cpu().double().numpy()
