"""The names of the methods that compute W."""

from __future__ import annotations

from typing import Literal, get_args

__all__ = ["ENTROPIC", "METHODS", "Method", "control_of"]

Method = Literal[
    "sinkhorn",
    "static",
    "row",
    "matched",
    "hard",
    "shared",
    "reversed",
    "shuffled",
    "row-reversed",
    "row-shuffled",
    "matched-reversed",
    "matched-shuffled",
    "hard-reversed",
    "hard-shuffled",
    "shared-reversed",
    "shared-shuffled",
]
METHODS: tuple[Method, ...] = get_args(Method)
"""Ways to compute W from curves and a budget; see `recast.weigh`."""
ENTROPIC: tuple[Method, ...] = ("sinkhorn", "reversed", "shuffled")
"""The methods that solve the entropic problem, and so have a temperature."""


def control_of(method: str) -> tuple[str, str]:
    """The method whose gains a control takes in another order, and that order; other methods have the order "".

    Examples
    --------
    >>> control_of("matched-reversed"), control_of("shuffled"), control_of("row")
    (('matched', 'reversed'), ('sinkhorn', 'shuffled'), ('row', ''))
    """
    base, _, order = method.rpartition("-")
    return (base or "sinkhorn", order) if order in ("reversed", "shuffled") else (method, "")
