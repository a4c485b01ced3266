"""Z-Image and Z-Image-Turbo: a single-stream transformer with Qwen3 as its text encoder."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers.pipelines.z_image.pipeline_z_image import get_default_z_image_sigmas
from torch import Tensor

from recast.errors import RecastError
from recast.flow.pipeline import PipelinePolicy

__all__ = ["PROJECTIONS", "ZImagePolicy"]

PROJECTIONS = ("to_q", "to_k", "to_v", "to_out.0")
"""The projections of a layer's attention that have adapters; the refiners of the noise and the text have none."""
_MULTIPLE = 32
"""The transformer pads text to a multiple of this number of tokens."""


class ZImagePolicy(PipelinePolicy):
    """A policy on a `ZImagePipeline`.

    The pipeline's `guidance_scale` is g in pos + g (pos − neg), and 0 is no guidance. Here, as for all families, 1 is
    none: `guidance` is g + 1, so that the pipeline's default of 5 is 6 here, and Turbo's 0 is 1.

    A prompt has as many embeddings as it has tokens. The transformer takes lists, and masks what pads the shorter
    prompts of a batch.
    """

    vectors = 17
    targets = rf"layers\.\d+\.attention\.({'|'.join(map(re.escape, PROJECTIONS))})"
    longest_text = 512
    sizes = ("length",)

    @property
    def default_side(self) -> int:
        """Side of the pipeline's own images in pixels."""
        return 1024

    @property
    def width(self) -> int:
        """Width of the network."""
        return int(self.network.config.dim)

    def _size(self, resolution: int | Sequence[int] | None) -> tuple[int, int]:
        """Height and width in pixels; raises if the model has no positions for them or for the text."""
        size = super()._size(resolution)
        most, *sides = self.network.config.axes_lens
        unit = self.pipe.vae_scale_factor * self.patch
        for side, largest in zip(size, sides, strict=True):
            if side > unit * largest:
                raise RecastError(
                    f"the resolution {side} is above {unit * largest}, the largest for which this model has positions"
                )
        longest = (most - 2) // _MULTIPLE * _MULTIPLE  # the image comes after the text, which starts at 1
        if self.max_sequence_length > longest:
            raise RecastError(
                f"max_sequence_length = {self.max_sequence_length} is above {longest}, the most text tokens for which "
                "this model has positions"
            )
        return size

    def timesteps(self, steps: int) -> dict[str, Any]:
        """Even levels, rounded as the pipeline rounds them, and their shift."""
        return {"sigmas": get_default_z_image_sigmas(steps), "mu": self.shift(steps)}

    def encode_prompt(self, prompt: str) -> dict[str, Tensor]:
        """Embeddings of the prompt's tokens in the chat template, and their number."""
        found, _ = self.pipe.encode_prompt(
            [prompt],
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
        )
        return {"embeds": found[0], "length": torch.tensor(len(found[0]))}

    def blank_prompt(self) -> dict[str, Tensor]:
        """Embeddings without values, and their number."""
        size = (self.text_tokens, self.network.config.cap_feat_dim)
        found = {"embeds": torch.empty(size, dtype=self._dtype, device="meta")}
        return found | {"length": torch.tensor(self.text_tokens)}

    def predict(self, x: Tensor, level: Tensor, tensors: Mapping[str, Tensor], _guidance: float) -> Tensor:
        """The transformer's velocity, which it has with the opposite sign, at times from 0 (noise) to 1."""
        lengths = tensors["length"].tolist()
        texts = [row[:length] for row, length in zip(tensors["embeds"], lengths, strict=True)]
        time = (1000 - level * self.pipe.scheduler.config.num_train_timesteps) / 1000
        found = self.model(list(x.unsqueeze(2)), time, texts, return_dict=False)[0]
        return -torch.stack(found).squeeze(2)

    def guided(self, prompted: Tensor, empty: Tensor, guidance: float) -> Tensor:
        """Classifier-free guidance, written as in the pipeline."""
        return prompted + (guidance - 1) * (prompted - empty)
