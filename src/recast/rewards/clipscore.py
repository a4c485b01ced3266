"""ClipScore: the cosine similarity of CLIP's image and text embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recast.rewards import catalog, clip
from recast.rewards.base import Images, as_tensor

__all__ = ["ClipScore"]


class ClipScore:
    """The ClipScore of the paper for any `CLIPModel`, given as a hub name or a local folder.

    `preprocess="processor"` (the default) resizes like the image processor that is published with the model: bicubic,
    by PIL, on 8-bit pixels. `"nft"` resizes like the reward of DiffusionNFT, the codebase that the paper builds on:
    bilinear with antialiasing, on floats, with pixels equal to the bit; the recipes of the paper use it. The two were
    compared with the only trained CLIP at hand, that of the shapes world, on its 128 test images enlarged to 512
    pixels: cosines differ by 0.005 on average and 0.021 at most (`benchmarks/published/clipscore.py`). For CLIP
    ViT-L/14, the difference was not measured.
    """

    def __init__(
        self,
        model: str | Path = catalog.CLIP_L14,
        preprocess: clip.Preprocess = "processor",
        device: str = "auto",
        dtype: str = "float32",
        batch_size: int = 64,
        offload: bool = False,
    ) -> None:
        self.batch_size = clip.check_batch("clipscore", batch_size)
        self.clip, self.pixels = clip.load("clipscore", model, None, preprocess, device, dtype, offload)

    def __call__(
        self, images: Images, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]] | None = None
    ) -> NDArray[np.float64]:
        """Cosine of each image and its prompt."""
        found = self.clip.cosines(as_tensor(images, prompts), prompts, self.pixels, self.batch_size)
        return found.cpu().double().numpy()
