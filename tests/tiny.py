"""A Stable Diffusion 3 pipeline with random weights: every real component class and file, at a tiny size."""

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import CLIPTextModelWithProjection, T5Config, T5EncoderModel, T5TokenizerFast

from recast.shapes import models

WORDS = ("▁a", "▁red", "▁circle", "▁and", "▁blue", "▁square", "▁", "e", "r", "s")


def pipeline(**parts: object) -> StableDiffusion3Pipeline:
    """Two CLIP encoders, T5, a convolutional VAE with SD3's constants, dual attention in the first block."""
    torch.manual_seed(0)
    tokens = models.tokenizer(length=24)
    encoders = [CLIPTextModelWithProjection(_text_config(tokens)) for _ in range(2)]
    t5 = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu")
    specials = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    vocabulary = specials + [(word, -float(k)) for k, word in enumerate(WORDS)]
    whole = {
        "transformer": SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=16,
            out_channels=16,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            caption_projection_dim=32,
            pooled_projection_dim=32,
            pos_embed_max_size=12,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
        ),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0),
        "vae": autoencoder(scaling_factor=1.5305, shift_factor=0.0609),
        "text_encoder": encoders[0],
        "tokenizer": tokens,
        "text_encoder_2": encoders[1],
        "tokenizer_2": models.tokenizer(length=24),
        "text_encoder_3": T5EncoderModel(t5),
        "tokenizer_3": T5TokenizerFast(vocab=vocabulary, extra_ids=0, model_max_length=512),
    }
    return StableDiffusion3Pipeline(**(whole | parts))


def autoencoder(**settings: float) -> AutoencoderKL:
    """A convolutional VAE of 8 pixels per cell and 16 channels."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 16, 16),
        norm_num_groups=4,
        latent_channels=16,
        use_quant_conv=False,
        use_post_quant_conv=False,
        **settings,
    )


def _text_config(tokens: object) -> object:
    config = models.text_config(tokens)
    config.max_position_embeddings, config.hidden_size, config.num_attention_heads = 24, 16, 2
    config.intermediate_size, config.projection_dim = 32, 16
    return config


def folder(path: Path, **parts: object) -> Path:
    """The pipeline saved as a user would have it on disk."""
    pipeline(**parts).save_pretrained(path)
    return path
