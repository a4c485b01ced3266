"""What the samplers and the estimator ask of a policy: a velocity, and nothing else."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Velocity(Protocol):
    """A rectified-flow velocity field, already conditioned on its prompt.

    Called with a batch `x` of any shape `(B, ...)` and one noise level `sigma` in [0, 1] for the
    whole batch; returns v = E[ε − x_0 | x_σ = x] in the shape of `x` (Eq. fm-loss). The batch may be
    of any size and order, and each row's answer depends on that row alone.
    """

    def __call__(self, x: Tensor, sigma: float) -> Tensor:
        """Velocity of every row of `x` at noise level `sigma`."""
        ...
