"""A FLUX.1 pipeline with random weights: every real component class and file, at a tiny size."""

from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from transformers import CLIPTextModel, T5Config, T5EncoderModel, T5TokenizerFast

import tiny
from recast.shapes import models

WORDS = ("▁a", "▁red", "▁circle", "▁and", "▁blue", "▁square", "▁", "e", "r", "s")


def pipeline(guidance_embeds: bool = True, **parts: object) -> FluxPipeline:
    """FLUX.1 dev, or schnell without `guidance_embeds`: their schedulers, and the VAE's constants."""
    torch.manual_seed(0)
    tokens = models.tokenizer(length=24)
    text = models.text_config(tokens)
    text.max_position_embeddings, text.hidden_size, text.num_attention_heads, text.intermediate_size = 24, 16, 2, 32
    t5 = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu")
    specials = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    vocabulary = specials + [(word, -float(k)) for k, word in enumerate(WORDS)]
    # scheduler/scheduler_config.json of FLUX.1-dev and of FLUX.1-schnell.
    scheduler = FlowMatchEulerDiscreteScheduler(
        shift=3.0 if guidance_embeds else 1.0, use_dynamic_shifting=guidance_embeds, base_shift=0.5, max_shift=1.15
    )
    whole = {
        "transformer": FluxTransformer2DModel(
            patch_size=1,
            in_channels=64,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=16,
            guidance_embeds=guidance_embeds,
            axes_dims_rope=(4, 6, 6),
        ),
        "scheduler": scheduler,
        "vae": tiny.autoencoder(scaling_factor=0.3611, shift_factor=0.1159),
        "text_encoder": CLIPTextModel(text),
        "tokenizer": tokens,
        "text_encoder_2": T5EncoderModel(t5),
        "tokenizer_2": T5TokenizerFast(vocab=vocabulary, extra_ids=0, model_max_length=512),
    }
    return FluxPipeline(**(whole | parts))


def folder(path: Path, guidance_embeds: bool = True, **parts: object) -> Path:
    """The pipeline saved as a user would have it on disk."""
    pipeline(guidance_embeds, **parts).save_pretrained(path)
    return path
