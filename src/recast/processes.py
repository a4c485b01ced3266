"""The processes that one launcher started together (torchrun, accelerate launch): this one's place, and waiting."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

RANK, COUNT = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
"""This process among those of its launcher, known before any heavy import."""
PATIENCE = timedelta(days=1)
"""How long processes wait for each other: images of an API, or the slowest prompt, may take a night."""


def wait() -> None:
    """Return once every process of this launcher has come here; at once where there is only one."""
    if COUNT > 1:
        import torch
        from accelerate import PartialState

        PartialState(cpu=not torch.cuda.is_available(), timeout=PATIENCE).wait_for_everyone()


def part() -> None:
    """At the end of a command: leave the group, where there is one, so that no process waits for another."""
    if COUNT > 1 and "torch" in sys.modules:
        import torch

        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def cores() -> int:
    """Share that this process has of the machine's cores, at least one."""
    return max(1, _machine() // _neighbours())


def spare_core() -> bool:
    """Whether this machine has more cores than the launcher's processes on it: one may score meanwhile."""
    return _machine() > _neighbours()


def _machine() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _neighbours() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))
