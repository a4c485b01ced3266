"""A Qwen-Image pipeline with random weights: every real component class and file, at a tiny size."""

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

PROMPT = "a red circle and a blue square"
"""Its words, and those of the pipeline's template, are one token each; any other text is split into bytes."""
SCHEDULER = {
    "shift": 1.0,
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 0.9,
    "base_image_seq_len": 256,
    "max_image_seq_len": 8192,
    "shift_terminal": 0.02,
    "time_shift_type": "exponential",
}
"""The scheduler_config.json of Qwen/Qwen-Image."""


def tokenizer() -> Qwen2Tokenizer:
    """Qwen's byte-level BPE, in which the template's instruction has 34 tokens, as with the published tokenizer."""
    template = QwenImagePipeline(*[None] * 5).prompt_template_encode
    empty = Qwen2Tokenizer(additional_special_tokens=["<|im_start|>", "<|im_end|>"], model_max_length=131072)
    settings = {"initial_alphabet": sorted(ByteLevel.alphabet()), "show_progress": False}
    return empty.train_new_from_iterator([template.format(PROMPT)], 1024, **settings)


def text_encoder(words: int) -> Qwen2_5_VLForConditionalGeneration:
    """Two layers of Qwen2.5-VL, and one of its vision tower, which no prompt uses."""
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": words,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 2048,
            "initializer_range": 0.3,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6},
        },
        vision_config={"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32},
        tie_word_embeddings=False,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def pipeline(**parts: object) -> QwenImagePipeline:
    """Two blocks, and the causal VAE at an eighth of the side with the published statistics of its 16 channels."""
    torch.manual_seed(0)
    tokens = tokenizer()
    whole = {
        "transformer": transformer(),
        "scheduler": FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        "vae": AutoencoderKLQwenImage(base_dim=8, num_res_blocks=1),
        "text_encoder": text_encoder(len(tokens)),
        "tokenizer": tokens,
    }
    return QwenImagePipeline(**(whole | parts))


def transformer(**settings: object) -> QwenImageTransformer2DModel:
    """Two blocks of width 32."""
    sizes: dict[str, object] = {
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "axes_dims_rope": (4, 6, 6),
    }
    made = QwenImageTransformer2DModel(**(sizes | settings))
    with torch.no_grad():
        for matrix in made.parameters():
            if matrix.ndim == 2:
                matrix.mul_(2.0)  # with torch's own initial values, prompts hardly change an image
    return made


def folder(path: Path, **parts: object) -> Path:
    """The pipeline saved as a user would have it on disk."""
    pipeline(**parts).save_pretrained(path)
    return path
