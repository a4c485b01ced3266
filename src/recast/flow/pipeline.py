"""What all families share: a policy on a diffusers pipeline, apart from the family's network, VAE and text encoders."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from recast.config import PolicyConfig
from recast.device import dtype
from recast.errors import RecastError
from recast.flow import loading
from recast.flow.policy import Condition, padded

__all__ = ["PipelinePolicy", "stacked", "trimmed"]

_SHIFT = {"base_image_seq_len": 256, "max_image_seq_len": 4096, "base_shift": 0.5, "max_shift": 1.15}
"""Settings of a scheduler that decide `mu`, and the pipelines' values where it has none."""


class PipelinePolicy(ABC):
    """A `recast.flow.policy.Policy` on a diffusers pipeline; a family is a subclass.

    A family says how a prompt is encoded (`encode_prompt`) and what the network predicts (`predict`), and overrides
    what differs from most: the VAE (`to_images`, `to_latents`), the grid (`timesteps`), guidance (`guided`), sizes.

    Latents and velocities are float32 for any dtype of the network; the VAE is float32. Prompts are encoded one
    at a time, so that an embedding does not depend on the other prompts, and are cached on the CPU.

    Parameters
    ----------
    pipe : DiffusionPipeline
        The pipeline; its components are moved to the device and frozen.
    device : str or torch.device, default "cpu"
        Device of all components.
    guidance : float, default 1.0
        Scale of guidance, as the family understands it; 1 is none for classifier-free guidance.
    resolution : int or pair of int, optional
        Height and width of the images in pixels, or one number for both; by default the model's own.
    max_sequence_length : int, optional
        Number of text tokens; by default the family's `longest_text`, or fewer if the tokenizer has a lower limit.
    cached_prompts : int, default 1024
        Number of prompts whose embeddings are kept, those used last.
    offload_text : bool, default False
        Whether the text encoders are on the device only while they encode.
    vae_batch : int, default 4
        Number of images that the VAE encodes or decodes together.
    """

    targets: str
    """Regular expression of the modules that get adapters."""
    optional: ClassVar[tuple[str, ...]] = ()
    """Components of the pipeline that a model may lack."""
    longest_text: ClassVar[int] = 512
    """Default of `max_sequence_length`."""
    vectors: ClassVar[int] = 14
    """Vectors per token that a velocity call holds at its peak (tests/flow/test_memory.py)."""
    sizes: ClassVar[tuple[str, ...]] = ()
    """Tensors of a prompt that stay on the CPU: a network needs their values to form shapes, and to read them from a
    GPU would make every call wait for the one before."""
    joint: ClassVar[bool] = True
    """Whether guidance evaluates the empty and the prompted rows in one call, as the family's pipeline does."""

    def __init__(
        self,
        pipe: Any,
        *,
        device: str | torch.device = "cpu",
        guidance: float = 1.0,
        resolution: int | Sequence[int] | None = None,
        max_sequence_length: int | None = None,
        cached_prompts: int = 1024,
        offload_text: bool = False,
        vae_batch: int = 4,
    ) -> None:
        self.pipe, self.device, self.guidance = pipe, torch.device(device), guidance
        self.network: Any = pipe.transformer
        self.model: Any = self.network  # called by `velocity`; a trainer may wrap it
        self.offload_text, self.vae_batch, self.cached_prompts = offload_text, vae_batch, cached_prompts
        self.max_sequence_length = max_sequence_length or min(self.longest_text, self.text_limit)
        self.image_size = self._size(resolution)
        self._dtype = self.network.dtype  # diffusers iterates over all modules on every access
        self._cache: OrderedDict[str, dict[str, Tensor]] = OrderedDict()
        for part in (self.network, pipe.vae, *self.encoders):
            part.eval().requires_grad_(False)
        for part in (self.network, pipe.vae):
            if part.device != self.device:  # a quantized network cannot be moved, and is already there
                part.to(self.device)
        self._place_text(self.device if not offload_text else torch.device("cpu"))

    @classmethod
    def load(cls, source: str, config: PolicyConfig, device: torch.device) -> PipelinePolicy:
        """The policy of a recipe's section `policy`, with its adapter; `source` is the name or folder of the model."""
        pipe = loading.load_pipeline(source, dtype(config.dtype), config.quantize, cls.optional)
        if config.lora is not None:
            loading.add_lora(pipe, config.lora)
        policy = cls(
            pipe,
            device=device,
            guidance=config.guidance,
            resolution=config.resolution,
            max_sequence_length=config.max_sequence_length,
            cached_prompts=config.cached_prompts,
            offload_text=config.offload_text,
            vae_batch=config.vae_batch,
        )
        loading.accelerate(policy.network, config)
        return policy

    # What a family says.

    @abstractmethod
    def encode_prompt(self, prompt: str) -> Mapping[str, Tensor]:
        """Named tensors of one prompt, without a batch axis; tensors of different lengths are padded by zeros."""

    def blank_prompt(self) -> dict[str, Tensor]:
        """What `encode_prompt` gives for a prompt of the most tokens, without values; costs are counted with it."""
        config = self.network.config
        sizes: dict[str, tuple[int, ...]] = {"embeds": (self.text_tokens, config.joint_attention_dim)}
        if config.get("pooled_projection_dim"):
            sizes["pooled"] = (config.pooled_projection_dim,)
        return {name: torch.empty(size, dtype=self._dtype, device="meta") for name, size in sizes.items()}

    @abstractmethod
    def predict(self, x: Tensor, level: Tensor, tensors: Mapping[str, Tensor], guidance: float) -> Tensor:
        """The network's output at packed latents (B, ...) and noise levels (B,), without classifier-free guidance."""

    def pack(self, x: Tensor) -> Tensor:
        """Latents as the network takes them."""
        return x

    def unpack(self, output: Tensor) -> Tensor:
        """A velocity in the layout of latents, from the network's."""
        return output

    def to_images(self, latents: Tensor) -> Tensor:
        """The VAE's images in [-1, 1] of latents; here with one shift and one scale."""
        vae = self.pipe.vae
        images: Tensor = vae.decode(latents / vae.config.scaling_factor + vae.config.shift_factor, return_dict=False)[0]
        return images

    def to_latents(self, images: Tensor) -> Tensor:
        """Latents of images in [-1, 1]: here the mode of the VAE's posterior, shifted and scaled."""
        vae = self.pipe.vae
        mode: Tensor = vae.encode(images).latent_dist.mode()
        return (mode - vae.config.shift_factor) * vae.config.scaling_factor

    def guided(self, prompted: Tensor, empty: Tensor, guidance: float) -> Tensor:
        """The output from those of the prompt and of the empty prompt: classifier-free guidance."""
        return empty + guidance * (prompted - empty)

    @property
    def needs_empty(self) -> bool:
        """Whether guidance needs the velocity of the empty prompt."""
        return self.guidance > 1

    @property
    def patch(self) -> int:
        """Latent cells per side of a token."""
        return 2

    @property
    def channels(self) -> int:
        """Channels of the latents."""
        return int(self.network.config.in_channels)

    @property
    def default_side(self) -> int:
        """Side of the model's own images in pixels."""
        return int(self.pipe.default_sample_size * self.pipe.vae_scale_factor)

    @property
    def text_limit(self) -> int:
        """Most tokens that the tokenizer takes."""
        return int(min(getattr(self.pipe.tokenizer, "model_max_length", self.longest_text), self.longest_text))

    @property
    def text_tokens(self) -> int:
        """Tokens of a prompt in the network."""
        return self.max_sequence_length

    @property
    def width(self) -> int:
        """Width of the network."""
        return int(self.network.config.num_attention_heads * self.network.config.attention_head_dim)

    def timesteps(self, steps: int) -> dict[str, Any]:
        """Arguments of the scheduler's `set_timesteps`, as most pipelines give them: even levels, and their shift."""
        found: dict[str, Any] = {"mu": self.shift(steps)}
        if self.pipe.scheduler.config.get("use_flow_sigmas"):  # such a scheduler has levels of its own
            return found | {"num_inference_steps": steps}
        return found | {"sigmas": np.linspace(1.0, 1 / steps, steps)}

    def shift(self, _steps: int) -> float:
        """`mu` of dynamic shifting: linear in the number of image tokens."""
        low, high, least, most = (self.pipe.scheduler.config.get(key, value) for key, value in _SHIFT.items())
        slope = (most - least) / (high - low)
        return float(self.image_tokens * slope + (least - slope * low))

    # What stages use.

    @property
    def cells(self) -> tuple[int, int]:
        """Height and width of the VAE's latents."""
        scale = self.pipe.vae_scale_factor
        return self.image_size[0] // scale, self.image_size[1] // scale

    @property
    def image_tokens(self) -> int:
        """Tokens of an image in the network."""
        return (self.cells[0] // self.patch) * (self.cells[1] // self.patch)

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Channels, height and width of one image's latents."""
        return (self.channels, *self.cells)

    @property
    def row_bytes(self) -> int:
        """Approximate size of one sample's activations in a velocity call: `vectors` per token."""
        size = torch.finfo(self._dtype).bits // 8
        both = 2 if self.needs_empty and self.joint else 1
        return both * self.vectors * (self.image_tokens + self.text_tokens) * self.width * size

    @property
    def identity(self) -> dict[str, Any]:
        """The pipeline's class, the size of images and latents, and the tokens of a prompt."""
        return {
            "pipeline": type(self.pipe).__name__,
            "image_size": list(self.image_size),
            "latent_shape": list(self.latent_shape),
            "max_sequence_length": self.max_sequence_length,
        }

    def sigmas(self, steps: int) -> list[float]:
        """σ_0..σ_T as the pipeline's scheduler sets them, depending on the resolution if it uses dynamic shifting."""
        if steps < 1:
            raise RecastError(f"the number of steps must be at least 1, not {steps}")
        config = self.pipe.scheduler.config
        if steps == 1 and config.get("shift_terminal"):
            return [0.0, 1.0]  # diffusers divides 0 by 0 here
        scheduler = type(self.pipe.scheduler).from_config(config)
        scheduler.set_timesteps(**self.timesteps(steps))
        return [float(value) for value in scheduler.sigmas.flip(0).tolist()]

    @torch.no_grad()
    def condition(self, prompts: Sequence[str]) -> Condition:
        """Embeddings of the prompts, one row per prompt; cached prompts are not encoded again."""
        if isinstance(prompts, str) or not prompts:
            raise RecastError(f"prompts must be a list of at least one prompt, not {prompts!r}")
        rows = self._encode([*prompts, ""] if self.needs_empty else prompts)
        found = Condition(stacked(rows[: len(prompts)]), self.guidance, stacked(rows[len(prompts) :]))
        return found.to(self.device, but=self.sizes)

    def velocity(self, x: Tensor, sigma: float | Tensor, condition: Condition) -> Tensor:
        """v at latents `x` and level `sigma`, with guidance if the condition has an empty prompt.

        Differentiable in `x` and in the network's parameters.
        """
        count = len(x)
        condition = condition.expand(count)
        if not isinstance(sigma, Tensor):  # filled in on the device: to copy a number there would make the CPU wait
            sigma = torch.full((), sigma, device=x.device)
        level = sigma.to(x.device, torch.float32).expand(count)
        inputs, tensors, scale = self.pack(x.to(self._dtype)), condition.tensors, condition.guidance
        if not condition.empty:
            return self.unpack(self.predict(inputs, level, tensors, scale).to(x.dtype))
        empty = condition.empty
        if not self.joint:
            both = [self.predict(inputs, level, each, scale).to(x.dtype) for each in (tensors, empty)]
            return self.unpack(self.guided(both[0], both[1], scale))
        inputs, level = torch.cat([inputs] * 2), torch.cat([level] * 2)
        output = self.predict(inputs, level, condition.both, scale).to(x.dtype)
        return self.unpack(self.guided(output[count:], output[:count], scale))

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Images (B, 3, H, W) in [0, 1] of latents, `vae_batch` at a time."""
        parts = latents.split(self.vae_batch)
        images = [self.to_images(part.to(self.device, torch.float32)) * 0.5 + 0.5 for part in parts]
        return torch.cat([part.clamp(0, 1) for part in images])

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Latents of images in [0, 1]."""
        height, width = self.image_size
        if images.ndim != 4 or images.shape[1:] != (3, height, width):
            raise RecastError(
                f"this policy's images have the shape (B, 3, {height}, {width}), not {tuple(images.shape)}"
            )
        parts = images.split(self.vae_batch)
        return torch.cat([self.to_latents(part.to(self.device, torch.float32) * 2 - 1) for part in parts])

    def _size(self, resolution: int | Sequence[int] | None) -> tuple[int, int]:
        """Height and width in pixels; raises if they are not multiples of a token's side."""
        if resolution is None or isinstance(resolution, int):
            size = (resolution or self.default_side,) * 2
        else:
            size = (int(resolution[0]), int(resolution[1]))
        unit = self.pipe.vae_scale_factor * self.patch
        for side in size:
            if side % unit or side < unit:
                raise RecastError(f"the resolution {side} is not a multiple of {unit}, as this model requires")
        return size

    def _encode(self, prompts: Sequence[str]) -> list[dict[str, Tensor]]:
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._cache]
        found = {prompt: self._cache[prompt] for prompt in prompts if prompt in self._cache}
        if new:
            self._place_text(self.device)
            try:
                for prompt in new:
                    made = {name: tensor.cpu() for name, tensor in self.encode_prompt(prompt).items()}
                    found[prompt] = self._cache[prompt] = made
            finally:
                if self.offload_text:
                    self._place_text(torch.device("cpu"))
        for prompt in dict.fromkeys(prompts):
            self._cache[prompt] = found[prompt]
            self._cache.move_to_end(prompt)
        while len(self._cache) > self.cached_prompts:
            self._cache.popitem(last=False)
        return [found[prompt] for prompt in prompts]

    @property
    def encoders(self) -> list[Any]:
        """The text encoders."""
        parts = self.pipe.components
        return [part for name, part in parts.items() if name.startswith("text_encoder") and part is not None]

    def _place_text(self, device: torch.device) -> None:
        for encoder in self.encoders:
            if encoder.device != device:
                encoder.to(device)


def stacked(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Named tensors with one row per element; those whose first axis differs in length are padded by zeros.

    >>> stacked([{"embeds": torch.ones(2, 3)}, {"embeds": torch.ones(4, 3)}])["embeds"].sum(2).tolist()
    [[3.0, 3.0, 0.0, 0.0], [3.0, 3.0, 3.0, 3.0]]
    """
    if not rows:
        return {}
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return {name: torch.stack(padded(column, 0)) for name, column in columns.items()}


def trimmed(embeds: Tensor, mask: Tensor, length: Tensor) -> tuple[Tensor, Tensor | None]:
    """Embeddings (B, tokens, d) and their mask without the padding that no row needs; no mask if all tokens count.

    `length` (B,) is the number of tokens of each row, on the CPU.
    """
    shortest, longest = int(length.min()), int(length.max())
    return embeds[:, :longest], None if shortest == longest else mask[:, :longest]
