"""Tensors that FSDP has sharded over processes: gathering one, its local part, and sharding one again."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import distribute_tensor

__all__ = ["like", "part", "whole"]


def whole(tensor: Tensor) -> Tensor:
    """The full tensor; all processes must call this together."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def part(tensor: Tensor) -> Tensor:
    """The part of the tensor that this process holds."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def like(tensor: Tensor, other: Any) -> Tensor:
    """A full tensor, sharded as `other` is."""
    if not hasattr(other, "full_tensor") or tensor.shape != other.shape:
        return tensor
    return distribute_tensor(tensor.to(part(other).device), other.device_mesh, other.placements)
