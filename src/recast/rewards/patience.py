"""A time limit for rewards of one's own, which may never return. It is off by default."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
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
    enter = _modes()

    def run() -> None:
        try:
            with ExitStack() as stack:
                enter(stack)
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


def _modes() -> Callable[[ExitStack], None]:
    """A function that gives another thread the modes of torch in this one, which are those of a thread."""
    torch = sys.modules.get("torch")
    if torch is None:
        return lambda _: None
    gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    lower = {kind: torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)}

    def enter(stack: ExitStack) -> None:
        if gpu is not None:
            torch.cuda.set_device(gpu)
        stack.enter_context(torch.inference_mode(inference))
        stack.enter_context(torch.set_grad_enabled(grad))
        for kind, dtype in lower.items():
            stack.enter_context(torch.autocast(kind, dtype=dtype))

    return enter


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
