"""ImageReward against a few lines of the original layers, on a tiny checkpoint in its published layout."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_clip import pictures
from torch import Tensor
from torch.nn import functional
from transformers import BertTokenizer, BlipTextConfig, BlipTextModel, CLIPImageProcessorPil

from recast.errors import RecastError
from recast.rewards import clip
from recast.rewards.imagereward import ImageReward
from tolerance import tolerance

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "circle", "two", "blue", "squares", "big"]
PROMPTS = ["a red circle", "two blue squares", "a big circle " * 30]
WIDTH, SIDE = 128, 48
TERMS, LAYERS = 5000, 35
"""Products that one score adds up: 768 of a patch, 650 in each of two layers of the vision tower, 900 in each of two of
the text tower, 1360 in the head; and layers that it goes through."""


def layer(state: dict[str, Tensor], name: str, after: int, before: int) -> None:
    state[f"{name}.weight"] = torch.randn(after, before) / before**0.5
    state[f"{name}.bias"] = torch.randn(after) * 0.1


def norm(state: dict[str, Tensor], name: str, width: int) -> None:
    state[f"{name}.weight"], state[f"{name}.bias"] = 1 + torch.randn(width) * 0.1, torch.randn(width) * 0.1


def checkpoint() -> dict[str, Tensor]:
    """A flat state dict: a ViT with two heads of 64 over 3 by 3 patches, BERT with cross-attention, the head."""
    torch.manual_seed(0)
    state: dict[str, Tensor] = {}
    eyes = "blip.visual_encoder."
    state[f"{eyes}cls_token"] = torch.randn(1, 1, WIDTH) * 0.1
    state[f"{eyes}pos_embed"] = torch.randn(1, 10, WIDTH) * 0.1
    state[f"{eyes}patch_embed.proj.weight"] = torch.randn(WIDTH, 3, 16, 16) / 28
    state[f"{eyes}patch_embed.proj.bias"] = torch.randn(WIDTH) * 0.1
    for k in range(2):
        block = f"{eyes}blocks.{k}."
        norm(state, f"{block}norm1", WIDTH)
        norm(state, f"{block}norm2", WIDTH)
        layer(state, f"{block}attn.qkv", 3 * WIDTH, WIDTH)
        layer(state, f"{block}attn.proj", WIDTH, WIDTH)
        layer(state, f"{block}mlp.fc1", 200, WIDTH)
        layer(state, f"{block}mlp.fc2", WIDTH, 200)
    norm(state, f"{eyes}norm", WIDTH)
    text = BlipTextModel(text_config(), add_pooling_layer=False)
    state |= {f"blip.text_encoder.{name}": value.detach() for name, value in text.state_dict().items()}
    state["blip.text_encoder.embeddings.position_ids"] = torch.arange(40)[None]
    layer(state, "blip.vision_proj", 8, WIDTH)
    layer(state, "blip.text_proj", 8, 128)
    for number, (before, after) in {0: (128, 1024), 2: (1024, 128), 4: (128, 64), 6: (64, 16), 7: (16, 1)}.items():
        layer(state, f"mlp.layers.{number}", after, before)
    return state


def text_config() -> BlipTextConfig:
    return BlipTextConfig(
        vocab_size=len(WORDS),
        hidden_size=128,
        encoder_hidden_size=WIDTH,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=40,
        layer_norm_eps=1e-12,
        hidden_act="gelu",
        is_decoder=True,
        initializer_range=WIDTH**-0.5,  # larger values make attention pick single tokens, and errors large
        bos_token_id=2,
        eos_token_id=3,
        sep_token_id=3,
    )


def vision(state: dict[str, Tensor], pixels: Tensor) -> Tensor:
    """timm's ViT as ImageReward has it, in functional form; eps 1e-6."""
    get = {
        name.removeprefix("blip.visual_encoder."): value for name, value in state.items() if "visual_encoder" in name
    }

    def normed(x: Tensor, name: str) -> Tensor:
        return functional.layer_norm(x, (WIDTH,), get[f"{name}.weight"], get[f"{name}.bias"], 1e-6)

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ get[f"{name}.weight"].T + get[f"{name}.bias"]

    x = functional.conv2d(pixels, get["patch_embed.proj.weight"], get["patch_embed.proj.bias"], 16).flatten(2).mT
    x = torch.cat([get["cls_token"].expand(len(x), -1, -1), x], 1) + get["pos_embed"]
    for k in range(2):
        parts = linear(normed(x, f"blocks.{k}.norm1"), f"blocks.{k}.attn.qkv").unflatten(-1, (3, 2, 64))
        q, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = ((q @ key.mT / 8).softmax(-1) @ value).transpose(1, 2).flatten(2)
        x = x + linear(attended, f"blocks.{k}.attn.proj")
        hidden = functional.gelu(linear(normed(x, f"blocks.{k}.norm2"), f"blocks.{k}.mlp.fc1"))
        x = x + linear(hidden, f"blocks.{k}.mlp.fc2")
    return normed(x, "norm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("imagereward")
    torch.save(checkpoint(), path / "ImageReward.pt")
    (path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer", "do_lower_case": true}')
    return path


@torch.no_grad()
def test_scores_are_those_of_the_original_layers(folder: Path) -> None:
    images, pil = pictures(60, 81)
    state = torch.load(folder / "ImageReward.pt", weights_only=True)
    processor = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    seen = vision(state, processor(pil, return_tensors="pt")["pixel_values"])
    tokens = BertTokenizer.from_pretrained(folder)(
        PROMPTS, padding="max_length", max_length=35, truncation=True, return_tensors="pt"
    )
    text = BlipTextModel(text_config(), add_pooling_layer=False).eval()
    names = {f"blip.text_encoder.{name}" for name in text.state_dict()}
    text.load_state_dict({k.removeprefix("blip.text_encoder."): v for k, v in state.items() if k in names})
    x = text(
        tokens["input_ids"], tokens["attention_mask"], encoder_hidden_states=seen, encoder_attention_mask=None
    ).last_hidden_state[:, 0]
    for number in (0, 2, 4, 6, 7):
        x = x @ state[f"mlp.layers.{number}.weight"].T + state[f"mlp.layers.{number}.bias"]
    expected = (x[:, 0] - 0.16717362830052426) / 1.0333394966054072
    reward = ImageReward(folder, tokenizer=folder)
    assert np.ptp(expected.numpy()) > 0.01
    np.testing.assert_allclose(reward(images, PROMPTS), expected, atol=tolerance(TERMS), rtol=0)
    parts = ImageReward(folder, folder, batch_size=2)
    np.testing.assert_allclose(parts(images, PROMPTS), expected, atol=tolerance(TERMS), rtol=0)
    assert reward(images[:0], []).shape == (0,)


def test_an_odd_margin_is_cut_as_torchvision_cuts_it(folder: Path) -> None:
    """48 by 51: a margin of 1.5 on either side, which rounds to 2."""
    images, _ = pictures(48, 51)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (clip.MEAN, clip.STD))
    expected = (images[..., 2:50] - mean) / std
    torch.testing.assert_close(ImageReward(folder, folder).pixels(images), expected, atol=tolerance(3, 3), rtol=0)


def test_a_later_word_reaches_the_first_state(folder: Path) -> None:
    """The text tower must not be causal: [CLS] comes first and reads everything."""
    images, _ = pictures(count=2)
    images = images[:1].expand(2, -1, -1, -1)
    first, second = ImageReward(folder, folder)(images, ["a red circle", "a red squares"])
    assert abs(first - second) > 1e-4


def test_curves_take_a_sigmoid(folder: Path) -> None:
    scores = np.array([-2.0, 0.0, np.nan, 3.0])
    np.testing.assert_allclose(ImageReward(folder, folder).positive(scores), 1 / (1 + np.exp(-scores)))


def test_offloading_and_half_precision(folder: Path) -> None:
    images, _ = pictures()
    whole = ImageReward(folder, folder)(images, PROMPTS)
    np.testing.assert_array_equal(ImageReward(folder, folder, offload=True)(images, PROMPTS), whole)
    half = ImageReward(folder, folder, dtype="bfloat16")
    assert half.model["head"][0].weight.dtype == torch.float32
    close = tolerance(LAYERS, dtype=torch.bfloat16)
    np.testing.assert_allclose(half(images, PROMPTS), whole, atol=close, rtol=0)


def test_a_checkpoint_that_does_not_fit_is_named(folder: Path, tmp_path: Path) -> None:
    whole = checkpoint()
    for absent, name in {
        "mlp.layers.7.bias": "7.bias",
        "blip.visual_encoder.norm.bias": "post_layernorm.bias",
        "blip.text_encoder.embeddings.word_embeddings.weight": "embeddings.word_embeddings.weight",
        "blip.visual_encoder.blocks.1.attn.proj.bias": "encoder.layers.1.self_attn.projection.bias",
    }.items():
        torch.save({k: v for k, v in whole.items() if k != absent}, tmp_path / "ImageReward.pt")
        with pytest.raises(RecastError, match=f"no ImageReward checkpoint in .*it has no tensor {name}"):
            ImageReward(tmp_path, folder)
