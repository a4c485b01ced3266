"""The objects in an image by Mask2Former, with the input and the post-processing of the original evaluation (mmdet)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from recast import device as devices
from recast.errors import RecastError
from recast.rewards import checkpoints, mask2former
from recast.rewards import clip as clips
from recast.rewards.geneval_clauses import CLASSES

__all__ = ["Detector", "Instances", "inputs", "instances", "load", "resized"]

_SHORT, _LONG = 800, 1333
"""Largest edges of the detector's input."""
_DIVISOR, _PADDING = 32, 128
_MEAN, _STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
_MOST = 100
"""Pairs of a query and a class that are considered per image."""


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


class Detector:
    """Instances of COCO's classes by a Mask2Former model in float32: half precision gave NaN on the CPU."""

    def __init__(self, model: Any, device: torch.device, offload: bool = False) -> None:
        self.model = model.to("cpu" if offload else device).eval().requires_grad_(False)
        self.device, self.offload = device, offload
        self.edges = (_SHORT, _LONG)

    @torch.no_grad()
    def detect(self, images: Tensor, thresholds: Sequence[float], batch_size: int) -> Iterator[Instances]:
        """Instances above the threshold of each 8-bit image (B, 3, H, W)."""
        with devices.visiting(self.model, self.device, self.offload):
            for start in range(0, len(images), batch_size):
                pixels, inside = inputs(images[start : start + batch_size].to(self.device), *self.edges)
                output = self.model(pixel_values=pixels)
                classes, masks = output.class_queries_logits, output.masks_queries_logits
                if not (classes.isfinite().all() and masks.isfinite().all()):
                    # No score would exceed a threshold: every image would seem to contain no object.
                    raise RecastError("the output of geneval's detector is not finite: its checkpoint is damaged")
                sizes = (tuple(pixels.shape[-2:]), inside, tuple(images.shape[-2:]))
                yield from instances(classes, masks, *sizes, thresholds[start : start + batch_size])


def load(source: str | Path, device: torch.device, offload: bool = False) -> Detector:
    """The detector of a checkpoint (`mask2former.load`); one that is already loaded is shared."""

    def made() -> Detector:
        with checkpoints.loading("Mask2Former model", source):
            return Detector(mask2former.load(source, len(CLASSES)), device, offload)

    return clips.shared(("mask2former", str(source), device, offload), made)


def inputs(images: Tensor, short: int, long: int) -> tuple[Tensor, tuple[int, int]]:
    """Input (B, 3, h, w) of the detector for 8-bit images (B, 3, H, W), and the height and width inside its padding.

    The images are resized as large as `short` and `long` allow for their edges, padded with gray at the bottom and at
    the right to multiples of 32, and normalized.
    """
    height, width = images.shape[-2:]
    scale = min(long / max(height, width), short / min(height, width))
    inside = (int(height * scale + 0.5), int(width * scale + 0.5))
    bottom, right = (-side % _DIVISOR for side in inside)
    padded = functional.pad(resized(images, inside), (0, right, 0, bottom), value=_PADDING)
    return clips.normalized(padded.float(), _MEAN, _STD), inside


def resized(images: Tensor, size: tuple[int, int]) -> Tensor:
    """8-bit images (B, 3, *size) from 8-bit images (B, 3, H, W): bilinear, without antialiasing, equal to OpenCV's.

    OpenCV multiplies by weights of 11 bits and rounds after each axis; float arithmetic gives another level for an
    eighth of the pixels.
    """
    (left, right, across), (top, bottom, down) = (
        _weights(images.shape[axis], size[axis], images.device) for axis in (-1, -2)
    )
    levels = images.int()
    rows = (levels[..., left] * across[0] + levels[..., right] * across[1]) >> 4
    upper = rows[..., top, :] * down[0].unsqueeze(1) >> 16
    lower = rows[..., bottom, :] * down[1].unsqueeze(1) >> 16
    return ((upper + lower + 2) >> 2).byte()


def _weights(old: int, new: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The two pixels that each of `new` pixels lies between, and their weights (2, new) in 2048ths."""
    places = ((torch.arange(new, dtype=torch.float64) + 0.5) * (old / new) - 0.5).float().to(device)
    before = places.floor()
    share = places - before
    weights = (torch.stack([1 - share, share]) * 2048).round().int()
    first = before.long()
    return first.clamp(0, old - 1), (first + 1).clamp(0, old - 1), weights


def instances(
    classes: Tensor,
    masks: Tensor,
    padded: tuple[int, ...],
    inside: tuple[int, ...],
    size: tuple[int, ...],
    thresholds: Sequence[float],
) -> list[Instances]:
    """Instances of B images from the logits of their queries: classes (B, Q, C + 1) and masks (B, Q, h, w).

    The logits of the masks are interpolated to the size of the padded input, cut to what is `inside` the padding and
    interpolated to the size of the image; a mask is where they are positive. The score is the probability of the class
    times the mean probability inside the mask. Values are read from the device for all images together.
    """
    probabilities = classes.softmax(-1)[..., :-1]
    chances, places = probabilities.flatten(1).topk(min(_MOST, probabilities[0].numel()))
    # A score is at most its chance, so the other masks are not needed. Chances are in descending order.
    counts = (chances > torch.tensor(thresholds, device=chances.device).unsqueeze(1)).sum(1).tolist()
    queries, labels = places // probabilities.shape[2], places % probabilities.shape[2]
    parts = []
    for k, count in enumerate(counts):
        logits = _enlarged(masks[k, queries[k, :count]].unsqueeze(1), padded)[..., : inside[0], : inside[1]]
        logits = _enlarged(logits, size)[:, 0]
        found = logits > 0
        scores = chances[k, :count] * ((logits.sigmoid() * found).sum((1, 2)) / (found.sum((1, 2)) + 1e-6))
        parts.append((scores, labels[k, :count], found))
    columns: list[Any] = [torch.cat(column).cpu().split(counts) for column in zip(*parts, strict=True)]
    return [_above(*image) for image in zip(*columns, thresholds, strict=True)]


def _above(scores: Tensor, labels: Tensor, masks: Tensor, threshold: float) -> Instances:
    """Instances above the threshold, by descending score, without empty ones."""
    order = scores.sort(descending=True, stable=True).indices
    order = order[(scores[order] > threshold) & masks[order].flatten(1).any(1)]
    return Instances(scores[order], labels[order], masks[order])


def _enlarged(logits: Tensor, size: tuple[int, ...]) -> Tensor:
    return functional.interpolate(logits, size, mode="bilinear", align_corners=False)
