"""Object detection in images of the shapes world, by least squares against the objects of the renderer.

The counterpart of GenEval's detector: a cell contains an object if one of the renderer's objects explains most of its
content. All images are processed at once, as a few matrix products.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from recast.errors import RecastError
from recast.shapes import render

__all__ = ["Reading", "read"]

_DRAWN = 0.06
"""Root mean square difference from the paper above which a cell counts as drawn; an object has 0.2 to 0.4."""
_ROUNDING = 1 / 255**2 / 12
_EXPLAINED = 0.5
"""An object is certain if it leaves at most this share of the difference, as a ratio of root mean squares."""


@dataclass(frozen=True)
class Reading:
    """The content of each cell of a batch of images, (B, 16).

    `drawn`: something is drawn. `held`: the index of the closest object. `certain`: it is that object. `error`: root
    mean square error over the pixels of the object. `paper_error`: the same, relative to the paper, over the pixels of
    the cell around it.
    """

    drawn: Tensor
    held: Tensor
    certain: Tensor
    error: Tensor
    paper_error: Tensor


def read(images: Tensor) -> Reading:
    """Detect the objects in images (B, 3, 64, 64) in [0, 1]; the result for the last batch is cached."""
    if images.is_inference():  # changes of such a tensor cannot be noticed
        return _read(images)
    latest = _latest.get("reading")
    if latest is None or latest[0]() is not images or latest[1] != images._version:
        latest = _latest["reading"] = (weakref.ref(images), images._version, _read(images))
    return latest[2]


_latest: dict[str, tuple[weakref.ref[Tensor], int, Reading]] = {}


@torch.no_grad()
def _read(images: Tensor) -> Reading:
    if images.ndim != 4 or images.shape[1:] != (3, render.SIZE, render.SIZE):
        raise RecastError(
            f"images of the shapes world are (B, 3, {render.SIZE}, {render.SIZE}), not {tuple(images.shape)}"
        )
    images = images.detach().float().cpu()
    table = render.objects()
    cells = render.to_cells(images)
    paper = render.to_cells(_paper(images))
    difference = cells - paper
    square = difference.square().sum(2)
    pixels = cells.shape[-1]
    # ‖difference − (object − coverage · paper)‖² over the pixels of the object, expanded.
    touched = (table.coverage > 0).float()
    cover = table.coverage[:, None].expand_as(table.image)
    inside = (
        square @ touched.T
        + table.image.square().sum((1, 2))
        - 2 * difference.flatten(2) @ table.image.flatten(1).T
        + 2 * (difference * paper).sum(2) @ table.coverage.T
        - 2 * paper.flatten(2) @ (table.image * cover).flatten(1).T
        + paper.square().sum(2) @ table.coverage.square().T
    )
    outside = square @ (1 - touched).T
    left, held = (inside + outside).clamp(min=0).min(-1)
    there = square.sum(-1)
    drawn = there > _DRAWN**2 * 3 * pixels
    own = inside.gather(-1, held[..., None])[..., 0] / (3 * touched.sum(1)[held])
    certain = drawn & (left < _EXPLAINED**2 * there)
    around = 1 - touched[held]
    stray = (square * around).sum(-1) / (3 * around.sum(-1))
    # The rounding of images stored in 8 bits does not count as an error.
    stray = (stray - _ROUNDING).clamp(min=0)
    return Reading(drawn, held, certain, own.clamp(min=0).sqrt(), stray.sqrt())


@cache
def _ring() -> Tensor:
    """(256,): 1 on the outermost pixels of a cell, which no object covers."""
    ring = torch.ones(render.CELL, render.CELL)
    ring[1:-1, 1:-1] = 0
    return ring.flatten()


@cache
def _paper_fit() -> Tensor:
    """(64, pixels): the map from ring pixels to the colors of the rows, a least-squares fit of constant and slope."""
    ring = render.from_cells(_ring().expand(1, render.CELLS, 1, -1))[0, 0].bool()
    height = torch.linspace(-1, 1, render.SIZE, dtype=torch.float64)
    basis = torch.stack([torch.ones_like(height), height], dim=1)
    rows = ring.nonzero()[:, 0]
    return (basis @ torch.linalg.pinv(basis[rows])).float()


def _paper(images: Tensor) -> Tensor:
    """The paper under the objects (B, 3, 64, 64), fitted to the pixels that objects never cover."""
    ring = render.from_cells(_ring().expand(1, render.CELLS, 1, -1))[0, 0].bool()
    column = (images[:, :, ring] @ _paper_fit().T).clamp(*render.PAPER)
    return column[..., None].expand_as(images)
