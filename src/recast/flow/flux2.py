"""FLUX.2 klein, 4B and 9B, base and distilled."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from torch import Tensor

from recast.errors import RecastError
from recast.flow.pipeline import PipelinePolicy

__all__ = ["DOUBLE", "SINGLE", "Flux2KleinPolicy"]

DOUBLE = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
"""The projections of a double block's attention, of the image stream and of the text stream."""
SINGLE = ("to_qkv_mlp_proj", "to_out")
"""The projections of a single block: attention and feed-forward are fused in both."""


class Flux2KleinPolicy(PipelinePolicy):
    """A policy on a `Flux2KleinPipeline`, text to image.

    Latents are patches of the VAE's, (4 C, h/2, w/2), as the pipeline draws its noise. Guidance is classifier-free in
    a base model; a distilled model (`is_distilled` in its `model_index.json`) has none, and refuses a scale above 1.
    The network sees the padding of a prompt, so that another `max_sequence_length` gives other images.
    """

    vectors = 26
    targets = (
        rf"transformer_blocks\.\d+\.attn\.({'|'.join(map(re.escape, DOUBLE))})"
        rf"|single_transformer_blocks\.\d+\.attn\.({'|'.join(SINGLE)})"
    )
    joint = False

    def __init__(self, pipe: Any, *, guidance: float = 1.0, **settings: Any) -> None:
        if guidance > 1 and pipe.config.is_distilled:
            raise RecastError(
                f"guidance {guidance:g} cannot be used with this FLUX.2 model, which is distilled to few steps without "
                "guidance: set policy.guidance and evaluate.guidance to 1, or use its base model"
            )
        super().__init__(pipe, guidance=guidance, **settings)
        # Positions of the tokens, the same for all rows; made once, since they would be copied to the device each call.
        shape, text = (1, *self.latent_shape), (1, self.text_tokens, 1)
        self._image_ids = pipe._prepare_latent_ids(torch.empty(shape, device="meta"))[0].to(self.device)
        self._text_ids = pipe._prepare_text_ids(torch.empty(text, device="meta"))[0].to(self.device)

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Channels, height and width of one image's patched latents."""
        return (self.channels, self.cells[0] // self.patch, self.cells[1] // self.patch)

    def shift(self, steps: int) -> float:
        """`mu`, which depends on the number of steps as well."""
        return float(compute_empirical_mu(image_seq_len=self.image_tokens, num_steps=steps))

    def encode_prompt(self, prompt: str) -> dict[str, Tensor]:
        """Hidden states of the text encoder's layers 9, 18 and 27, for all tokens with the padding."""
        embeds, _ = self.pipe.encode_prompt([prompt], device=self.device, max_sequence_length=self.max_sequence_length)
        return {"embeds": embeds[0]}

    def predict(self, x: Tensor, level: Tensor, tensors: Mapping[str, Tensor], _guidance: float) -> Tensor:
        """The transformer's velocity."""
        timestep = (level * self.pipe.scheduler.config.num_train_timesteps).to(x.dtype)
        found: Tensor = self.model(
            hidden_states=x,
            timestep=timestep / 1000,  # rounded as the pipeline rounds it
            guidance=None,
            encoder_hidden_states=tensors["embeds"],
            txt_ids=self._text_ids,
            img_ids=self._image_ids,
            return_dict=False,
        )[0]
        return found

    def pack(self, x: Tensor) -> Tensor:
        """Tokens (B, tokens, 4 C), one for each patch."""
        return self.pipe._pack_latents(x)

    def unpack(self, output: Tensor) -> Tensor:
        """Latents of tokens."""
        return output.transpose(1, 2).unflatten(2, self.latent_shape[1:])

    def to_images(self, latents: Tensor) -> Tensor:
        """The VAE's images of latents, after its batch normalization is undone."""
        vae = self.pipe.vae
        mean, deviation = vae.bn.running_mean, torch.sqrt(vae.bn.running_var + vae.config.batch_norm_eps)
        whole = latents * deviation.view(1, -1, 1, 1) + mean.view(1, -1, 1, 1)
        return vae.decode(self.pipe._unpatchify_latents(whole), return_dict=False)[0]

    def to_latents(self, images: Tensor) -> Tensor:
        """Latents of images, in patches and normalized by the VAE's batch statistics."""
        found: Tensor = self.pipe._encode_vae_image(images, generator=None)
        return found
