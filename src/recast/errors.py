"""The exception for invalid input, and the warnings that the package issues."""

from __future__ import annotations

__all__ = ["ClampWarning", "ConvergenceWarning", "FloorWarning", "GridWarning", "RecastError", "StaleError"]


class RecastError(ValueError):
    """Invalid input; the message is one sentence that names the thing, the value and the remedy.

    The command line prints the message without a traceback and exits with code 2.
    """


class StaleError(RecastError):
    """An existing artifact was made with other settings; `recast run` sets it aside and makes a new one."""


class ConvergenceWarning(UserWarning):
    """A solver stopped before it reached its tolerance."""


class FloorWarning(UserWarning):
    """A moment was below the numerical floor of Alg. 1 and was replaced by it."""


class ClampWarning(UserWarning):
    """Negative scores of a reward were set to 0 to compute its gain curve."""


class GridWarning(UserWarning):
    """A trainer never trains some steps of W."""
