"""CLIP for all rewards that use it: one model in memory, every image and prompt embedded once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from recast import device as devices
from recast.errors import RecastError
from recast.rewards import checkpoints

__all__ = [
    "MEAN",
    "STD",
    "Clip",
    "Preprocess",
    "Processor",
    "check_batch",
    "finite",
    "load",
    "normalized",
    "shared",
]

Preprocess = Literal["processor", "nft"]
_Pixels = Callable[[Tensor], Tensor]
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Mean and standard deviation of the pixels that CLIP was trained on."""
_KEPT = 100_000
"""Prompts whose embeddings are cached: at most 400 MB."""
_Model = TypeVar("_Model")
_shared: weakref.WeakValueDictionary[tuple[Any, ...], Any] = weakref.WeakValueDictionary()


class Clip:
    """Normalized embeddings by one CLIP model.

    The embeddings of the last batch of images are cached, so several rewards that score the same batch embed it once;
    the embeddings of all prompts are cached.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        device: torch.device,
        dtype: torch.dtype,
        offload: bool = False,
        clean: Callable[[str], str] = str,
    ) -> None:
        self.scale = float(model.logit_scale.detach().double().exp())  # before it is rounded to half precision
        self.model = model.to("cpu" if offload else device, dtype).eval().requires_grad_(False)
        self.tokenizer, self.device, self.dtype, self.offload, self._clean = tokenizer, device, dtype, offload, clean
        self._texts: dict[str, Tensor] = {}
        self._last: tuple[weakref.ref[Tensor], int, _Pixels, Tensor] | None = None

    @torch.no_grad()
    def images(self, images: Tensor, pixels: _Pixels, batch_size: int) -> Tensor:
        """Embeddings (B, d) of images in [0, 1]; `pixels` makes the input of the vision tower from them."""
        if self._last is not None:
            seen, version, how, features = self._last
            if seen() is images and not images.is_inference() and version == images._version and how == pixels:
                return features
        parts = images.split(batch_size) if len(images) else ()
        features = self._vision(pixels(part) for part in parts)
        if not images.is_inference():
            self._last = (weakref.ref(images), images._version, pixels, features)
        return features

    @torch.no_grad()
    def seen(self, pixels: Tensor, batch_size: int) -> Tensor:
        """Embeddings (B, d) of inputs of the vision tower; they are not cached."""
        return self._vision(pixels.split(batch_size))

    def _vision(self, parts: Iterable[Tensor]) -> Tensor:
        found = []
        with devices.visiting(self.model, self.device, self.offload):
            for part in parts:
                output = self.model.get_image_features(pixel_values=part.to(self.device, self.dtype)).pooler_output
                found.append(functional.normalize(finite("CLIP", output.float()), dim=-1))
        return torch.cat(found) if found else torch.empty(0, self.model.config.projection_dim, device=self.device)

    @torch.no_grad()
    def texts(self, prompts: Sequence[str], batch_size: int) -> Tensor:
        """Embeddings (B, d) of prompts; only new ones are computed."""
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._texts]
        if len(self._texts) + len(new) > _KEPT:
            self._texts.clear()
            new = list(dict.fromkeys(prompts))
        if new:
            with devices.visiting(self.model, self.device, self.offload):
                for start in range(0, len(new), batch_size):
                    part = new[start : start + batch_size]
                    self._texts |= zip(part, self._embed([self._clean(text) for text in part]), strict=True)
        return torch.stack([self._texts[prompt] for prompt in prompts])

    def _embed(self, texts: list[str]) -> Tensor:
        length = self.model.config.text_config.max_position_embeddings
        tokens = self.tokenizer(texts, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
        output = self.model.get_text_features(**tokens.to(self.device)).pooler_output
        return functional.normalize(finite("CLIP", output.float()), dim=-1)

    def cosines(self, images: Tensor, prompts: Sequence[str], pixels: _Pixels, batch_size: int) -> Tensor:
        """Cosines (B,) of images and their prompts, in float32."""
        if not prompts:
            return torch.empty(0)
        return (self.images(images, pixels, batch_size) * self.texts(prompts, batch_size)).sum(-1)


def shared(key: tuple[Any, ...], make: Callable[[], _Model]) -> _Model:
    """The model of a key; `make` is called only if no reward holds that model yet."""
    found = _shared.get(key)
    if found is None:
        found = _shared[key] = make()
    return found


class Processor:
    """Preprocessing for a vision tower: resize the shortest edge, crop the center, normalize.

    `processor` resizes like the published image processor (PIL, bicubic, on 8-bit pixels), `nft` like the reward of
    DiffusionNFT (torchvision, bilinear with antialiasing, on floats). Instances with the same settings are equal, so
    embeddings can be shared.
    """

    def __init__(
        self, size: int, crop: tuple[int, int], mean: Any, std: Any, preprocess: Preprocess, even: bool = False
    ) -> None:
        self.size, self.crop, self.mean, self.std, self.preprocess = size, crop, tuple(mean), tuple(std), preprocess
        # If the remainder is odd, the processor rounds the margin down; torchvision, which NFT uses, rounds to even.
        self.even = even or preprocess == "nft"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Processor) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, images: Tensor) -> Tensor:
        """Pixels (B, 3, h, w) of images (B, 3, H, W) in [0, 1]."""
        height, width = images.shape[-2:]
        wide = height <= width
        long = int(self.size * max(height, width) / min(height, width))
        size = (self.size, long) if wide else (long, self.size)
        images = images.float().clamp(0, 1)
        if self.preprocess == "processor":
            images = _resized(images, size)
        elif size != (height, width):
            images = functional.interpolate(images, size=size, mode="bilinear", antialias=True)
        rest = (size[0] - self.crop[0], size[1] - self.crop[1])
        top, left = (round(each / 2) if self.even else each // 2 for each in rest)
        return normalized(images[..., top : top + self.crop[0], left : left + self.crop[1]], self.mean, self.std)


def _resized(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Images in [0, 1], rounded to 8 bits and resized by PIL's bicubic filter."""
    levels = (images * 255).round()
    if size == tuple(images.shape[-2:]):
        return levels / 255
    pixels = levels.byte().permute(0, 2, 3, 1).cpu().numpy()
    # PIL takes one image at a time. The filter of torch takes a batch, but differs by up to 25 of 256 levels.
    small = [np.asarray(Image.fromarray(each).resize(size[::-1], Image.Resampling.BICUBIC)) for each in pixels]
    return torch.from_numpy(np.stack(small)).permute(0, 3, 1, 2).to(images.device).float() / 255


def normalized(images: Tensor, mean: Sequence[float] = MEAN, std: Sequence[float] = STD) -> Tensor:
    """(images − mean) / std per channel."""
    low, scale = (torch.tensor(values, device=images.device).view(3, 1, 1) for values in (mean, std))
    return (images - low) / scale


def load(
    what: str,
    model: str | Path,
    processor: str | Path | None = None,
    preprocess: Preprocess = "processor",
    device: str = "auto",
    dtype: str = "float32",
    offload: bool = False,
) -> tuple[Clip, Processor]:
    """A `CLIPModel` and its preprocessing, from hub names or folders; a model that is already loaded is shared."""
    try:
        from transformers import AutoTokenizer, CLIPImageProcessorPil, CLIPModel
    except ImportError as error:
        raise RecastError(f"{what} needs transformers 5.4 or later ({error})") from error
    if preprocess not in get_args(Preprocess):
        raise RecastError(f"{what} has the preprocessing 'processor' and 'nft', not {preprocess!r}")
    where, numbers = devices.pick(device), devices.dtype(dtype)
    side = processor or model
    with checkpoints.loading("CLIP model", model):
        made = shared(
            (str(model), str(side), where, numbers, offload),
            lambda: Clip(
                checkpoints.pretrained(CLIPModel, model), AutoTokenizer.from_pretrained(side), where, numbers, offload
            ),
        )
        found = CLIPImageProcessorPil.from_pretrained(side)
    crop = (found.crop_size["height"], found.crop_size["width"])
    sees = Processor(found.size["shortest_edge"], crop, found.image_mean, found.image_std, preprocess)
    return made, sees


def finite(what: str, values: Tensor) -> Tensor:
    """The same values; raises if one is not finite, since NaN would be read as "does not apply"."""
    if not values.isfinite().all():
        raise RecastError(f"the output of {what} is not finite: its checkpoint is damaged, or its dtype too narrow")
    return values


def check_batch(what: str, batch_size: int) -> int:
    """The batch size; raises if it is below 1."""
    if batch_size < 1:
        raise RecastError(f"{what}'s batch_size must be at least 1, not {batch_size}")
    return batch_size
