"""GenEval: the clauses in a prompt's metadata, checked on objects found by Mask2Former and their colors by CLIP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from recast import device as devices
from recast.errors import RecastError
from recast.rewards import catalog, checkpoints
from recast.rewards import clip as clips
from recast.rewards.base import Images, as_tensor
from recast.rewards.geneval_clauses import (
    CLASSES,
    COLORS,
    MAX_OBJECTS,
    Mode,
    Objects,
    Request,
    assess,
    colored,
    parse,
)

__all__ = ["GenEval", "Instances", "instances"]

_SIZE = {"shortest_edge": 800, "longest_edge": 1333}
"""Input size of the original detector; the published processor alone would resize to squares of 384 pixels."""
_GRID = (384, 384)
"""Resolution at which transformers' post-processing binarizes masks and averages their probabilities."""
_GRAY = 153
_TEMPLATES = ("a photo of a {color} {name}", "a photo of a {color}-colored {name}", "a photo of a {color} object")
_CLIP_BATCH = 64


@dataclass(frozen=True)
class Instances:
    """Scores (n,), labels (n,) and non-empty masks (n, H, W) of the objects in an image, by descending score."""

    scores: Tensor
    labels: Tensor
    masks: Tensor

    def boxes(self) -> Tensor:
        """Left, top, right, bottom (n, 4) of the masks; the last two are exclusive."""
        sides = []
        for along in (self.masks.any(1), self.masks.any(2)):
            first, last = along.int().argmax(1), along.flip(1).int().argmax(1)
            sides.append((first, along.shape[1] - last))
        return torch.stack([sides[0][0], sides[1][0], sides[0][1], sides[1][1]], 1)


class _Detector:
    """Instances of COCO's classes by a Mask2Former model in float32: half precision gave NaN on the CPU."""

    def __init__(self, model: Any, processor: Any, device: torch.device, offload: bool = False) -> None:
        self.model = model.to("cpu" if offload else device).eval().requires_grad_(False)
        self.processor, self.device, self.offload = processor, device, offload

    @torch.no_grad()
    def detect(self, images: Tensor, thresholds: Sequence[float], batch_size: int) -> Iterator[Instances]:
        """Instances above the threshold of each 8-bit image (B, 3, H, W)."""
        with devices.visiting(self.model, self.device, self.offload):
            for start in range(0, len(images), batch_size):
                part = [image.numpy() for image in images[start : start + batch_size]]
                seen = self.processor(part, input_data_format="channels_first", return_tensors="pt")["pixel_values"]
                output = self.model(pixel_values=seen.to(self.device))
                classes, masks = output.class_queries_logits, output.masks_queries_logits
                if not (classes.isfinite().all() and masks.isfinite().all()):
                    # No score would exceed a threshold: every image would seem to contain no object.
                    raise RecastError("the output of geneval's detector is not finite: its checkpoint is damaged")
                for k, threshold in enumerate(thresholds[start : start + batch_size]):
                    yield instances(classes[k], masks[k], tuple(images.shape[-2:]), threshold)


def instances(classes: Tensor, masks: Tensor, size: tuple[int, ...], threshold: float) -> Instances:
    """Instances of an image from the logits of its queries: classes (Q, C + 1) and masks (Q, h, w).

    Equal to transformers' `post_process_instance_segmentation` without its loop over the queries. The score is the
    probability of the class times the mean probability inside the mask.
    """
    probabilities = classes.softmax(-1)[:, :-1]
    chances, places = probabilities.flatten().topk(len(classes))
    above = chances > threshold  # a score is at most its chance, so the other masks are not needed
    chances, places = chances[above], places[above]
    queries, labels = places // probabilities.shape[1], places % probabilities.shape[1]
    logits = functional.interpolate(masks[queries].unsqueeze(1), _GRID, mode="bilinear", align_corners=False)
    inside = logits > 0
    means = (logits.sigmoid() * inside).sum((1, 2, 3)) / (inside.sum((1, 2, 3)) + 1e-6)
    full = functional.interpolate(inside.float(), size, mode="nearest")[:, 0] > 0
    scores = chances * means
    order = scores.sort(descending=True, stable=True).indices
    order = order[(scores[order] > threshold) & full[order].flatten(1).any(1)]
    return Instances(scores[order].cpu(), labels[order].cpu(), full[order].cpu())


class GenEval:
    """Agreement of an image with the clauses of its prompt, in [0, 1]; NaN if the metadata have no `include`.

    `mode="clauses"` is the share of confirmed clauses. An entry of `include`, n objects of a class, has the clauses
    - object: at least one object of the class is found;
    - count, if the tag is `counting`, n is above 1 or `exclude` names the class: at least n objects are found, and
      fewer than each number in `exclude`;
    - color, if the entry has one: the n objects with the highest scores all have it;
    - position, if the entry has one: each of these n objects is in the relation to each of the n objects of the target
      entry, and both entries have their n objects in their colors (the target also in its own position).

    A class that only `exclude` names has one count clause. An image with all clauses confirmed is what the original
    evaluation calls correct.

    `"strict"` is 1 if all clauses are confirmed and exactly n objects are found per entry, else 0. `"partial"` is the
    mean of these terms: per entry max(0, 1 − |n − found| / n); if the count is not exact and the entry has a color or
    a position, a 0; if it is exact, for a color the share of the n objects that have it, and for a position, unless the
    color is wrong, 1 or 0, where the target needs its exact count, too. Exclusions do not contribute.

    Objects are those above `threshold`, or above `counting_threshold` for the tag `counting`. Both are the values of
    the original, whose detector was trained in mmdet; how the scores of this one, which has the same architecture,
    compare at them is not established. `dtype` applies to CLIP; the detector always runs in float32.
    """

    def __init__(
        self,
        model: str | Path = catalog.MASK2FORMER,
        clip: str | Path = catalog.CLIP_L14,
        mode: Mode = "clauses",
        threshold: float = 0.3,
        counting_threshold: float = 0.9,
        device: str = "auto",
        dtype: str = "float32",
        batch_size: int = 8,
        offload: bool = False,
    ) -> None:
        if mode not in get_args(Mode):
            raise RecastError(f"geneval has the modes {', '.join(get_args(Mode))}, not {mode!r}")
        for name, value in (("threshold", threshold), ("counting_threshold", counting_threshold)):
            if not 0 <= value < 1:
                raise RecastError(f"geneval's {name} must be at least 0 and below 1, not {value!r}")
        self.mode, self.threshold, self.counting_threshold = mode, threshold, counting_threshold
        self.batch_size = clips.check_batch("geneval", batch_size)
        self.clip, self.pixels = clips.load("geneval", clip, device=device, dtype=dtype, offload=offload)
        where = devices.pick(device)
        self.detector = clips.shared(("mask2former", str(model), where, offload), lambda: _load(model, where, offload))

    def __call__(
        self, images: Images, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]] | None = None
    ) -> NDArray[np.float64]:
        """One score per image, for the clauses in its row of metadata."""
        images = as_tensor(images, prompts)
        rows = [None] * len(prompts) if metadata is None else metadata
        if len(rows) != len(prompts):
            raise RecastError(f"{len(prompts)} prompts need as many rows of metadata, not {len(rows)}")
        requests = {k: request for k, row in enumerate(rows) if (request := parse(row, prompts[k])) is not None}
        scores = np.full(len(prompts), np.nan)
        if not requests:
            return scores
        levels = (images[list(requests)].float().clamp(0, 1) * 255).round().byte().cpu()
        objects, crops = self._look(levels, list(requests.values()))
        colors = self._colors(crops)
        for number, (k, request) in enumerate(requests.items()):
            scores[k] = assess(request, objects[number], colors.get(number, {})).score(self.mode)
        return scores

    def _look(self, levels: Tensor, requests: Sequence[Request]) -> tuple[list[Objects], list[_Crop]]:
        """The objects of each image, and crops of those whose color is needed."""
        thresholds = [self.counting_threshold if request.counting else self.threshold for request in requests]
        objects: list[Objects] = []
        crops: list[_Crop] = []
        found = self.detector.detect(levels, thresholds, self.batch_size)
        for number, (image, request, seen) in enumerate(zip(levels, requests, found, strict=True)):
            places, boxes = _by_class(seen.labels), seen.boxes()
            listed = list(zip(seen.scores.tolist(), map(tuple, boxes.tolist()), strict=True))
            objects.append({name: [listed[k] for k in group] for name, group in places.items()})
            for name, count in colored(request, objects[-1]).items():
                parts = [_cut(image, seen.masks[k], boxes[k]) for k in places[name][:count]]
                crops += [_Crop(number, name, self.pixels(part)) for part in parts]
        return objects, crops

    def _colors(self, crops: Sequence[_Crop]) -> dict[int, dict[str, list[str]]]:
        """The colors of the crops by image and class, in their order."""
        colors: dict[int, dict[str, list[str]]] = {}
        if not crops:
            return colors
        names = list(dict.fromkeys(crop.name for crop in crops))
        features = self.clip.seen(torch.cat([crop.pixels for crop in crops]), _CLIP_BATCH)
        texts = [form.format(color=color, name=name) for name in names for color in COLORS for form in _TEMPLATES]
        embedded = self.clip.texts(texts, _CLIP_BATCH).view(len(names), len(COLORS), len(_TEMPLATES), -1)
        known = functional.normalize(embedded.mean(2), dim=-1)[[names.index(crop.name) for crop in crops]]
        best = (known @ features.unsqueeze(2)).squeeze(2).argmax(1).tolist()
        for crop, color in zip(crops, best, strict=True):
            colors.setdefault(crop.image, {}).setdefault(crop.name, []).append(COLORS[color])
        return colors


@dataclass(frozen=True)
class _Crop:
    """CLIP's input (1, 3, h, w) for an object: index of the image, name of the class, pixels."""

    image: int
    name: str
    pixels: Tensor


def _by_class(labels: Tensor) -> dict[str, list[int]]:
    """Indices of the first objects of each class."""
    places: dict[str, list[int]] = {}
    for k, label in enumerate(labels.tolist()):
        group = places.setdefault(CLASSES[label], [])
        if len(group) < MAX_OBJECTS:
            group.append(k)
    return places


def _cut(image: Tensor, mask: Tensor, box: Tensor) -> Tensor:
    """An object (1, 3, h, w) in [0, 1]: the box of an 8-bit image, gray outside the mask."""
    left, top, right, bottom = box.tolist()
    window = (..., slice(top, bottom), slice(left, right))
    return torch.where(mask[window], image[window], _GRAY).unsqueeze(0) / 255


def _load(source: str | Path, device: torch.device, offload: bool) -> _Detector:
    try:
        from transformers import Mask2FormerForUniversalSegmentation, Mask2FormerImageProcessorPil
    except ImportError as error:
        raise RecastError(f"geneval needs transformers 5 or later ({error})") from error

    class Segmentation(Mask2FormerForUniversalSegmentation):  # type: ignore[misc]
        _keys_to_ignore_on_load_missing = (r"^criterion\.",)  # only the training loss needs them

    with checkpoints.loading("Mask2Former model", source):
        model = checkpoints.pretrained(Segmentation, source)
        if model.config.num_labels != len(CLASSES):
            raise ValueError(f"it has {model.config.num_labels} classes, not the {len(CLASSES)} of COCO's instances")
        processor = Mask2FormerImageProcessorPil.from_pretrained(source, size=_SIZE)
    return _Detector(model, processor, device, offload)
