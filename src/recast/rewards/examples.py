"""Two examples for custom rewards: a class with an option, and a function. In a recipe:

rewards:
  jpeg: {quality: 95}
  recast.rewards.examples:brightness:
  my_package.my_module:MyReward: {option: 1}
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recast.errors import RecastError
from recast.rewards.base import Images, as_tensor

__all__ = ["JpegSize", "brightness"]


class JpegSize:
    """The negative size of the image as a JPEG file, in kilobytes: the compressibility of DDPO."""

    def __init__(self, quality: int = 95) -> None:
        if not 1 <= quality <= 95:
            raise RecastError(f"jpeg's quality must lie between 1 and 95, not {quality}")
        self.quality = quality

    def __call__(
        self, images: Images, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]] | None = None
    ) -> NDArray[np.float64]:
        """−kilobytes per image."""
        from PIL import Image

        sizes = []
        for pixels in (as_tensor(images, prompts) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy():
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "JPEG", quality=self.quality)
            sizes.append(-file.tell() / 1000)
        return np.array(sizes, dtype=np.float64)

    @staticmethod
    def positive(scores: NDArray[np.float64]) -> NDArray[np.float64]:
        """For gain curves: 1 / (1 + kilobytes), which preserves the order."""
        return 1 / (1 - scores)


def brightness(
    images: Images, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]] | None = None, scale: float = 1.0
) -> NDArray[np.float64]:
    """Mean pixel value of each image, times `scale`."""
    return scale * as_tensor(images, prompts).double().mean((1, 2, 3)).cpu().numpy()
