"""Strict models of artifacts and rows: one model checks what is written and what is read back.

Nothing is converted: a text is no number, true is no 1, NaN and infinity are no numbers. A field that the model does
not have is refused. An error names file, line and field.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from recast.core import artifact
from recast.errors import RecastError

__all__ = ["Count", "Share", "Strict", "Whole", "lines", "read", "read_rows", "require", "write"]

Whole = Annotated[int, Field(ge=-(2**53), le=2**53)]
"""A whole number that every reader of JSON has exactly."""
Count = Annotated[int, Field(ge=0, le=2**53)]
"""A number of things."""
Share = Annotated[float, Field(ge=0)]
"""A number that is not negative."""


_TAG = re.compile(r"float|(list|nullable)\[.*")
"""What pydantic adds to the place of an error in a field of several types."""


class Strict(BaseModel):
    """The fields of a file or row. A field with a default may be missing, but not null unless its type allows it."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


def require(model: type[Strict], content: Mapping[str, Any], where: str | Path, remedy: str) -> None:
    """Raise a RecastError that names the first field of `content` that does not fit the model.

    >>> class Row(Strict):
    ...     seed: Whole
    >>> require(Row, {"seed": 3}, "rows.jsonl, line 1", "run it again")
    >>> require(Row, {"seed": True}, "rows.jsonl, line 1", "run it again")
    Traceback (most recent call last):
        ...
    recast.errors.RecastError: rows.jsonl, line 1: the field seed is True: input should be a valid integer: run it again
    """
    try:
        model.model_validate(content)
    except (ValidationError, RecursionError) as error:
        raise RecastError(f"{where}: {_reason(error)}: {remedy}") from error


def _reason(error: ValidationError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    found = error.errors(include_url=False)
    same = [each for each in found if each["loc"][:1] == found[0]["loc"][:1]]
    first = max(same, key=lambda each: len(each["loc"]))  # of the types that a field may have, the one that fits best
    name = ".".join(str(part) for part in first["loc"] if not _TAG.fullmatch(str(part)))
    if first["type"] in ("extra_forbidden", "missing"):
        return f"the field {name} is {'missing' if first['type'] == 'missing' else 'unknown'}"
    message = " ".join(first["msg"].split())
    return f"the field {name} is {_short(first['input'])}: {message[:1].lower()}{message[1:]}"


def _short(value: Any) -> str:
    """A value as an error shows it."""
    if isinstance(value, (list, dict)):
        return f"a {type(value).__name__}"
    try:
        return f"{value!r:.60}"
    except ValueError:  # more digits than Python prints
        return "a huge number"


def write(path: str | Path, format: str, model: type[Strict], fields: Mapping[str, Any], version: int = 1) -> Path:
    """Write an artifact that `read` will accept, atomically; a RecastError and no file if it would not."""
    content = artifact.plain(fields)
    require(model, content, path, "it is not written")
    return artifact.write(path, format, content, version)


def read(
    path: str | Path, format: str, model: type[Strict], remedy: str, newest: int = 1, *, checked: bool = True
) -> dict[str, Any]:
    """The fields of an artifact; a RecastError that names the first one that does not fit the model.

    With `checked` false, the caller calls `recast.core.artifact.verify` after its own checks: an error that names a
    field says more than one about the checksum.
    """
    content = artifact.read(path, format, newest, checked=False)
    own = {key: value for key, value in content.items() if key not in artifact.ENVELOPE}
    require(model, own, path, remedy)
    if checked:
        artifact.verify(content, path)
    return content


def lines(model: type[Strict], rows: Iterable[Mapping[str, Any]], where: str | Path) -> str:
    """The text of a JSONL file whose rows fit the model; see `recast.core.artifact.lines`."""
    found = [artifact.plain(row) for row in rows]
    for number, row in enumerate(found, start=1):
        require(model, row, f"{where}, line {number}", "it is not written")
    return artifact.lines(found)


def read_rows(model: type[Strict], path: Path, maker: str) -> list[dict[str, Any]]:
    """The rows of a JSONL file that the command `maker` wrote; an error that names the first line that does not fit."""
    rows = artifact.read_rows(path, maker)
    for number, row in enumerate(rows, start=1):
        require(model, row, f"{path}, line {number}", f"run {maker} again")
    return rows
