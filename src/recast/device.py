"""Devices and number formats by the names that recipes use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from recast.errors import RecastError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick(name: str) -> torch.device:
    """The device of a name; `auto` is this process's GPU where there is one, else the CPU."""
    if name == "auto":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise RecastError(f"the device {name!r} cannot be used here ({reason}): try cpu or auto") from error
    return device


def worker(where: torch.device) -> ThreadPoolExecutor:
    """One thread that works beside this one, on the same GPU: a new thread would start on the first."""
    if where.type != "cuda":
        return ThreadPoolExecutor(1)
    return ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(where,))


@contextmanager
def visiting(model: torch.nn.Module, where: torch.device, offload: bool) -> Iterator[None]:
    """The model on its device while the block lasts; with `offload` on the CPU again afterwards."""
    model.to(where)
    try:
        yield
    finally:
        if offload:
            model.to("cpu")


def dtype(name: str) -> torch.dtype:
    """The number format of a name."""
    if name not in DTYPES:
        raise RecastError(f"unknown dtype {name!r}: choose one of {', '.join(DTYPES)}")
    return DTYPES[name]
