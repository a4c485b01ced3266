"""The untrained models of the shapes world: the classes of diffusers and transformers at tiny sizes."""

from __future__ import annotations

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPProcessor,
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5TokenizerFast,
)

from recast.shapes import prompts, render, vae

__all__ = ["clip", "pipeline", "text_config", "tokenizer", "words"]

_TOKENS = 16
"""Maximum length of a prompt in tokens; the longest of the grammar has 8 words and two special tokens."""
_TEXT_WIDTH, _WIDTH, _LATENTS = 48, 96, 40
_SHIFT, _TERMINAL = 1.5, 0.1
"""Of the scheduler: a grid that resolves where the rewards are decided, and has no level that trains nothing."""


def words() -> list[str]:
    """The words of the grammar, each of which is one token."""
    plural = [f"{shape}es" if shape.endswith("s") else f"{shape}s" for shape in prompts.SHAPES]
    related = [word for relation in prompts.RELATIONS for word in relation.split()]
    every = (*prompts.NUMBERS, "an", *prompts.COLORS, *prompts.SHAPES, *plural, *related, "and")
    return list(dict.fromkeys(every))


def tokenizer(length: int = _TOKENS) -> CLIPTokenizer:
    """CLIP's byte-level BPE with merges for the words of the grammar only; any other text is split into bytes."""
    alphabet = sorted(ByteLevel.alphabet())
    tokens = dict.fromkeys([*alphabet, *(f"{letter}</w>" for letter in alphabet)])
    merges: dict[tuple[str, str], None] = {}
    for word in words():
        pieces = [*word[:-1], f"{word[-1]}</w>"]
        while len(pieces) > 1:  # from the right, so that "circle" and "circles" share only letters
            merges[pieces[-2], pieces[-1]] = None
            pieces[-2:] = [pieces[-2] + pieces[-1]]
            tokens[pieces[-1]] = None
    vocabulary = {token: k for k, token in enumerate([*tokens, "<|startoftext|>", "<|endoftext|>"])}
    return CLIPTokenizer(vocab=vocabulary, merges=list(merges), model_max_length=length)


def text_config(words_to: CLIPTokenizer, layers: int = 2) -> CLIPTextConfig:
    """A CLIP text tower of width 48 over the tokenizer's vocabulary."""
    return CLIPTextConfig(
        vocab_size=len(words_to),
        hidden_size=_TEXT_WIDTH,
        intermediate_size=4 * _TEXT_WIDTH,
        projection_dim=_TEXT_WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=3,
        max_position_embeddings=_TOKENS,
        initializer_factor=1.0,
        bos_token_id=words_to.bos_token_id,
        eos_token_id=words_to.eos_token_id,
        pad_token_id=words_to.pad_token_id,
    )


def pipeline(seed: int = 0) -> StableDiffusion3Pipeline:
    """An untrained SD3 pipeline of about 1.4 million parameters; only its VAE is already fitted.

    T5 is absent (`text_encoder_3: null`). Its tokenizer only determines the length: one zero token instead of
    diffusers' 256.
    """
    torch.manual_seed(seed)
    encoders = []
    for _ in range(2):
        encoder = CLIPTextModelWithProjection(text_config(tokenizer()))
        for embedding in (
            encoder.text_model.embeddings.token_embedding,
            encoder.text_model.embeddings.position_embedding,
        ):
            torch.nn.init.normal_(embedding.weight, std=0.5)  # from CLIP's 0.02, training needs a thousand more steps
        encoders.append(encoder)
    transformer = SD3Transformer2DModel(
        sample_size=render.GRID,
        patch_size=1,
        in_channels=_LATENTS,
        out_channels=_LATENTS,
        num_layers=4,
        attention_head_dim=32,
        num_attention_heads=_WIDTH // 32,
        joint_attention_dim=2 * _TEXT_WIDTH,
        caption_projection_dim=_WIDTH,
        pooled_projection_dim=2 * _TEXT_WIDTH,
        pos_embed_max_size=render.GRID,
        qk_norm="rms_norm",
    )
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=_SHIFT, shift_terminal=_TERMINAL),
        vae=vae.fit(_LATENTS),
        text_encoder=encoders[0],
        tokenizer=tokenizer(),
        text_encoder_2=encoders[1],
        tokenizer_2=tokenizer(),
        text_encoder_3=None,
        tokenizer_3=T5TokenizerFast(extra_ids=0, model_max_length=1),
    )


def clip(seed: int = 0) -> tuple[CLIPModel, CLIPProcessor]:
    """An untrained CLIP whose patches are the cells, and its processor."""
    torch.manual_seed(seed)
    words_to = tokenizer()
    config = CLIPConfig(
        text_config=text_config(words_to).to_dict(),
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 256,
            "projection_dim": _TEXT_WIDTH,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "image_size": render.SIZE,
            "patch_size": render.CELL,
        },
        projection_dim=_TEXT_WIDTH,
    )
    side = {"height": render.SIZE, "width": render.SIZE}
    images = CLIPImageProcessorPil(size={"shortest_edge": render.SIZE}, crop_size=side)
    return CLIPModel(config), CLIPProcessor(image_processor=images, tokenizer=words_to)
