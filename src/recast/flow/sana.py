"""SANA and SANA-1.5: a linear-attention transformer on the latents of a deep-compression autoencoder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from recast.errors import RecastError
from recast.flow.pipeline import PipelinePolicy

__all__ = ["PROJECTIONS", "SanaPolicy"]

PROJECTIONS = ("to_q", "to_k", "to_v", "to_out.0")
"""The projections of a block's self-attention (`attn1`) and cross-attention (`attn2`) that have adapters."""


class SanaPolicy(PipelinePolicy):
    """A policy on a `SanaPipeline`, with classifier-free guidance.

    Prompts are encoded by Gemma 2 in lower case, as the pipeline does, and without its "complex human instruction": an
    image is that of the pipeline called with `complex_human_instruction=None` and `use_resolution_binning=False`.

    The usual scheduler is `DPMSolverMultistepScheduler` with flow sigmas. Its grid ends at σ_T = .9997 instead of 1,
    where sampling starts from pure noise, as in the pipeline. Its timesteps are whole numbers, so the network is
    called with 1000 σ rounded down at any σ, which equals the timesteps for all published shifts.
    `FlowMatchEulerDiscreteScheduler` does not round.

    The autoencoder has no posterior: encoding gives its latents.
    """

    targets = rf"transformer_blocks\.\d+\.attn[12]\.({'|'.join(map(re.escape, PROJECTIONS))})"
    longest_text = 300

    @property
    def patch(self) -> int:
        """Latent cells per side of a token."""
        return int(self.network.config.patch_size)

    @property
    def default_side(self) -> int:
        """Side of the model's own images in pixels."""
        return int(self.network.config.sample_size * self.pipe.vae_scale_factor)

    def timesteps(self, steps: int) -> dict[str, Any]:
        """The number of steps; raises if the scheduler is not one of a flow."""
        config = self.pipe.scheduler.config
        flow = config.get("use_flow_sigmas", True) and config.get("prediction_type") in (None, "flow_prediction")
        if not flow or config.get("final_sigmas_type", "zero") != "zero":
            raise RecastError(
                f"the scheduler {type(self.pipe.scheduler).__name__} of this model does not follow a flow to 0: set "
                "use_flow_sigmas to true, prediction_type to flow_prediction and final_sigmas_type to zero in its "
                "scheduler_config.json"
            )
        return {"num_inference_steps": steps}

    def encode_prompt(self, prompt: str) -> dict[str, Tensor]:
        """Token embeddings of Gemma, padded to `max_sequence_length`, and the mask of the prompt's own tokens."""
        embeds, mask, _, _ = self.pipe.encode_prompt(
            [prompt],
            do_classifier_free_guidance=False,
            device=self.device,
            max_sequence_length=self.max_sequence_length,
            complex_human_instruction=None,
        )
        return {"embeds": embeds[0], "mask": mask[0]}

    def blank_prompt(self) -> dict[str, Tensor]:
        """Embeddings and their mask, without values."""
        size = (self.text_tokens, self.network.config.caption_channels)
        mask = torch.ones(self.text_tokens, dtype=torch.long, device="meta")
        return {"embeds": torch.empty(size, dtype=self._dtype, device="meta"), "mask": mask}

    def predict(self, x: Tensor, level: Tensor, tensors: Mapping[str, Tensor], _guidance: float) -> Tensor:
        """The transformer's velocity."""
        settings = self.pipe.scheduler.config
        timestep = level * settings.num_train_timesteps
        if settings.get("use_flow_sigmas"):  # such a scheduler has whole numbers
            timestep = timestep.floor()
        found: Tensor = self.model(
            hidden_states=x,
            encoder_hidden_states=tensors["embeds"],
            encoder_attention_mask=tensors["mask"],
            timestep=timestep * self.network.config.timestep_scale,
            return_dict=False,
        )[0]
        return found[:, : self.channels]  # a model with learned variances predicts them in further channels

    def to_images(self, latents: Tensor) -> Tensor:
        """The autoencoder's images of latents."""
        vae = self.pipe.vae
        return vae.decode(latents / vae.config.scaling_factor, return_dict=False)[0]

    def to_latents(self, images: Tensor) -> Tensor:
        """Latents of images."""
        vae = self.pipe.vae
        return vae.encode(images, return_dict=False)[0] * vae.config.scaling_factor
