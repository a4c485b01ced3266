"""A self-test for each reward: drawn pictures and prompts for which the order of the scores is known."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from recast.errors import RecastError
from recast.rewards import base
from recast.shapes import prompts, render

__all__ = ["CAPTIONS", "Case", "Outcome", "Trial", "draw", "run", "trials"]

_SIDE = 512
_LARGE = 1e4
"""Scores above this are considered a mistake of scale."""
_MATCHED = ("clipscore", "hpsv2", "pickscore", "imagereward", "hpsv3", "unifiedreward")
"""Rewards that measure the agreement of prompt and image."""


@dataclass(frozen=True)
class Case:
    """One picture with a prompt and its metadata."""

    picture: str
    prompt: str
    metadata: Mapping[str, Any]


@dataclass(frozen=True)
class Trial:
    """Two cases, of which the first must score higher."""

    what: str
    better: Case
    worse: Case


@dataclass(frozen=True)
class Outcome:
    """The two scores of a trial."""

    what: str
    better: float
    worse: float

    @property
    def passed(self) -> bool:
        """Whether the better case scored higher; False for NaN."""
        return self.better > self.worse


CAPTIONS = {
    "circle": "a red circle on a white background",
    "meadow": "a green meadow under a blue sky with a yellow sun",
    "text": 'the word "HELLO" in black letters on white paper',
}
_STOP = {"tag": "single_object", "include": [{"class": "stop sign", "count": 1}]}


def trials(name: str) -> list[Trial]:
    """The trials of a reward; a custom reward has none."""
    if name in _MATCHED:
        names = list(CAPTIONS)
        return [
            Trial(
                f"{picture}: its caption above the caption of {other}",
                Case(picture, CAPTIONS[picture], {}),
                Case(picture, CAPTIONS[other], {}),
            )
            for picture in names
            for other in names
            if other != picture
        ]
    if name == "ocr":
        prompt = CAPTIONS["text"]
        order = [("text", "the text"), ("typo", "one wrong letter"), ("circle", "no text")]
    elif name == "geneval":
        prompt, order = "a photo of a stop sign", [("sign", "a stop sign"), ("meadow", "no stop sign")]
    elif name == "aesthetic":
        prompt, order = "", [("meadow", "a drawn meadow"), ("noise", "noise")]
    elif name == "jpeg":
        prompt, order = "", [("circle", "a flat circle"), ("meadow", "a meadow"), ("noise", "noise")]
    else:
        return []
    rows = {"prompt": prompt} | (_STOP if name == "geneval" else {})
    return [
        Trial(f"{words} above {less}", Case(picture, prompt, rows), Case(other, prompt, rows))
        for (picture, words), (other, less) in zip(order[:-1], order[1:], strict=True)
    ]


def run(name: str, options: Mapping[str, Any]) -> list[Outcome]:
    """Outcomes of the trials of a reward; without any, whether it gives different scores to different pictures.

    A custom reward that is random, depends on the batch, changes its images or returns huge numbers gets a warning.
    """
    reward = base.load(name, **options)
    module, kind = base.find(name)
    if module == "recast.shapes.rewards":
        return _shapes(name, kind, reward)
    tried = trials(name)
    if tried:
        scores = _score(name, reward, [case for trial in tried for case in (trial.better, trial.worse)])
        return [Outcome(trial.what, *pair) for trial, pair in zip(tried, scores.reshape(-1, 2).tolist(), strict=True)]
    cases = [Case(picture, CAPTIONS[picture], {}) for picture in CAPTIONS]
    scores = _score(name, reward, cases)
    if np.isnan(scores).all():
        raise RecastError(f"the reward {name!r} applies to none of the test pictures (NaN for each)")
    for habit in _habits(name, reward, cases, scores):
        warnings.warn(f"the reward {name!r} {habit}", stacklevel=2)
    return [Outcome("different scores: highest above lowest", float(np.nanmax(scores)), float(np.nanmin(scores)))]


def _score(name: str, reward: base.Reward, cases: Sequence[Case]) -> NDArray[np.float64]:
    """Scores of the cases, in one batch."""
    images = torch.stack([draw(case.picture) for case in cases])
    rows = [{"prompt": case.prompt, **case.metadata} for case in cases]
    return base.score({name: reward}, images, [case.prompt for case in cases], rows)[0]


def _habits(name: str, reward: base.Reward, cases: Sequence[Case], scores: NDArray[np.float64]) -> Iterator[str]:
    """What makes a reward a poor measure, in words."""

    def differ(others: NDArray[np.float64]) -> bool:
        return not np.allclose(scores, others, rtol=1e-2, atol=1e-6, equal_nan=True)  # a lower precision is no habit

    again = _score(name, reward, cases)
    if differ(again):
        yield "gives other scores to the same images in a second call: seed it, or curves and training are noise"
    elif differ(np.concatenate([_score(name, reward, [case]) for case in cases])):
        yield "gives an image another score alone than in a batch: scores must not depend on the other images"
    images = torch.stack([draw(case.picture) for case in cases])
    before = images.clone()
    base.score({name: reward}, images, [case.prompt for case in cases], [{"prompt": case.prompt} for case in cases])
    if not torch.equal(images, before):
        yield "changes the images it is given, which other rewards score too: let it work on a copy"
    if np.nanmax(np.abs(scores)) > _LARGE:
        yield f"returns numbers up to {np.nanmax(np.abs(scores)):.3g}, beside which other rewards count for nothing"


def draw(picture: str, side: int = _SIDE) -> Tensor:
    """A picture (3, side, side) in [0, 1]."""
    if picture == "noise":
        return torch.rand(3, side, side, generator=torch.Generator().manual_seed(0))
    page = Image.new("RGB", (side, side), "white")
    pen = ImageDraw.Draw(page)
    if picture == "circle":
        pen.ellipse([side * 0.25] * 2 + [side * 0.75] * 2, fill=(220, 30, 30))
    elif picture == "meadow":
        for row in range(side):
            sky, shade = row < side * 0.6, row / side
            color = (110 + shade * 130, 170 + shade * 90, 250) if sky else (40, 170 - shade * 70, 50)
            pen.line([(0, row), (side, row)], fill=tuple(int(each) for each in color))
        pen.ellipse([side * 0.65, side * 0.12, side * 0.82, side * 0.29], fill=(255, 230, 60))
    elif picture in ("text", "typo"):
        _write(pen, "HELLO" if picture == "text" else "HEILO", side, "black", side // 6)
    elif picture == "sign":
        pen.rectangle([0, 0, side, side], fill=(135, 190, 235))
        pen.rectangle([side * 0.48, side * 0.5, side * 0.52, side], fill=(120, 120, 120))
        middle = (side / 2, side * 0.42)
        pen.regular_polygon((*middle, side * 0.33), 8, rotation=22, fill="white")
        pen.regular_polygon((*middle, side * 0.31), 8, rotation=22, fill=(190, 20, 30))
        _write(pen, "STOP", side, "white", side // 6, 0.42)
    else:
        raise KeyError(picture)
    return torch.from_numpy(np.array(page)).permute(2, 0, 1) / 255


def _write(pen: ImageDraw.ImageDraw, words: str, side: int, ink: str, size: int, height: float = 0.5) -> None:
    font = ImageFont.load_default(size=size)
    pen.text((side / 2, side * height), words, fill=ink, font=font, anchor="mm")


def _shapes(name: str, kind: str, reward: base.Reward) -> list[Outcome]:
    """Trials on images of the shapes world: the right prompt above another one, clean images above noisy ones."""
    rows = prompts.load("validation")[:8]
    texts = [row["prompt"] for row in rows]
    images = render.render(rows, 0)
    noise = torch.rand(images.shape, generator=torch.Generator().manual_seed(0))
    if kind in ("Detail", "Background"):
        what, worse, others = "clean images above noisy ones", 0.8 * images + 0.2 * noise, texts
    else:
        what, worse, others = "the prompt of an image above another prompt", images, texts[1:] + texts[:1]
    scored = [base.score({name: reward}, *pair)[0].mean() for pair in ((images, texts), (worse, others))]
    return [Outcome(what, float(scored[0]), float(scored[1]))]
