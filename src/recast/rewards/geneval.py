"""GenEval: the clauses in a prompt's metadata, checked on objects found by Mask2Former and their colors by CLIP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from recast.rewards import catalog, geneval_detector
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

__all__ = ["GenEval"]

_GRAY = 153
_TEMPLATES = ("a photo of a {color} {name}", "a photo of a {color}-colored {name}", "a photo of a {color} object")
_CLIP_BATCH = 64


class GenEval:
    """Agreement of an image with the clauses of its prompt, at most 1; NaN if the metadata have no `include`.

    `mode="clauses"` is the share of confirmed clauses. An entry of `include`, n objects of a class, has the clauses
    - object: at least one object of the class is found;
    - count, if the tag is `counting`, n is above 1 or `exclude` names the class: at least n objects are found, and
      fewer than each number in `exclude`;
    - color, if the entry has one: the n objects with the highest scores all have it;
    - position, if the entry has one: each of these n objects is in the relation to each of the n objects of the target
      entry, and both entries have their n objects in their colors (the target also in its own position).

    A class that only `exclude` names has one count clause.

    `"correct"` is 1 if all clauses are confirmed, else 0: the verdict of the benchmark. Superfluous objects matter in
    neither mode, except where `exclude` names them. `"strict"` is 1 if exactly n objects are also found per entry.

    `"nft"` is the score that DiffusionNFT and Flow-GRPO train on, the mean of these terms: per entry
    1 − |n − found| / n, which is negative above 2 n objects; if the count is not exact and the entry has a color or a
    position, a 0; if it is exact, for a color the share of the n objects that have it, and for a position, if the color
    is right, a 1, with a further 0 if the relation is wrong, and only a 0 if the target is not matched exactly.
    `exclude` does not contribute. In this mode the detector sees the image with red and blue exchanged, since these
    codebases pass RGB arrays to an interface of mmdet that expects BGR.

    Objects are those above `threshold`, or above `counting_threshold` for the tag `counting`: the values of the
    benchmark for its detector, the checkpoint of mmdet, which is downloaded by default. `model` is this file, another
    address of it, or a folder or hub repository with a Mask2Former of transformers. `dtype` applies to CLIP; the
    detector always runs in float32.
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
        self.pixels.even = True  # a margin of half a pixel is rounded to even by torchvision, which open_clip uses
        self.detector = geneval_detector.load(model, devices.pick(device), offload)

    @staticmethod
    def versions(model: str | Path = catalog.MASK2FORMER, **_: Any) -> dict[str, str]:
        """What decides a score besides the options: the name of the detector, and the steps around it."""
        return {"detector": Path(model).name, "pipeline": "mmdet's"}

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
        inputs = levels.flip(1) if self.mode == "nft" else levels
        found = self.detector.detect(inputs, thresholds, self.batch_size)
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
