"""A Z-Image pipeline with random weights: every real component class and file, at a tiny size."""

from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2TokenizerFast, Qwen3Config, Qwen3Model

import tiny

WORDS = ("a", " red", " circle", " and", " a", " blue", " square", "user", "assistant")
TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


def tokenizer() -> Qwen2TokenizerFast:
    """Qwen's byte-level BPE with a merge for every word above, and its chat template without tools."""
    tokens, merges = dict.fromkeys(sorted(ByteLevel.alphabet())), {}
    for word in WORDS:
        pieces = list(word.replace(" ", "Ġ"))
        while len(pieces) > 1:
            merges[pieces[0], pieces[1]] = None
            pieces[:2] = [pieces[0] + pieces[1]]
            tokens[pieces[0]] = None
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return Qwen2TokenizerFast(
        vocab={token: k for k, token in enumerate([*tokens, *specials])},
        merges=list(merges),
        additional_special_tokens=specials[1:],
        chat_template=TEMPLATE,
        model_max_length=131072,
    )


def pipeline(**parts: object) -> ZImagePipeline:
    """Qwen3, the VAE of FLUX.1, a transformer with refiners and the scheduler of Z-Image-Turbo."""
    torch.manual_seed(0)
    words = tokenizer()
    qwen = Qwen3Config(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        initializer_range=0.5,
    )
    transformer = ZImageTransformer2DModel(
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        axes_dims=[8, 4, 4],
        axes_lens=[256, 8, 8],
    )
    for pad in (transformer.x_pad_token, transformer.cap_pad_token):
        torch.nn.init.normal_(pad)  # else what pads a text to 32 tokens could be anything
    whole = {
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0),
        "vae": tiny.autoencoder(scaling_factor=0.3611, shift_factor=0.1159),
        "text_encoder": Qwen3Model(qwen),
        "tokenizer": words,
        "transformer": transformer,
    }
    return ZImagePipeline(**(whole | parts))


def folder(path: Path, **parts: object) -> Path:
    """The pipeline saved as a user would have it on disk."""
    pipeline(**parts).save_pretrained(path)
    return path
