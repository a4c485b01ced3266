"""How stages report progress, independently of how it is displayed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

__all__ = ["OnProgress", "Progress", "ignore_progress", "no_progress"]

_Item = TypeVar("_Item")
Progress = Callable[[Iterable[Any], str, int], Iterable[Any]]
"""Wraps an iterable: `progress(items, title, total)` yields the same items and may display a bar meanwhile."""
OnProgress = Callable[[str, int, int], None]
"""Callback with the name of a phase, how many units of it are done, and how many there are."""


def no_progress(items: Iterable[_Item], title: str, total: int) -> Iterable[_Item]:
    """Return the items unchanged: a `Progress` that displays nothing."""
    return items


def ignore_progress(phase: str, done: int, total: int) -> None:
    """Do nothing: an `OnProgress` for callers without a display."""
