"""A time limit for rewards of one's own, which may never return. It is off by default."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from recast.errors import RecastError

__all__ = ["VARIABLE", "limited"]

_Result = TypeVar("_Result")
VARIABLE = "RECAST_REWARD_TIMEOUT"
"""Environment variable with the seconds that a call of a reward may take; it changes no result."""


def limited(call: Callable[[], _Result]) -> _Result:
    """The result of a call; TimeoutError if it takes longer than `VARIABLE` says.

    Nothing can end a call that never returns, so it is made in a thread that ends with the process.

    >>> limited(lambda: 7)
    7
    """
    seconds = _limit()
    if seconds is None:
        return call()
    found: dict[str, Any] = {}
    torch = sys.modules.get("torch")
    gpu = torch.cuda.current_device() if torch is not None and torch.cuda.is_initialized() else None

    def run() -> None:
        try:
            if torch is not None and gpu is not None:
                torch.cuda.set_device(gpu)  # a new thread would use the first one
            found["result"] = call()
        except BaseException as error:
            found["error"] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if "error" in found:
        raise found["error"]
    if "result" not in found:
        raise TimeoutError(f"it has not returned after {seconds:g} s, the limit that {VARIABLE} sets")
    return found["result"]


def _limit() -> float | None:
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < threading.TIMEOUT_MAX:
        raise RecastError(f"the environment variable {VARIABLE} = {text!r:.100} must be a number of seconds above 0")
    return seconds
