"""Tensors that FSDP has spread over processes: the whole of one, this process's part, and spreading one again."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import distribute_tensor


def whole(tensor: Tensor) -> Tensor:
    """The full tensor; every process must ask together."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def part(tensor: Tensor) -> Tensor:
    """What this process holds of it."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def like(tensor: Tensor, other: Any) -> Tensor:
    """A full tensor, spread as another one is."""
    if not hasattr(other, "full_tensor") or tensor.shape != other.shape:
        return tensor

    return distribute_tensor(tensor.to(part(other).device), other.device_mesh, other.placements)
