"""Each reward model at its published widths on a GPU that is not there: one device, one dtype, no wait per image.

Two layers stand for all of a kind; the loaders, which read files, are replaced.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertTokenizer,
    BlipTextConfig,
    BlipTextModel,
    BlipVisionConfig,
    BlipVisionModel,
    CLIPConfig,
    CLIPModel,
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    Qwen2Tokenizer,
    Qwen2VLConfig,
    Qwen2VLImageProcessorPil,
    Qwen2VLModel,
    SwinConfig,
)

from fake_gpu import DEVICE, FakeGpu
from real_size import building
from recast.rewards import aesthetic, base, clip, geneval, geneval_detector, hpsv2, hpsv3, imagereward
from recast.shapes import models

PROMPTS = ["a red circle", "a blue square", "two green triangles"]
# Labels read from the device are 1, so the objects of this class are found, and CLIP is asked for their colors.
ROWS = [{"include": [{"class": geneval.CLASSES[1], "count": 1, "color": "red"}], "tag": "color_attr"}] * 3
QUESTION = "Rate {text_prompt} <|Reward|>"


def tower(width: int, layers: int = 2, head: int = 64) -> dict[str, int]:
    return {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // head,
    }


def a_clip(large: bool, dtype: str) -> CLIPModel:
    """CLIP ViT-L/14, or ViT-H/14, on which PickScore and HPSv2 are built."""
    text, vision = (tower(1024), tower(1280, head=80)) if large else (tower(768), tower(1024))
    width = 1024 if large else 768
    with building(DEVICE, getattr(torch, dtype)):
        return CLIPModel(CLIPConfig(text_config=text, vision_config=vision | {"patch_size": 14}, projection_dim=width))


def clip_reward(patch: pytest.MonkeyPatch, large: bool, options: dict[str, Any]) -> None:
    """Replace what loads a CLIP model."""

    def made(offload: bool, clean: Callable[[str], str] = str) -> clip.Clip:
        device, dtype = torch.device(DEVICE), options["dtype"]
        return clip.Clip(
            a_clip(large, dtype), models.tokenizer(length=77), device, getattr(torch, dtype), offload, clean
        )

    def load(_what: str, *_: Any, preprocess: Any = "processor", offload: bool = False, **__: Any) -> Any:
        return made(offload), clip.Processor(224, (224, 224), clip.MEAN, clip.STD, preprocess)

    patch.setattr(clip, "load", load)
    patch.setattr(hpsv2, "_load", lambda *given: made(given[-1], hpsv2.cleaned))


def on_device(make: Callable[[], Any], dtype: str = "float32") -> Any:
    with building(DEVICE, getattr(torch, dtype)):
        return make().eval().requires_grad_(False)


def an_imagereward(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """BLIP with ViT-L/16 and BERT base."""
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "circle"]))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer", "do_lower_case": true}')
    vision = BlipVisionConfig(**tower(1024), image_size=224, patch_size=16)
    text = BlipTextConfig(**tower(768), vocab_size=30524, encoder_hidden_size=1024, is_decoder=True)
    parts = (
        BertTokenizer.from_pretrained(folder),
        on_device(lambda: BlipVisionModel(vision)),
        on_device(lambda: BlipTextModel(text, add_pooling_layer=False)),
        on_device(lambda: aesthetic.head(768)),
    )
    patch.setattr(imagereward, "_load", lambda *_: parts)


def an_hpsv3(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Qwen2-VL-7B."""
    (folder / "question.txt").write_text(QUESTION)
    words = Qwen2Tokenizer(vocab={letter: k for k, letter in enumerate("Ġabcdefghijklmnopqrstuvwxyz")}, merges=[])
    words.add_tokens(["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"], special_tokens=True)
    words.add_tokens(["<|image_pad|>", "<|Reward|>"], special_tokens=True)
    config = Qwen2VLConfig(
        text_config=tower(3584, head=128)
        | {"intermediate_size": 18944, "num_key_value_heads": 4, "vocab_size": 151658}
        | {"rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6}},
        vision_config={"depth": 2, "embed_dim": 1280, "hidden_size": 3584, "num_heads": 16, "mlp_ratio": 4},
        image_token_id=words.convert_tokens_to_ids("<|image_pad|>"),
        vision_start_token_id=words.convert_tokens_to_ids("<|vision_start|>"),
    )
    backbone = on_device(lambda: Qwen2VLModel(config), "bfloat16")
    layers = [torch.nn.Linear(3584, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 16), torch.nn.Linear(16, 2)]
    head = on_device(lambda: torch.nn.Sequential(*layers).to(DEVICE))
    model = hpsv3._Model(backbone, head, words.convert_tokens_to_ids("<|Reward|>"))
    size = {"shortest_edge": hpsv3._PIXELS, "longest_edge": hpsv3._PIXELS}
    patch.setattr(hpsv3, "_load", lambda *_: (model, words, Qwen2VLImageProcessorPil(size=size)))


def a_detector(patch: pytest.MonkeyPatch, offload: bool) -> None:
    """Mask2Former with Swin-S."""
    swin = SwinConfig(
        embed_dim=96, depths=[2, 2, 2, 2], num_heads=[3, 6, 12, 24], out_features=[f"stage{k}" for k in range(1, 5)]
    )
    config = Mask2FormerConfig(backbone_config=swin, num_labels=80, encoder_layers=1, decoder_layers=3)
    model = on_device(lambda: Mask2FormerForUniversalSegmentation(config))
    made = geneval_detector.Detector(model, torch.device(DEVICE), offload)
    patch.setattr(geneval_detector, "load", lambda *_: made)


def loaded(name: str, patch: pytest.MonkeyPatch, folder: Path, offload: bool, dtype: str) -> base.Reward:
    options: dict[str, Any] = {"device": DEVICE, "dtype": dtype, "offload": offload}
    clip_reward(patch, name in ("hpsv2", "pickscore"), options)
    patch.setattr(aesthetic, "_load_head", lambda _source, width: on_device(lambda: aesthetic.head(width)))
    if name == "imagereward":
        an_imagereward(patch, folder)
    if name == "hpsv3":
        an_hpsv3(patch, folder)
        options |= {"instruction": folder / "question.txt", "instruction_sha256": None}
    if name == "geneval":
        a_detector(patch, offload)
    return base.load(name, **options)


READS = {
    "clipscore": {"tolist": 2, "copy": 2, "item": 2},
    "hpsv2": {"tolist": 2, "copy": 1, "item": 2},
    "pickscore": {"tolist": 2, "copy": 2, "item": 2},
    "aesthetic": {"tolist": 2, "copy": 2, "item": 2},
    "imagereward": {"tolist": 2, "copy": 2, "item": 1},
    "hpsv3": {"tolist": 2 + 3 * 3, "copy": 2, "item": 1, "shape": 2},
    "geneval": {"tolist": 4, "copy": 4, "item": 3},
}
"""Reads from the device that a batch of images may take: two checks of the range of its pixels, checks for NaN, the
scores, and the pixels where PIL resizes them. Of HPSv3's, nine are in transformers' vision tower, three per call of its
attention and as many before."""


@pytest.mark.parametrize("name", READS)
def test_a_batch_waits_as_often_as_an_image(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    reward = loaded(name, monkeypatch, tmp_path, False, "float32" if name in ("hpsv2", "geneval") else "bfloat16")
    drawn, wide = gpu.draws, gpu.wide
    for count in (1, 3):
        images = torch.rand(count, 3, 512, 512).to(DEVICE)
        gpu.reads.clear()
        found = base.score({name: reward}, images, [f"{prompt} {count}" for prompt in PROMPTS[:count]], ROWS[:count])
        assert found.shape == (1, count)
        first = {"item": name == "geneval" and count == 1}  # the names of the colors are embedded once, and checked
        assert gpu.reads == Counter(READS[name]) + Counter(first)
    assert (gpu.draws, gpu.wide) == (drawn, wide)


@pytest.mark.parametrize("name", ["hpsv2", "imagereward"])
def test_an_offloaded_reward_is_on_the_device_while_it_scores(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    reward: Any = loaded(name, monkeypatch, tmp_path, True, "float32")
    base.score({name: reward}, torch.rand(2, 3, 512, 512).to(DEVICE), PROMPTS[:2], ROWS[:2])
    model = reward.model if name == "imagereward" else reward.clip.model
    assert {each.device.type for each in [*model.parameters(), *model.buffers()]} == {"cpu"}
