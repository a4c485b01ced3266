"""Names and shapes of the tensors in a Mask2Former checkpoint of mmdet, as its sources (2.28.2) define them.

`benchmarks/published/geneval.py` compares them with those of the model that mmdet builds.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

Shape = tuple[int, ...]
SMALL: dict[str, Any] = {
    "width": 8,
    "depths": (2, 1, 1, 1),
    "heads": (1, 2, 2, 4),
    "window": 3,
    "size": 32,
    "attention_heads": 4,
    "encoder": (1, 24),
    "decoder": (2, 40),
    "number": 6,
}


def pair(name: str, out: int, *rest: int) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (out, *rest)
    yield f"{name}.bias", (out,)


def backbone(width: int, depths: tuple[int, ...], heads: tuple[int, ...], window: int) -> Iterator[tuple[str, Shape]]:
    yield from pair("backbone.patch_embed.projection", width, 3, 4, 4)
    yield from pair("backbone.patch_embed.norm", width)
    for stage, depth in enumerate(depths):
        side, top = width * 2**stage, f"backbone.stages.{stage}"
        for block in range(depth):
            name = f"{top}.blocks.{block}"
            yield from pair(f"{name}.norm1", side)
            yield f"{name}.attn.w_msa.relative_position_bias_table", ((2 * window - 1) ** 2, heads[stage])
            yield f"{name}.attn.w_msa.relative_position_index", (window**2, window**2)
            yield from pair(f"{name}.attn.w_msa.qkv", 3 * side, side)
            yield from pair(f"{name}.attn.w_msa.proj", side, side)
            yield from pair(f"{name}.norm2", side)
            yield from pair(f"{name}.ffn.layers.0.0", 4 * side, side)
            yield from pair(f"{name}.ffn.layers.1", side, 4 * side)
        if stage < 3:
            yield from pair(f"{top}.downsample.norm", 4 * side)
            yield f"{top}.downsample.reduction.weight", (2 * side, 4 * side)
        yield from pair(f"backbone.norm{stage}", side)


def pixels(width: int, size: int, heads: int, layers: int, hidden: int) -> Iterator[tuple[str, Shape]]:
    top = "panoptic_head.pixel_decoder"
    for level in range(3):
        yield from pair(f"{top}.input_convs.{level}.conv", size, width * 2 ** (3 - level), 1, 1)
        yield from pair(f"{top}.input_convs.{level}.gn", size)
    for layer in range(layers):
        name = f"{top}.encoder.layers.{layer}"
        yield from pair(f"{name}.attentions.0.sampling_offsets", heads * 3 * 4 * 2, size)
        yield from pair(f"{name}.attentions.0.attention_weights", heads * 3 * 4, size)
        yield from pair(f"{name}.attentions.0.value_proj", size, size)
        yield from pair(f"{name}.attentions.0.output_proj", size, size)
        yield from pair(f"{name}.ffns.0.layers.0.0", hidden, size)
        yield from pair(f"{name}.ffns.0.layers.1", size, hidden)
        for norm in range(2):
            yield from pair(f"{name}.norms.{norm}", size)
    yield f"{top}.level_encoding.weight", (3, size)
    yield f"{top}.lateral_convs.0.conv.weight", (size, width, 1, 1)
    yield from pair(f"{top}.lateral_convs.0.gn", size)
    yield f"{top}.output_convs.0.conv.weight", (size, size, 3, 3)
    yield from pair(f"{top}.output_convs.0.gn", size)
    yield from pair(f"{top}.mask_feature", size, size, 1, 1)


def queries(number: int, labels: int, size: int, layers: int, hidden: int) -> Iterator[tuple[str, Shape]]:
    for layer in range(layers):
        name = f"panoptic_head.transformer_decoder.layers.{layer}"
        for attention in range(2):
            yield f"{name}.attentions.{attention}.attn.in_proj_weight", (3 * size, size)
            yield f"{name}.attentions.{attention}.attn.in_proj_bias", (3 * size,)
            yield from pair(f"{name}.attentions.{attention}.attn.out_proj", size, size)
        yield from pair(f"{name}.ffns.0.layers.0.0", hidden, size)
        yield from pair(f"{name}.ffns.0.layers.1", size, hidden)
        for norm in range(3):
            yield from pair(f"{name}.norms.{norm}", size)
    yield from pair("panoptic_head.transformer_decoder.post_norm", size)
    for name, rows in (("query_embed", number), ("query_feat", number), ("level_embed", 3)):
        yield f"panoptic_head.{name}.weight", (rows, size)
    yield from pair("panoptic_head.cls_embed", labels + 1, size)
    for layer in (0, 2, 4):
        yield from pair(f"panoptic_head.mask_embed.{layer}", size, size)


def shapes(
    width: int = 96,
    depths: tuple[int, ...] = (2, 2, 18, 2),
    heads: tuple[int, ...] = (3, 6, 12, 24),
    window: int = 7,
    size: int = 256,
    attention_heads: int = 8,
    encoder: tuple[int, int] = (6, 1024),
    decoder: tuple[int, int] = (9, 2048),
    number: int = 100,
    labels: int = 80,
) -> dict[str, Shape]:
    """Shapes by name; by default those of mask2former_swin-s-p4-w7-224_lsj_8x2_50e_coco."""
    return dict(
        [
            *backbone(width, depths, heads, window),
            *pixels(width, size, attention_heads, *encoder),
            *queries(number, labels, size, *decoder),
        ]
    )


def tensors(**options: Any) -> dict[str, torch.Tensor]:
    """Random tensors of a model, the same each time."""
    generator = torch.Generator().manual_seed(0)
    found = {name: torch.randn(shape, generator=generator) / 4 for name, shape in shapes(**options).items()}
    for name, value in found.items():
        if name.endswith("relative_position_index"):
            found[name] = torch.zeros(value.shape, dtype=torch.long)
    return found


def save(path: Path, meta: dict[str, Any], found: dict[str, torch.Tensor]) -> Path:
    """A file as mmdet publishes it: the older format of torch, with what is known about the training beside."""
    torch.save({"meta": meta, "state_dict": found}, path, _use_new_zipfile_serialization=False)
    return path
