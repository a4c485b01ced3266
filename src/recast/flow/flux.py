"""FLUX.1, dev and schnell: packed latents, guidance as an input of the network, T5 and CLIP."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from recast.errors import RecastError
from recast.flow.pipeline import PipelinePolicy

__all__ = ["DOUBLE", "SINGLE", "FluxPolicy"]

DOUBLE = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
"""The projections of a double block's attention, for the image and for the text."""
SINGLE = ("to_q", "to_k", "to_v")
"""The projections of a single block's attention; its output projection is one matrix with that of the MLP."""


def _any_of(names: tuple[str, ...]) -> str:
    return f"({'|'.join(map(re.escape, names))})"


class FluxPolicy(PipelinePolicy):
    """A policy on a `FluxPipeline`: FLUX.1 dev, schnell, or a model of the same architecture.

    In a model that is distilled for guidance, as dev is, the recipe's `guidance` is an input of the network: one
    evaluation per step for any value, 1 is a value like any other, and there is no empty prompt. A model without this
    input, such as schnell, takes guidance 1 only. Negative prompts (the pipeline's true CFG) and image prompts
    (IP-Adapter) are not used.

    Latents are those of the VAE, with 16 channels and 8 pixels per cell; a token is 2 × 2 cells.
    Prompts have 512 tokens of T5 by default, as in the pipeline. Schnell was published for at most 256, so that a
    recipe for it should set `max_sequence_length: 256`. It is also distilled for 1 to 4 steps: its velocity is meant
    for these steps, and curves on a finer grid say little about it.

    Parameters
    ----------
    pipe : FluxPipeline
        The pipeline.
    guidance : float, default 1.0
        Input of a network that takes guidance; otherwise 1.
    max_sequence_length : int, optional
        Tokens of T5, at most 512, which is the default.
    **options
        See `recast.flow.pipeline.PipelinePolicy`.

    Raises
    ------
    RecastError
        If guidance is above 1 and the network does not take it, or `max_sequence_length` is above 512.
    """

    vectors = 19
    targets = (
        rf"transformer_blocks\.\d+\.attn\.{_any_of(DOUBLE)}|single_transformer_blocks\.\d+\.attn\.{_any_of(SINGLE)}"
    )
    optional = ("image_encoder", "feature_extractor")

    def __init__(
        self, pipe: Any, *, guidance: float = 1.0, max_sequence_length: int | None = None, **options: Any
    ) -> None:
        self.embedded = bool(pipe.transformer.config.guidance_embeds)
        if guidance > 1 and not self.embedded:
            raise RecastError(
                f"guidance {guidance:g} cannot be used with this FLUX model, which has no guidance input, like "
                "schnell: set policy.guidance and evaluate.guidance to 1"
            )
        if (max_sequence_length or 0) > self.longest_text:
            raise RecastError(
                f"max_sequence_length {max_sequence_length} is above {self.longest_text}, the limit of FLUX.1: "
                "choose a smaller number"
            )
        super().__init__(pipe, guidance=guidance, max_sequence_length=max_sequence_length, **options)

    @property
    def needs_empty(self) -> bool:
        """Never: guidance is an input of the network."""
        return False

    @property
    def text_limit(self) -> int:
        """Most tokens that T5 takes."""
        return int(self.pipe.tokenizer_2.model_max_length)

    @property
    def channels(self) -> int:
        """Channels of the latents; a token has four cells."""
        return int(self.network.config.in_channels) // 4

    def encode_prompt(self, prompt: str) -> dict[str, Tensor]:
        """Token embeddings of T5, and the pooled embedding of CLIP."""
        embeds, pooled, _ = self.pipe.encode_prompt(
            [prompt], device=self.device, max_sequence_length=self.max_sequence_length
        )
        return {"embeds": embeds[0], "pooled": pooled[0]}

    @cached_property
    def _ids(self) -> tuple[Tensor, Tensor]:
        """Positions of the text tokens, all 0, and of the image tokens, which all samples share."""
        height, width = (side // self.patch for side in self.cells)
        text = torch.zeros(self.text_tokens, 3, device=self.device)
        return text, self.pipe._prepare_latent_image_ids(1, height, width, self.device, torch.float32)

    def predict(self, x: Tensor, level: Tensor, tensors: Mapping[str, Tensor], guidance: float) -> Tensor:
        """The transformer's velocity, on packed latents."""
        times = (level * self.pipe.scheduler.config.num_train_timesteps).to(x.dtype)
        text_ids, image_ids = self._ids
        found: Tensor = self.model(
            hidden_states=x,
            timestep=times / 1000,  # the network multiplies by 1000, and rounding must be the pipeline's
            guidance=torch.full_like(level, guidance) if self.embedded else None,
            encoder_hidden_states=tensors["embeds"],
            pooled_projections=tensors["pooled"],
            txt_ids=text_ids,
            img_ids=image_ids,
            return_dict=False,
        )[0]
        return found

    def pack(self, x: Tensor) -> Tensor:
        """Tokens (B, tokens, 4 C) of 2 × 2 cells."""
        return self.pipe._pack_latents(x, len(x), *x.shape[1:])

    def unpack(self, output: Tensor) -> Tensor:
        """Latents of tokens."""
        return self.pipe._unpack_latents(output, *self.image_size, self.pipe.vae_scale_factor)
