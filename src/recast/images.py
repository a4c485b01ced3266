"""Images to and from the bytes of image files."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from recast.errors import RecastError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SUFFIXES", "UndecodableError", "inspect", "read", "to_array", "to_png"]

SUFFIXES = {"PNG": ".png", "JPEG": ".jpg", "WEBP": ".webp"}
"""File suffix of every supported image format."""


class UndecodableError(RecastError):
    """The bytes are not an image; requesting them again may help."""


def inspect(content: bytes, smallest: int, what: str) -> tuple[str, int, int]:
    """Suffix, width and height of an image that decodes and has at least `smallest` pixels per side.

    `what` names the image in the error message.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content)) as image:
            image.load()
            suffix, (width, height) = SUFFIXES.get(image.format or ""), image.size
            frames = getattr(image, "n_frames", 1)
    except Exception as error:  # PIL raises many kinds for a broken file
        raise UndecodableError(f"{what} cannot be decoded as an image: {error}") from error
    if suffix is None:
        raise RecastError(f"{what} has the format {image.format}; supported formats are {', '.join(SUFFIXES)}")
    if frames > 1:
        raise RecastError(f"{what} is an animation of {frames} images; only single images are supported")
    if min(width, height) < smallest:
        raise RecastError(f"{what} is {width}×{height} pixels, below the minimum of {smallest} pixels per side")
    return suffix, width, height


def read(path: Path, remedy: str, sha256: str | None = None) -> bytes:
    """The content of an image file, checked to be one and to have a hash; an error that ends with `remedy` if not."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RecastError(f"{path} cannot be read: {error.strerror or error}: {remedy}") from error
    if sha256 is not None and hashlib.sha256(content).hexdigest() == sha256:  # it was decoded when it was recorded
        return content
    try:
        inspect(content, 1, str(path))
    except RecastError as error:
        raise RecastError(f"{error}: {remedy}") from error
    if sha256 is not None:
        raise RecastError(f"{path} is not the image that was recorded, its hash is another: {remedy}")
    return content


def to_png(image: Tensor) -> bytes:
    """PNG file of an image (3, H, W) with values in [0, 1]; an error if they are not finite, which would be black."""
    from PIL import Image

    if not bool(image.isfinite().all()):
        raise RecastError("an image has pixels that are not finite: the policy or its adapter is broken")
    levels = (image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
    buffer = io.BytesIO()
    Image.fromarray(levels).save(buffer, "PNG")
    return buffer.getvalue()


def to_array(content: bytes, size: tuple[int, int]) -> NDArray[np.float32]:
    """Array (3, height, width) in [0, 1] of an image file: center-cropped to the shape, then resized."""
    from PIL import Image, ImageOps

    with Image.open(io.BytesIO(content)) as image:
        fitted = ImageOps.fit(image.convert("RGB"), size[::-1], Image.Resampling.BICUBIC)
    pixels: NDArray[np.float32] = np.asarray(fitted, np.float32).transpose(2, 0, 1) / np.float32(255)
    return pixels
