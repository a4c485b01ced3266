"""HPSv2: an open_clip ViT-H/14 fine-tuned on preferences; its published file is read into transformers' CLIP."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from recast import device as devices
from recast.errors import RecastError
from recast.rewards import catalog, checkpoints, clip
from recast.rewards.base import Images, as_tensor

__all__ = ["FILE", "HPSv2", "cleaned", "converted", "pixels"]

FILE = "HPS_v2.1_compressed.pt"
_SIDE = 224
_PLACES = {
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.ln_pre.": "vision_model.pre_layrnorm.",
    "visual.ln_post.": "vision_model.post_layernorm.",
    "visual.transformer.resblocks.": "vision_model.encoder.layers.",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.": "text_model.final_layer_norm.",
    "transformer.resblocks.": "text_model.encoder.layers.",
}
_PARTS = {
    ".attn.out_proj.": ".self_attn.out_proj.",
    ".ln_1.": ".layer_norm1.",
    ".ln_2.": ".layer_norm2.",
    ".mlp.c_fc.": ".mlp.fc1.",
    ".mlp.c_proj.": ".mlp.fc2.",
}


class HPSv2:
    """Cosine by HPS v2.1, without a logit scale; `checkpoint` is the published file, its folder or its hub repository.

    As in the published scorer, the longest side of an image becomes 224, the rest is padded with black and nothing is
    cropped, and prompts are cleaned as in open_clip.
    """

    def __init__(
        self,
        checkpoint: str | Path = catalog.HPSV2,
        tokenizer: str | Path = catalog.CLIP_H14,
        device: str = "auto",
        dtype: str = "float32",
        batch_size: int = 32,
        offload: bool = False,
    ) -> None:
        self.batch_size = clip.check_batch("hpsv2", batch_size)
        where, numbers = devices.pick(device), devices.dtype(dtype)
        self.clip = clip.shared(
            ("hpsv2", str(checkpoint), str(tokenizer), where, numbers, offload),
            lambda: _load(checkpoint, tokenizer, where, numbers, offload),
        )

    def __call__(
        self, images: Images, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]] | None = None
    ) -> NDArray[np.float64]:
        """Cosine of each image and its prompt."""
        found = self.clip.cosines(as_tensor(images, prompts), prompts, pixels, self.batch_size)
        return found.cpu().double().numpy()


def pixels(images: Tensor) -> Tensor:
    """The whole image on a black square of 224 pixels, normalized."""
    height, width = images.shape[-2:]
    scale = _SIDE / max(height, width)
    size = (round(height * scale), round(width * scale))
    images = images.float().clamp(0, 1)
    if size != (height, width):
        images = functional.interpolate(images, size=size, mode="bicubic", antialias=True)
    down, across = _SIDE - size[0], _SIDE - size[1]
    margins = (across // 2, across - across // 2, down // 2, down - down // 2)
    return clip.normalized(functional.pad(images, margins))


def cleaned(text: str) -> str:
    """A prompt as open_clip's tokenizer cleans it: repaired by ftfy, unescaped twice, single spaces, lower case."""
    import ftfy

    repaired = html.unescape(html.unescape(ftfy.fix_text(text)))
    return " ".join(repaired.split()).lower()


def converted(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of open_clip under the names of transformers' `CLIPModel`."""
    made: dict[str, Tensor] = {}
    for name, value in state.items():
        if name in ("visual.proj", "text_projection"):
            # Both are transposed; the second is square, so a missing transpose would not raise an error.
            made["visual_projection.weight" if name == "visual.proj" else "text_projection.weight"] = (
                value.T.contiguous()
            )
            continue
        start = next((old for old in _PLACES if name.startswith(old)), None)
        place = name if start is None else _PLACES[start] + name.removeprefix(start)
        for old, new in _PARTS.items():
            place = place.replace(old, new)
        if ".attn.in_proj_" in place:
            for letter, part in zip("qkv", value.chunk(3), strict=True):
                made[place.replace(".attn.in_proj_", f".self_attn.{letter}_proj.")] = part
        else:
            made[place] = value
    return made


def _config_of(state: Mapping[str, Tensor]) -> Any:
    """The `CLIPConfig` implied by the shapes in a checkpoint; heads are 80 wide in the vision tower, 64 in the text."""
    from transformers import CLIPConfig

    def layers(prefix: str) -> int:
        return len({name.split(".resblocks.")[1].split(".")[0] for name in state if name.startswith(prefix)})

    def tower(prefix: str, width: int, head: int) -> dict[str, Any]:
        hidden = state[f"{prefix}transformer.resblocks.0.mlp.c_fc.weight"].shape[0]
        return {
            "hidden_size": width,
            "intermediate_size": hidden,
            "num_hidden_layers": layers(f"{prefix}transformer.resblocks."),
            "num_attention_heads": max(1, width // head),
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "projection_dim": state["text_projection"].shape[1],
        }

    convolution = state["visual.conv1.weight"]
    vision = tower("visual.", convolution.shape[0], 80) | {"image_size": _SIDE, "patch_size": convolution.shape[-1]}
    words, width = state["token_embedding.weight"].shape
    text = tower("", width, 64) | {
        "vocab_size": words,
        "max_position_embeddings": state["positional_embedding"].shape[0],
        "bos_token_id": words - 2,
        "eos_token_id": words - 1,
    }
    return CLIPConfig(text_config=text, vision_config=vision, projection_dim=state["text_projection"].shape[1])


def _load(
    source: str | Path, tokenizer: str | Path, device: torch.device, dtype: torch.dtype, offload: bool
) -> clip.Clip:
    try:
        import ftfy  # noqa: F401
        from transformers import AutoTokenizer, CLIPModel
    except ImportError as error:
        raise RecastError(f"hpsv2 needs more packages ({error}): pip install 'recast-diffusion[rewards]'") from error
    with checkpoints.loading("HPS v2.1 checkpoint", source):
        state = checkpoints.read(checkpoints.find(source, FILE))
        state.pop("logit_scale", None)  # not part of the score
        try:
            config = _config_of(state)
        except KeyError as error:
            raise ValueError(f"it has no tensor {error.args[0]}") from error
        model = checkpoints.pretrained(CLIPModel, None, config, converted(state) | {"logit_scale": torch.zeros(())})
    with checkpoints.loading("CLIP tokenizer", tokenizer):
        words = AutoTokenizer.from_pretrained(tokenizer)
    return clip.Clip(model, words, device, dtype, offload, cleaned)
