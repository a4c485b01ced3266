"""A CLIP with random weights in the published layout, and smooth pictures to show it."""

import json
from pathlib import Path

import torch
from PIL import Image
from torch.nn import functional
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel

from recast.shapes import models

PROMPTS = ["a red circle", "two blue squares", "a red circle"]
TERMS, LAYERS = 1500, 28
"""Products that one cosine adds up, 600 in the vision tower and 900 in the text tower, and layers it goes through."""


def save(path: Path, side: int = 32, seed: int = 0) -> Path:
    """Files as openai/clip-vit-large-patch14 has them: preprocessor_config.json, vocab.json, merges.txt."""
    torch.manual_seed(seed)
    words = models.tokenizer(length=77)
    text = models.text_config(words)
    text.max_position_embeddings = 77
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": side,
        "patch_size": 8,
    }
    model = CLIPModel(CLIPConfig(text_config=text.to_dict(), vision_config=vision, projection_dim=24))
    model.save_pretrained(path)
    processor = CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
    settings = json.loads(processor.to_json_string()) | {"image_processor_type": "CLIPFeatureExtractor"}
    (path / "preprocessor_config.json").write_text(json.dumps(settings))
    save_tokenizer(path)
    return path


def save_tokenizer(path: Path) -> Path:
    """The tokenizer's files alone."""
    state = json.loads(models.tokenizer(length=77).backend_tokenizer.to_str())["model"]
    path.mkdir(exist_ok=True)
    (path / "vocab.json").write_text(json.dumps(state["vocab"]))
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in state["merges"]]
    (path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    (path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "CLIPTokenizer", "model_max_length": 77})
    )
    return path


def pictures(height: int = 48, width: int = 64, count: int = 3) -> tuple[torch.Tensor, list[Image.Image]]:
    """Smooth images as 8-bit floats, and the same as PIL."""
    generator = torch.Generator().manual_seed(0)
    small = torch.rand(count, 3, 6, 8, generator=generator)
    images = (functional.interpolate(small, (height, width), mode="bicubic").clamp(0, 1) * 255).round()
    return images / 255, [Image.fromarray(image.byte().permute(1, 2, 0).numpy()) for image in images]


def embeddings(folder: Path, pil: list[Image.Image], prompts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalized embeddings by transformers alone: its processor, its tokenizer, its model."""
    from transformers import AutoTokenizer

    model = CLIPModel.from_pretrained(folder).eval()
    pixels = CLIPImageProcessorPil.from_pretrained(folder)(pil, return_tensors="pt")["pixel_values"]
    tokens = AutoTokenizer.from_pretrained(folder)(prompts, padding="max_length", max_length=77, return_tensors="pt")
    with torch.no_grad():
        both = model(pixel_values=pixels, **tokens)
    return both.image_embeds, both.text_embeds
