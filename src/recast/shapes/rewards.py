"""The rewards of the shapes world, all in [0, 1]: three by rule, a learned one, and a held-out one.

Each is called with (images, prompts, metadata=None). The request is parsed from the prompt, so metadata are not needed.
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

__all__ = ["Alignment", "Background", "Census", "Composition", "Detail"]

_Array = NDArray[np.float64]
_Metadata = Sequence[Mapping[str, Any]] | None
_KINDS = len(prompts.SHAPES) * len(prompts.COLORS)
_DETAIL_SCALE, _BACKGROUND_SCALE = 0.05, 0.01
"""Errors with a score of 1/e, chosen so that the base policy can improve (docs/shapes.md)."""


@dataclass(frozen=True)
class _Wanted:
    """What prompts ask for: counts (B, shapes, colors), and relations between two kinds (B,), −1 for none."""

    counts: NDArray[np.int64]
    relation: NDArray[np.int64]
    subject: NDArray[np.int64]
    target: NDArray[np.int64]


def _wanted(texts: Sequence[str]) -> _Wanted:
    """The requests of a batch of prompts; every distinct prompt is parsed once."""
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
    return _Wanted(counts[rows], relation[rows], subject[rows], target[rows])


def _kind(shape: int, color: int) -> int:
    return shape * len(prompts.COLORS) + color


class Composition:
    """The share of the prompt's clauses that the detector confirms, as in GenEval.

    The clauses per phrase: the shape occurs, it occurs in its color, and its number is exact. The clauses per prompt:
    the relation, if there is one, holds between all objects of the two kinds, and the number of drawn cells is right.
    """

    def __call__(self, images: Images, texts: Sequence[str], metadata: _Metadata = None) -> _Array:
        """Share of confirmed clauses, (B,)."""
        holds, asked = self.clauses(images, texts)
        return (holds & asked).sum(1) / asked.sum(1)

    def clauses(self, images: Images, texts: Sequence[str]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Which clauses hold, and which are part of the prompt, both (B, clauses)."""
        images = as_tensor(images, texts)
        want, reading = _wanted(texts), detect.read(images)
        kind = torch.where(reading.certain, reading.held // len(render.RADII), _KINDS).numpy()
        where = np.arange(_KINDS)[:, None] == kind[:, None, :]  # (B, kinds, cells)
        found = where.sum(-1).reshape(want.counts.shape)
        asked = want.counts > 0
        shape_there = np.broadcast_to((found.sum(2, keepdims=True) > 0), asked.shape)
        things = [shape_there, found > 0, found == want.counts]
        clean = reading.drawn.numpy().sum(1) == want.counts.sum((1, 2))
        related = want.relation >= 0
        placed = related & _related(where, want)
        holds = np.concatenate(
            [each.reshape(len(asked), _KINDS) for each in things] + [placed[:, None], clean[:, None]], 1
        )
        every = np.ones((len(asked), 1), bool)
        return holds, np.concatenate([asked.reshape(len(asked), _KINDS)] * 3 + [related[:, None], every], 1)


def _related(where: NDArray[np.bool_], want: _Wanted) -> NDArray[np.bool_]:
    """Whether subject and target occur and every pair of them is in the relation, (B,)."""
    rows = np.arange(len(where))
    subject, target = where[rows, want.subject], where[rows, want.target]
    broken = np.einsum("bi,bij,bj->b", subject, ~_relations()[want.relation], target, dtype=np.int64)
    return subject.any(1) & target.any(1) & (broken == 0)


@cache
def _relations() -> NDArray[np.bool_]:
    return np.stack([render.relation_holds(name) for name in prompts.RELATIONS])


class Detail:
    """The quality of the drawn objects, independent of the prompt: outline, glint and flat color.

    The mean of exp(−error / 0.05) over the drawn cells, relative to the closest object; 0 for an empty paper.
    """

    def __call__(self, images: Images, texts: Sequence[str], metadata: _Metadata = None) -> _Array:
        """Mean quality of the drawn objects, (B,)."""
        images = as_tensor(images, texts)
        reading = detect.read(images)
        return _mean_drawn(torch.exp(-reading.error / _DETAIL_SCALE), reading.drawn)


class Background:
    """The cleanness of the paper around the drawn objects, independent of the prompt and of the number of objects.

    The mean of exp(−error / 0.01) over the drawn cells, outside their objects and relative to a smooth gradient; 0 for
    an empty paper. Over the whole paper, a policy would raise it by drawing fewer objects (docs/shapes.md).
    """

    def __call__(self, images: Images, texts: Sequence[str], metadata: _Metadata = None) -> _Array:
        """Cleanness of the paper, (B,)."""
        images = as_tensor(images, texts)
        reading = detect.read(images)
        return _mean_drawn(torch.exp(-reading.paper_error / _BACKGROUND_SCALE), reading.drawn)


def _mean_drawn(quality: Tensor, drawn: Tensor) -> _Array:
    """Mean quality (B,) of the drawn cells, 0 if there are none."""
    return ((quality * drawn).sum(1) / drawn.sum(1).clamp(min=1)).double().numpy()


class Alignment(ClipScore):
    """`clipscore` with the small CLIP that was trained on the shapes world."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**({"model": str(files("recast.shapes").joinpath("data/clip"))} | options))

    def __call__(self, images: Images, texts: Sequence[str], metadata: _Metadata = None) -> _Array:
        """The cosine, clamped to [0, 1], (B,)."""
        return super().__call__(images, texts, metadata).clip(0, 1)


class Census:
    """A held-out reward, never trained on: objects are connected components, without templates or cells.

    The F1 score of the found objects relative to the requested ones; half of it if the relation does not hold between
    the mean positions of the two kinds.
    """

    def __call__(self, images: Images, texts: Sequence[str], metadata: _Metadata = None) -> _Array:
        """F1 score of the found objects, (B,)."""
        images = as_tensor(images, texts)
        if not texts:
            return np.empty(0)
        want = _wanted(texts)
        image, kind, centre = _components(images)
        found = np.zeros((len(images), _KINDS), np.int64)
        np.add.at(found, (image, kind), 1)
        right = np.minimum(found, want.counts.reshape(len(images), _KINDS)).sum(1)
        f1 = 2 * right / np.maximum(1, found.sum(1) + want.counts.sum((1, 2)))
        middle = np.zeros((len(images), _KINDS, 2))
        np.add.at(middle, (image, kind), centre)
        middle = np.where(found[..., None] > 0, middle / np.maximum(found, 1)[..., None], np.nan)
        rows = np.arange(len(images))
        offset = middle[rows, want.subject] - middle[rows, want.target]
        axis, sign = np.array([(1, -1), (1, 1), (0, -1), (0, 1)])[want.relation].T
        along = offset[rows, axis] * sign
        holds = along > 0.5 * np.hypot(*offset.T)  # False if one of them is missing
        return np.where((want.relation < 0) | holds, f1, f1 / 2)


_PAINT = np.array([*render.PALETTE.values()])
_INK, _SPECK = 0.25, 24
"""Minimum difference of an object's pixel from the paper; components with at most _SPECK pixels are ignored."""


def _components(images: Tensor) -> tuple[NDArray[np.int64], NDArray[np.int64], _Array]:
    """The connected components of all images: index of the image, kind, and center (y, x)."""
    image, features, color, centre = _measure(images)
    shape = ((features[:, None] - _prototypes()) ** 2).sum(-1).argmin(1) // len(render.RADII)
    return image, shape * len(prompts.COLORS) + color, centre


@cache
def _prototypes() -> _Array:
    """Features of every shape in every size, measured on rendered images."""
    held = np.full((len(prompts.SHAPES) * len(render.RADII), render.CELLS), render.EMPTY)
    blue = prompts.COLORS.index("blue")
    held[:, 5] = [
        (shape * len(prompts.COLORS) + blue) * len(render.RADII) + size
        for shape in range(len(prompts.SHAPES))
        for size in range(len(render.RADII))
    ]
    return _measure(render.draw(held, render.paper(len(held), np.random.default_rng(0))))[1]


def _measure(images: Tensor) -> tuple[NDArray[np.int64], _Array, NDArray[np.int64], _Array]:
    """Image, shape features (n, 3), color and center of every connected component.

    Features: area over bounding box, distance of the center of mass below the center of the box, and
    E|dx dy| / E(dx² + dy²), scaled to similar spreads. They distinguish circle, square, triangle and cross at any size.
    """
    pixels = images.detach().float().cpu().permute(0, 2, 3, 1).numpy()
    ink = np.abs(pixels - np.median(pixels, axis=(1, 2), keepdims=True)).max(-1) > _INK
    within = np.zeros((3, 3, 3), bool)
    within[1] = True  # neighbors in the same image only
    labels, count = ndimage.label(ink, within)
    area = np.bincount(labels.ravel(), minlength=count + 1)[1:]
    keep = np.flatnonzero(area > _SPECK)
    boxes = ndimage.find_objects(labels)
    box = np.array([[(side.start, side.stop) for side in boxes[k]] for k in keep], float).reshape(-1, 3, 2)
    low, high = (np.zeros((count, 2)) for _ in range(2))
    low[keep], high[keep] = box[:, 1:, 0], box[:, 1:, 1]
    owner = labels[ink] - 1
    place = (np.argwhere(ink)[:, 1:] + 0.5 - (low + high)[owner] / 2) / np.maximum(high - low, 1)[owner]

    def mean(values: _Array) -> _Array:
        return np.bincount(owner, values, count)[keep] / area[keep]

    filled = area[keep] / np.prod(high - low, axis=1)[keep]
    diagonal = mean(np.abs(place).prod(1)) / np.maximum(mean((place**2).sum(1)), 1e-9)
    features = np.stack([filled, 3 * mean(place[:, 0]), 4 * diagonal], -1)
    votes = np.zeros((count, len(_PAINT)))
    np.add.at(votes, owner, np.exp(-((pixels[ink][:, None] - _PAINT) ** 2).sum(-1) / 0.02))
    return box[:, 0, 0].astype(np.int64), features, votes[keep].argmax(1), (low + high)[keep] / 2
