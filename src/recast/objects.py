"""Python objects that a recipe names as `package.module:Object`, and libraries that a setting needs."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from recast.errors import RecastError

__all__ = ["find", "library", "working_directory"]


def find(name: str, what: str, needs: str | None = None) -> Any:
    """The object behind `package.module:Object`; modules in the working directory are found.

    Parameters
    ----------
    name : str
        The path of the object.
    what : str
        What names it, for errors.
    needs : str, optional
        An attribute that it must have.

    Examples
    --------
    >>> find("recast.errors:RecastError", "an example").__name__
    'RecastError'
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute or module.startswith("."):
        raise RecastError(f"{what} = {name!r} must have the form package.module:Object")
    try:
        with working_directory():
            found = getattr(importlib.import_module(module), attribute, None)
    except (Exception, SystemExit) as error:  # the module may raise anything
        hint = "; is its folder in PYTHONPATH?" if isinstance(error, ImportError) else ""
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise RecastError(f"{what} = {name!r} cannot be imported ({reason}){hint}") from error
    if found is None or (needs is not None and not callable(getattr(found, needs, None))):
        lacks = f"the module {module} has no {attribute!r}" if found is None else f"it has no method {needs}"
        raise RecastError(f"{what} = {name!r}: {lacks}")
    return found


def library(name: str, setting: str, otherwise: str) -> Any:
    """A module of an optional library, which `setting` needs; a RecastError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RecastError(
            f"{setting} needs {name.partition('.')[0]}: pip install 'recast-diffusion[quantize]', or choose {otherwise}"
        ) from error


@contextmanager
def working_directory() -> Iterator[None]:
    """Find modules in the working directory, after all others, for the duration of the block."""
    try:
        here = os.getcwd()
    except OSError as error:
        raise RecastError("the working folder does not exist any more: change to another one") from error
    known = here in sys.path
    sys.path.append(here)
    try:
        yield
    finally:
        if not known:  # otherwise the first one, which is not ours, would go
            sys.path.remove(here)
        elif sys.path[-1] == here:
            sys.path.pop()
