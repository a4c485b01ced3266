"""The array type of the mathematics, and checks of what users pass in."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from recast.errors import RecastError

__all__ = ["Array", "check_names", "like", "namespace", "numbers"]

Array = NDArray[np.float64]


def check_names(names: Sequence[str]) -> tuple[str, ...]:
    """Reward names as a tuple; an error if there are none, one is repeated or one is not a string."""
    result = tuple(names) if isinstance(names, (list, tuple)) else ()
    if not result or not all(isinstance(name, str) and name for name in result):
        raise RecastError(f"rewards must be a list of names, not {names!r:.200}")
    if len(set(result)) != len(result):
        raise RecastError(f"reward names must differ, but they are {', '.join(result)}")
    return result


def numbers(values: ArrayLike, name: str) -> Array:
    """A float64 copy of `values`; an error that names them if they are not a rectangular array of numbers."""
    try:
        return np.array(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise RecastError(f"{name} must be a rectangular array of numbers: {error}") from error


def namespace(values: Any) -> Any:
    """`torch` for a tensor, else `numpy`; torch is not imported here, since a tensor implies that it is."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(values, torch.Tensor) else np


def like(array: Array, values: Any) -> Any:
    """`array` as the same kind of object as `values`, with its dtype and device."""
    if isinstance(values, np.ndarray):
        return array
    return sys.modules["torch"].as_tensor(array, dtype=values.dtype, device=values.device)
