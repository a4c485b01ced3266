"""The folder of proposals: one image file per prompt and number, and a manifest of all images.

The file name of an image is derived from its prompt and number, so that no image is made twice, in whichever order
prompts come. The source `folder` reads `manifest.jsonl` (prompt, file, generator, sha256, width, height), so the
proposals of one run can serve another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from recast import identity, images, lock
from recast.core import artifact, strict
from recast.errors import RecastError
from recast.images import SUFFIXES, UndecodableError

__all__ = ["Store", "key", "read_manifest", "stored"]

_FORMAT = "recast.proposals"


class _Settings(strict.Strict):
    """settings.json: what decides the images."""

    settings: dict[str, Any]


class _Row(strict.Strict):
    """A row of manifest.jsonl; whoever brings images of their own need only name prompt and file, and may add more."""

    model_config = ConfigDict(extra="allow")

    prompt: str
    file: str
    generator: str = ""
    sha256: str | None = None


def key(prompt: str, number: int) -> str:
    """File stem of the image `number` of a prompt."""
    return f"{hashlib.sha256(prompt.encode()).hexdigest()[:16]}-{number:03d}"


def stored(folder: Path) -> dict[str, Path]:
    """The image files in a folder of proposals by their stems; none if there is no such folder."""
    return {path.stem: path for path in (folder / "images").glob("*") if path.suffix in SUFFIXES.values()}


@dataclass
class Store:
    """Proposals in `folder` that were made with `settings`; those of other settings are refused."""

    folder: Path
    settings: Mapping[str, Any]
    smallest: int = 64

    def __post_init__(self) -> None:
        from PIL import Image  # noqa: F401  # a missing Pillow is an error before an image is paid for

        path = self.folder / "settings.json"
        if path.exists():
            known = strict.read(path, _FORMAT, _Settings, "remove the folder and propose again")
            identity.require_same(known["settings"], self.settings, f"{self.folder} holds proposals made")
        else:
            strict.write(path, _FORMAT, _Settings, {"settings": dict(self.settings)})
        (self.folder / "images").mkdir(exist_ok=True)
        self._files = stored(self.folder)
        self._rows = self._read_rows()

    @classmethod
    def open(cls, folder: Path, settings: Mapping[str, Any], smallest: int) -> Store:
        """The store in a folder that has proposals already."""
        if not (folder / "settings.json").exists():
            raise RecastError(f"there are no proposals in {folder}: run `recast propose` with the same --out first")
        return cls(folder, settings, smallest)

    def alone(self) -> AbstractContextManager[None]:
        """Lock the folder: two processes would request the same images."""
        return lock.alone(self.folder / ".lock", f"making proposals in {self.folder}")

    def missing(self, prompts: Sequence[str], samples: int) -> list[tuple[str, int]]:
        """The (prompt, number) pairs that have no image yet, in order."""
        return [(prompt, k) for prompt in prompts for k in range(samples) if key(prompt, k) not in self._files]

    def add(self, prompt: str, number: int, content: bytes) -> Path:
        """Check an image and store it unchanged and atomically; an image that is too small is kept in `rejected`."""
        what = f"the proposal {number} for the prompt {prompt!r}"
        try:
            suffix, _, _ = images.inspect(content, self.smallest, what)
        except UndecodableError:
            raise
        except RecastError as error:  # it may have been paid for
            rejected = self.folder / "rejected" / key(prompt, number)
            rejected.parent.mkdir(exist_ok=True)
            rejected.write_bytes(content)
            raise RecastError(f"{error}; it is kept as {rejected}") from error
        path = self.folder / "images" / f"{key(prompt, number)}{suffix}"
        if self._rows.pop(f"images/{path.name}", None):  # in place of one that was removed; first, in case of a kill
            self._write_rows(list(self._rows.values()))
        artifact.write_bytes(path, content)
        self._files[path.stem] = path
        return path

    def _read_rows(self) -> dict[str, dict[str, Any]]:
        """The rows of the manifest by file; none if there is no manifest yet."""
        path = self.folder / "manifest.jsonl"
        try:
            rows = strict.read_rows(_Row, path, "recast propose") if path.exists() else []
        except RecastError as error:
            raise RecastError(
                f"{error}; remove {path}: the images stay, and `recast propose` writes it anew"
            ) from error
        return {row["file"]: row for row in rows}

    def _write_rows(self, rows: list[dict[str, Any]]) -> Path:
        path = self.folder / "manifest.jsonl"
        return artifact.write_text(path, strict.lines(_Row, rows, path))

    def path(self, prompt: str, number: int) -> Path:
        """The file of an image; an error if there is none."""
        try:
            return self._files[key(prompt, number)]
        except KeyError:
            raise RecastError(
                f"{self.folder} has no proposal {number} for the prompt {prompt!r}: run `recast propose` first"
            ) from None

    def read(self, prompt: str, number: int) -> bytes:
        """The content of an image, checked to be the one in the manifest, if it is there already."""
        path = self.path(prompt, number)
        known = self._rows.get(f"images/{path.name}", {})
        return images.read(path, "remove it and run `recast propose` again", known.get("sha256"))

    def write_manifest(self, prompts: Sequence[str], samples: int, generator: str) -> Path:
        """Write `manifest.jsonl`, one line per image, with its hash and size; returns its path."""
        rows = []
        for prompt in prompts:
            for k in range(samples):
                path, content = self.path(prompt, k), self.read(prompt, k)
                _, width, height = images.inspect(content, self.smallest, str(path))
                row: dict[str, Any] = {"prompt": prompt, "file": f"images/{path.name}", "generator": generator}
                row |= {"sha256": hashlib.sha256(content).hexdigest(), "width": width, "height": height}
                rows.append(row)
        return self._write_rows(rows)


def read_manifest(folder: Path) -> dict[str, list[Path]]:
    """Image files of each prompt in a folder with a manifest (JSONL: prompt, file, generator)."""
    path = folder / "manifest.jsonl"
    found: dict[str, list[Path]] = {}
    for number, row in enumerate(artifact.read_rows(path, "recast propose"), start=1):
        where = f"{path}, line {number}"
        strict.require(_Row, row, where, "a line must have prompt and file")
        file = artifact.inside(folder, row["file"], where)
        if not file.is_file():
            raise RecastError(f"{where}: the image {file} does not exist")
        images.read(file, f"{where} does not fit its file", row.get("sha256"))
        if file in found.setdefault(row["prompt"], []):
            raise RecastError(f"{where}: the image {file} is named twice for one prompt")
        found[row["prompt"]].append(file)
    return found
