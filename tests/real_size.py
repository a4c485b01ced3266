"""Pipelines with the published widths on a device without memory; a few layers of each kind stand for all of them.

The tokenizers and schedulers are those of the tiny pipelines. The transformers' numbers are also in tests/flow, where
their sources are named and their parameters are counted; those of the other parts are from the `config.json` of the
published models.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import (
    AutoencoderDC,
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    Flux2Transformer2DModel,
    FluxTransformer2DModel,
    QwenImageTransformer2DModel,
    SanaTransformer2DModel,
    SD3Transformer2DModel,
    ZImageTransformer2DModel,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    Gemma2Config,
    Gemma2Model,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    T5Config,
    T5EncoderModel,
)
from transformers.initialization import no_init_weights

import tiny
import tiny_flux
import tiny_flux2
import tiny_qwen
import tiny_sana
import tiny_zimage
from recast.shapes import models


@contextmanager
def building(device: str, dtype: torch.dtype = torch.float32) -> Iterator[None]:
    """Modules are built on the device, in a dtype and without initial values, as `from_pretrained` does."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with no_init_weights(), torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def sd35_medium(device: str, layers: int = 3) -> Any:
    """Stable Diffusion 3.5 Medium: blocks with two attentions first, and a last one without text."""
    with building(device, torch.bfloat16):
        transformer = SD3Transformer2DModel(
            sample_size=128,
            num_layers=layers,
            attention_head_dim=64,
            num_attention_heads=24,
            joint_attention_dim=4096,
            caption_projection_dim=1536,
            pooled_projection_dim=2048,
            pos_embed_max_size=384,
            dual_attention_layers=tuple(range((layers + 1) // 2)),
            qk_norm="rms_norm",
        )
        encoders = [CLIPTextModelWithProjection(_clip(width)) for width in (768, 1280)]
        t5 = T5EncoderModel(_t5())
    tokens = models.tokenizer(length=77)
    return tiny.pipeline(
        transformer=transformer,
        vae=_autoencoder(device, 1.5305, 0.0609),
        text_encoder=encoders[0],
        text_encoder_2=encoders[1],
        text_encoder_3=t5,
        tokenizer=tokens,
        tokenizer_2=tokens,
    )


def flux(device: str) -> Any:
    """FLUX.1 dev."""
    with building(device, torch.bfloat16):
        transformer = FluxTransformer2DModel(num_layers=1, num_single_layers=1, guidance_embeds=True)
        clip, t5 = CLIPTextModel(_clip(768)), T5EncoderModel(_t5())
    return tiny_flux.pipeline(
        transformer=transformer,
        vae=_autoencoder(device, 0.3611, 0.1159),
        text_encoder=clip,
        text_encoder_2=t5,
        tokenizer=models.tokenizer(length=77),
    )


def flux2_klein(device: str) -> Any:
    """FLUX.2 klein 4B, base; its text encoder has the layers up to the last one that the pipeline reads."""
    with building(device, torch.bfloat16):
        transformer = Flux2Transformer2DModel(
            num_layers=1,
            num_single_layers=1,
            num_attention_heads=24,
            joint_attention_dim=3 * 2560,
            guidance_embeds=False,
        )
        text = Qwen3ForCausalLM(_qwen3(layers=28))
    with building(device):
        vae = AutoencoderKLFlux2()
    return tiny_flux2.pipeline(transformer=transformer, vae=vae, text_encoder=text)


def qwen_image(device: str) -> Any:
    """Qwen-Image."""
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 2,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6},
        },
        vision_config={"depth": 1, "hidden_size": 1280, "out_hidden_size": 3584},
    )
    with building(device, torch.bfloat16):
        transformer = QwenImageTransformer2DModel(num_layers=2)
        text = Qwen2_5_VLForConditionalGeneration(config)
    with building(device):
        vae = AutoencoderKLQwenImage()
    return tiny_qwen.pipeline(transformer=transformer, vae=vae, text_encoder=text)


def sana(device: str) -> Any:
    """SANA 1.6B with Gemma 2 2B and DC-AE f32c32."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
    config = Gemma2Config(hidden_size=2304, intermediate_size=9216, num_hidden_layers=2, vocab_size=256000, **heads)
    with building(device, torch.bfloat16):
        transformer = SanaTransformer2DModel(num_layers=2, caption_channels=2304)
        text = Gemma2Model(config)
    blocks = ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3
    widths, scales = (128, 256, 512, 512, 1024, 1024), ((),) * 3 + ((5,),) * 3
    with building(device):
        vae = AutoencoderDC(
            latent_channels=32,
            attention_head_dim=32,
            encoder_block_types=blocks,
            decoder_block_types=blocks,
            encoder_block_out_channels=widths,
            decoder_block_out_channels=widths,
            encoder_layers_per_block=(1,) * 6,
            decoder_layers_per_block=(1,) * 6,
            encoder_qkv_multiscales=scales,
            decoder_qkv_multiscales=scales,
            downsample_block_type="Conv",
            upsample_block_type="interpolate",
            scaling_factor=0.41407,
        )
    return tiny_sana.pipeline(transformer=transformer, vae=vae, text_encoder=text)


def z_image(device: str) -> Any:
    """Z-Image-Turbo."""
    with building(device, torch.bfloat16):
        transformer = ZImageTransformer2DModel(n_layers=1, n_refiner_layers=1, axes_lens=[1536, 512, 512])
        text = Qwen3Model(_qwen3(layers=2))
    return tiny_zimage.pipeline(transformer=transformer, vae=_autoencoder(device, 0.3611, 0.1159), text_encoder=text)


def _clip(width: int) -> CLIPTextConfig:
    """CLIP's text tower of ViT-L/14 (768) or of bigG/14 (1280)."""
    return CLIPTextConfig(
        vocab_size=49408,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=2,
        num_attention_heads=width // 64,
        projection_dim=width,
    )


def _t5() -> T5Config:
    """T5-XXL, version 1.1."""
    return T5Config(
        vocab_size=32128,
        d_model=4096,
        d_kv=64,
        d_ff=10240,
        num_layers=2,
        num_heads=64,
        feed_forward_proj="gated-gelu",
    )


def _qwen3(layers: int) -> Qwen3Config:
    """Qwen3-4B."""
    return Qwen3Config(
        vocab_size=151936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
    )


def _autoencoder(device: str, scale: float, shift: float) -> AutoencoderKL:
    """The VAE of SD3 and FLUX.1, which differ in their constants."""
    with building(device):
        return AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(128, 256, 512, 512),
            layers_per_block=2,
            latent_channels=16,
            use_quant_conv=False,
            use_post_quant_conv=False,
            scaling_factor=scale,
            shift_factor=shift,
            sample_size=1024,
        )
