"""The figure of decisive wins: two pairs of images per budget with their prompts, as in App. G."""

from __future__ import annotations

import io
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from recast import images
from recast.evaluate import Budget, Scores
from recast.judge import Verdicts
from recast.report import judged, sections

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Pair", "decisive_figures", "gallery_figure"]

Pair = tuple[str, Path, Path]
"""A prompt, the image on the left and the one on the right."""
_CELL, _INNER, _OUTER, _MARGIN = 1.65, 0.05, 0.25, 0.12
"""Inches: the side of an image, and the gaps within a pair, between pairs and at the edges."""
_LINE, _HEAD = 0.105, 0.3
"""Inches: the height of a line of text, and of the names above the images."""
_WIDTH = 2 * _MARGIN + 4 * _CELL + 2 * _INNER + _OUTER
_PROMPT_LETTERS, _CAPTION_LETTERS, _LONGEST = 74, 142, 600
_SIDE = 384
"""Pixels of the largest image in the files."""


def decisive_figures(verdicts: Sequence[Verdicts], policies: Sequence[Scores]) -> dict[str, Figure]:
    """The figures of the decisive wins of either method, by file name; none for a method without such wins.

    In each of them the baseline is on the left and ReCAST on the right, whichever of the two won.
    """
    figures: dict[str, Figure] = {}
    seen = Counter[str]()
    for group, where in judged.located(verdicts, policies):
        methods, shown = (group[0].first, group[0].second), judged.names(group[0])
        left, right = judged.sides(group[0])
        for second in (False, True):
            name = f"decisive-{methods[second]}-{methods[not second]}"
            seen[name] += 1  # another judge compared the same methods
            wins = judged.decisive(group, second)
            if any(wins.values()):
                rows = {budget: [_pair(*row, left, where) for row in found] for budget, found in wins.items()}
                title = f"Decisive wins of {shown[second]} over {shown[not second]} (judge: {group[0].model})."
                caption = f"{title} {judged.selection(group, second)}"
                file = f"{name}-{seen[name]}" if seen[name] > 1 else name
                figures[file] = gallery_figure(rows, (shown[left], shown[right]), caption)
    return figures


def _pair(verdicts: Verdicts, row: int, left: int, where: judged.Where) -> Pair:
    """A judged pair; `left` is the run shown on the left, 0 the first and 1 the second."""
    number = verdicts.indices[row]
    runs = [where[method, verdicts.budget, verdicts.seed] for method in (verdicts.first, verdicts.second)]
    files = [run.image(number) for run in runs]
    for run in runs:
        run.picture(number)  # an error if it is not the image that was scored
    return verdicts.prompts[row], files[left], files[1 - left]


def gallery_figure(rows: Mapping[Budget, Sequence[Pair]], names: tuple[str, str], caption: str) -> Figure:
    """One row per budget with up to two pairs of images, each with its prompt and λ below it.

    Parameters
    ----------
    rows : mapping of Budget to sequence of (str, Path, Path)
        By budget, up to two pairs: the prompt, the image on the left and the one on the right.
    names : tuple of str
        The names of the left and of the right images.
    caption : str
        The text below the images.

    Returns
    -------
    matplotlib.figure.Figure
    """
    from matplotlib.figure import Figure

    prompts = {budget: [_wrapped(prompt, _PROMPT_LETTERS) for prompt, _, _ in pairs] for budget, pairs in rows.items()}
    heights = [_row_height(lines, bool(rows[budget])) for budget, lines in prompts.items()]
    below = _wrapped(caption, _CAPTION_LETTERS)
    height = 2 * _MARGIN + _HEAD + sum(heights) + _LINE * (len(below) + 1)
    figure = Figure(figsize=(_WIDTH, height))
    for half in range(judged.PER_BUDGET):
        for side, name in enumerate(names):
            _write(figure, _left(half, side) + _CELL / 2, height - _MARGIN, [name], 9, weight="bold")
    top = height - _MARGIN - _HEAD
    for (budget, pairs), row_height in zip(rows.items(), heights, strict=True):
        label = f"λ = {sections.budget_name(budget)}"
        for half in range(judged.PER_BUDGET):
            middle = _left(half, 1) - _INNER / 2
            if half >= len(pairs):
                missing = "no further decisive win" if pairs else "no decisive win"
                _write(figure, middle, top - (_CELL / 2 if pairs else 0), [missing, label], 7, color="0.4")
                continue
            for side, path in enumerate(pairs[half][1:]):
                _show(figure, path, _left(half, side), top - _CELL)
            lines = prompts[budget][half]
            _write(figure, middle, top - _CELL - 0.05, lines, 6, style="italic")
            _write(figure, middle, top - _CELL - 0.05 - _LINE * len(lines), [label], 7)
        top -= row_height
    _write(figure, _WIDTH / 2, top - _LINE / 2, below, 6.5)
    return figure


def _row_height(prompts: Sequence[Sequence[str]], shown: bool) -> float:
    lines = max(map(len, prompts), default=1) + 1
    return (_CELL if shown else 0) + 0.05 + _LINE * (lines + 1)


def _left(half: int, side: int) -> float:
    """The left edge of an image, in inches: of the first or second pair, its left or right image."""
    return _MARGIN + half * (2 * _CELL + _INNER + _OUTER) + side * (_CELL + _INNER)


def _wrapped(text: str, letters: int) -> list[str]:
    return textwrap.wrap(textwrap.shorten(text, _LONGEST, placeholder=" …"), letters) or [""]


def _write(
    figure: Figure, x: float, y: float, lines: Sequence[str], size: float, *, color: str = "black", **font: str
) -> None:
    """Lines of text, centered at x and below y, in inches; a dollar sign is just a dollar sign."""
    width, height = figure.get_size_inches()
    for number, line in enumerate(lines):
        place = x / width, (y - number * _LINE) / height
        figure.text(*place, line, fontsize=size, ha="center", va="top", color=color, parse_math=False, **font)  # type: ignore[arg-type]


def _show(figure: Figure, path: Path, x: float, y: float) -> None:
    """An image with its lower left corner at (x, y), in inches."""
    from PIL import Image

    width, height = figure.get_size_inches()
    axes = figure.add_axes((x / width, y / height, _CELL / width, _CELL / height))
    with Image.open(io.BytesIO(images.read(path, "run recast evaluate again"))) as image:
        image = image.convert("RGB")
        image.thumbnail((_SIDE, _SIDE))
        axes.imshow(np.asarray(image), interpolation="nearest" if max(image.size) <= 128 else "antialiased")
    axes.set_axis_off()
