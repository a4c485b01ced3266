"""What decides the scores of a reward on this machine: packages, the reward's own versions, and its files."""

from __future__ import annotations

import hashlib
import inspect
import platform
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from recast._version import __version__
from recast.rewards import base, catalog

__all__ = ["digest", "files", "packages", "rows"]

_WITH = {"transformers": ("tokenizers", "safetensors"), "rapidocr": ("cv2",), "paddleocr": ("paddle", "cv2")}
"""Packages on which scores depend as well, by import name."""
_CHECKPOINTS = (".safetensors", ".pt", ".pth", ".bin", ".txt", ".whl")
_LARGE = 2 * 2**30
"""Bytes above which a file is not hashed, as that would take more than seconds."""


def rows(name: str, options: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values of everything that decides a score, for a table.

    Parameters
    ----------
    name : str
        A key of `recast.rewards.NAMES`, or the path of a class or function.
    options : mapping of str to any
        Its options.

    Returns
    -------
    list of tuple of str
        recast and Python, the packages, what the reward itself names, and its files.

    Examples
    --------
    >>> [key for key, _ in rows("jpeg", {})]
    ['recast', 'python', 'numpy', 'pillow', 'torch']
    """
    found = [("recast", __version__), ("python", platform.python_version())]
    found += sorted(packages(name, options).items(), key=lambda row: row[0].lower())
    found += base.versions(name, options).items()
    for option, path in files(name, options):
        found.append((option, f"{path.name}, {path.stat().st_size / 1e6:,.1f} MB, SHA-256 {digest(path)}"))
    return found


def packages(name: str, options: Mapping[str, Any]) -> dict[str, str]:
    """Versions of the distributions that a reward computes with; without those that are not installed."""
    if name in catalog.ENTRIES:
        wanted = ["numpy", "PIL", *catalog.ENTRIES[name].packages]
    else:
        wanted = ["numpy", "torch", base.find(name)[0].partition(".")[0]]
    if name == "ocr" and options.get("engine") == "paddleocr":
        wanted = [each for each in wanted if each not in ("rapidocr", "onnxruntime")] + ["paddleocr"]
    wanted += [each for first in wanted for each in _WITH.get(first, ())]
    return {each: metadata.version(each) for package in wanted for each in _distributions().get(package, ())}


@cache
def _distributions() -> Mapping[str, list[str]]:
    """The installed distributions by the packages they contain; half a second."""
    return metadata.packages_distributions()


def files(name: str, options: Mapping[str, Any]) -> Iterator[tuple[str, Path]]:
    """The files that the options of a reward name, or its defaults; those of the hub only if they are cached."""
    parameters = inspect.signature(base.loadable(name)).parameters
    for key, parameter in parameters.items():
        value = options.get(key, parameter.default)
        if not isinstance(value, (str, Path)):
            continue
        path = Path(value).expanduser()
        try:
            is_folder, is_file = path.is_dir(), path.is_file()
        except OSError:  # a text that is too long for a path
            continue
        if is_folder and "Path" in str(parameter.annotation):
            yield from ((key, each) for each in sorted(path.iterdir()) if each.suffix in _CHECKPOINTS)
        elif is_file:
            yield key, path
        else:
            yield from ((key, each) for each in _cached(name, str(value)))


def _cached(name: str, source: str) -> Iterator[Path]:
    known = catalog.ENTRIES[name].files if name in catalog.ENTRIES else ()
    for each in known:
        path = each.path() if each.source == source else None
        if path is not None and path.is_file():
            yield path


def digest(path: Path) -> str:
    """The first 12 digits of a file's SHA-256; "not computed" for a large one.

    The cache of the hub names large files by their SHA-256, so those are not read.
    """
    path = path.resolve()
    if re.fullmatch("[0-9a-f]{64}", path.name):
        return path.name[:12]
    if path.stat().st_size > _LARGE:
        return "not computed"
    found = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(2**20):
            found.update(part)
    return found.hexdigest()[:12]
