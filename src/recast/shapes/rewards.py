"""The shapes world's rewards, all in [0, 1]: three by rule, one learned, and one more to judge by.

Each takes (images, prompts, metadata=None); what a prompt asks for is read from its words, so that no
metadata are needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import ndimage
from torch import Tensor

from recast.rewards.base import Images, as_tensor
from recast.rewards.clipscore import ClipScore
from recast.shapes import detect, prompts, render

Array = NDArray[np.float64]
Metadata = Sequence[Mapping[str, Any]] | None
KINDS = len(prompts.SHAPES) * len(prompts.COLORS)
DETAIL_SCALE, BACKGROUND_SCALE = 0.05, 0.008
"""Errors that score 1/e: chosen so that the base has room to move (docs/shapes.md)."""


@dataclass(frozen=True)
class Wanted:
    """What prompts ask for: counts (B, shapes, colours), and who stands in which relation (B,), −1 for none."""

    counts: NDArray[np.int64]
    relation: NDArray[np.int64]
    subject: NDArray[np.int64]
    target: NDArray[np.int64]


def wanted(texts: Sequence[str]) -> Wanted:
    """The requests of a batch of prompts; each different one is parsed once."""
    different = list(dict.fromkeys(texts))
    row_of = {text: k for k, text in enumerate(different)}
    counts = np.zeros((len(different), len(prompts.SHAPES), len(prompts.COLORS)), np.int64)
    relation, subject, target = (np.full(len(different), -1) for _ in range(3))
    for k, text in enumerate(different):
        include = prompts.parse(text)
        kinds = [(prompts.SHAPES.index(e["class"]), prompts.COLORS.index(e["color"])) for e in include]
        for kind, entry in zip(kinds, include, strict=True):
            counts[k, kind[0], kind[1]] += entry["count"]
        if "position" in include[-1]:
            name, other = include[-1]["position"]
            relation[k] = prompts.RELATIONS.index(name)
            subject[k] = _kind(*kinds[-1])
            target[k] = _kind(*kinds[other])
    rows = np.array([row_of[text] for text in texts], np.int64)
    return Wanted(counts[rows], relation[rows], subject[rows], target[rows])


def _kind(shape: int, color: int) -> int:
    return shape * len(prompts.COLORS) + color


class Composition:
    """GenEval's kind: the share of the prompt's clauses that the detector confirms.

    For each thing asked for: the shape is there, it is there in its colour, the number is exact. For the whole: its
    relation, if it names one, holds between all that are there; and as many things are drawn as were asked for.
    """

    def __call__(self, images: Images, texts: Sequence[str], metadata: Metadata = None) -> Array:
        """Share of clauses that hold, (B,)."""
        holds, asked = self.clauses(images, texts)
        return (holds & asked).sum(1) / asked.sum(1)

    def clauses(self, images: Images, texts: Sequence[str]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Which clauses hold and which are asked, both (B, clauses)."""
        images = as_tensor(images, texts)
        want, reading = wanted(texts), detect.read(images)
        kind = torch.where(reading.certain, reading.held // len(render.RADII), KINDS).numpy()
        where = np.arange(KINDS)[:, None] == kind[:, None, :]  # (B, kinds, cells)
        found = where.sum(-1).reshape(want.counts.shape)
        asked = want.counts > 0
        shape_there = np.broadcast_to((found.sum(2, keepdims=True) > 0), asked.shape)
        things = [shape_there, found > 0, found == want.counts]
        clean = reading.drawn.numpy().sum(1) == want.counts.sum((1, 2))
        related = want.relation >= 0
        placed = related & _related(where, want)
        holds = np.concatenate(
            [each.reshape(len(asked), KINDS) for each in things] + [placed[:, None], clean[:, None]], 1
        )
        every = np.ones((len(asked), 1), bool)
        return holds, np.concatenate([asked.reshape(len(asked), KINDS)] * 3 + [related[:, None], every], 1)


def _related(where: NDArray[np.bool_], want: Wanted) -> NDArray[np.bool_]:
    """Whether subject and target are there and every pair of them stands in the relation, (B,)."""
    rows = np.arange(len(where))
    subject, target = where[rows, want.subject], where[rows, want.target]
    broken = np.einsum("bi,bij,bj->b", subject, ~_relations()[want.relation], target, dtype=np.int64)
    return subject.any(1) & target.any(1) & (broken == 0)


@cache
def _relations() -> NDArray[np.bool_]:
    return np.stack([render.relation_holds(name) for name in prompts.RELATIONS])


class Detail:
    """How well objects are drawn, whatever they are: outline, glint and flat colour, against the nearest object.

    The mean of exp(−error / 0.05) over all that is drawn; 0 for an empty paper.
    """

    def __call__(self, images: Images, texts: Sequence[str], metadata: Metadata = None) -> Array:
        """Mean quality of what is drawn, (B,)."""
        images = as_tensor(images, texts)
        reading = detect.read(images)
        quality = torch.exp(-reading.error / DETAIL_SCALE) * reading.drawn
        return (quality.sum(1) / reading.drawn.sum(1).clamp(min=1)).double().numpy()


class Background:
    """How clean the paper is: exp(−error / 0.008) against one smooth gradient, away from what is drawn."""

    def __call__(self, images: Images, texts: Sequence[str], metadata: Metadata = None) -> Array:
        """Cleanness of the paper, (B,)."""
        images = as_tensor(images, texts)
        return torch.exp(-detect.read(images).paper_error / BACKGROUND_SCALE).double().numpy()


class Alignment(ClipScore):
    """CLIPScore's kind: `clipscore` with the small CLIP trained on this world."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**({"model": str(files("recast.shapes").joinpath("data/clip"))} | options))

    def __call__(self, images: Images, texts: Sequence[str], metadata: Metadata = None) -> Array:
        """The cosine, clamped to [0, 1] as all of this world's rewards."""
        return super().__call__(images, texts, metadata).clip(0, 1)


class Census:
    """Held out, never trained on: objects as connected components, without templates or cells.

    The F1 of the objects found against those asked for; half of it where a relation does not hold between the mean
    places of the two kinds.
    """

    def __call__(self, images: Images, texts: Sequence[str], metadata: Metadata = None) -> Array:
        """F1 of what is there against what was asked for, (B,)."""
        images = as_tensor(images, texts)
        if not texts:
            return np.empty(0)
        want = wanted(texts)
        image, kind, centre = components(images)
        found = np.zeros((len(images), KINDS), np.int64)
        np.add.at(found, (image, kind), 1)
        right = np.minimum(found, want.counts.reshape(len(images), KINDS)).sum(1)
        f1 = 2 * right / np.maximum(1, found.sum(1) + want.counts.sum((1, 2)))
        middle = np.zeros((len(images), KINDS, 2))
        np.add.at(middle, (image, kind), centre)
        middle = np.where(found[..., None] > 0, middle / np.maximum(found, 1)[..., None], np.nan)
        rows = np.arange(len(images))
        offset = middle[rows, want.subject] - middle[rows, want.target]
        axis, sign = np.array([(1, -1), (1, 1), (0, -1), (0, 1)])[want.relation].T
        along = offset[rows, axis] * sign
        holds = along > 0.5 * np.hypot(*offset.T)  # False where one of them is missing
        return np.where((want.relation < 0) | holds, f1, f1 / 2)


_PAINT = np.array([*render.PALETTE.values()])
_INK, _SPECK = 0.25, 24
"""Difference from paper that makes a pixel part of an object, and the most pixels that are still none."""


def components(images: Tensor) -> tuple[NDArray[np.int64], NDArray[np.int64], Array]:
    """Connected objects of all images: which image, which kind, and the centre (y, x)."""
    image, features, color, centre = _measure(images)
    shape = ((features[:, None] - _prototypes()) ** 2).sum(-1).argmin(1) // len(render.RADII)
    return image, shape * len(prompts.COLORS) + color, centre


@cache
def _prototypes() -> Array:
    """Features of every shape in every size, measured on the renderer's own."""
    held = np.full((len(prompts.SHAPES) * len(render.RADII), render.CELLS), render.EMPTY)
    blue = prompts.COLORS.index("blue")
    held[:, 5] = [
        (shape * len(prompts.COLORS) + blue) * len(render.RADII) + size
        for shape in range(len(prompts.SHAPES))
        for size in range(len(render.RADII))
    ]
    return _measure(render.draw(held, render.paper(len(held), np.random.default_rng(0))))[1]


def _measure(images: Tensor) -> tuple[NDArray[np.int64], Array, NDArray[np.int64], Array]:
    """Image, shape features (n, 3), colour and centre of every connected object.

    Features: area over bounding box, how far the centre of mass lies below the box's, and E|dx dy| / E(dx² + dy²),
    weighted to spread alike. Together they tell disc, square, triangle and cross apart at any size.
    """
    pixels = images.detach().float().cpu().permute(0, 2, 3, 1).numpy()
    ink = np.abs(pixels - np.median(pixels, axis=(1, 2), keepdims=True)).max(-1) > _INK
    within = np.zeros((3, 3, 3), bool)
    within[1] = True  # neighbours in the same image only
    labels, count = ndimage.label(ink, within)
    area = np.bincount(labels.ravel(), minlength=count + 1)[1:]
    keep = np.flatnonzero(area > _SPECK)
    boxes = ndimage.find_objects(labels)
    box = np.array([[(side.start, side.stop) for side in boxes[k]] for k in keep], float).reshape(-1, 3, 2)
    low, high = (np.zeros((count, 2)) for _ in range(2))
    low[keep], high[keep] = box[:, 1:, 0], box[:, 1:, 1]
    owner = labels[ink] - 1
    place = (np.argwhere(ink)[:, 1:] + 0.5 - (low + high)[owner] / 2) / np.maximum(high - low, 1)[owner]

    def mean(values: Array) -> Array:
        return np.bincount(owner, values, count)[keep] / area[keep]

    filled = area[keep] / np.prod(high - low, axis=1)[keep]
    diagonal = mean(np.abs(place).prod(1)) / np.maximum(mean((place**2).sum(1)), 1e-9)
    features = np.stack([filled, 3 * mean(place[:, 0]), 4 * diagonal], -1)
    votes = np.zeros((count, len(_PAINT)))
    np.add.at(votes, owner, np.exp(-((pixels[ink][:, None] - _PAINT) ** 2).sum(-1) / 0.02))
    return box[:, 0, 0].astype(np.int64), features, votes[keep].argmax(1), (low + high)[keep] / 2
