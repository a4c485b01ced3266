"""A linear autoencoder with the interface of `AutoencoderKL`: the principal components of the cells."""

from __future__ import annotations

import numpy as np
import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.models.autoencoders.vae import DecoderOutput, DiagonalGaussianDistribution
from diffusers.models.modeling_outputs import AutoencoderKLOutput
from torch import Tensor, nn

from recast.shapes import prompts, render

__all__ = ["CellVAE", "fit"]


class CellVAE(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """Each 16×16 cell of an image in [−1, 1] as its `latent_channels` leading principal components.

    The components are orthonormal, so `encode(decode(z))` is z, and decoding is one matrix product. `encode` returns
    a distribution without variance.
    """

    _supports_gradient_checkpointing = False

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        latent_channels: int = 40,
        scaling_factor: float = 1.0,
        shift_factor: float = 0.0,
        # SD3's pipeline derives the scale from the length of this list: 2^4 = 16 pixels per latent.
        block_out_channels: tuple[int, ...] = (1, 1, 1, 1, 1),
    ) -> None:
        super().__init__()
        self.components = nn.Parameter(torch.zeros(latent_channels, 3, render.CELL, render.CELL), requires_grad=False)
        self.mean = nn.Parameter(torch.zeros(3, render.CELL, render.CELL), requires_grad=False)

    def encode(self, x: Tensor, return_dict: bool = True) -> AutoencoderKLOutput | tuple[DiagonalGaussianDistribution]:
        """Latents (B, c, h/16, w/16) of images (B, 3, h, w) in [−1, 1]."""
        count, _, height, width = x.shape
        side = render.CELL
        cells = x.reshape(count, 3, height // side, side, width // side, side).permute(0, 2, 4, 1, 3, 5)
        mean = (cells - self.mean).flatten(3) @ self.components.flatten(1).T
        mean = mean.permute(0, 3, 1, 2)
        posterior = DiagonalGaussianDistribution(torch.cat([mean, torch.zeros_like(mean)], dim=1), deterministic=True)
        return AutoencoderKLOutput(latent_dist=posterior) if return_dict else (posterior,)

    def decode(self, z: Tensor, return_dict: bool = True, generator: object = None) -> DecoderOutput | tuple[Tensor]:
        """Images (B, 3, h, w) of latents; not clipped to [−1, 1]."""
        # A matrix product; the equivalent transposed convolution takes ten times as long on a CPU.
        count, _, height, width = z.shape
        cells = z.permute(0, 2, 3, 1) @ self.components.flatten(1)
        cells = cells.reshape(count, height, width, 3, render.CELL, render.CELL) + self.mean
        images = cells.permute(0, 3, 1, 4, 2, 5).reshape(count, 3, height * render.CELL, width * render.CELL)
        return DecoderOutput(sample=images) if return_dict else (images,)


def fit(latent_channels: int = 40, images: int = 2048, seed: int = 0) -> CellVAE:
    """The principal components of rendered cells, scaled so that the latents have unit variance overall."""
    rng = np.random.default_rng(seed)
    rows = prompts.load("train")
    pictures = render.render([rows[k] for k in rng.integers(0, len(rows), images)], seed)
    cells = render.to_cells(2 * pictures - 1).flatten(0, 1).flatten(1).double()
    mean = cells.mean(0)
    values, vectors = torch.linalg.eigh((cells - mean).T @ (cells - mean) / len(cells))
    values, vectors = values.flip(0)[:latent_channels], vectors.flip(1)[:, :latent_channels].T
    # The sign of an eigenvector is arbitrary; its largest entry decides it, so that all machines agree.
    vectors = vectors * vectors.gather(1, vectors.abs().argmax(1, keepdim=True)).sign()
    vae = CellVAE(latent_channels, scaling_factor=float(values.mean().rsqrt()))
    vae.components.copy_(vectors.reshape(latent_channels, 3, render.CELL, render.CELL))
    vae.mean.copy_(mean.reshape(3, render.CELL, render.CELL))
    return vae
