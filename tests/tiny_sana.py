"""A SANA pipeline with random weights: every real component class and file, at a tiny size."""

from pathlib import Path

import torch
from diffusers import AutoencoderDC, DPMSolverMultistepScheduler, SanaPipeline, SanaTransformer2DModel
from transformers import Gemma2Config, Gemma2Model, GemmaTokenizerFast

WORDS = ("▁a", "▁red", "▁circle", "▁and", "▁blue", "▁square", "a", "▁", "e", "r", "s")
BLOCKS = ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3


def tokenizer() -> GemmaTokenizerFast:
    """Gemma's byte-fallback BPE with a merge for every word above; <bos> comes first."""
    specials = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens, merges = dict.fromkeys([*specials, *sorted(set("".join(WORDS)))]), {}
    for word in WORDS:
        pieces = list(word)
        while len(pieces) > 1:
            merges[pieces[0], pieces[1]] = None
            pieces[:2] = [pieces[0] + pieces[1]]
            tokens[pieces[0]] = None
    vocabulary = {token: k for k, token in enumerate(tokens)}
    return GemmaTokenizerFast(vocab=vocabulary, merges=list(merges), add_bos_token=True)


def pipeline(**parts: object) -> SanaPipeline:
    """Gemma 2, a deep-compression autoencoder of factor 32 and SANA's usual scheduler."""
    torch.manual_seed(0)
    words = tokenizer()
    gemma = Gemma2Config(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        initializer_range=0.5,
    )
    whole = {
        "tokenizer": words,
        "text_encoder": Gemma2Model(gemma),
        "vae": autoencoder(),
        "transformer": SanaTransformer2DModel(
            in_channels=8,
            out_channels=8,
            num_attention_heads=4,
            attention_head_dim=8,
            num_layers=2,
            num_cross_attention_heads=2,
            cross_attention_head_dim=16,
            cross_attention_dim=32,
            caption_channels=16,
            sample_size=2,
        ),
        "scheduler": DPMSolverMultistepScheduler(
            flow_shift=3.0, use_flow_sigmas=True, prediction_type="flow_prediction"
        ),
    }
    return SanaPipeline(**(whole | parts))


def autoencoder() -> AutoencoderDC:
    """DC-AE's six levels, three of them with linear attention."""
    return AutoencoderDC(
        latent_channels=8,
        attention_head_dim=8,
        encoder_block_types=BLOCKS,
        decoder_block_types=BLOCKS,
        encoder_block_out_channels=(8,) * 6,
        decoder_block_out_channels=(8,) * 6,
        encoder_layers_per_block=(1,) * 6,
        decoder_layers_per_block=(1,) * 6,
        downsample_block_type="Conv",
        upsample_block_type="interpolate",
        scaling_factor=0.41407,
    )


def folder(path: Path, **parts: object) -> Path:
    """The pipeline saved as a user would have it on disk."""
    pipeline(**parts).save_pretrained(path)
    return path
