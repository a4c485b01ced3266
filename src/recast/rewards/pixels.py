"""Images as rewards receive them: tensors in [0, 1], or PIL images of one size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from recast.errors import RecastError

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    Images: TypeAlias = Tensor | Sequence[Image]
else:
    Images = Any

__all__ = ["Images", "as_tensor"]

_ROUNDING = 1e-3  # excess over [0, 1] that counts as rounding


def as_tensor(images: Images, prompts: Sequence[str]) -> Tensor:
    """Images (B, 3, H, W) in [0, 1] of such a tensor or of PIL images of one size; raises for any other range."""
    import torch

    if not isinstance(images, torch.Tensor):
        images = _from_pil(images)
    _check(images, prompts)
    return images


def _from_pil(images: Sequence[Any]) -> Tensor:
    import torch
    from PIL.Image import Image

    for image in images:
        if not isinstance(image, Image):
            raise RecastError(f"images are a float tensor (B, 3, H, W) or PIL images, not a {type(image).__name__}")
    sizes = sorted({image.size for image in images})
    if len(sizes) > 1:
        raise RecastError(f"PIL images that are scored together need one size, not {sizes[0]} and {sizes[1]}")
    pixels = [np.asarray(image.convert("RGB")) for image in images]
    return torch.from_numpy(np.stack(pixels) if pixels else np.empty((0, 1, 1, 3), np.uint8)).permute(0, 3, 1, 2) / 255


def _check(images: Tensor, prompts: Sequence[str]) -> None:
    """Raise unless these are images in [0, 1] with one prompt each."""
    if images.ndim != 4 or images.shape[1] != 3 or not images.is_floating_point():
        raise RecastError(f"images are float tensors (B, 3, H, W), not {images.dtype} {tuple(images.shape)}")
    if len(images) != len(prompts):
        raise RecastError(f"{len(images)} images need as many prompts, not {len(prompts)}")
    if not images.numel():
        return
    low, high = images.flatten(1).amin(1), images.flatten(1).amax(1)
    right = ((low >= -_ROUNDING) & (high <= 1 + _ROUNDING)).tolist()  # the one value that is read from the device
    wrong = [k for k, fine in enumerate(right) if not fine]
    if wrong:
        k = wrong[0]
        raise RecastError(
            f"images must lie in [0, 1] and be finite, but {len(wrong)} of {len(images)} do not: number {k}, for the "
            f"prompt {prompts[k]!r}, goes from {low[k]:g} to {high[k]:g}"
        )
