"""What rewards take at their published sizes: bytes of parameters, FLOPs per image, and bytes of activations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.resources import files
from typing import Any, Literal

import torch
from torch import Tensor, nn

from recast.device import dtype
from recast.plan.meter import measure
from recast.quiet import quiet
from recast.rewards import aesthetic, base, catalog
from recast.shapes import render

__all__ = ["Scorer", "resident", "scorer"]

_Where = Literal["gpu", "cpu", "endpoint", "unknown"]
_INSTRUCTION = 600
"""Tokens of HPSv3's instruction and a prompt, about; its text is not part of this package."""
_WHOLE = 64
"""Images of a call of a reward that takes all at once."""
_COUNTED = 2
"""Images in a counted call; every quantity is proportional to their number."""
_NAMES = ("composition", "detail", "background", "census", "jpeg")
"""Rewards of the package without a network."""


@dataclass(frozen=True)
class Scorer:
    """The cost of one reward.

    Parameters
    ----------
    where : {"gpu", "cpu", "endpoint", "unknown"}
        Where it computes; only what runs on a GPU has bytes and FLOPs.
    models : mapping of str to int
        Bytes of its networks; those of the same key are shared between rewards.
    flops : mapping of str to float
        FLOPs per image by kind, as in `recast.plan.meter.Measured`.
    activations : int
        Peak bytes of a call on `batch` images.
    offload : bool
        Whether its networks are on the device only while it scores.
    """

    where: _Where
    models: Mapping[str, int] = field(default_factory=dict)
    flops: Mapping[str, float] = field(default_factory=dict)
    activations: int = 0
    offload: bool = False


@dataclass(frozen=True)
class _Network:
    """A network on the meta device, and what it computes for so many images."""

    parts: Mapping[str, nn.Module]
    call: Callable[[int], object]


def scorer(name: str, options: Mapping[str, Any] | None, offload: bool = False) -> Scorer:
    """The cost of a reward with its options, at the published size of its model.

    Examples
    --------
    >>> scorer("ocr", None).where
    'cpu'
    """
    options = dict(options or {})
    base.find(name)
    if name == "unifiedreward":
        return Scorer("endpoint")
    if name not in base.NAMES:
        return Scorer("unknown")
    if name in ("ocr", *_NAMES) or str(options.get("device", "auto")).startswith("cpu"):
        return Scorer("cpu")
    numbers = str(options.get("dtype", "bfloat16" if name == "hpsv3" else "float32"))
    offloaded = bool(options.get("offload", offload))
    parameters = inspect.signature(base.loadable(name)).parameters
    default = parameters["batch_size"].default if "batch_size" in parameters else _WHOLE
    sizes, flops, each = _counted(name, numbers)
    models = {f"{key}, {numbers}{', offloaded' if offloaded else ''}": size for key, size in sizes.items()}
    return Scorer("gpu", models, flops, each * int(options.get("batch_size", default)), offloaded)


def resident(scorers: Iterable[Scorer]) -> int:
    """Bytes of the networks that stay on a GPU; a network that several rewards use is there once."""
    found: dict[str, int] = {}
    for each in scorers:
        if not each.offload:
            found |= each.models
    return sum(found.values())


@cache
def _counted(name: str, numbers: str) -> tuple[dict[str, int], dict[str, float], int]:
    """Bytes of a reward's networks, FLOPs per image and activation bytes per image."""
    with quiet(), torch.device("meta"), torch.no_grad():
        made = _MODELS[name](dtype(numbers))
        for part in made.parts.values():
            part.eval().requires_grad_(False)
        tensors = [each for part in made.parts.values() for each in (*part.parameters(), *part.buffers())]
        found = measure(partial(made.call, _COUNTED), tensors)
    sizes = {
        key: sum(each.nbytes for each in (*part.parameters(), *part.buffers())) for key, part in made.parts.items()
    }
    return sizes, {kind: count / _COUNTED for kind, count in found.flops.items()}, found.peak // _COUNTED


def _clip(sizes: str, checkpoint: str, head: bool, numbers: torch.dtype) -> _Network:
    from transformers import CLIPConfig, CLIPModel

    model = CLIPModel(CLIPConfig(**catalog.configurations()[sizes])).to(numbers)
    parts: dict[str, nn.Module] = {checkpoint: model} | ({"aesthetic head": aesthetic.head(768)} if head else {})

    def call(count: int) -> Tensor:
        seen = model.get_image_features(pixel_values=torch.empty(count, 3, 224, 224, dtype=numbers)).pooler_output
        return parts["aesthetic head"](seen.float()) if head else seen

    return _Network(parts, call)


def _alignment(numbers: torch.dtype) -> _Network:
    from transformers import CLIPConfig, CLIPModel

    with torch.device("cpu"):
        config = CLIPConfig.from_pretrained(str(files("recast.shapes").joinpath("data/clip")))
    model = CLIPModel(config).to(numbers)
    side = render.SIZE
    pixels = partial(torch.empty, dtype=numbers)
    return _Network(
        {"CLIP of the shapes world": model}, lambda count: model.get_image_features(pixels(count, 3, side, side))
    )


def _imagereward(numbers: torch.dtype) -> _Network:
    from transformers import BlipTextConfig, BlipTextModel, BlipVisionConfig, BlipVisionModel

    sizes = catalog.configurations()
    eyes = BlipVisionModel(BlipVisionConfig(**sizes["BLIP vision"])).to(numbers)
    words = BlipTextModel(BlipTextConfig(**sizes["BLIP text"]), add_pooling_layer=False).to(numbers)
    head = aesthetic.head(768)

    def call(count: int) -> Tensor:
        seen = eyes(pixel_values=torch.empty(count, 3, 224, 224, dtype=numbers)).last_hidden_state
        tokens = torch.zeros(count, 35, dtype=torch.long)
        read = words(tokens, encoder_hidden_states=seen)  # without masks, whose values decide how they are applied
        return head(read.last_hidden_state[:, 0].float())

    return _Network({"ImageReward": nn.ModuleList([eyes, words, head])}, call)


def _geneval(_numbers: torch.dtype) -> _Network:
    """The detector, in float32 at 800 pixels; crops of objects that CLIP classifies depend on the image."""
    from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation, SwinConfig

    swin = SwinConfig(**catalog.configurations()["Swin-S"])
    model = Mask2FormerForUniversalSegmentation(Mask2FormerConfig(backbone_config=swin, num_labels=80)).to("meta")
    eyes = _clip("CLIP ViT-L/14", catalog.CLIP_L14, False, torch.float32).parts
    return _Network({"Mask2Former": model, **eyes}, lambda count: model(pixel_values=torch.empty(count, 3, 800, 800)))


def _hpsv3(numbers: torch.dtype) -> _Network:
    from transformers import Qwen2VLConfig, Qwen2VLModel

    model = Qwen2VLModel(Qwen2VLConfig(**catalog.configurations()["Qwen2-VL-7B"])).to(numbers)
    head = nn.Sequential(nn.Linear(3584, 1024), nn.Linear(1024, 16), nn.Linear(16, 2))

    # Sizes of images are values, which exist on the CPU only; the positions that follow from them are not.
    model.visual.rotary_pos_emb.register_forward_pre_hook(lambda _, given: tuple(each.to("meta") for each in given))

    def call(count: int) -> object:  # 256 tokens of 2 x 2 patches
        grid = torch.tensor([[1, 32, 32]] * count, device="cpu")
        seen = model.visual(torch.empty(count * 1024, 1176, dtype=numbers), grid_thw=grid)
        embedded = torch.empty(count, 256 + _INSTRUCTION, 3584, dtype=numbers)
        positions = torch.zeros(3, count, embedded.shape[1], dtype=torch.long)
        read = model.language_model(inputs_embeds=embedded, position_ids=positions, use_cache=False)
        return head(read.last_hidden_state[:, -1].float()), seen

    return _Network({"HPSv3": nn.ModuleList([model, head])}, call)


_MODELS: dict[str, Callable[[torch.dtype], _Network]] = {
    "clipscore": partial(_clip, "CLIP ViT-L/14", catalog.CLIP_L14, False),
    "aesthetic": partial(_clip, "CLIP ViT-L/14", catalog.CLIP_L14, True),
    "hpsv2": partial(_clip, "CLIP ViT-H/14", catalog.HPSV2, False),
    "pickscore": partial(_clip, "CLIP ViT-H/14", catalog.PICKSCORE, False),
    "imagereward": _imagereward,
    "geneval": _geneval,
    "hpsv3": _hpsv3,
    "alignment": _alignment,
}
