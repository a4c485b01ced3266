"""Stable Diffusion 3 and 3.5, Medium and Large, and the embedded model of the shapes world."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from recast.errors import RecastError
from recast.flow.pipeline import PipelinePolicy

__all__ = ["PROJECTIONS", "SD3Policy"]

PROJECTIONS = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
"""The projections of a joint block's attention that have adapters (App. E.2); `attn2` has none."""


class SD3Policy(PipelinePolicy):
    """A policy on a `StableDiffusion3Pipeline`, with classifier-free guidance; T5 may be missing."""

    targets = rf"transformer_blocks\.\d+\.attn\.({'|'.join(map(re.escape, PROJECTIONS))})"
    optional = ("text_encoder_3", "tokenizer_3")
    longest_text = 256

    @property
    def text_limit(self) -> int:
        """Most tokens that T5 takes."""
        return int(getattr(self.pipe.tokenizer_3, "model_max_length", self.longest_text))

    @property
    def text_tokens(self) -> int:
        """Tokens of CLIP and T5."""
        return int(self.pipe.tokenizer_max_length + self.max_sequence_length)

    @property
    def patch(self) -> int:
        """Latent cells per side of a token."""
        return int(self.network.config.patch_size)

    def _size(self, resolution: int | Sequence[int] | None) -> tuple[int, int]:
        size = super()._size(resolution)
        largest = self.network.config.pos_embed_max_size * self.pipe.vae_scale_factor * self.patch
        if max(size) > largest:
            raise RecastError(
                f"the resolution {max(size)} is above {largest}, the largest for which this model has positions"
            )
        return size

    def timesteps(self, steps: int) -> dict[str, Any]:
        """The number of steps, and `mu` if the scheduler shifts dynamically."""
        dynamic = self.pipe.scheduler.config.get("use_dynamic_shifting")
        return {"num_inference_steps": steps} | ({"mu": self.shift(steps)} if dynamic else {})

    def encode_prompt(self, prompt: str) -> dict[str, Tensor]:
        """Token embeddings of CLIP and T5, and the pooled embeddings of CLIP."""
        embeds, _, pooled, _ = self.pipe.encode_prompt(
            [prompt],
            None,
            None,
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
        )
        return {"embeds": embeds[0], "pooled": pooled[0]}

    def predict(self, x: Tensor, level: Tensor, tensors: Mapping[str, Tensor], _guidance: float) -> Tensor:
        """The transformer's velocity."""
        found: Tensor = self.model(
            hidden_states=x,
            timestep=level * self.pipe.scheduler.config.num_train_timesteps,
            encoder_hidden_states=tensors["embeds"],
            pooled_projections=tensors["pooled"],
            return_dict=False,
        )[0]
        return found
