"""`recast propose`: N images of π⁺ for every prompt, checked, hashed and stored in RUN/proposals."""

from __future__ import annotations

from pathlib import Path

from recast import identity, prompts
from recast.config import Recipe
from recast.errors import RecastError
from recast.progress import Progress
from recast.propose import api, store
from recast.rewards import base

__all__ = ["propose"]


def propose(recipe: Recipe, out: Path, progress: Progress) -> Path:
    """Make the proposals that are missing and write the manifest; returns its path."""
    if recipe.world.kind != "images":
        raise RecastError(f"world.kind = {recipe.world.kind} makes its own proposals: run `recast estimate`")
    rows = prompts.load_distinct(recipe.prompts.source, recipe.prompts.count, recipe.prompts.seed)
    texts = [row["prompt"] for row in rows]
    settings, samples = recipe.propose, recipe.estimate.samples
    for name in recipe.rewards:  # an unknown name is an error before any image is paid for
        base.find(name)
    client = api.Client(settings) if settings.endpoint is not None else None  # a missing key leaves no folder behind
    given = _given(Path(settings.folder or ""), out, texts, samples) if settings.source == "folder" else {}
    kept = store.Store(out / "proposals", identity.proposals(recipe), settings.smallest)
    with kept.alone():
        missing = kept.missing(texts, samples)
        if missing:
            if client is not None:
                api.fetch(client, kept, missing, progress)
            elif settings.source == "folder":
                _copy(given, kept, missing, progress)
            else:
                from recast.propose import draw  # torch, which an API or a folder does not need

                draw.draw(recipe, {row["prompt"]: row for row in rows}, kept, missing, progress)
        return kept.write_manifest(texts, samples, recipe.generator)


def _given(folder: Path, out: Path, texts: list[str], samples: int) -> dict[str, list[Path]]:
    """The images in a folder by prompt; an error, before anything is written, if they are too few for those missing."""
    present = store.stored(out / "proposals")
    missing = [(text, k) for text in texts for k in range(samples) if store.key(text, k) not in present]
    found = store.read_manifest(folder) if missing else {}
    for prompt, number in missing:
        if number >= (count := len(found.get(prompt, []))):
            raise RecastError(
                f"{folder} has {count} images for the prompt {prompt!r}, but at least {number + 1} are needed"
            )
    return found


def _copy(found: dict[str, list[Path]], kept: store.Store, missing: list[tuple[str, int]], progress: Progress) -> None:
    for prompt, number in progress(missing, "copying proposals", len(missing)):
        try:
            content = found[prompt][number].read_bytes()
        except OSError as error:
            raise RecastError(f"{error.filename}: the image cannot be read: {error.strerror or error}") from error
        kept.add(prompt, number, content)
