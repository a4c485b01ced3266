"""GenEval from pixels to scores: a tiny Mask2Former in the published files, and a detector that knows the answer."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import tiny_clip
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation, SwinConfig

from recast.errors import RecastError
from recast.rewards import clip, load
from recast.rewards.clipscore import ClipScore
from recast.rewards.geneval import GenEval
from recast.rewards.geneval_clauses import CLASSES, COLORS, Mode, parse
from recast.rewards.geneval_detector import Instances
from tolerance import tolerance

LOW = 0.05
SMALL = (96, 192)
SCORE = tolerance(96 * 96, scale=0.05)
"""Of a detection: the mean over up to 96 · 96 pixels, times a chance of about 0.05."""
Row = dict[str, Any]
Quick = Callable[[GenEval], GenEval]


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that tells crops and colors apart: the best color is ahead of the second by 0.004 at least.

    Parameters as small as they begin make all embeddings alike; much larger ones let attention pick single tokens, and
    some colors are the same.
    """
    path = tiny_clip.save(tmp_path_factory.mktemp("clip"))
    tensors = load_file(path / "model.safetensors")
    tensors["vision_model.embeddings.patch_embedding.weight"] *= 30
    for name in tensors:
        if "_model.encoder." in name and name.endswith("_proj.weight"):
            tensors[name] *= 10 if name.startswith("vision") else 4
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files as facebook/mask2former-swin-small-coco-instance has them; random weights that find something."""
    path = tmp_path_factory.mktemp("mask2former")
    torch.manual_seed(1)
    stages = [f"stage{k}" for k in range(1, 5)]
    swin = SwinConfig(
        image_size=64, embed_dim=8, depths=[1] * 4, num_heads=[1, 1, 2, 2], window_size=4, out_features=stages
    )
    small = dict.fromkeys(("feature_size", "mask_feature_size", "hidden_dim", "dim_feedforward"), 32)
    config = Mask2FormerConfig(
        backbone_config=swin,
        encoder_feedforward_dim=32,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        num_queries=20,
        num_labels=80,
        **small,
    )
    model = Mask2FormerForUniversalSegmentation(config)
    with torch.no_grad():
        model.class_predictor.weight.mul_(8)
        model.model.transformer_module.queries_features.weight.mul_(4)
        # Masks of some pixels: larger logits, and, by a channel that is constant, lower ones.
        pixels = model.model.pixel_level_module.decoder.mask_projection
        queries = model.model.transformer_module.decoder.mask_predictor.mask_embedder.get_submodule("2.0")
        queries.weight.mul_(2e4)
        for weight, bias, value in ((pixels.weight, pixels.bias, 1.0), (queries.weight, queries.bias, -3.0)):
            weight[0], bias[0] = 0, value
    model.save_pretrained(path)
    return path


def entry(name: str, count: int = 1, **more: object) -> Row:
    return {"class": name, "count": count, **more}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Quick:
    """The same with smaller inputs to the detector, for one test: it is shared."""

    def smaller(reward: GenEval) -> GenEval:
        monkeypatch.setattr(reward.detector, "edges", SMALL)
        return reward

    return smaller


def pictures(count: int) -> torch.Tensor:
    return tiny_clip.pictures(count=count)[0]


def reference(reward: GenEval, image: torch.Tensor) -> list[dict[str, Any]]:
    """Score, class, box and color of each object, from the raw outputs by OpenCV and PIL, one by one."""
    levels = (image * 255).byte().permute(1, 2, 0).numpy()
    pil = Image.fromarray(levels)
    scale = min(96 / min(pil.size), 192 / max(pil.size))
    width, height = (round(side * scale) for side in pil.size)
    large = cv2.resize(levels, (width, height), interpolation=cv2.INTER_LINEAR)
    padded = np.full((-(-height // 32) * 32, -(-width // 32) * 32, 3), 128)
    padded[:height, :width] = large
    seen = (padded / 255 - np.array([0.485, 0.456, 0.406])) / np.array([0.229, 0.224, 0.225])
    with torch.no_grad():
        output = reward.detector.model(pixel_values=torch.tensor(seen).float().permute(2, 0, 1)[None])
    classes, masks = output.class_queries_logits[0].softmax(-1), output.masks_queries_logits[0]
    objects = []
    for query, label in np.argwhere(classes[:, :80].numpy() > LOW):
        logits = functional.interpolate(masks[query][None, None], padded.shape[:2], mode="bilinear")
        logits = functional.interpolate(logits[..., :height, :width], image.shape[-2:], mode="bilinear")
        mask, certain = (logits[0, 0] > 0).numpy(), logits[0, 0].sigmoid().numpy()
        score = float(classes[query, label]) * float(certain[mask].mean()) if mask.any() else 0
        if score > LOW:
            ys, xs = np.nonzero(mask)
            box = (xs.min(), ys.min(), xs.max() + 1, ys.max() + 1)
            gray = Image.new("RGB", pil.size, (153, 153, 153))
            crop = Image.composite(pil, gray, Image.fromarray(mask)).crop(box)
            name = CLASSES[label]
            objects.append({"score": score, "name": name, "box": box, "color": closest(reward, crop, name)})
    return sorted(objects, key=lambda each: -each["score"])


def closest(reward: GenEval, crop: Image.Image, name: str) -> str:
    """The color of a crop: 32 pixels on its shorter edge, then the middle of the other one, halves rounded to even."""
    width, height = crop.size
    scaled = crop.resize(
        (int(32 * width / min(crop.size)), int(32 * height / min(crop.size))), Image.Resampling.BICUBIC
    )
    left, top = (round((side - 32) / 2) for side in scaled.size)
    square = torch.tensor(np.array(scaled.crop((left, top, left + 32, top + 32)))).permute(2, 0, 1) / 255
    model = reward.clip.model
    with torch.no_grad():
        seen = model.get_image_features(pixel_values=clip.normalized(square)[None]).pooler_output[0]
        logits = functional.cosine_similarity(words(model, reward.clip.tokenizer, name), seen, dim=1)
    return COLORS[int(logits.argmax())]


@cache
def words(model: Any, tokenizer: Any, name: str) -> torch.Tensor:
    """What each color of a class reads like (10, d): the mean of three sentences' directions."""
    means = []
    for color in COLORS:
        texts = [f"a photo of a {color} {name}", f"a photo of a {color}-colored {name}", f"a photo of a {color} object"]
        tokens = tokenizer(texts, padding="max_length", max_length=77, return_tensors="pt")
        means.append(functional.normalize(model.get_text_features(**tokens).pooler_output, dim=-1).mean(0))
    return torch.stack(means)


def test_detections_and_colors_are_those_of_the_raw_outputs(folder: Path, clip_folder: Path, quick: Quick) -> None:
    images = pictures(2)
    # One by one, as the reference has them: in a batch, a pixel at the edge of a mask may round to its other side.
    reward = quick(GenEval(folder, clip_folder, threshold=LOW, batch_size=1))
    expected = [reference(reward, image) for image in images]
    assert min(map(len, expected)) > 4
    assert len({each["name"] for objects in expected for each in objects}) > 2
    assert len({each["color"] for objects in expected for each in objects}) > 1
    assert len({each["box"] for objects in expected for each in objects}) > 4
    rows = []
    for objects in expected:
        numbers = Counter(each["name"] for each in objects)
        rows.append({"include": [entry(name, number, color="red") for name, number in numbers.items()]})
    requests = [parse(row, "") for row in rows]
    found, crops = reward._look((images * 255).byte(), requests)  # type: ignore[arg-type]
    colors = reward._colors(crops)
    for k, objects in enumerate(expected):
        for name in {each["name"] for each in objects}:
            theirs = [each for each in objects if each["name"] == name]
            scores = [score for score, _ in found[k][name]]
            np.testing.assert_allclose(scores, [each["score"] for each in theirs], atol=SCORE, rtol=0)
            assert [box for _, box in found[k][name]] == [each["box"] for each in theirs]
            assert colors[k][name] == [each["color"] for each in theirs]
    first = [objects[0] for objects in expected]
    rows = [{"include": [entry(each["name"], color=each["color"]), entry("cat", 3)]} for each in first]
    np.testing.assert_array_equal(reward(images, ["x"] * 2, rows), 1 / 2)


def test_batches_and_order_change_nothing(folder: Path, clip_folder: Path, quick: Quick) -> None:
    images = pictures(5)
    whole = quick(GenEval(folder, clip_folder, threshold=LOW))
    names = [CLASSES[int(found.labels[0])] for found in whole.detector.detect((images * 255).byte(), [LOW] * 5, 5)]
    rows: list[Row] = [
        {"tag": "colors", "include": [{"class": name, "count": 1, "color": color}, {"class": "cat", "count": 2}]}
        for name, color in zip(names, COLORS, strict=False)
    ]
    rows[2] = {}
    scores = whole(images, ["x"] * 5, rows)
    assert np.isnan(scores).tolist() == [False, False, True, False, False]
    single = GenEval(folder, clip_folder, threshold=LOW, batch_size=1)
    np.testing.assert_array_equal(single(images, ["x"] * 5, rows), scores)
    order = [3, 0, 4, 2, 1]
    np.testing.assert_array_equal(whole(images[order], ["x"] * 5, [rows[k] for k in order]), scores[order])


def test_one_detector_and_one_clip_serve_all(folder: Path, clip_folder: Path) -> None:
    first, second = GenEval(folder, clip_folder), GenEval(folder, clip_folder, mode="strict")
    assert first.detector is second.detector
    assert first.clip is second.clip is ClipScore(clip_folder).clip
    assert GenEval(folder, clip_folder, offload=True).detector is not first.detector


def test_crops_leave_the_embeddings_of_images_that_others_share(clip_folder: Path) -> None:
    images = pictures(3)
    score = ClipScore(clip_folder)
    features = score.clip.images(images, score.pixels, 8)
    crops = score.clip.seen(score.pixels(images.flip(0)), 2)
    assert score.clip.images(images, score.pixels, 8) is features
    torch.testing.assert_close(crops, features.flip(0), atol=tolerance(tiny_clip.TERMS), rtol=0)


def test_half_precision_is_clips_and_offload_is_both_models(
    folder: Path, clip_folder: Path, monkeypatch: pytest.MonkeyPatch, quick: Quick
) -> None:
    reward = quick(GenEval(folder, clip_folder, dtype="bfloat16", threshold=LOW, offload=True))
    assert reward.clip.model.dtype == torch.bfloat16
    assert reward.detector.model.dtype == torch.float32
    images = pictures(1)
    name = CLASSES[int(next(reward.detector.detect((images * 255).byte(), [LOW], 1)).labels[0])]
    moves: list[str] = []
    monkeypatch.setattr(reward.detector.model, "to", lambda where: moves.append(f"detector {where}"))
    monkeypatch.setattr(reward.clip.model, "to", lambda where: moves.append(f"clip {where}"))
    reward(images, ["x"], [{"include": [entry(name, color="red")]}])
    assert moves == ["detector cpu", "detector cpu"] + ["clip cpu"] * 4  # there and back; images, then texts


def test_a_detector_that_gives_nan_is_an_error(
    folder: Path, clip_folder: Path, monkeypatch: pytest.MonkeyPatch, quick: Quick
) -> None:
    reward = quick(GenEval(folder, clip_folder))
    predictor = reward.detector.model.class_predictor
    monkeypatch.setattr(predictor, "bias", torch.nn.Parameter(predictor.bias.clone().fill_(torch.nan)))
    with pytest.raises(RecastError, match="the output of geneval's detector is not finite"):
        reward(pictures(1), ["x"], [{"include": [entry("cat")]}])


def test_an_older_file_loads_and_a_wrong_one_is_refused(folder: Path, clip_folder: Path, tmp_path: Path) -> None:
    """Buffers that older versions saved are ignored; those of the loss and an unused norm may lack, others may not."""
    shutil.copytree(folder, tmp_path / "old")
    tensors = load_file(folder / "model.safetensors")
    unused = [name for name in tensors if name.startswith("criterion.") or ".encoder.swin.layernorm." in name]
    assert len(unused) == 3
    for name in unused:  # as in the published file: it is of a version whose backbone had no such norm
        del tensors[name]
    index = "model.pixel_level_module.encoder.encoder.layers.0.blocks.0.attention.self.relative_position_index"
    save_file(tensors | {index: torch.zeros(16, 16, dtype=torch.long)}, tmp_path / "old/model.safetensors")
    old, new = (GenEval(path, clip_folder).detector.model for path in (tmp_path / "old", folder))
    for name, value in new.state_dict().items():
        assert torch.equal(old.state_dict()[name], value) or name in unused, name
    image = pictures(1)
    torch.testing.assert_close(
        old(pixel_values=image).masks_queries_logits, new(pixel_values=image).masks_queries_logits, atol=0, rtol=0
    )
    del tensors["class_predictor.weight"]
    save_file(tensors, tmp_path / "old/model.safetensors")
    with pytest.raises(RecastError, match="no Mask2Former model in .* no tensor class_predictor.weight"):
        GenEval(tmp_path / "old", clip_folder, batch_size=2, device="cpu", offload=True)
    with pytest.raises(RecastError, match="no Mask2Former model in"):
        GenEval(tmp_path, clip_folder)
    config = json.loads((folder / "config.json").read_text())
    shutil.copytree(folder, tmp_path / "panoptic")
    labels = {str(k): str(k) for k in range(133)}
    config |= {"id2label": labels, "label2id": {name: int(k) for k, name in labels.items()}}
    (tmp_path / "panoptic/config.json").write_text(json.dumps(config))
    with pytest.raises(RecastError, match="no Mask2Former model in"):
        GenEval(tmp_path / "panoptic", clip_folder)


def test_options_that_cannot_be_are_refused(folder: Path, clip_folder: Path) -> None:
    with pytest.raises(RecastError, match="geneval has the modes clauses, nft, correct, strict, not 'loose'"):
        GenEval(folder, clip_folder, mode="loose")  # type: ignore[arg-type]
    with pytest.raises(RecastError, match="mode = 'partial': input should be 'clauses', 'nft', 'correct' or 'strict'"):
        load("geneval", model=str(folder), clip=str(clip_folder), mode="partial")  # of version 0.2
    with pytest.raises(RecastError, match="geneval's counting_threshold must be at least 0 and below 1, not 90"):
        GenEval(folder, clip_folder, counting_threshold=90)
    with pytest.raises(RecastError, match="geneval's batch_size must be at least 1, not 0"):
        GenEval(folder, clip_folder, batch_size=0)
    reward = load("geneval", model=str(folder), clip=str(clip_folder), mode="nft")
    images = pictures(2)
    assert np.isnan(reward(images, ["a", "b"])).all()
    assert reward(images[:0], []).shape == (0,)
    with pytest.raises(RecastError, match="2 prompts need as many rows of metadata, not 1"):
        reward(images, ["a", "b"], [{}])
    with pytest.raises(RecastError, match="the prompt 'b' cannot be used: unknown class 'circle'"):
        reward(images, ["a", "b"], [{}, {"include": [{"class": "circle", "count": 1}]}])


PAINT = {
    "red": (220, 20, 20),
    "orange": (250, 140, 10),
    "yellow": (240, 230, 30),
    "green": (20, 160, 40),
    "blue": (30, 60, 220),
    "purple": (120, 30, 160),
    "pink": (250, 150, 190),
    "brown": (110, 70, 30),
    "black": (5, 5, 5),
    "white": (250, 250, 250),
}
Thing = tuple[str, str, tuple[int, int, int, int], float]


class Painter:
    """A stand-in for detector and CLIP: scenes of painted rectangles, their masks, and colors by their paint.

    The detector is to see red and blue exchanged if it is `exchanged`; the crops are not.
    """

    def __init__(self, scenes: Sequence[Sequence[Thing]], exchanged: bool = False) -> None:
        self.scenes, self.exchanged = scenes, exchanged
        self.images = torch.full((len(scenes), 3, 96, 96), 60 / 255)
        self.masks = []
        for image, scene in zip(self.images, scenes, strict=True):
            owner = torch.full((96, 96), -1)
            for k, (_, color, (left, top, right, bottom), _) in enumerate(scene):
                image[:, top:bottom, left:right] = torch.tensor(PAINT[color]).view(3, 1, 1) / 255
                owner[top:bottom, left:right] = k
            self.masks.append(torch.stack([owner == k for k in range(len(scene))]) if scene else owner[None][:0] > 0)

    def detect(self, images: torch.Tensor, thresholds: Sequence[float], batch_size: int) -> Iterator[Instances]:
        """What was painted, if its score is above the image's threshold."""
        expected = (self.images * 255).round().byte()
        assert torch.equal(images, expected[:, [2, 1, 0]] if self.exchanged else expected)
        for scene, masks, threshold in zip(self.scenes, self.masks, thresholds, strict=True):
            scores = torch.tensor([score for *_, score in scene])
            labels = torch.tensor([CLASSES.index(name) for name, *_ in scene], dtype=torch.long)
            order = scores.sort(descending=True).indices
            order = order[scores[order] > threshold]
            yield Instances(scores[order], labels[order], masks[order])

    def texts(self, prompts: Sequence[str], batch_size: int) -> torch.Tensor:
        """One axis a color."""
        words = [prompt.removeprefix("a photo of a ").split()[0].removesuffix("-colored") for prompt in prompts]
        return torch.eye(10)[[COLORS.index(word) for word in words]]

    def seen(self, pixels: torch.Tensor, batch_size: int) -> torch.Tensor:
        """The axis of the paint that is nearest to the mean of what is not gray."""
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (clip.MEAN, clip.STD))
        levels = (pixels * std + mean) * 255
        paints = torch.tensor([PAINT[color] for color in COLORS]).float()
        means = [level[:, (level - 153).abs().amax(0) > 2].mean(1) for level in levels]
        return torch.eye(10)[[int((paints - one).abs().sum(1).argmin()) for one in means]]


def dogs(*scores: float) -> list[Thing]:
    return [("dog", "brown", (10 + 20 * k, 10, 25 + 20 * k, 30), score) for k, score in enumerate(scores)]


COLORED = {"tag": "colors", "include": [entry("cow", color="red")]}
PAIRED = {"tag": "color_attr", "include": [entry("cow", color="red"), entry("dog", color="blue")]}
COUNTED = {"tag": "counting", "include": [entry("dog", 2)], "exclude": [entry("dog", 3)]}
PLACED = {"tag": "position", "include": [entry("dog"), entry("cow", position=["left of", 0])]}
AROUND: Thing = ("cow", "red", (10, 10, 70, 70), 0.8)
INSIDE: Thing = ("dog", "blue", (20, 20, 60, 60), 0.7)
PAINTED: list[tuple[Row, list[Thing], tuple[float, float, float, float]]] = [
    ({"tag": "single_object", "include": [entry("dog")]}, dogs(0.4), (1, 1, 1, 1)),
    ({"tag": "single_object", "include": [entry("dog")]}, dogs(0.2), (0, 0, 0, 0)),
    # Three dogs for one: they cost nothing in the first and the third mode.
    ({"tag": "single_object", "include": [entry("dog")]}, dogs(0.4, 0.5, 0.6), (1, -1, 1, 0)),
    ({"tag": "two_object", "include": [entry("dog"), entry("cow")]}, [AROUND, INSIDE], (1, 1, 1, 1)),
    ({"tag": "two_object", "include": [entry("dog"), entry("cow")]}, [AROUND], (1 / 2, 1 / 2, 0, 0)),
    (COUNTED, dogs(0.95, 0.92), (1, 1, 1, 1)),
    (COUNTED, dogs(0.95, 0.92, 0.85), (1, 1, 1, 1)),  # the third is not sure enough to be counted
    (COUNTED, dogs(0.95, 0.85), (1 / 2, 1 / 2, 0, 0)),
    (COUNTED, dogs(0.95, 0.92, 0.91), (1 / 2, 1 / 2, 0, 0)),
    (COLORED, [AROUND], (1, 1, 1, 1)),
    (COLORED, [AROUND, INSIDE], (1, 1, 1, 1)),  # without its mask the cow would be nearer to blue
    (COLORED, [("cow", "green", (5, 5, 40, 90), 0.6)], (1 / 2, 1 / 2, 0, 0)),
    (COLORED, [("cow", "green", (5, 5, 40, 40), 0.6), ("cow", "red", (50, 50, 90, 90), 0.9)], (1, 0, 1, 0)),
    (COLORED, [("cow", "green", (5, 5, 40, 40), 0.9), ("cow", "red", (50, 50, 90, 90), 0.6)], (1 / 2, 0, 0, 0)),
    (PAIRED, [AROUND, INSIDE], (1, 1, 1, 1)),
    (PAIRED, [AROUND, ("dog", "white", (20, 20, 60, 60), 0.7)], (3 / 4, 3 / 4, 0, 0)),
    (PLACED, [("cow", "red", (5, 30, 25, 60), 0.5), ("dog", "blue", (60, 30, 80, 60), 0.5)], (1, 1, 1, 1)),
    (PLACED, [("dog", "red", (5, 30, 25, 60), 0.5), ("cow", "blue", (60, 30, 80, 60), 0.5)], (2 / 3, 3 / 4, 0, 0)),
    (PLACED, [AROUND, INSIDE], (2 / 3, 3 / 4, 0, 0)),
    ({"tag": "single_object", "include": [entry("dog", 16)]}, dogs(*[0.5] * 4) * 5, (1, 1, 1, 1)),
    ({}, dogs(0.9), (np.nan,) * 4),
    (PLACED, [], (0, 0, 0, 0)),
]
MODES: tuple[Mode, ...] = ("clauses", "nft", "correct", "strict")


@pytest.mark.parametrize("mode", MODES)
def test_painted_scenes_of_every_tag(
    folder: Path, clip_folder: Path, monkeypatch: pytest.MonkeyPatch, mode: Mode
) -> None:
    reward = GenEval(folder, clip_folder, mode=mode)
    rows, scenes, expected = zip(*PAINTED, strict=True)
    applies = Painter([scene for row, scene in zip(rows, scenes, strict=True) if row], mode == "nft")
    monkeypatch.setattr(reward.detector, "detect", applies.detect)
    monkeypatch.setattr(reward.clip, "seen", applies.seen)
    monkeypatch.setattr(reward.clip, "texts", applies.texts)
    images = Painter(scenes).images
    scores = reward(images, ["x"] * len(rows), rows)
    np.testing.assert_allclose(scores, [each[MODES.index(mode)] for each in expected])
    assert scores.dtype == np.float64
