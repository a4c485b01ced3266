"""The processes of one launcher (torchrun, accelerate launch): rank, synchronization and CPU cores."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

from recast.errors import RecastError

__all__ = ["COUNT", "PARENT", "PATIENCE", "RANK", "check", "cores", "leave_group", "spare_core", "wait"]


def _variable(name: str, default: int) -> int:
    """A whole number from the environment; the default if it is none, which `check` reports."""
    value = os.environ.get(name, "").strip()
    return int(value) if value.isascii() and value.isdigit() and len(value) < 9 else default


RANK, COUNT = _variable("RANK", 0), _variable("WORLD_SIZE", 1)
"""Index of this process and number of processes, from the environment, without a heavy import."""
PARENT = "RECAST_PARENT"
"""Environment variable with the process that started this one, without which it must not go on."""
PATIENCE = timedelta(days=1)
"""Time limit of `wait`: images from an API, or the slowest prompt, may take hours."""


def check() -> None:
    """Raise if the variables of a launcher are not numbers, or contradict each other."""
    for name, least in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)):
        value = os.environ.get(name)
        if value is not None and _variable(name, -1) < least:
            raise RecastError(
                f"the environment variable {name} = {value!r:.100} must be a whole number of at least {least}: "
                "launchers such as torchrun set it; unset it to run one process"
            )
    if RANK >= COUNT:
        raise RecastError(
            f"the environment variable RANK = {RANK} must be below WORLD_SIZE = {COUNT}: launchers such as torchrun "
            "set both; unset them to run one process"
        )


def wait() -> None:
    """Return once every process of this launcher has called this; immediately if there is only one."""
    if COUNT > 1:
        import torch
        from accelerate import PartialState

        PartialState(cpu=not torch.cuda.is_available(), timeout=PATIENCE).wait_for_everyone()


def leave_group() -> None:
    """Leave the process group, if there is one, at the end of a command, so that no process waits for another."""
    if COUNT > 1 and "torch" in sys.modules:
        import torch

        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def cores() -> int:
    """Number of CPU cores per process of the launcher on this machine, at least one."""
    return max(1, _machine() // _neighbours())


def spare_core() -> bool:
    """Whether this machine has more cores than processes of the launcher, so that scoring can run in parallel."""
    return _machine() > _neighbours()


def _machine() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _neighbours() -> int:
    return max(1, _variable("LOCAL_WORLD_SIZE", 1))
