"""The one exception for input a user can mend, and the warnings the package gives."""

from __future__ import annotations


class RecastError(ValueError):
    """Bad input: one sentence that names the thing, the value and the remedy.

    The command line prints it without a traceback and exits with code 2.
    """


class StaleError(RecastError):
    """What is there was made with other settings: `recast run` sets it aside and makes it anew."""


class ConvergenceWarning(UserWarning):
    """A solver stopped before it met its tolerance."""


class FloorWarning(UserWarning):
    """A moment was so small that the numerical floor of Alg. 1 replaced it."""


class ClampWarning(UserWarning):
    """Gain curves were made of a reward whose negative scores count as 0."""
