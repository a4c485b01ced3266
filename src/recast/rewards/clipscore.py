"""ClipScore: the cosine of CLIP's image and text embeddings, negative ones clamped at 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import functional

from recast import device as devices
from recast.console import quiet
from recast.errors import RecastError
from recast.rewards.base import check_images

Preprocess = Literal["processor", "nft"]


class ClipScore:
    """The paper's ClipScore for any `CLIPModel`, from a hub name or a local folder.

    `preprocess="processor"` resizes as the model's own image processor does (bicubic, on 8-bit pixels);
    `"nft"` as DiffusionNFT's reward does (bilinear, on floats). Text embeddings are kept per prompt.
    """

    def __init__(
        self,
        model: str | Path = "openai/clip-vit-large-patch14",
        preprocess: Preprocess = "processor",
        device: str = "auto",
        dtype: str = "float32",
        batch_size: int = 64,
    ) -> None:
        try:
            from transformers import AutoTokenizer, CLIPImageProcessorPil, CLIPModel
        except ImportError as error:
            raise RecastError(f"clipscore needs transformers 5 or later ({error})") from error
        if preprocess not in get_args(Preprocess):
            raise RecastError(f"clipscore knows the preprocessing 'processor' and 'nft', not {preprocess!r}")
        if batch_size < 1:
            raise RecastError(f"clipscore's batch_size must be at least 1, not {batch_size}")
        where, numbers = devices.pick(device), devices.dtype(dtype)
        try:
            with quiet():
                loaded, report = CLIPModel.from_pretrained(model, output_loading_info=True)
                if report["missing_keys"]:
                    raise ValueError(f"it has no weights for {min(report['missing_keys'])}")
                self.processor = CLIPImageProcessorPil.from_pretrained(model)
                self.tokenizer = AutoTokenizer.from_pretrained(model)
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise RecastError(f"no CLIP model in {str(model)!r}: give a hub name or a folder ({reason})") from error
        self.model = loaded.to(where, numbers).eval().requires_grad_(False)
        self.preprocess, self.batch_size = preprocess, batch_size
        self._texts: dict[str, Tensor] = {}

    @torch.no_grad()
    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]] | None = None
    ) -> NDArray[np.float64]:
        """cos, clamped to [0, 1], for each image and its prompt."""
        check_images(images, prompts)
        if not prompts:
            return np.empty(0)
        texts = self.text_features(prompts)
        scores = []
        for part, text in zip(images.split(self.batch_size), texts.split(self.batch_size), strict=True):
            scores.append((self.image_features(part) * text).sum(-1))
        return torch.cat(scores).clamp(0, 1).double().cpu().numpy()

    def image_features(self, images: Tensor) -> Tensor:
        """Normalised embeddings (B, d) of images in [0, 1]."""
        pixels = self.pixels(images.to(self.model.device)).to(self.model.dtype)
        return functional.normalize(self.model.get_image_features(pixel_values=pixels).pooler_output.float(), dim=-1)

    def text_features(self, prompts: Sequence[str]) -> Tensor:
        """Normalised embeddings (B, d) of the prompts; each new one is embedded once."""
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._texts]
        for start in range(0, len(new), self.batch_size):
            part = new[start : start + self.batch_size]
            length = self.model.config.text_config.max_position_embeddings
            tokens = self.tokenizer(part, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
            output = self.model.get_text_features(**tokens.to(self.model.device)).pooler_output
            self._texts |= zip(part, functional.normalize(output.float(), dim=-1), strict=True)
        return torch.stack([self._texts[prompt] for prompt in prompts])

    def pixels(self, images: Tensor) -> Tensor:
        """What the vision tower sees: shortest edge resized, centre cropped, normalised."""
        shortest = self.processor.size["shortest_edge"]
        crop = (self.processor.crop_size["height"], self.processor.crop_size["width"])
        height, width = images.shape[-2:]
        wide = height <= width
        size = (shortest, int(shortest * width / height)) if wide else (int(shortest * height / width), shortest)
        images = images.float().clamp(0, 1)
        if self.preprocess == "processor":
            images = (images * 255).round()
            if size != (height, width):
                images = functional.interpolate(images, size=size, mode="bicubic", antialias=True)
            images = images.clamp(0, 255).round() / 255
        elif size != (height, width):
            images = functional.interpolate(images, size=size, mode="bilinear", antialias=True)
        # Where the remainder is odd, the processor rounds the margin down and torchvision, in NFT's, to even.
        rest = (size[0] - crop[0], size[1] - crop[1])
        top, left = (each // 2 if self.preprocess == "processor" else round(each / 2) for each in rest)
        images = images[..., top : top + crop[0], left : left + crop[1]]
        mean, std = (
            torch.tensor(values, device=images.device).view(3, 1, 1)
            for values in (self.processor.image_mean, self.processor.image_std)
        )
        return (images - mean) / std
