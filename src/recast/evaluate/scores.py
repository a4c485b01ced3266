"""The scores of one evaluated policy, as `recast evaluate` left them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recast.core import artifact
from recast.errors import RecastError

FORMAT = "recast.scores"
Budget = tuple[tuple[str, float], ...]
"""λ by reward, as the user wrote it: hashable, in the order of the rewards."""


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
    def key(self) -> tuple[str, Budget, int]:
        """Method, budget and seed; the untrained base is the same at any budget and seed."""
        return ("base", (), 0) if self.method == "base" else (self.method, tuple(self.budget.items()), self.seed)

    @property
    def run(self) -> Path:
        """RUN of RUN/scores."""
        return self.folder.parent if self.folder.name == "scores" else self.folder

    @property
    def prompts_and_seeds(self) -> list[tuple[str, int]]:
        """What every image was made from: policies that agree on these can be compared image by image."""
        return [(image["prompt"], image["seed"]) for image in self.images]

    @property
    def rewards(self) -> tuple[str, ...]:
        """All rewards, the trained ones first; the rows of `values`."""
        return (*self.trained, *self.held_out)

    def images_hash(self) -> str:
        """A hash of what decides the images: the settings they were made with, their prompts and seeds."""
        content = json.dumps([dict(self.settings), self.prompts_and_seeds], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

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
        rows = artifact.read_rows(path / "scores.jsonl", "recast evaluate")
        try:
            table = [[row["scores"][name] for row in rows] for name in (*trained, *held_out)]
            values = np.array(table, dtype=np.float64).reshape(len(trained) + len(held_out), len(rows))
        except (KeyError, TypeError, ValueError) as error:
            raise RecastError(f"{path / 'scores.jsonl'}: a row lacks a score ({error}): run recast evaluate") from error
        images = tuple({key: value for key, value in row.items() if key != "scores"} for row in rows)
        settings = artifact.mapping(manifest, "settings", path / "manifest.json")
        return cls(path, method, dict(budget), int(seed), trained, held_out, images, values, settings)


def find(folders: Sequence[Path]) -> list[Scores]:
    """Every evaluated policy in or below the folders, in a fixed order, checked to be comparable."""
    places: dict[Path, None] = {}
    for folder in folders:
        if not folder.is_dir():
            raise RecastError(f"{folder} is not a folder of runs")
        if not (found := locate(folder)):
            raise RecastError(f"{folder} has no evaluated run: run recast evaluate with --out there first")
        places |= dict.fromkeys(found)
    policies = [Scores.load(place) for place in places]
    _require_comparable(policies)
    return policies


def locate(folder: Path) -> list[Path]:
    """The folders with scores at or below one, without those that were set aside as stale."""
    found = sorted(path.parent for path in folder.glob("**/scores/manifest.json") if ".stale-" not in str(path))
    if (folder / "manifest.json").is_file() and (folder / "scores.jsonl").is_file():
        found.append(folder)
    return [path.resolve() for path in found]


def _require_comparable(policies: Sequence[Scores]) -> None:
    """Refuse two policies of the same method, budget and seed, and policies of other prompts, seeds or rewards."""
    first, seen = policies[0], dict[Any, Scores]()
    for policy in policies:
        if policy.key in seen:
            other = seen[policy.key].folder
            raise RecastError(f"{policy.folder} and {other} are both {policy.method} with the same budget and seed")
        seen[policy.key] = policy
        if policy.prompts_and_seeds != first.prompts_and_seeds:
            raise RecastError(f"{policy.folder} and {first.folder} were evaluated on other prompts or seeds")
        if (policy.trained, policy.held_out) != (first.trained, first.held_out):
            raise RecastError(f"{policy.folder} and {first.folder} were scored by other rewards")
