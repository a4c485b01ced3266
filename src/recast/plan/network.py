"""What a policy's calls take: FLOPs and bytes of velocities, of training and of the VAE, counted without parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor, nn

from recast import objects, train
from recast.config import PolicyConfig, TrainConfig
from recast.device import dtype
from recast.errors import RecastError
from recast.flow import configurations, families
from recast.flow.lora import Adapters
from recast.flow.pipeline import PipelinePolicy, stacked
from recast.flow.policy import Condition
from recast.plan.meter import Measured, measure
from recast.quiet import quiet

__all__ = ["Line", "Network", "Pair", "weight_bytes"]

_INT8, _NF4 = 1.0, 0.5 + 4 / 64
"""Bytes per quantized number: nf4 by bitsandbytes has one float32 scale for 64 numbers."""


@dataclass(frozen=True)
class Line:
    """Bytes that grow with the rows of a call: `fixed` + `each` · rows.

    >>> Line(10, 2).at(5), Line(10, 2).most(25)
    (20, 7)
    """

    fixed: float
    each: float

    def at(self, rows: int) -> int:
        """Bytes of a call with so many rows."""
        return round(self.fixed + self.each * rows)

    def most(self, room: float) -> int:
        """The largest number of rows that fits into `room` bytes; 0 if none does."""
        return max(0, int((room - self.fixed) // self.each)) if self.each else 0


@dataclass(frozen=True)
class Pair:
    """FLOPs of one (image, level) pair of training by pass and kind, and bytes of a micro-batch.

    `recomputed` are the FLOPs that checkpointing adds, and `memory` the bytes without and with it, by "plain" and
    "checkpointed"; `saved` are the bytes per pair that autograd keeps.
    """

    forward: Mapping[str, float]
    base: Mapping[str, float]
    backward: Mapping[str, float]
    recomputed: Mapping[str, float]
    memory: Mapping[str, Line]
    saved: Mapping[str, float]

    def flops(self, settings: TrainConfig) -> dict[str, float]:
        """FLOPs by kind: old and new forward, base as far as the KL term needs it, backward, and recomputation.

        The passes that the first optimizer step of a training leaves out are counted.
        """
        share = 1 / settings.kl_every if settings.kl_weight > 0 else 0.0
        parts = [self.forward, self.forward, self.backward, {kind: share * each for kind, each in self.base.items()}]
        parts += [self.recomputed] if settings.checkpointing else []
        return {kind: sum(part.get(kind, 0.0) for part in parts) for kind in {key for part in parts for key in part}}


class Network:
    """A recipe's policy on the meta device, or a family of one's own on the CPU, with the costs of its calls."""

    def __init__(self, config: PolicyConfig) -> None:
        self.config = config
        self.policy, self.origin = _policy(config)
        self.where = "meta" if self.origin != "loaded" else "cpu"
        self.points = (2, 8) if self.where == "meta" else (1, 2)  # rows of the two calls that fix a line

    def guided(self, guidance: float) -> Network:
        """The same policy with another scale of guidance."""
        return (
            self if guidance == self.config.guidance else Network(self.config.model_copy(update={"guidance": guidance}))
        )

    @cached_property
    def parameters(self) -> dict[str, int]:
        """Bytes of the transformer as it is quantized, of the VAE, and of the text encoders."""
        pipe = getattr(self.policy, "pipe", None)
        found = {"transformer": weight_bytes(self.policy.network, self.config.quantize)}
        found["vae"] = _bytes(pipe.vae) if pipe is not None else 0
        found["text encoders"] = sum(map(_bytes, self.policy.encoders)) if pipe is not None else 0
        return found

    @cached_property
    def dequantized(self) -> int:
        """Bytes of the largest matrix, which a quantized network holds in full for the duration of its product."""
        if self.config.quantize == "none":
            return 0
        sizes = [each.weight.numel() for each in self.policy.network.modules() if isinstance(each, nn.Linear)]
        return max(sizes) * dtype(self.config.dtype).itemsize

    @property
    def latent_bytes(self) -> int:
        """Bytes of one image's latents, in float32."""
        return 4 * int(torch.Size(self.policy.latent_shape).numel())

    @property
    def image_bytes(self) -> int:
        """Bytes of one image, in float32."""
        return 12 * self.policy.image_size[0] * self.policy.image_size[1]

    @cached_property
    def prompt_bytes(self) -> int:
        """Bytes of one encoded prompt."""
        return sum(each.nbytes for each in self._condition(1).tensors.values())

    def _condition(self, rows: int) -> Condition:
        if not isinstance(self.policy, PipelinePolicy) or self.where == "cpu":
            return self.policy.condition(["a photo of a cat"] * rows)
        blank = self.policy.blank_prompt()
        empty = stacked([blank]) if self.policy.needs_empty else {}
        return Condition(stacked([blank] * rows), self.policy.guidance, empty).expand(rows)

    def _latents(self, rows: int) -> Tensor:
        return torch.zeros(rows, *self.policy.latent_shape, device=self.where)

    def _measured(
        self,
        call: Callable[[int], Callable[[], object]],
        autocast: torch.dtype | None = None,
        points: tuple[int, ...] | None = None,
    ) -> _Counted:
        """FLOPs per row and bytes of a call, from two numbers of rows; from equal ones, FLOPs alone."""
        modules = [self.policy.network, *([self.policy.pipe.vae] if hasattr(self.policy, "pipe") else [])]
        known = [each for module in modules for each in (*module.parameters(), *module.buffers())]
        known += [each.grad for each in known if each.grad is not None]
        fewer, more = points or self.points
        first = measure(call(fewer), known, autocast)
        return _Counted(first, first if fewer == more else measure(call(more), known, autocast), fewer, more)

    @cached_property
    def velocity(self) -> _Counted:
        """One velocity evaluation, guidance included."""

        def call(rows: int) -> Callable[[], object]:
            x, condition = self._latents(rows), self._condition(rows)
            return lambda: self.policy.velocity(x, 0.5, condition)

        with torch.no_grad():
            return self._measured(call)

    @cached_property
    def decoding(self) -> _Counted:
        """Decoding of images that the VAE takes at a time."""
        return self._vae(lambda rows: lambda: self.policy.decode(self._latents(rows)))

    @cached_property
    def encoding(self) -> _Counted:
        """Encoding of images."""
        size = self.policy.image_size
        return self._vae(lambda rows: lambda: self.policy.encode(torch.zeros(rows, 3, *size, device=self.where)))

    def _vae(self, call: Callable[[int], Callable[[], object]]) -> _Counted:
        batch = getattr(self.policy, "vae_batch", None)
        if batch is not None:
            self.policy.vae_batch = max(self.points)  # all rows of the two calls at a time
        try:
            return self._measured(call)
        finally:
            if batch is not None:
                self.policy.vae_batch = batch

    @cached_property
    def vae_batch(self) -> int:
        """Images that the VAE takes at a time."""
        return int(getattr(self.policy, "vae_batch", 1))

    def training(self, settings: TrainConfig) -> tuple[Pair, int]:
        """The cost of a pair, and the bytes of one adapter; adds adapters to the policy, so it is called once."""
        with quiet(), torch.device(self.where):
            adapters = Adapters(self.policy.network, self.policy.targets, settings.rank, settings.alpha)
        for each in adapters.parameters:  # from the second micro-batch on, gradients are there
            each.grad = torch.zeros_like(each)
        lower = None if settings.precision == "float32" else dtype(settings.precision)
        passes = {}
        for who in ("old", "base"):
            with torch.no_grad(), adapters.using(who):
                passes[who] = self._measured(self._pass, lower, self.points[:1] * 2).flops
        found: dict[str, _Counted] = {}
        for how in ("plain", "checkpointed"):
            if how == "checkpointed" and hasattr(self.policy.network, "enable_gradient_checkpointing"):
                self.policy.network.enable_gradient_checkpointing()
            found[how] = self._measured(lambda rows: self._step(rows, adapters, settings), lower)
        pair = Pair(
            passes["old"],
            passes["base"],
            _sum(found["plain"].flops, passes["old"], -1),
            _sum(found["checkpointed"].flops, found["plain"].flops, -1),
            {how: replace(each.memory, fixed=each.memory.fixed + self.dequantized) for how, each in found.items()},
            {how: each.saved for how, each in found.items()},
        )
        return pair, sum(each.nbytes for each in adapters.parameters)

    def _pass(self, rows: int) -> Callable[[], object]:
        x, sigma, condition = self._latents(rows), torch.full((rows,), 0.5, device=self.where), self._condition(rows)
        return lambda: self.policy.velocity(x, sigma, condition)

    def _step(self, rows: int, adapters: Adapters, settings: TrainConfig) -> Callable[[], None]:
        """The part of a micro-batch with gradients: the new velocity, the loss, and its gradient.

        The velocities of old and base are only there: their passes hold less, and their FLOPs are counted apart.
        """
        sigma, r = (torch.full((rows,), 0.5, device=self.where) for _ in range(2))

        def call() -> None:
            condition = self._condition(rows)
            clean, noise = self._latents(rows), self._latents(rows)
            level = sigma.reshape(-1, *(1 for _ in clean.shape[1:]))
            x = (1 - level) * clean + level * noise
            old, base = (self._latents(rows), self._latents(rows) if settings.kl_weight > 0 else None)
            adapters.use("default")
            terms = train.nft.loss(
                self.policy.velocity(x, sigma, condition),
                old,
                *(clean, noise, sigma, r),
                v_base=base,
                kl_weight=settings.kl_weight,
            )
            terms.total.mean().backward()

        return call


class _Counted:
    """FLOPs per row by kind, and bytes as a line, from calls with two numbers of rows."""

    def __init__(self, first: Measured, second: Measured, fewer: int, more: int) -> None:
        apart = max(more - fewer, 1)
        slope = (second.peak - first.peak) / apart
        self.memory = Line(max(0.0, first.peak - slope * fewer), slope)
        self.flops = {kind: count / more for kind, count in second.flops.items()}
        self.saved = (second.saved - first.saved) / apart

    @property
    def total(self) -> float:
        """FLOPs per row."""
        return sum(self.flops.values())


def _sum(one: Mapping[str, float], other: Mapping[str, float], sign: int = 1) -> dict[str, float]:
    return {kind: one.get(kind, 0.0) + sign * other.get(kind, 0.0) for kind in dict.fromkeys([*one, *other])}


def _policy(config: PolicyConfig) -> tuple[Any, str]:
    """The policy without parameters and where its configuration is from; a family that cannot be so made is loaded."""
    source = str(files("recast.shapes").joinpath("data/pipeline")) if config.model == "shapes" else config.model
    family = None if config.family is None else objects.find(config.family, "policy.family", needs="load")
    if family is not None and not (isinstance(family, type) and issubclass(family, PipelinePolicy)):
        return families.load(config.model_copy(update={"device": "cpu"})), "loaded"
    found = configurations.read(source)
    if family is None:
        if found.pipeline not in families.FAMILIES:
            raise RecastError(
                f"the model {source!r} is a {found.pipeline}, which no family supports: use a model with one of "
                f"{', '.join(families.FAMILIES)}, or name your own family in policy.family as package.module:Object"
            )
        family = objects.find(families.FAMILIES[found.pipeline], "policy.family", needs="load")
    made = family(
        configurations.pipeline(found, dtype(config.dtype)),
        device="meta",
        guidance=config.guidance,
        resolution=config.resolution,
        max_sequence_length=config.max_sequence_length,
        offload_text=False,  # without parameters there is nothing to move
        vae_batch=config.vae_batch,
    )
    return made, found.origin


def _bytes(module: nn.Module) -> int:
    return sum(each.nbytes for each in (*module.parameters(), *module.buffers()))


def weight_bytes(network: nn.Module, quantize: str = "none") -> int:
    """Bytes of a network's parameters; quantization applies to the matrices of its linear layers.

    int8 has one scale per output in the network's dtype, nf4 one float32 scale per 64 numbers.

    >>> weight_bytes(nn.Linear(64, 2, bias=False), "int8")
    136
    """
    linear = {id(each.weight): each for each in network.modules() if isinstance(each, nn.Linear)}
    total = 0.0
    for each in (*network.parameters(), *network.buffers()):
        if quantize == "none" or id(each) not in linear:
            total += each.nbytes
        elif quantize == "int8":
            total += _INT8 * each.numel() + len(each) * each.itemsize
        else:
            total += _NF4 * each.numel()
    return round(total)
