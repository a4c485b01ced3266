"""Mask2Former with a Swin backbone on COCO's instances: files of transformers, and the checkpoints of mmdet."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recast.errors import RecastError
from recast.rewards import catalog, checkpoints

__all__ = ["config", "load", "renamed"]

_IGNORED = (r"^criterion\.", r"\.encoder\.swin\.layernorm\.", r"\.relative_position_index$")
"""What a file may lack: the loss, a norm that newer versions have and do not use, and an index that is computed."""
_SWIN, _PIXELS = "model.pixel_level_module.encoder.", "model.pixel_level_module.decoder."
_QUERIES = "model.transformer_module."
_BLOCK, _TO_BLOCK = r"backbone\.stages\.(\d+)\.blocks\.(\d+)\.", _SWIN + r"encoder.layers.\1.blocks.\2."
_ENCODER, _TO_ENCODER = r"panoptic_head\.pixel_decoder\.encoder\.layers\.(\d+)\.", _PIXELS + r"encoder.layers.\1."
_LAYER, _TO_LAYER = r"panoptic_head\.transformer_decoder\.layers\.(\d+)\.", _QUERIES + r"decoder.layers.\1."
# The names of transformers are those of the files on the hub: every version of the package reads them.
_NAMES = (
    (r"backbone\.patch_embed\.projection\.", _SWIN + "embeddings.patch_embeddings.projection."),
    (r"backbone\.patch_embed\.norm\.", _SWIN + "embeddings.norm."),
    (_BLOCK + r"norm1\.", _TO_BLOCK + "layernorm_before."),
    (_BLOCK + r"norm2\.", _TO_BLOCK + "layernorm_after."),
    (_BLOCK + r"attn\.w_msa\.proj\.", _TO_BLOCK + "attention.output.dense."),
    (_BLOCK + r"attn\.w_msa\.", _TO_BLOCK + "attention.self."),
    (_BLOCK + r"ffn\.layers\.0\.0\.", _TO_BLOCK + "intermediate.dense."),
    (_BLOCK + r"ffn\.layers\.1\.", _TO_BLOCK + "output.dense."),
    (r"backbone\.stages\.(\d+)\.downsample\.", _SWIN + r"encoder.layers.\1.downsample."),
    (r"panoptic_head\.pixel_decoder\.input_convs\.(\d+)\.conv\.", _PIXELS + r"input_projections.\1.0."),
    (r"panoptic_head\.pixel_decoder\.input_convs\.(\d+)\.gn\.", _PIXELS + r"input_projections.\1.1."),
    (_ENCODER + r"attentions\.0\.", _TO_ENCODER + "self_attn."),
    (_ENCODER + r"norms\.0\.", _TO_ENCODER + "self_attn_layer_norm."),
    (_ENCODER + r"norms\.1\.", _TO_ENCODER + "final_layer_norm."),
    (_ENCODER + r"ffns\.0\.layers\.0\.0\.", _TO_ENCODER + "fc1."),
    (_ENCODER + r"ffns\.0\.layers\.1\.", _TO_ENCODER + "fc2."),
    (r"panoptic_head\.pixel_decoder\.level_encoding\.weight", _PIXELS + "level_embed"),
    (r"panoptic_head\.pixel_decoder\.lateral_convs\.0\.conv\.", _PIXELS + "adapter_1.0."),
    (r"panoptic_head\.pixel_decoder\.lateral_convs\.0\.gn\.", _PIXELS + "adapter_1.1."),
    (r"panoptic_head\.pixel_decoder\.output_convs\.0\.conv\.", _PIXELS + "layer_1.0."),
    (r"panoptic_head\.pixel_decoder\.output_convs\.0\.gn\.", _PIXELS + "layer_1.1."),
    (r"panoptic_head\.pixel_decoder\.mask_feature\.", _PIXELS + "mask_projection."),
    (_LAYER + r"attentions\.0\.attn\.", _TO_LAYER + "cross_attn."),
    (_LAYER + r"attentions\.1\.attn\.", _TO_LAYER + "self_attn."),
    (_LAYER + r"norms\.0\.", _TO_LAYER + "cross_attn_layer_norm."),
    (_LAYER + r"norms\.1\.", _TO_LAYER + "self_attn_layer_norm."),
    (_LAYER + r"norms\.2\.", _TO_LAYER + "final_layer_norm."),
    (_LAYER + r"ffns\.0\.layers\.0\.0\.", _TO_LAYER + "fc1."),
    (_LAYER + r"ffns\.0\.layers\.1\.", _TO_LAYER + "fc2."),
    (r"panoptic_head\.transformer_decoder\.post_norm\.", _QUERIES + "decoder.layernorm."),
    (r"panoptic_head\.query_embed\.", _QUERIES + "queries_embedder."),
    (r"panoptic_head\.query_feat\.", _QUERIES + "queries_features."),
    (r"panoptic_head\.level_embed\.", _QUERIES + "level_embed."),
    (r"panoptic_head\.cls_embed\.", "class_predictor."),
)
_SPLIT = (
    (r"(attention\.self\.)qkv\.(weight|bias)$", ("query", "key", "value")),
    (r"(layers\.\d+\.self_attn\.)in_proj_(weight|bias)$", ("q_proj", "k_proj", "v_proj")),
)
"""One tensor for three projections, and the names of the three."""


def load(source: str | Path, labels: int) -> Any:
    """The model of a hub repository, of a folder in its layout, or of a checkpoint file or address of mmdet.

    Raises ValueError if the files have another number of classes or if a tensor is missing.
    """
    try:
        from transformers import Mask2FormerForUniversalSegmentation
    except ImportError as error:
        raise RecastError(f"geneval needs transformers 5.4 or later ({error})") from error

    class Segmentation(Mask2FormerForUniversalSegmentation):  # type: ignore[misc]
        _keys_to_ignore_on_load_missing = _IGNORED

    if not _is_file(source):
        model = checkpoints.pretrained(Segmentation, source)
    else:
        tensors = _read(checkpoints.find(source, catalog.MASK2FORMER_FILE))
        model = checkpoints.pretrained(Segmentation, None, config(tensors), renamed(tensors))
    if model.config.num_labels != labels:
        raise ValueError(f"it has {model.config.num_labels} classes, not the {labels} of COCO's instances")
    return model


def _is_file(source: str | Path) -> bool:
    path = Path(source)
    return path.is_file() or path.suffix in (".pt", ".pth") or str(source).startswith("https://")


def _read(path: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint of mmdet; numbers of numpy in its `meta` are allowed, other classes are refused."""
    scalar: Any = np.float64(0).__reduce__()[0]
    kinds = {type(np.dtype(kind)) for kind in (np.float64, np.float32, np.int64, np.int32, np.bool_)}
    names = ("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")
    with torch.serialization.safe_globals([*((scalar, name) for name in names), np.dtype, *kinds]):
        return checkpoints.read(path)


def renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under the names that transformers' files have, from the names of mmdet.

    Projections that mmdet stores as one tensor are split into three. Where two by two patches are merged, mmdet orders
    the 4 C channels by channel and then by row and column, Swin by column, row and then by channel. The index of the
    relative positions is the same in both and is not loaded.
    """
    found: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if name.endswith("relative_position_index"):
            continue
        if ".downsample." in name:
            value = value[..., _merged(value.shape[-1] // 4)]
        found |= dict(_placed(_renamed(name), value))
    return found


def _merged(channels: int) -> Tensor:
    """For each of Swin's 4 C channels (column, row, channel) the place of mmdet's (channel, row, column)."""
    return torch.arange(4 * channels).view(channels, 2, 2).permute(2, 1, 0).flatten()


def _renamed(name: str) -> str:
    norm = re.fullmatch(r"backbone\.norm(\d)\.(weight|bias)", name)
    if norm:
        return f"{_SWIN}hidden_states_norms.stage{int(norm[1]) + 1}.{norm[2]}"
    mask = re.fullmatch(r"panoptic_head\.mask_embed\.([024])\.(weight|bias)", name)
    if mask:
        return f"{_QUERIES}decoder.mask_predictor.mask_embedder.{int(mask[1]) // 2}.0.{mask[2]}"
    for pattern, target in _NAMES:
        replaced, count = re.subn("^" + pattern, target, name)
        if count:
            return replaced
    return name


def _placed(name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    for pattern, parts in _SPLIT:
        match = re.search(pattern, name)
        if match:
            before = name[: match.start()] + match[1]
            yield from ((f"{before}{part}.{match[2]}", each) for part, each in zip(parts, value.chunk(3), strict=True))
            return
    yield name, value


def config(tensors: Mapping[str, Tensor]) -> Any:
    """The configuration of a Mask2Former model of mmdet, read off the shapes of its tensors.

    Three feature levels with four points each are those of every published one.
    """
    from transformers import Mask2FormerConfig, SwinConfig

    def size(name: str, axis: int = 0) -> int:
        if name not in tensors:
            raise ValueError(f"it has no tensor {name}, so it is no Mask2Former model of mmdet with a Swin backbone")
        return int(tensors[name].shape[axis])

    def count(pattern: str) -> int:
        return len({match[0] for name in tensors if (match := re.match(pattern, name))})

    head, pixels = "panoptic_head.", "panoptic_head.pixel_decoder."
    table = "backbone.stages.{}.blocks.0.attn.w_msa.relative_position_bias_table"
    stages = range(4)
    swin = SwinConfig(
        embed_dim=size("backbone.patch_embed.norm.weight"),
        depths=[count(rf"backbone\.stages\.{stage}\.blocks\.\d+\.") for stage in stages],
        num_heads=[size(table.format(stage), 1) for stage in stages],
        window_size=(math.isqrt(size(table.format(0))) + 1) // 2,
        out_features=[f"stage{stage + 1}" for stage in stages],
    )
    return Mask2FormerConfig(
        backbone_config=swin,
        feature_size=size(head + "query_feat.weight", 1),
        mask_feature_size=size(pixels + "mask_feature.weight"),
        hidden_dim=size(head + "query_feat.weight", 1),
        encoder_feedforward_dim=size(pixels + "encoder.layers.0.ffns.0.layers.0.0.weight"),
        encoder_layers=count(_ENCODER),
        dim_feedforward=size(head + "transformer_decoder.layers.0.ffns.0.layers.0.0.weight"),
        decoder_layers=count(_LAYER) + 1,  # transformers counts the prediction before the first layer
        num_attention_heads=size(pixels + "encoder.layers.0.attentions.0.sampling_offsets.bias") // (3 * 4 * 2),
        num_queries=size(head + "query_feat.weight"),
        num_labels=size(head + "cls_embed.weight") - 1,
    )
