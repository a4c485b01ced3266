"""Typed, strict models of rows and artifacts: nothing is converted, and an error names file, line and field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from recast.errors import RecastError

__all__ = ["Strict", "require"]


class Strict(BaseModel):
    """A model that takes a text for no number, true for no 1 and no NaN; fields it does not know are left alone."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


def require(model: type[Strict], content: Mapping[str, Any], where: str, remedy: str) -> None:
    """Raise a RecastError that names the first field of `content` that does not fit the model.

    >>> class Row(Strict):
    ...     seed: int
    >>> require(Row, {"seed": 3}, "rows.jsonl, line 1", "make it again")
    >>> require(Row, {"seed": True}, "rows.jsonl, line 1", "make it again")
    Traceback (most recent call last):
        ...
    recast.errors.RecastError: rows.jsonl, line 1: the field seed: Input should be a valid integer: make it again
    """
    try:
        model.model_validate(dict(content))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = ".".join(map(str, first["loc"]))
        raise RecastError(f"{where}: the field {name}: {' '.join(first['msg'].split())}: {remedy}") from error
