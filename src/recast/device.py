"""Devices and dtypes by the names that recipes use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from recast.errors import RecastError

__all__ = ["dtype", "pick", "visiting", "worker"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick(name: str) -> torch.device:
    """The device of a name; `auto` is this process's GPU if there is one, else the CPU."""
    if name == "auto":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
        if device.type == "meta":
            raise RuntimeError("it has no values")
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise RecastError(f"the device {name!r} cannot be used here ({reason}): try cpu or auto") from error
    return device


def worker(where: torch.device) -> ThreadPoolExecutor:
    """A pool of one thread that uses the same GPU as this one; by default a new thread would use the first."""
    if where.type != "cuda":
        return ThreadPoolExecutor(1)
    return ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(where,))


@contextmanager
def visiting(model: torch.nn.Module, where: torch.device, offload: bool) -> Iterator[None]:
    """Move the model to a device for the duration of the block; with `offload`, back to the CPU afterwards."""
    model.to(where)
    try:
        yield
    finally:
        if offload:
            model.to("cpu")


def dtype(name: str) -> torch.dtype:
    """The torch dtype of a name."""
    if name not in _DTYPES:
        raise RecastError(f"unknown dtype {name!r}: choose one of {', '.join(_DTYPES)}")
    return _DTYPES[name]
