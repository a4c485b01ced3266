"""Stable Diffusion 3 as a policy, through diffusers: SD3.5-Medium, or the embedded model of the shapes world."""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusion3Pipeline
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift
from safetensors import SafetensorError
from torch import Tensor

from recast import device
from recast.config import PolicyConfig
from recast.errors import RecastError
from recast.flow.lora import FILE
from recast.flow.policy import Condition
from recast.quiet import quiet

__all__ = ["SD3Policy", "load", "load_pipeline"]

_UNREADABLE = (OSError, ValueError, TypeError, KeyError, ImportError, AttributeError, RuntimeError, SafetensorError)
_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")


def load(config: PolicyConfig) -> SD3Policy:
    """The policy that a recipe's section `policy` describes.

    Parameters
    ----------
    config : PolicyConfig
        Its `model` is a name on the Hugging Face Hub, a local folder, or `shapes`, the embedded model. Use
        `recast.config.policy` to create one from keyword arguments.

    Returns
    -------
    SD3Policy
        The policy on its device, with the adapter of `config.lora` if one is set.

    Raises
    ------
    RecastError
        If the model, the adapter or the device is not available.

    Examples
    --------
    >>> from recast import config
    >>> policy = load(config.policy(model="shapes", guidance=2.0))
    >>> policy.condition(["a red circle", "a blue square"]).guidance
    2.0
    """
    where = device.pick(config.device)
    source = str(files("recast.shapes").joinpath("data/pipeline")) if config.model == "shapes" else config.model
    pipe = load_pipeline(source, device.dtype(config.dtype))
    if config.lora is not None:
        _add_lora(pipe, config.lora)
    return SD3Policy(
        pipe,
        device=where,
        guidance=config.guidance,
        resolution=config.resolution,
        max_sequence_length=config.max_sequence_length,
        cached_prompts=config.cached_prompts,
        offload_text=config.offload_text,
        vae_batch=config.vae_batch,
    )


def load_pipeline(source: str | Path, dtype: torch.dtype = torch.float32) -> StableDiffusion3Pipeline:
    """A `StableDiffusion3Pipeline` from a hub name or folder, without the components that its index omits.

    The VAE is float32 for any `dtype`. A RecastError is raised if a tensor is missing in the checkpoint, since
    diffusers and transformers would initialize it randomly.
    """
    if str(source).startswith((".", "/", "~")):
        source = Path(source).expanduser()
        if not source.is_dir():
            raise RecastError(f"the folder {str(source)!r} does not exist: give a hub name or the folder of a pipeline")
    try:
        with quiet():
            index = StableDiffusion3Pipeline.load_config(source)
            parts = {name: part for name, part in index.items() if isinstance(part, (list, tuple))}
            given: dict[str, Any] = {
                name: None for name in ("text_encoder_3", "tokenizer_3") if parts.get(name, [None])[0] is None
            }
            for name, (library, kind) in parts.items():
                if library == "transformers" and name in _ENCODERS:
                    given[name] = _encoder(source, name, kind, dtype)
                elif library and library.startswith("recast."):
                    importlib.import_module(library)  # diffusers does not import a module that a folder names
            formats = {"vae": torch.float32, "default": dtype}
            pipe = StableDiffusion3Pipeline.from_pretrained(source, torch_dtype=formats, **given)
    except _UNREADABLE as error:
        raise RecastError(
            f"no Stable Diffusion 3 pipeline in {str(source)!r}: give a hub name or a folder ({_reason(error)})"
        ) from error
    for name in ("transformer", "vae"):
        empty = [key for key, tensor in getattr(pipe, name).state_dict().items() if tensor.is_meta]
        if empty:
            raise RecastError(
                f"the {name} in {str(source)!r} has no tensor {empty[0]}: download or save the checkpoint again"
            )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _add_lora(pipe: StableDiffusion3Pipeline, folder: str | Path) -> None:
    """Load a saved adapter into the pipeline, as a diffusers user would."""
    path = Path(folder).expanduser() / FILE
    if not path.is_file():
        raise RecastError(f"there is no adapter {path}")
    try:
        with quiet():
            pipe.load_lora_weights(path.parent, weight_name=FILE)
    except _UNREADABLE as error:
        raise RecastError(f"{path} is not an adapter of this model: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """First line of an error's message, or its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _encoder(source: str | Path, name: str, kind: str, dtype: torch.dtype) -> Any:
    """A text encoder; an error for a missing tensor, which transformers would initialize randomly."""
    import transformers

    found = getattr(transformers, kind)
    model, report = found.from_pretrained(source, subfolder=name, dtype=dtype, output_loading_info=True)
    if report["missing_keys"]:
        raise ValueError(f"{name} has no tensor {min(report['missing_keys'])}")
    return model


class SD3Policy:
    """A `recast.flow.policy.Policy` on a diffusers pipeline; see `load`.

    Latents and velocities are float32 for any dtype of the transformer; the VAE is float32. Prompts are encoded one
    at a time, so that an embedding does not depend on the other prompts, and are cached on the CPU.

    Parameters
    ----------
    pipe : StableDiffusion3Pipeline
        The pipeline; its components are moved to the device and frozen.
    device : str or torch.device, default "cpu"
        Device of all components.
    guidance : float, default 1.0
        Scale of classifier-free guidance; 1 is none.
    resolution : int, optional
        Side of the images in pixels; by default the model's own.
    max_sequence_length : int, optional
        Number of T5 tokens; by default 256, or fewer if the tokenizer has a lower limit.
    cached_prompts : int, default 1024
        Number of prompts whose embeddings are kept, those used last.
    offload_text : bool, default False
        Whether the text encoders are on the device only while they encode.
    vae_batch : int, default 4
        Number of images that the VAE encodes or decodes together.
    """

    def __init__(
        self,
        pipe: StableDiffusion3Pipeline,
        *,
        device: str | torch.device = "cpu",
        guidance: float = 1.0,
        resolution: int | None = None,
        max_sequence_length: int | None = None,
        cached_prompts: int = 1024,
        offload_text: bool = False,
        vae_batch: int = 4,
    ) -> None:
        self.pipe, self.device, self.guidance = pipe, torch.device(device), guidance
        self.model: Any = pipe.transformer  # called by `velocity`; a trainer may wrap it
        self.offload_text, self.vae_batch, self.cached_prompts = offload_text, vae_batch, cached_prompts
        limit = getattr(pipe.tokenizer_3, "model_max_length", 256)
        self.max_sequence_length = min(256, limit) if max_sequence_length is None else max_sequence_length
        side = pipe.transformer.config.sample_size * pipe.vae_scale_factor if resolution is None else resolution
        unit = pipe.vae_scale_factor * pipe.transformer.config.patch_size
        if side % unit or side < unit:
            raise RecastError(f"the resolution {side} is not a multiple of {unit}, as this model requires")
        self.side = side // pipe.vae_scale_factor
        largest = pipe.transformer.config.pos_embed_max_size * unit
        if side > largest:
            raise RecastError(
                f"the resolution {side} is above {largest}, the largest for which this model has positions"
            )
        self._dtype = pipe.transformer.dtype  # diffusers iterates over all modules on every access
        self._cache: OrderedDict[str, tuple[Tensor, Tensor]] = OrderedDict()
        for part in (pipe.transformer, pipe.vae, *self._encoders()):
            part.eval().requires_grad_(False)
        pipe.transformer.to(self.device)
        pipe.vae.to(self.device)
        self._place_text(self.device if not offload_text else torch.device("cpu"))

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of one image's latents."""
        return (self.pipe.transformer.config.in_channels, self.side, self.side)

    @property
    def row_bytes(self) -> int:
        """Approximate size of one sample's activations in a velocity call: 14 vectors per token."""
        config = self.pipe.transformer.config
        tokens = (self.side // config.patch_size) ** 2 + self.pipe.tokenizer_max_length + self.max_sequence_length
        width = config.num_attention_heads * config.attention_head_dim
        size = torch.finfo(self.pipe.transformer.dtype).bits // 8
        return (2 if self.guidance > 1 else 1) * 14 * tokens * width * size

    def sigmas(self, steps: int) -> list[float]:
        """σ_0..σ_T as the pipeline's scheduler sets them, depending on the resolution if it uses dynamic shifting."""
        if steps < 1:
            raise RecastError(f"the number of steps must be at least 1, not {steps}")
        if steps == 1:
            return [0.0, 1.0]  # diffusers divides 0 by 0 here if the scheduler has a terminal shift
        config = self.pipe.scheduler.config
        scheduler = type(self.pipe.scheduler).from_config(config)
        shift = {}
        if config.get("use_dynamic_shifting"):
            tokens = (self.side // self.pipe.transformer.config.patch_size) ** 2
            keys = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
            shift = {"mu": calculate_shift(tokens, *(config[key] for key in keys))}
        scheduler.set_timesteps(steps, **shift)
        return scheduler.sigmas.flip(0).tolist()

    @torch.no_grad()
    def condition(self, prompts: Sequence[str]) -> Condition:
        """Embeddings of the prompts, one row per prompt; cached prompts are not encoded again."""
        if isinstance(prompts, str) or not prompts:
            raise RecastError(f"prompts must be a list of at least one prompt, not {prompts!r}")
        guided = self.guidance > 1
        rows = self._encode([*prompts, ""] if guided else prompts)
        embeds, pooled = (torch.stack(column).to(self.device) for column in zip(*rows, strict=True))
        if not guided:
            return Condition(embeds, pooled, self.guidance)
        return Condition(embeds[:-1], pooled[:-1], self.guidance, embeds[-1:], pooled[-1:])

    def velocity(self, x: Tensor, sigma: float | Tensor, condition: Condition) -> Tensor:
        """v at latents `x` and level `sigma`, with classifier-free guidance if the condition has an empty prompt.

        Differentiable in `x` and in the transformer's parameters.
        """
        count = len(x)
        condition = condition.expand(count)
        level = torch.as_tensor(sigma, dtype=torch.float32, device=x.device).expand(count)
        embeds, pooled, inputs = condition.embeds, condition.pooled, x.to(self._dtype)
        guided = condition.empty_embeds is not None and condition.empty_pooled is not None
        if guided:
            embeds = torch.cat([condition.empty_embeds.expand(count, -1, -1), embeds])  # type: ignore[union-attr]
            pooled = torch.cat([condition.empty_pooled.expand(count, -1), pooled])  # type: ignore[union-attr]
            inputs, level = torch.cat([inputs] * 2), torch.cat([level] * 2)
        output = self.model(
            hidden_states=inputs,
            timestep=level * self.pipe.scheduler.config.num_train_timesteps,
            encoder_hidden_states=embeds,
            pooled_projections=pooled,
            return_dict=False,
        )[0].to(x.dtype)
        if not guided:
            return output
        empty, prompted = output.chunk(2)
        return empty + condition.guidance * (prompted - empty)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Images (B, 3, H, W) in [0, 1] of latents, `vae_batch` at a time."""
        vae = self.pipe.vae
        images = []
        for part in latents.split(self.vae_batch):
            scaled = part.to(self.device, torch.float32) / vae.config.scaling_factor + vae.config.shift_factor
            images.append((vae.decode(scaled, return_dict=False)[0] * 0.5 + 0.5).clamp(0, 1))
        return torch.cat(images)

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Latents of images in [0, 1]: the mode of the VAE's posterior, shifted and scaled."""
        vae = self.pipe.vae
        height = self.side * self.pipe.vae_scale_factor
        if images.ndim != 4 or images.shape[1:] != (3, height, height):
            raise RecastError(
                f"this policy's images have the shape (B, 3, {height}, {height}), not {tuple(images.shape)}"
            )
        latents = []
        for part in images.split(self.vae_batch):
            mean = vae.encode(part.to(self.device, torch.float32) * 2 - 1).latent_dist.mode()
            latents.append((mean - vae.config.shift_factor) * vae.config.scaling_factor)
        return torch.cat(latents)

    def _encode(self, prompts: Sequence[str]) -> list[tuple[Tensor, Tensor]]:
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._cache]
        found = {prompt: self._cache[prompt] for prompt in prompts if prompt in self._cache}
        if new:
            self._place_text(self.device)
            try:
                for prompt in new:
                    found[prompt] = self._cache[prompt] = self._encode_one(prompt)
            finally:
                if self.offload_text:
                    self._place_text(torch.device("cpu"))
        for prompt in dict.fromkeys(prompts):
            self._cache[prompt] = found[prompt]
            self._cache.move_to_end(prompt)
        while len(self._cache) > self.cached_prompts:
            self._cache.popitem(last=False)
        return [found[prompt] for prompt in prompts]

    def _encode_one(self, prompt: str) -> tuple[Tensor, Tensor]:
        embeds, _, pooled, _ = self.pipe.encode_prompt(
            [prompt],
            None,
            None,
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
        )
        return embeds[0].cpu(), pooled[0].cpu()

    def _encoders(self) -> list[Any]:
        return [part for part in (getattr(self.pipe, name) for name in _ENCODERS) if part is not None]

    def _place_text(self, device: torch.device) -> None:
        for encoder in self._encoders():
            if encoder.device != device:
                encoder.to(device)
