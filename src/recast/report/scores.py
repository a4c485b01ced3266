"""The scores of one evaluated policy, as `recast evaluate` left them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recast.core import artifact
from recast.errors import RecastError

FORMAT = "recast.scores"


@dataclass(frozen=True)
class Scores:
    """One policy on held-out prompts: what it was trained with, and a table of scores (rewards × images)."""

    folder: Path
    method: str
    budget: dict[str, float]
    seed: int
    trained: tuple[str, ...]
    held_out: tuple[str, ...]
    images: tuple[dict[str, Any], ...]
    values: NDArray[np.float64]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rewards(self) -> tuple[str, ...]:
        """All rewards, the trained ones first; the rows of `values`."""
        return (*self.trained, *self.held_out)

    def identity(self) -> str:
        """A hash of what decides the images: the settings they were made with, their prompts and seeds."""
        pictures = [(image["prompt"], image["seed"]) for image in self.images]
        return hashlib.sha256(json.dumps([dict(self.settings), pictures], sort_keys=True).encode()).hexdigest()

    def means(self) -> dict[str, float]:
        """Mean of every reward over the images it applies to; NaN where it applies to none."""
        applies = ~np.isnan(self.values)
        count = applies.sum(1)
        total = np.where(applies, self.values, 0.0).sum(1)
        found = np.where(count > 0, total / np.maximum(count, 1), np.nan)
        return dict(zip(self.rewards, found.tolist(), strict=True))

    @classmethod
    def load(cls, folder: str | Path) -> Scores:
        """Of a folder RUN/scores, or of RUN."""
        path = Path(folder)
        path = path / "scores" if (path / "scores").is_dir() else path
        manifest = artifact.read(path / "manifest.json", FORMAT)
        run = artifact.mapping(manifest, "run", path / "manifest.json")
        method, budget, seed = (
            artifact.field(run, key, path / "manifest.json") for key in ("method", "budget", "seed")
        )
        trained, held_out = (tuple(artifact.field(manifest, key, path)) for key in ("trained", "held_out"))
        rows = read_rows(path / "scores.jsonl")
        try:
            table = [[row["scores"][name] for row in rows] for name in (*trained, *held_out)]
            values = np.array(table, dtype=np.float64).reshape(len(trained) + len(held_out), len(rows))
        except (KeyError, TypeError, ValueError) as error:
            raise RecastError(f"{path / 'scores.jsonl'}: a row lacks a score ({error}): run recast evaluate") from error
        images = tuple({key: value for key, value in row.items() if key != "scores"} for row in rows)
        settings = artifact.mapping(manifest, "settings", path / "manifest.json")
        return cls(path, method, dict(budget), int(seed), trained, held_out, images, values, settings)


def read_rows(path: Path, maker: str = "recast evaluate") -> list[dict[str, Any]]:
    """The objects of a JSONL file that `maker` wrote; a line that is none is an error."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecastError(f"{path}: cannot be read: {error.strerror or error}; run {maker} first") from error
    rows = []
    lines = text.removesuffix("\n").split("\n") if text else []  # a prompt may hold other line ends
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise RecastError(f"{path}, line {number}: not valid JSON ({error})") from error
    return rows
