"""ImageReward: a signed score by a chain of linear layers over the [CLS] state of BLIP for prompt and image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import expit
from torch import Tensor, nn

from recast import device as devices
from recast.errors import RecastError
from recast.rewards import aesthetic, catalog, checkpoints, clip
from recast.rewards.base import Images, as_tensor

__all__ = ["FILE", "ImageReward"]

FILE = "ImageReward.pt"
_MEAN, _STD = 0.16717362830052426, 1.0333394966054072
"""Of the raw scores on the authors' data: the reward is a z-score."""
_TOKENS = 35
"""Maximum length of a prompt in tokens."""
_NAMES = {
    "cls_token": "embeddings.class_embedding",
    "pos_embed": "embeddings.position_embedding",
    "patch_embed.proj.": "embeddings.patch_embedding.",
    "blocks.": "encoder.layers.",
    "norm.": "post_layernorm.",
}
_PARTS = {".attn.qkv.": ".self_attn.qkv.", ".attn.proj.": ".self_attn.projection.", ".norm": ".layer_norm"}


class ImageReward:
    """z-score by ImageReward-v1.0; `checkpoint` is the published file, its folder or its hub repository."""

    def __init__(
        self,
        checkpoint: str | Path = catalog.IMAGEREWARD,
        tokenizer: str | Path = catalog.BERT,
        device: str = "auto",
        dtype: str = "float32",
        batch_size: int = 32,
        offload: bool = False,
    ) -> None:
        self.batch_size = clip.check_batch("imagereward", batch_size)
        self.device, self.dtype, self.offload = devices.pick(device), devices.dtype(dtype), offload
        self.tokenizer, vision, text, head = _load(checkpoint, tokenizer)
        side = vision.config.image_size
        self.pixels = clip.Processor(side, (side, side), clip.MEAN, clip.STD, "processor", even=True)
        both = {"vision": vision.to(dtype=self.dtype), "text": text.to(dtype=self.dtype), "head": head}
        self.model = nn.ModuleDict(both).to("cpu" if offload else self.device).eval().requires_grad_(False)

    @torch.no_grad()
    def __call__(
        self, images: Images, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]] | None = None
    ) -> NDArray[np.float64]:
        """One z-score per image."""
        images = as_tensor(images, prompts)
        found = [torch.empty(0)]
        with devices.visiting(self.model, self.device, self.offload):
            for start in range(0, len(images), self.batch_size):
                part = slice(start, start + self.batch_size)
                found.append(self._score(images[part], list(prompts[part])).cpu())
        return (torch.cat(found).double().numpy() - _MEAN) / _STD

    def _score(self, images: Tensor, prompts: list[str]) -> Tensor:
        seen = self.model["vision"](pixel_values=self.pixels(images).to(self.device, self.dtype)).last_hidden_state
        tokens = self.tokenizer(
            prompts, padding="max_length", max_length=_TOKENS, truncation=True, return_tensors="pt"
        ).to(self.device)
        read = self.model["text"](
            input_ids=tokens["input_ids"],
            attention_mask=tokens["attention_mask"],
            encoder_hidden_states=seen,
            encoder_attention_mask=torch.ones(seen.shape[:2], dtype=torch.long, device=self.device),
        ).last_hidden_state
        return clip.finite("ImageReward", self.model["head"](read[:, 0].float())[:, 0])

    @staticmethod
    def positive(scores: NDArray[np.float64]) -> NDArray[np.float64]:
        """For gain curves: a sigmoid (App. E.1)."""
        return expit(scores)


def _load(source: str | Path, tokenizer: str | Path) -> tuple[Any, Any, Any, nn.Module]:
    try:
        from transformers import AutoTokenizer, BlipTextModel, BlipVisionModel
    except ImportError as error:
        raise RecastError(f"imagereward needs transformers 5.4 or later ({error})") from error
    with checkpoints.loading("ImageReward checkpoint", source):
        state = checkpoints.read(checkpoints.find(source, FILE))
        parts = {
            prefix: _below(state, prefix) for prefix in ("blip.visual_encoder.", "blip.text_encoder.", "mlp.layers.")
        }
        eyes, words, chain = parts.values()
        try:
            vision = checkpoints.pretrained(BlipVisionModel, None, _vision_config(eyes), _converted(eyes))
            text = checkpoints.pretrained(BlipTextModel, None, _text_config(words), words, add_pooling_layer=False)
            head = aesthetic.head(words["embeddings.word_embeddings.weight"].shape[1])
        except KeyError as error:
            raise ValueError(f"it has no tensor {error.args[0]}") from error
        checkpoints.fill(head, chain)
    with checkpoints.loading("BERT tokenizer", tokenizer):
        return AutoTokenizer.from_pretrained(tokenizer), vision, text, head


def _below(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors under a prefix, without the position indices that older files contain."""
    found = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    found.pop("embeddings.position_ids", None)
    return found


def _converted(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the vision tower under the names of transformers' `BlipVisionModel`."""
    made = {}
    for name, value in state.items():
        start = next((old for old in _NAMES if name.startswith(old)), None)
        place = name if start is None else _NAMES[start] + name.removeprefix(start)
        for old, new in _PARTS.items():
            place = place.replace(old, new)
        made[place] = value
    return made


def _vision_config(state: Mapping[str, Tensor]) -> Any:
    """The sizes implied by the tensors of the vision tower, with heads 64 wide."""
    from transformers import BlipVisionConfig

    width, _, patch, _ = state["patch_embed.proj.weight"].shape
    return BlipVisionConfig(
        hidden_size=width,
        intermediate_size=state["blocks.0.mlp.fc1.weight"].shape[0],
        num_hidden_layers=_layers(state, "blocks."),
        num_attention_heads=max(1, width // 64),
        image_size=patch * round((state["pos_embed"].shape[1] - 1) ** 0.5),
        patch_size=patch,
        layer_norm_eps=1e-6,
        hidden_act="gelu",
    )


def _text_config(state: Mapping[str, Tensor]) -> Any:
    """The sizes implied by the text tensors; `is_decoder` adds cross-attention, without a causal mask in the call."""
    from transformers import BlipTextConfig

    words, width = state["embeddings.word_embeddings.weight"].shape
    return BlipTextConfig(
        vocab_size=words,
        hidden_size=width,
        encoder_hidden_size=state["encoder.layer.0.crossattention.self.key.weight"].shape[1],
        intermediate_size=state["encoder.layer.0.intermediate.dense.weight"].shape[0],
        num_hidden_layers=_layers(state, "encoder.layer."),
        num_attention_heads=max(1, width // 64),
        max_position_embeddings=state["embeddings.position_embeddings.weight"].shape[0],
        layer_norm_eps=1e-12,
        hidden_act="gelu",
        is_decoder=True,
    )


def _layers(state: Mapping[str, Tensor], prefix: str) -> int:
    return len({name.removeprefix(prefix).split(".")[0] for name in state if name.startswith(prefix)})
