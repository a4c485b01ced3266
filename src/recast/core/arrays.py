"""The array type of the mathematics, and checks of what users pass in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from recast.errors import RecastError

__all__ = ["Array", "check_names", "numbers"]

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
