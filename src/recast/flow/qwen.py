"""Qwen-Image: true classifier-free guidance, a video VAE with channel statistics, and a Qwen2.5-VL text encoder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from recast.errors import RecastError
from recast.flow.pipeline import PipelinePolicy, trimmed

__all__ = ["PROJECTIONS", "QwenImagePolicy"]

PROJECTIONS = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
"""The projections of a block's attention that have adapters, those of the image and those of the text."""


class QwenImagePolicy(PipelinePolicy):
    """A policy on a `QwenImagePipeline`.

    Guidance is the pipeline's `true_cfg_scale` with an empty negative prompt: the guided velocity of every token is
    rescaled to the norm of the prompted one. Latents have no temporal axis, which has length 1 for an image. A
    prompt has as many tokens as its text, up to `max_sequence_length`; shorter prompts in a batch are masked.

    Raises
    ------
    RecastError
        If the transformer takes guidance or another condition as an embedding, or `max_sequence_length` is above the
        tokens that the pipeline encodes.
    """

    targets = rf"transformer_blocks\.\d+\.attn\.({'|'.join(map(re.escape, PROJECTIONS))})"
    sizes = ("length",)
    joint = False  # the two prompts have different lengths, and the pipeline calls the transformer twice

    def __init__(self, pipe: Any, **settings: Any) -> None:
        for setting in ("guidance_embeds", "use_additional_t_cond"):
            if pipe.transformer.config.get(setting):
                raise RecastError(
                    f"the transformer of this Qwen-Image model has {setting} = true, which QwenImagePipeline of "
                    "diffusers cannot run: use a model without it, such as Qwen/Qwen-Image"
                )
        super().__init__(pipe, **settings)
        # The text that leaves the last block is dropped. A projection without gradient would stop training by DDP.
        last = len(self.network.transformer_blocks) - 1
        self.targets = rf"(?!transformer_blocks\.{last}\.attn\.to_add_out$){type(self).targets}"
        if self.max_sequence_length > pipe.tokenizer_max_length:
            raise RecastError(
                f"max_sequence_length = {self.max_sequence_length} is above {pipe.tokenizer_max_length}, the most "
                "tokens that Qwen-Image encodes"
            )

    @property
    def channels(self) -> int:
        """Channels of the latents; the transformer's are those of a token, 2 × 2 cells."""
        return int(self.network.config.in_channels) // self.patch**2

    def encode_prompt(self, prompt: str) -> dict[str, Tensor]:
        """Embeddings of the prompt in the pipeline's template, without its instruction, their mask and their number."""
        embeds, _ = self.pipe.encode_prompt([prompt], device=self.device, max_sequence_length=self.max_sequence_length)
        count = embeds.shape[1]
        return {"embeds": embeds[0], "mask": torch.ones(count, dtype=torch.bool), "length": torch.tensor(count)}

    def blank_prompt(self) -> dict[str, Tensor]:
        """Embeddings without values, all of whose tokens count."""
        count = self.text_tokens
        return super().blank_prompt() | {"mask": torch.ones(count, dtype=torch.bool), "length": torch.tensor(count)}

    def predict(self, x: Tensor, level: Tensor, tensors: Mapping[str, Tensor], _guidance: float) -> Tensor:
        """The transformer's velocity."""
        embeds, mask = trimmed(tensors["embeds"], tensors["mask"], tensors["length"])
        height, width = self.cells
        found: Tensor = self.model(
            hidden_states=x,
            timestep=level * self.pipe.scheduler.config.num_train_timesteps / 1000,
            encoder_hidden_states=embeds,
            encoder_hidden_states_mask=mask,
            img_shapes=[[(1, height // self.patch, width // self.patch)]] * len(x),
            return_dict=False,
        )[0]
        return found

    def guided(self, prompted: Tensor, empty: Tensor, guidance: float) -> Tensor:
        """Classifier-free guidance, rescaled token by token to the norm of the prompted velocity."""
        found = empty + guidance * (prompted - empty)
        norms = (torch.norm(each, dim=-1, keepdim=True) for each in (prompted, found))
        return found * (next(norms) / next(norms))

    def to_images(self, latents: Tensor) -> Tensor:
        """The VAE's images of latents."""
        mean, scale = self._statistics
        return self.pipe.vae.decode(latents[:, :, None] / scale + mean, return_dict=False)[0][:, :, 0]

    def to_latents(self, images: Tensor) -> Tensor:
        """Latents of images."""
        mean, scale = self._statistics
        found = self.pipe.vae.encode(images[:, :, None]).latent_dist.mode()
        return ((found - mean) * scale)[:, :, 0]

    @cached_property
    def _statistics(self) -> tuple[Tensor, Tensor]:
        """Means and inverse standard deviations of the VAE's channels, formed as the pipeline does."""
        config = self.pipe.vae.config
        mean, std = (
            torch.tensor(each).view(1, -1, 1, 1, 1).to(self.device)
            for each in (config.latents_mean, config.latents_std)
        )
        return mean, 1.0 / std

    def pack(self, x: Tensor) -> Tensor:
        """Tokens (B, tokens, 4 C) of 2 × 2 cells."""
        return self.pipe._pack_latents(x, len(x), *x.shape[1:])

    def unpack(self, output: Tensor) -> Tensor:
        """Latents of tokens."""
        return self.pipe._unpack_latents(output, *self.image_size, self.pipe.vae_scale_factor)[:, :, 0]
