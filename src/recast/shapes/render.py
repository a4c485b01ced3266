"""The renderer: exact images of the shapes world, which serve as its π⁺.

64×64 pixels, a 4×4 grid of cells, at most one object per cell: a shape in one of two sizes with an ink outline and a
white glint, over a pastel paper with a vertical gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recast.errors import RecastError
from recast.shapes import prompts

__all__ = [
    "CELL",
    "CELLS",
    "EMPTY",
    "GRID",
    "PALETTE",
    "PAPER",
    "RADII",
    "SIZE",
    "Objects",
    "draw",
    "from_cells",
    "objects",
    "paper",
    "relation_holds",
    "render",
    "scene",
    "to_cells",
]

CELL, GRID = 16, 4
SIZE = CELL * GRID
CELLS = GRID * GRID
RADII = (5.4, 6.8)
"""Half the extent of an object in pixels; the outermost pixels of every cell are always paper."""
PALETTE = {
    "red": (0.86, 0.16, 0.18),
    "orange": (0.96, 0.55, 0.12),
    "yellow": (0.95, 0.86, 0.20),
    "green": (0.18, 0.62, 0.28),
    "blue": (0.16, 0.36, 0.85),
    "purple": (0.56, 0.22, 0.68),
}
_INK = 0.10
PAPER = (0.76, 1.0)
"""Range of the paper in every channel."""
_OUTLINE, _GLINT, _FINE = 1.2, 1.25, 8
EMPTY = -1


@dataclass(frozen=True)
class Objects:
    """All objects that a cell can contain, K = shapes × colors × sizes: coverage (K, C·C) and image (K, 3, C·C).

    An object over paper p is `image + (1 − coverage) p`: images are premultiplied by coverage.
    """

    coverage: Tensor
    image: Tensor

    def index(self, shape: str, color: str, size: int) -> int:
        """The row of an object in both tensors."""
        return (prompts.SHAPES.index(shape) * len(prompts.COLORS) + prompts.COLORS.index(color)) * len(RADII) + size


@cache
def objects() -> Objects:
    """The objects, antialiased by averaging 8×8 points per pixel."""
    centre = (np.arange(CELL * _FINE) + 0.5) / _FINE - CELL / 2
    y, x = np.meshgrid(centre, centre, indexing="ij")

    def pixels(mask: np.ndarray) -> np.ndarray:
        return mask.reshape(CELL, _FINE, CELL, _FINE).mean(axis=(1, 3)).ravel()

    coverage, image = [], []
    for shape in prompts.SHAPES:
        for color in prompts.COLORS:
            for radius in RADII:
                depth = _depth(shape, x, y, radius)
                lifted = -0.15 if shape == "triangle" else 0.35  # the tip is too narrow for a glint
                glint = np.hypot(x, y + lifted * radius) < _GLINT * radius / RADII[-1]
                fill = np.where(depth[None] > _OUTLINE, np.array(PALETTE[color])[:, None, None], _INK)
                fill = np.where(glint[None], 1.0, fill)
                coverage.append(pixels(depth > 0))
                image.append([pixels(channel * (depth > 0)) for channel in fill])
    return Objects(torch.tensor(np.array(coverage)).float(), torch.tensor(np.array(image)).float())


def _depth(shape: str, x: np.ndarray, y: np.ndarray, radius: float) -> np.ndarray:
    """Distance in pixels to the outline, positive inside."""
    if shape == "circle":
        return radius - np.hypot(x, y)
    if shape == "square":
        return 0.9 * radius - np.maximum(abs(x), abs(y))
    if shape == "triangle":
        slope = np.hypot(2.0, 1.0)
        return np.minimum(0.85 * radius - y, (radius + y - 2 * abs(x)) / slope)
    width = 0.42 * radius
    return np.maximum(np.minimum(width - abs(x), radius - abs(y)), np.minimum(radius - abs(x), width - abs(y)))


def relation_holds(relation: str) -> np.ndarray:
    """(16, 16): whether an object in cell a is in the relation to one in cell b, by the rule of GenEval.

    The offset along the axis of the relation must exceed half the distance: an angle of less than 60°.
    """
    row, column = np.divmod(np.arange(CELLS), GRID)
    dx, dy = column[:, None] - column, row[:, None] - row
    along = {"left of": -dx, "right of": dx, "above": -dy, "below": dy}[relation]
    return along > 0.5 * np.hypot(dx, dy) + 1e-9


def scene(include: Sequence[Mapping[str, Any]], rng: np.random.Generator) -> np.ndarray:
    """The object in each cell (16,), `EMPTY` for none: what the prompt asks for, in random cells."""
    table = objects()
    cells = rng.permutation(CELLS)
    wanted = sum(entry["count"] for entry in include)
    if wanted > CELLS:
        raise RecastError(f"a scene has at most {CELLS} objects, not {wanted}")
    if "position" in include[-1]:
        if any(entry["count"] != 1 for entry in include):
            raise RecastError(f"a relation needs single objects, unlike those in {prompts.sentence(include)!r}")
        relation, _ = include[-1]["position"]
        a, b = rng.permutation(np.argwhere(relation_holds(relation)))[0]
        cells = np.array([b, a])
    held = np.full(CELLS, EMPTY)
    start = 0
    for entry in include:
        for cell in cells[start : start + entry["count"]]:
            held[cell] = table.index(entry["class"], entry["color"], int(rng.integers(len(RADII))))
        start += entry["count"]
    return held


def paper(count: int, rng: np.random.Generator) -> Tensor:
    """Empty papers (B, 3, 64, 64): a pastel of random hue, with a random vertical gradient."""
    hue = rng.uniform(0, 2 * np.pi, (count, 1))
    base = 0.88 + 0.06 * np.cos(hue - 2 * np.pi * np.arange(3) / 3)
    slope = rng.uniform(-0.06, 0.06, (count, 1, 1))
    height = np.linspace(-1, 1, SIZE)
    column = torch.tensor(base[:, :, None] + slope * height).float()
    return column[..., None].expand(-1, -1, -1, SIZE).clone()


def draw(held: np.ndarray, background: Tensor) -> Tensor:
    """Images (B, 3, 64, 64) in [0, 1] of scenes (B, 16) over papers."""
    table = objects()
    rows = torch.tensor(np.where(held == EMPTY, 0, held))
    filled = torch.tensor(held != EMPTY)[..., None, None]
    image = torch.where(filled, table.image[rows], 0.0)
    through = 1 - torch.where(filled, table.coverage[rows][:, :, None], 0.0)
    return from_cells(image + through * to_cells(background))


def render(metadata: Sequence[Mapping[str, Any]], seed: int) -> Tensor:
    """One image per row of metadata, (B, 3, 64, 64) in [0, 1]; the same seed gives the same images."""
    rng = np.random.default_rng(seed)
    held = np.stack([_scene(row, rng) for row in metadata])
    return draw(held, paper(len(held), rng))


def _scene(row: Mapping[str, Any], rng: np.random.Generator) -> np.ndarray:
    """The scene of a row of a prompt file, which may have any content."""
    try:
        return scene(row["include"], rng)
    except RecastError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise RecastError(
            f"the renderer cannot draw include = {row.get('include')!r:.300} ({type(error).__name__}: {error}): "
            "see the prompts of the shapes world for the format"
        ) from error


def to_cells(images: Tensor) -> Tensor:
    """(B, c, 64, 64) to (B, 16, c, 256)."""
    count, channels = images.shape[:2]
    cells = images.reshape(count, channels, GRID, CELL, GRID, CELL).permute(0, 2, 4, 1, 3, 5)
    return cells.reshape(count, CELLS, channels, CELL * CELL)


def from_cells(cells: Tensor) -> Tensor:
    """(B, 16, c, 256) to (B, c, 64, 64)."""
    count, _, channels, _ = cells.shape
    images = cells.reshape(count, GRID, GRID, channels, CELL, CELL).permute(0, 3, 1, 4, 2, 5)
    return images.reshape(count, channels, SIZE, SIZE)
