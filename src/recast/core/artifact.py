"""Reading and writing the JSON files through which stages pass their results.

A file has the fields `format` and `version`, arrays as lists in full float precision, NaN as null, a checksum over all
of it, and nothing that differs between two identical runs. It is written under a temporary name and then renamed. Rows
of JSONL have checksums as well. Files and rows of earlier releases have none and are read without that check.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import socket
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from recast.errors import RecastError

__all__ = [
    "CHECKSUM",
    "ENVELOPE",
    "checksum",
    "inside",
    "line",
    "lines",
    "plain",
    "read",
    "read_row",
    "read_rows",
    "running",
    "slug",
    "sweep",
    "verify",
    "write",
    "write_bytes",
    "write_text",
]

CHECKSUM = "checksum"
"""The field of a file or row with `checksum` of the others."""
ENVELOPE = ("format", "version", CHECKSUM)
"""The fields of every artifact besides its own."""
_EDITED = f"make it again, or remove the field '{CHECKSUM}' from the file or all its rows if the change is meant"
_VERSION = 1
_HOST = f"{zlib.crc32(socket.gethostname().encode()):08x}"
_TEMPORARY = re.compile(r"\.(?:.*\.(?P<host>[0-9a-f]{8})\.(?P<pid>\d{1,9})\.tmp|clock-(?P<probe>\d{1,9})-\d+)")
"""Names of temporary files, which end with their machine and process."""
_SLUG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")


def write(path: str | Path, format: str, fields: Mapping[str, Any], version: int = _VERSION) -> Path:
    """Write `fields` atomically as an artifact of the given format and version, and return the path."""
    content = plain({"format": format, "version": version, **fields})
    try:
        content[CHECKSUM] = checksum(content)
        lines = [f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in content.items()]
    except (TypeError, ValueError) as error:
        raise RecastError(f"{path}: cannot be written as {format}: {error}") from error
    return write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def checksum(fields: Mapping[str, Any], previous: str = "") -> str:
    """Sixteen digits of the SHA-256 of fields as JSON in any order, and of the checksum of the row before them.

    >>> checksum({"a": 1, "b": 2}) == checksum({"b": 2, "a": 1}) != checksum({"a": 1, "b": 2.5})
    True
    """
    return hashlib.sha256((previous + json.dumps(fields, sort_keys=True)).encode()).hexdigest()[:16]


def line(fields: Mapping[str, Any], previous: str = "") -> str:
    """A row of JSONL with its checksum, which also covers that of the row before it where that one is given.

    >>> line({"epoch": 1})
    '{"epoch": 1, "checksum": "becef8ff3d5edb2b"}'
    """
    text = json.dumps(plain(fields), ensure_ascii=False).encode("utf-8", "replace").decode()  # half characters
    return f'{text[:-1]}, "{CHECKSUM}": "{checksum(json.loads(text), previous)}"}}'


def lines(rows: Iterable[Mapping[str, Any]]) -> str:
    """The text of a JSONL file, in which no row can be lost, moved or changed unnoticed, except the last ones."""
    made, previous = [], ""
    for row in rows:
        made.append(line(row, previous))
        previous = json.loads(made[-1])[CHECKSUM]
    return "".join(f"{each}\n" for each in made)


def write_text(path: str | Path, text: str) -> Path:
    """Write a text file atomically, following symbolic links, and return the path."""
    return write_bytes(path, text.encode())


def write_bytes(path: str | Path, content: bytes) -> Path:
    """Write a file atomically, following symbolic links, and return the path."""
    try:
        target = Path(path).resolve()
        taken = target.exists() and not target.is_file()
    except (OSError, RuntimeError) as error:  # a name too long, a circle of links
        raise RecastError(f"{path}: cannot be written: {getattr(error, 'strerror', None) or error}") from error
    if taken:
        raise RecastError(f"{path}: cannot be written: it is a folder or a device, not a file")
    temporary = target.with_name(f".{target.name}.{_HOST}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if not isinstance(error, OSError):
            raise
        need = f" ({len(content):,} bytes are needed)" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise RecastError(f"{path}: cannot be written: {error.strerror or error}{need}") from error
    return Path(path)


def sweep(folder: Path) -> None:
    """Remove the temporary files that processes of this machine have left in a folder because they were killed."""
    with contextlib.suppress(OSError):
        for path in folder.glob(".*"):
            found = _TEMPORARY.fullmatch(path.name)
            host, pid = (found["host"] or _HOST, found["pid"] or found["probe"]) if found else ("", "")
            if host == _HOST and not running(int(pid)):
                path.unlink(missing_ok=True)


def running(pid: int) -> bool:
    """Whether a process of this machine is running, as far as can be known."""
    if os.name == "nt":  # where signal 0 is Ctrl-C
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


def read(path: str | Path, format: str, newest: int = _VERSION, *, checked: bool = True) -> dict[str, Any]:
    """Fields of an artifact up to the version `newest`; a RecastError if the file is not one of the given format.

    With `checked` false, the caller calls `verify` itself after its own checks, which can name the field that is wrong.
    """
    try:
        content = json.loads(
            Path(path).read_text(encoding="utf-8"), object_pairs_hook=_distinct, parse_constant=_no_constant
        )
    except OSError as error:
        raise RecastError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # bad UTF-8, bad JSON, absurd numbers, absurd nesting
        raise RecastError(f"{path}: not valid JSON ({error}); the file is truncated or has another format") from error
    found = content.get("format") if isinstance(content, dict) else None
    if not isinstance(content, dict) or found != format:
        raise RecastError(f"{path}: expected a {format} file, but its format is {found!r}")
    if content.get("version") not in range(_VERSION, newest + 1):
        known = str(newest) if newest == _VERSION else f"{_VERSION} to {newest}"
        raise RecastError(
            f"{path}: version {content.get('version')!r} of {format} is not the version {known} this package reads"
        )
    if checked:
        verify(content, path)
    return content


def verify(content: dict[str, Any], where: str | Path, previous: str = "") -> str:
    """Remove the checksum of a file or row and return it; an error if it is not that of the other fields."""
    if CHECKSUM not in content:
        if previous:
            raise RecastError(f"{where}: the field '{CHECKSUM}' is missing, which the rows before it have: {_EDITED}")
        return ""
    written, found = content.pop(CHECKSUM), checksum(content, previous)
    if written != found:
        what = "or a row before it was lost" if previous else "it was damaged or edited"
        raise RecastError(f"{where}: the content does not have its checksum {written!r:.40}, {what}: {_EDITED}")
    return found


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; an error if it has a key twice, since which one counts is not to be guessed."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} appears twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def slug(value: Any, what: str, path: str | Path) -> str:
    """A name that may become part of a file name; an error if it has anything but letters, digits and . _ + -."""
    if not isinstance(value, str) or not _SLUG.fullmatch(value):
        raise RecastError(f"{path}: {what} must be a name of letters, digits and . _ + -, not {value!r:.200}")
    return value


def inside(folder: Path, file: Any, path: str | Path) -> Path:
    """The file that a row of an artifact names relative to `folder`; an error if it lies outside, links followed."""
    try:
        found = folder / Path(file)
        found.exists()  # raises if the name is too long
        if found.resolve().is_relative_to(folder.resolve()) and found.resolve() != folder.resolve():
            return found
    except (TypeError, ValueError, OSError, RuntimeError):  # no text, a null byte, a name too long, a circle of links
        pass
    raise RecastError(f"{path}: the file {file!r:.200} must lie in {folder}; folders of others may name anything")


def plain(value: Any) -> Any:
    """`value` as JSON stores it: arrays and tuples as lists, NaN as None, keys as strings."""
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
    """Objects of a JSONL file that the command `maker` wrote; an error that names the first invalid line."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecastError(f"{path}: cannot be read: {error.strerror or error}; run {maker} first") from error
    except UnicodeDecodeError as error:
        raise RecastError(f"{path}: not UTF-8 text ({error.reason}); run {maker} again") from error
    rows, previous = [], ""
    parts = text.removesuffix("\n").split("\n") if text else []  # a prompt may contain other line separators
    for number, each in enumerate(parts, start=1):
        row, previous = read_row(each, f"{path}, line {number}", previous)
        rows.append(row)
    return rows


def read_row(text: str | bytes, where: str, previous: str = "") -> tuple[dict[str, Any], str]:
    """An object of JSON that `line` has made, and its checksum; an error that begins with `where` if it is damaged."""
    try:
        row = json.loads(text, object_pairs_hook=_distinct, parse_constant=_no_constant)
        if not isinstance(row, dict):
            raise ValueError("a row must be an object")
    except (ValueError, RecursionError) as error:
        raise RecastError(f"{where}: not valid JSON ({error})") from error
    return row, verify(row, where, previous)
