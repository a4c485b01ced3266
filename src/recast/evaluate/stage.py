"""`recast evaluate`: the same prompts and seeds for every policy, and all rewards on the same images.

RUN/scores contains images/ (PNG), parts/ (the scores of a few images each, written as soon as they are known) and,
once everything is done, scores.jsonl with one row per image. Nothing is made twice: a killed run resumes, and a
held-out reward that is added later scores the existing images.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recast import identity, images, lock, processes, prompts, versions
from recast.config import Recipe
from recast.core import artifact, strict
from recast.errors import RecastError
from recast.evaluate import written
from recast.evaluate.scores import FORMAT
from recast.flow import families
from recast.flow import lora as adapters
from recast.flow.generate import TILE, generate
from recast.progress import Progress
from recast.rewards import base

__all__ = ["PART", "check_stale", "complete", "evaluate"]

PART = 64
"""Images whose scores one file in parts/ holds."""
_PART_FORMAT = "recast.scores.part"


@dataclass(frozen=True)
class _Image:
    """One image to make and score: its number, its prompt with metadata, and its seed."""

    index: int
    row: Mapping[str, Any]
    seed: int

    @property
    def file(self) -> str:
        """Its path relative to RUN/scores."""
        return f"images/{self.index:05d}.png"


def evaluate(recipe: Recipe, out: Path, lora: Path | None, progress: Progress) -> Path | None:
    """Make and score the images of a policy; the path of RUN/scores/scores.jsonl.

    Every process of a launcher must call it; the first one returns the path, the others None.

    Parameters
    ----------
    recipe : Recipe
        The policy, the rewards and the section `evaluate`.
    out : Path
        RUN.
    lora : Path or None
        The folder of an adapter; None evaluates the untrained base.
    progress : Progress
        Wraps the loops over images and rewards.

    Returns
    -------
    Path or None
        scores.jsonl with one row per image.

    Raises
    ------
    RecastError
        If the recipe has no images or rewards, or the adapter is missing; StaleError if RUN/scores contains images
        that were made with other settings. If a reward has scored some of the images in another version, such as that
        of its package.
    """
    _check(recipe, lora)
    with lock.alone(out / "scores" / ".lock", f"evaluating in {out}"):
        return _evaluate(recipe, out / "scores", lora, progress)


def _evaluate(recipe: Recipe, folder: Path, lora: Path | None, progress: Progress) -> Path | None:
    planned = _images_of(recipe)
    parts = _parts(planned)
    if processes.RANK == 0:
        _claim(folder, recipe, lora)
    processes.wait()
    mine = parts[processes.RANK :: processes.COUNT]
    _draw(recipe, lora, folder, [image for part in mine for image in part], progress)
    _score(recipe, folder, mine, progress)
    processes.wait()
    if processes.RANK > 0:
        return None
    _versions(folder, recipe)  # the processes of other machines may have had others
    return _collect(recipe, folder, parts)


def _images_of(recipe: Recipe) -> list[_Image]:
    """Every image: the prompts in order, once per repeat; the seed is the first one plus the number of the image."""
    settings = recipe.evaluate
    rows = prompts.load(settings.prompts, settings.count) * settings.repeats
    return [_Image(k, row, settings.seed + k) for k, row in enumerate(rows)]


def _parts(planned: Sequence[_Image]) -> list[Sequence[_Image]]:
    """The images in groups whose scores share a file."""
    return [planned[start : start + PART] for start in range(0, len(planned), PART)]


def _reward_options(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """The options of every reward that scores the images: the trained ones, then the held-out ones."""
    return {name: options or {} for name, options in {**recipe.rewards, **recipe.evaluate.held_out}.items()}


def _check(recipe: Recipe, lora: Path | None) -> None:
    """Raise on settings that cannot work, before anything is loaded."""
    if recipe.world.kind != "images":
        raise RecastError(f"evaluation needs world.kind = images, not {recipe.world.kind}: only images can be scored")
    if not _reward_options(recipe):
        raise RecastError("the recipe has no reward: add at least one under rewards or evaluate.held_out")
    for name in _reward_options(recipe):
        base.find(name)
    if lora is not None and not (lora / adapters.FILE).is_file():
        raise RecastError(
            f"{lora} contains no adapter: train first, name one with --lora, or evaluate the base with --base"
        )


def check_stale(recipe: Recipe, folder: Path, lora: Path | None) -> dict[str, Any]:
    """The settings that decide the images; StaleError if the folder contains images made with others."""
    planned = _images_of(recipe)
    rows = [dict(image.row) for image in planned[: len(planned) // recipe.evaluate.repeats]]
    settings, path = identity.evaluation(recipe, lora, rows), folder / "manifest.json"
    if path.exists():
        known = strict.read(path, FORMAT, written.Manifest, f"remove {folder} and evaluate again")
        identity.require_same(known["settings"], settings, f"{folder} contains images made")
    return settings


def complete(recipe: Recipe, folder: Path) -> bool:
    """Whether every image has been scored by all rewards with their present options."""
    planned, options = _images_of(recipe), _reward_options(recipe)
    parts = _parts(planned)
    known = all(_known(folder, name, options[name], part) is not None for name in options for part in parts)
    return known and (folder / "scores.jsonl").is_file()


def _claim(folder: Path, recipe: Recipe, lora: Path | None) -> None:
    """Record settings and versions in the manifest, so that images and scores of others are never mixed in."""
    settings = check_stale(recipe, folder, lora)
    scored_by = _versions(folder, recipe)
    method = "base" if lora is None else recipe.weigh.method
    run = {"method": method, "budget": recipe.budget, "seed": recipe.train.seed}
    held_out = [name for name in _reward_options(recipe) if name not in recipe.rewards]
    fields: dict[str, Any] = {"settings": settings, "run": run, "trained": list(recipe.rewards), "held_out": held_out}
    fields |= {"versions": scored_by} if scored_by else {}
    fields["images"] = len(_images_of(recipe))
    strict.write(folder / "manifest.json", FORMAT, written.Manifest, fields)
    for name in ("images", "parts"):
        (folder / name).mkdir(exist_ok=True)


def _versions(folder: Path, recipe: Recipe) -> dict[str, dict[str, str]]:
    """The versions by which every reward has scored or will score; raises if its scores would be of two."""
    found, parts = {}, _parts(_images_of(recipe))
    for name, options in _reward_options(recipe).items():
        known = [part for part in parts if _known(folder, name, options, part) is not None]
        each = [_content(folder, name, part).get("versions", {}) for part in known]
        each += [base.versions(name, options)] if len(known) < len(parts) else []
        remedy = f"remove {_path(folder, name, '*')} to score these images again"
        for other in each[1:]:
            first, second = (versions.flat({name: these}) for these in (each[0], other))
            versions.require_same(first, second, f"{folder} has scores", remedy)
        found[name] = each[0] if each else {}
    return {name: these for name, these in found.items() if these}


def _draw(recipe: Recipe, lora: Path | None, folder: Path, planned: Sequence[_Image], progress: Progress) -> None:
    """Make the missing images."""
    missing = [image for image in planned if not (folder / image.file).is_file()]
    if not missing:
        return
    settings = recipe.evaluate
    adapter = None if lora is None else str(lora)
    policy = families.load(recipe.policy.model_copy(update={"guidance": settings.guidance, "lora": adapter}))
    size = max(1, settings.batch // TILE) * TILE
    batches = [missing[start : start + size] for start in range(0, len(missing), size)]
    for batch in progress(batches, "making images", len(batches)):
        # Padded to whole tiles, so that an image's bits do not depend on which others are missing.
        whole = [*batch, *[batch[-1]] * (-len(batch) % TILE)]
        texts, seeds = [image.row["prompt"] for image in whole], [image.seed for image in whole]
        made = generate(policy, texts, seeds, steps=settings.steps, method=settings.solver, batch=len(whole))
        for image, pixels in zip(batch, made, strict=False):
            artifact.write_bytes(folder / image.file, images.to_png(pixels))


def _score(recipe: Recipe, folder: Path, parts: Sequence[Sequence[_Image]], progress: Progress) -> None:
    """Compute the missing scores reward by reward: one model is in memory, and every part is written at once."""
    options = _reward_options(recipe)
    todo = [(name, part) for name in options for part in parts if not _known(folder, name, options[name], part)]
    loaded: tuple[str, base.Reward] | None = None
    for name, part in progress(todo, "scoring", len(todo)):
        if loaded is None or loaded[0] != name:
            loaded = (name, base.load(name, **options[name]))
        rows = [image.row for image in part]
        texts = [row["prompt"] for row in rows]
        pixels, hashes = _read(folder, part)
        values = base.score({name: loaded[1]}, pixels, texts, rows)[0]
        fields = {"reward": name, "options": options[name], "scores": values, "images": hashes}
        if present := base.versions(name, options[name]):
            fields["versions"] = present
        strict.write(_path(folder, name, f"{part[0].index:05d}"), _PART_FORMAT, written.Part, fields)


def _path(folder: Path, name: str, first: str) -> Path:
    """The file of a part's scores by one reward; its name is hashed because a custom reward's contains a colon."""
    short = hashlib.sha256(name.encode()).hexdigest()[:8]
    return folder / "parts" / f"{first}-{short}.json"


def _content(folder: Path, name: str, part: Sequence[_Image]) -> dict[str, Any]:
    """What the file of a part's scores holds; empty if there is none."""
    path = _path(folder, name, f"{part[0].index:05d}")
    if not path.exists():
        return {}
    remedy = "remove the file and run recast evaluate again"
    found = strict.read(path, _PART_FORMAT, written.Part, remedy)
    if found["reward"] != name:
        raise RecastError(f"{path}: the scores are by {found['reward']!r:.100}, not by {name}: {remedy}")
    return found


def _known(folder: Path, name: str, options: Mapping[str, Any], part: Sequence[_Image]) -> list[float] | None:
    """The scores in a part's file; None if there is no file, or the options or the number of images differ."""
    found = _content(folder, name, part)
    if not found:
        return None
    scores = list(found["scores"])
    same = identity.current_options(name, found["options"]) == artifact.plain(options)
    return scores if same and len(scores) == len(part) else None


def _read(folder: Path, part: Sequence[_Image]) -> tuple[Tensor, list[str]]:
    """Images as stored on disk, so that scores do not depend on when the images were made, and their hashes."""
    contents = {image.file: (folder / image.file).read_bytes() for image in part}
    remedy = "(remove it and run recast evaluate again)"
    sizes = [images.inspect(content, 1, f"{folder / file} {remedy}")[:0:-1] for file, content in contents.items()]
    pixels = torch.from_numpy(np.stack([images.to_array(content, sizes[0]) for content in contents.values()]))
    return pixels, [hashlib.sha256(content).hexdigest() for content in contents.values()]


def _hashes(folder: Path, names: Sequence[str], part: Sequence[_Image]) -> Sequence[str | None]:
    """The hashes of a part's images, which all rewards must have scored; None where no reward has recorded them."""
    known = {name: _content(folder, name, part).get("images") for name in names}
    first = next((hashes for hashes in known.values() if hashes is not None), None)
    for name, hashes in known.items():
        if hashes is not None and (hashes != first or len(hashes) != len(part)):
            path = _path(folder, name, f"{part[0].index:05d}")
            raise RecastError(f"{path}: {name} has scored other images than the rewards before it: remove that file")
    return [None] * len(part) if first is None else first


def _collect(recipe: Recipe, folder: Path, parts: Sequence[Sequence[_Image]]) -> Path:
    """Write one row per image with all its scores, in order."""
    options, rows = _reward_options(recipe), []
    for part in parts:
        columns = {name: _known(folder, name, options[name], part) or [] for name in options}
        hashes = _hashes(folder, list(options), part)
        for k, image in enumerate(part):
            scores = {name: column[k] for name, column in columns.items()}
            row = {"index": image.index, "prompt": image.row["prompt"], "seed": image.seed, "file": image.file}
            row |= {} if hashes[k] is None else {"sha256": hashes[k]}
            rows.append(row | {"scores": scores})
    path = folder / "scores.jsonl"
    return artifact.write_text(path, strict.lines(written.Row, rows, path))
