"""Reading and writing the JSON files that stages leave for each other.

A file carries `format` and `version`, arrays as lists in full float precision, NaN as null, and nothing
that differs between two runs of the same thing. It is written under a temporary name and renamed.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from recast.errors import RecastError

VERSION = 1


def write(path: str | Path, format: str, fields: Mapping[str, Any]) -> Path:
    """Write `fields` as an artifact of the named format, atomically; returns the path."""
    content = {"format": format, "version": VERSION, **fields}
    try:
        lines = [f"{json.dumps(key)}: {json.dumps(plain(value), allow_nan=False)}" for key, value in content.items()]
    except (TypeError, ValueError) as error:
        raise RecastError(f"{path}: cannot be written as {format}: {error}") from error
    return write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def write_text(path: str | Path, text: str) -> Path:
    """Write a text file so that no reader ever sees half of it; links are followed."""
    return write_bytes(path, text.encode())


def write_bytes(path: str | Path, content: bytes) -> Path:
    """Write a file so that no reader ever sees half of it; links are followed."""
    target = Path(path).resolve()
    if target.exists() and not target.is_file():
        raise RecastError(f"{path}: cannot be written: it is a folder or a device, not a file")
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        os.replace(temporary, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise RecastError(f"{path}: cannot be written: {error.strerror or error}") from error
    return Path(path)


def read(path: str | Path, format: str) -> dict[str, Any]:
    """Fields of an artifact of the named format; a clear error for anything else."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise RecastError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # bad UTF-8, bad JSON, absurd numbers, absurd nesting
        raise RecastError(f"{path}: not valid JSON ({error}); the file is truncated or of another kind") from error
    found = content.get("format") if isinstance(content, dict) else None
    if not isinstance(content, dict) or found != format:
        raise RecastError(f"{path}: expected a {format} file, but its format is {found!r}")
    if content.get("version") != VERSION:
        raise RecastError(
            f"{path}: version {content.get('version')!r} of {format} is not the version {VERSION} this package reads"
        )
    return content


def field(content: Mapping[str, Any], key: str, path: str | Path) -> Any:
    """One field of an artifact, or an error that names what is missing and what is there."""
    if key not in content:
        raise RecastError(f"{path}: the field {key!r} is missing; the file has {', '.join(content)}")
    return content[key]


def mapping(content: Mapping[str, Any], key: str, path: str | Path) -> dict[str, Any]:
    """One optional field that maps names to values; empty where it is missing."""
    value = content.get(key, {})
    if not isinstance(value, dict):
        raise RecastError(f"{path}: the field {key!r} must map names to values, not be a {type(value).__name__}")
    return value


def array(content: Mapping[str, Any], key: str, path: str | Path, ndim: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """One numeric field as a float64 array with `ndim` axes; null becomes NaN."""
    written = field(content, key, path)
    try:
        values = np.asarray(written, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise RecastError(f"{path}: the field {key!r} is not a number or a rectangular array of numbers") from error
    if values.ndim != ndim:
        raise RecastError(f"{path}: the field {key!r} must have {ndim} axes, not {values.ndim}")
    return values


def plain(value: Any) -> Any:
    """`value` as JSON holds it: arrays and tuples as lists, NaN as None, keys as strings."""
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float) and value != value:
        return None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def read_rows(path: Path, maker: str) -> list[dict[str, Any]]:
    """Objects of a JSONL file that the command `maker` wrote; a line that is not one is an error."""
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
