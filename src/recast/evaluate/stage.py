"""`recast evaluate`: the same prompts and seeds for every policy, all rewards on the same images, one row an image.

RUN/scores holds images/ (PNG), parts/ (scores of a few images each, kept as soon as they are there) and, once all is
done, scores.jsonl. Everything is made once: a run that is killed goes on where it was, and a judge that is added
later scores the images that are there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recast import identity, images, processes, prompts
from recast.config import Recipe
from recast.core import artifact
from recast.errors import RecastError
from recast.evaluate.scores import FORMAT
from recast.flow import lora as adapters
from recast.flow import sd3
from recast.flow.generate import TILE, generate
from recast.progress import Progress
from recast.rewards import base

PART_FORMAT = "recast.scores.part"
PART = 64
"""Images whose scores are kept in one file."""


@dataclass(frozen=True)
class Image:
    """One image to be made and scored: its number, prompt with metadata, and seed."""

    index: int
    row: Mapping[str, Any]
    seed: int

    @property
    def file(self) -> str:
        """Where it is, below RUN/scores."""
        return f"images/{self.index:05d}.png"


def evaluate(recipe: Recipe, out: Path, lora: Path | None, progress: Progress) -> Path | None:
    """RUN/scores/scores.jsonl of an adapter, or of the base where there is none.

    Every process of a launcher calls it; the first returns the file, the others None.
    """
    _check(recipe, lora)
    planned = images_of(recipe)
    folder = out / "scores"
    if processes.RANK == 0:
        _claim(folder, recipe, lora)
    processes.wait()
    parts = [planned[start : start + PART] for start in range(0, len(planned), PART)]
    mine = parts[processes.RANK :: processes.COUNT]
    _draw(recipe, lora, folder, [image for part in mine for image in part], progress)
    _score(recipe, folder, mine, progress)
    processes.wait()
    return _collect(recipe, folder, parts) if processes.RANK == 0 else None


def images_of(recipe: Recipe) -> list[Image]:
    """Every image: the prompts in their order, then again for each repeat; seed + number, whatever the policy."""
    settings = recipe.evaluate
    rows = prompts.load(settings.prompts, settings.count) * settings.repeats
    return [Image(k, row, settings.seed + k) for k, row in enumerate(rows)]


def reward_options(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Options of every reward that scores: the trained ones, then the held-out ones."""
    return {name: options or {} for name, options in {**recipe.rewards, **recipe.evaluate.held_out}.items()}


def _check(recipe: Recipe, lora: Path | None) -> None:
    """What can be known before anything is loaded."""
    if recipe.world.kind != "images":
        raise RecastError(f"evaluation needs a policy that makes images, and world.kind = {recipe.world.kind} has none")
    if not reward_options(recipe):
        raise RecastError("the recipe names no reward: put at least one under rewards or evaluate.held_out")
    for name in reward_options(recipe):
        base.find(name)
    if lora is not None and not (lora / adapters.FILE).is_file():
        raise RecastError(f"{lora} has no adapter: train first, name one by --lora, or evaluate the base by --base")


def check_stale(recipe: Recipe, folder: Path, lora: Path | None) -> dict[str, Any]:
    """The settings that decide the images; a folder that holds images of others is refused."""
    planned = images_of(recipe)
    rows = [dict(image.row) for image in planned[: len(planned) // recipe.evaluate.repeats]]
    settings, path = identity.evaluation(recipe, lora, rows), folder / "manifest.json"
    if path.exists():
        known = artifact.mapping(artifact.read(path, FORMAT), "settings", path)
        identity.require_same(known, settings, f"{folder} holds images made")
    return settings


def complete(recipe: Recipe, folder: Path) -> bool:
    """Whether every image has its row, with the scores of all rewards by their present options."""
    planned, options = images_of(recipe), reward_options(recipe)
    parts = [planned[start : start + PART] for start in range(0, len(planned), PART)]
    known = all(_known(folder, name, options[name], part) is not None for name in options for part in parts)
    return known and (folder / "scores.jsonl").is_file()


def _claim(folder: Path, recipe: Recipe, lora: Path | None) -> None:
    """Write what the folder is for; images of other settings are never mixed in."""
    settings = check_stale(recipe, folder, lora)
    method = "base" if lora is None else recipe.weigh.method
    run = {"method": method, "budget": recipe.budget, "seed": recipe.train.seed}
    held_out = [name for name in reward_options(recipe) if name not in recipe.rewards]
    fields = {"settings": settings, "run": run, "trained": list(recipe.rewards), "held_out": held_out}
    artifact.write(folder / "manifest.json", FORMAT, fields)
    for name in ("images", "parts"):
        (folder / name).mkdir(exist_ok=True)


def _draw(recipe: Recipe, lora: Path | None, folder: Path, planned: Sequence[Image], progress: Progress) -> None:
    """Make the images that are missing."""
    missing = [image for image in planned if not (folder / image.file).is_file()]
    if not missing:
        return
    settings = recipe.evaluate
    adapter = None if lora is None else str(lora)
    policy = sd3.load(recipe.policy.model_copy(update={"guidance": settings.guidance, "lora": adapter}))
    size = max(1, settings.batch // TILE) * TILE
    batches = [missing[start : start + size] for start in range(0, len(missing), size)]
    for batch in progress(batches, "making images", len(batches)):
        # Padded to whole tiles, so that an image's bits do not depend on which others are missing.
        whole = [*batch, *[batch[-1]] * (-len(batch) % TILE)]
        texts, seeds = [image.row["prompt"] for image in whole], [image.seed for image in whole]
        made = generate(policy, texts, seeds, steps=settings.steps, method=settings.solver, batch=len(whole))
        for image, pixels in zip(batch, made, strict=False):
            artifact.write_bytes(folder / image.file, images.to_png(pixels))


def _score(recipe: Recipe, folder: Path, parts: Sequence[Sequence[Image]], progress: Progress) -> None:
    """Score what is missing, reward by reward: one model at a time in memory, and each part kept at once."""
    options = reward_options(recipe)
    todo = [(name, part) for name in options for part in parts if not _known(folder, name, options[name], part)]
    loaded: tuple[str, base.Reward] | None = None
    for name, part in progress(todo, "scoring", len(todo)):
        if loaded is None or loaded[0] != name:
            loaded = (name, base.load(name, **options[name]))
        rows = [image.row for image in part]
        texts = [row["prompt"] for row in rows]
        values = base.score({name: loaded[1]}, _read(folder, part), texts, rows)[0]
        fields = {"reward": name, "options": options[name], "scores": values}
        artifact.write(_path(folder, name, part), PART_FORMAT, fields)


def _path(folder: Path, name: str, part: Sequence[Image]) -> Path:
    """A part's scores by one reward; the name is hashed, since a reward of one's own has a colon in it."""
    short = hashlib.sha256(name.encode()).hexdigest()[:8]
    return folder / "parts" / f"{part[0].index:05d}-{short}.json"


def _known(folder: Path, name: str, options: Mapping[str, Any], part: Sequence[Image]) -> list[float] | None:
    """Scores that were kept, unless the reward had other options or there were fewer images."""
    path = _path(folder, name, part)
    if not path.exists():
        return None
    found = artifact.read(path, PART_FORMAT)
    scores = list(artifact.field(found, "scores", path))
    same = identity.current_options(name, artifact.mapping(found, "options", path)) == artifact.plain(options)
    return scores if same and len(scores) == len(part) else None


def _read(folder: Path, part: Sequence[Image]) -> Tensor:
    """Images as they are on disk, so that scores do not depend on when they were made."""
    contents = {image.file: (folder / image.file).read_bytes() for image in part}
    remedy = "(remove it to have it made again)"
    sides = [images.inspect(content, 1, f"{folder / file} {remedy}")[1] for file, content in contents.items()]
    return torch.from_numpy(np.stack([images.to_array(content, sides[0]) for content in contents.values()]))


def _collect(recipe: Recipe, folder: Path, parts: Sequence[Sequence[Image]]) -> Path:
    """One row an image with all its scores, in order."""
    options, lines = reward_options(recipe), []
    for part in parts:
        columns = {name: _known(folder, name, options[name], part) or [] for name in options}
        for k, image in enumerate(part):
            scores = {name: column[k] for name, column in columns.items()}
            row = {"index": image.index, "prompt": image.row["prompt"], "seed": image.seed, "file": image.file}
            lines.append(json.dumps(row | {"scores": scores}, ensure_ascii=False))
    return artifact.write_text(folder / "scores.jsonl", "\n".join(lines) + "\n")
