"""A FLUX.2 klein pipeline with random weights: every real component class and file, at a tiny size."""

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
)
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3ForCausalLM

LAYERS = 28
"""Of the text encoder: one more than the last layer that the pipeline reads, so that no final norm is in between."""
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
TEMPLATE = (
    "{% for each in messages %}<|im_start|>{{ each.role }}\n{{ each.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""The form of Qwen3's chat template, for messages without tools."""


def tokenizer() -> Qwen2Tokenizer:
    """Byte-level tokens with three merges, Qwen3's special tokens and chat template."""
    letters = [*sorted(ByteLevel.alphabet()), "re", "red", "ir"]
    vocabulary = {token: place for place, token in enumerate([*letters, *SPECIALS])}
    found = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[("r", "e"), ("re", "d"), ("i", "r")],
        additional_special_tokens=list(SPECIALS[1:]),
        eos_token="<|im_end|>",
        model_max_length=1024,
    )
    found.chat_template = TEMPLATE
    return found


def pipeline(**parts: Any) -> Flux2KleinPipeline:
    """Two double and two single blocks, a VAE with batch statistics, Qwen3 with tied embeddings; a base model."""
    torch.manual_seed(0)
    tokens = tokenizer()
    text = Qwen3Config(
        vocab_size=len(tokens),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=1024,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    whole = {
        "transformer": Flux2Transformer2DModel(
            in_channels=32,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=3 * 16,
            timestep_guidance_channels=32,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=False,
        ),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        "vae": AutoencoderKLFlux2(
            block_out_channels=(8, 8, 16, 16), layers_per_block=1, norm_num_groups=4, latent_channels=8
        ),
        "text_encoder": Qwen3ForCausalLM(text),
        "tokenizer": tokens,
    }
    # Statistics that differ between channels, as in a trained VAE; a new one has mean 0 and variance 1.
    whole["vae"].bn.running_mean.copy_(0.3 * torch.randn(32))
    whole["vae"].bn.running_var.copy_(0.5 + torch.rand(32))
    return Flux2KleinPipeline(**(whole | parts))


def folder(path: Path, **parts: Any) -> Path:
    """The pipeline saved as a user would have it on disk."""
    pipeline(**parts).save_pretrained(path)
    return path
