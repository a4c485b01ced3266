"""How stages report progress, independently of how it is displayed."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

__all__ = ["PATIENCE", "OnProgress", "Progress", "ignore_progress", "no_progress", "waiting"]

_Item = TypeVar("_Item")
Progress = Callable[[Iterable[Any], str, int], Iterable[Any]]
"""Wraps an iterable: `progress(items, title, total)` yields the same items and may display a bar meanwhile."""
OnProgress = Callable[[str, int, int], None]
"""Callback with the name of a phase, how many units of it are done, and how many there are."""


PATIENCE = 120.0
"""Seconds after which `waiting` says what is being waited for."""


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Warn once if the block takes long, so that one that never ends is no riddle."""
    said = f"{what} has been running for {PATIENCE:g} s: still waiting for it"
    timer = threading.Timer(PATIENCE, lambda: warnings.warn(said, stacklevel=1))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def no_progress(items: Iterable[_Item], title: str, total: int) -> Iterable[_Item]:
    """Return the items unchanged: a `Progress` that displays nothing."""
    return items


def ignore_progress(phase: str, done: int, total: int) -> None:
    """Do nothing: an `OnProgress` for callers without a display."""
