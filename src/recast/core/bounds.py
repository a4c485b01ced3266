"""How far the shared proposal π⁺ can move the curves and the weights (App. A.3)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from recast.core.renyi import check_alpha
from recast.errors import RecastError

Array = NDArray[np.float64]


@dataclass(frozen=True)
class SurrogateBounds:
    """Bounds per reward (m,), and one for W; infinite where their condition fails.

    `ratio` M_i = R_i/Z_i, `eta` η_i (Eq. expectation-error), `divergence` b_i (Eq. divergence-error,
    needs η_i < 1), `gain` 2 b_i, `profile` 4 T b_i / (G_i − 2 b_i) (Eq. normalized-profile-error, needs
    G_i > 2 b_i), `weights` (B/τ)·max_i profile_i on ‖W̃ − W*‖₁. `reasons` has one sentence for each
    condition that fails.
    """

    ratio: Array
    eta: Array
    divergence: Array
    gain: Array
    profile: Array
    weights: float
    reasons: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether every condition holds, so that `weights` is a finite bound."""
        return not self.reasons


def surrogate(
    mismatch: ArrayLike,
    reward_max: ArrayLike,
    reward_mean: ArrayLike,
    total_gain: ArrayLike,
    steps: int,
    alpha: float = 2.0,
    tau: float = 1.0,
    mass: float = 1.0,
) -> SurrogateBounds:
    """Error bounds when π⁺ stands in for every π_i⁺.

    Per reward (m,) or scalar: `mismatch` ε_i = KL(π⁺‖π_i⁺), `reward_max` R_i, `reward_mean`
    Z_i = E_old[r_i], `total_gain` G_i. `steps` is T, `tau` the Sinkhorn temperature, `mass` B = Σ λ_i.
    """
    if check_alpha(alpha) < 1:
        raise RecastError(f"the bounds of App. A.3 hold for alpha > 1, not for {alpha:g}")
    if not (tau > 0 and mass > 0 and steps >= 1):
        raise RecastError(f"tau, mass and steps must be positive, not {tau:g}, {mass:g} and {steps}")
    given = [np.atleast_1d(np.asarray(a, dtype=np.float64)) for a in (mismatch, reward_max, reward_mean, total_gain)]
    if len({a.size for a in given} - {1}) > 1 or not all(np.isfinite(a).all() for a in given):
        raise RecastError(
            f"KL, largest reward, mean reward and total gain must be finite, one number a reward or one for all, "
            f"not of the sizes {[a.size for a in given]}"
        )
    epsilon, largest, mean, total = np.broadcast_arrays(*given)
    if (epsilon < 0).any() or (mean <= 0).any() or (largest < mean).any():
        raise RecastError("the bounds need KL >= 0 and 0 < E[r_i] <= max r_i for every reward")
    ratio = largest / mean
    eta = ratio ** (alpha - 1) * np.sqrt(epsilon / 2)
    close = eta < 1
    divergence = np.full_like(eta, np.inf)
    divergence[close] = -np.log1p(-eta[close]) / (alpha - 1)
    separated = close & (total > 2 * divergence)
    profile = np.full_like(eta, np.inf)
    profile[separated] = 4 * steps * divergence[separated] / (total[separated] - 2 * divergence[separated])
    reasons = [
        f"reward {i}: eta = {eta[i]:.4g} >= 1, so nothing bounds its divergence; the proposal is too far from "
        f"its positive policy (KL {epsilon[i]:.4g}, max/mean reward {ratio[i]:.4g})"
        for i in np.flatnonzero(~close)
    ] + [
        f"reward {i}: its total gain {total[i]:.4g} does not exceed 2b = {2 * divergence[i]:.4g}, so nothing bounds "
        "its normalised profile or W"
        for i in np.flatnonzero(close & ~separated)
    ]
    return SurrogateBounds(
        ratio=ratio,
        eta=eta,
        divergence=divergence,
        gain=2 * divergence,
        profile=profile,
        weights=float(mass / tau * profile.max()),
        reasons=tuple(reasons),
    )
