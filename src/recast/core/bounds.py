"""How much the shared proposal π⁺ can change the gain curves and the weights (App. A.3)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from recast.core.arrays import Array
from recast.core.renyi import check_alpha
from recast.errors import RecastError

__all__ = ["SurrogateBounds", "surrogate"]


@dataclass(frozen=True)
class SurrogateBounds:
    """Error bounds per reward, and one for W; infinite where their condition fails.

    Attributes
    ----------
    ratio : ndarray, shape (m,)
        M_i = R_i / Z_i.
    eta : ndarray, shape (m,)
        η_i (Eq. expectation-error).
    divergence : ndarray, shape (m,)
        b_i, the bound on D_i (Eq. divergence-error); needs η_i < 1.
    gain : ndarray, shape (m,)
        2 b_i, the bound on every gain.
    profile : ndarray, shape (m,)
        4 T b_i / (G_i − 2 b_i), the bound on the normalized gains (Eq. normalized-profile-error); needs G_i > 2 b_i.
    weights : float
        (B/τ)·max_i profile_i, the bound on ‖W̃ − W*‖₁.
    reasons : tuple of str
        One sentence for each condition that fails.
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
    """Error bounds when one proposal π⁺ replaces the positive policy π_i⁺ of every reward.

    Parameters
    ----------
    mismatch, reward_max, reward_mean, total_gain : array-like, shape (m,), or float
        ε_i = KL(π⁺‖π_i⁺), R_i = max r_i, Z_i = E_old[r_i] and G_i = Σ_t ΔD_{i,t} of each reward.
    steps : int
        T.
    alpha : float, default 2.0
        Rényi order, above 1.
    tau, mass : float, default 1.0
        Temperature τ of the Sinkhorn problem, and B = Σ λ_i.

    Returns
    -------
    SurrogateBounds
        The bounds, infinite where their condition fails, and the reasons.

    Raises
    ------
    RecastError
        If α is not above 1, a parameter is not positive, or the rewards' numbers are inconsistent.

    Examples
    --------
    >>> bounds = surrogate(mismatch=2e-4, reward_max=1.0, reward_mean=0.5, total_gain=1.5, steps=10)
    >>> bounds.holds, bounds.divergence.round(4).tolist()
    (True, [0.0202])
    """
    if check_alpha(alpha) < 1:
        raise RecastError(f"the bounds of App. A.3 hold for alpha > 1, not for {alpha:g}")
    if not (tau > 0 and mass > 0 and steps >= 1):
        raise RecastError(f"tau, mass and steps must be positive, not {tau:g}, {mass:g} and {steps}")
    epsilon, largest, mean, total = _per_reward(mismatch, reward_max, reward_mean, total_gain)
    ratio = largest / mean
    eta = ratio ** (alpha - 1) * np.sqrt(epsilon / 2)
    close = eta < 1
    divergence, profile = np.full_like(eta, np.inf), np.full_like(eta, np.inf)
    divergence[close] = -np.log1p(-eta[close]) / (alpha - 1)
    separated = close & (total > 2 * divergence)
    profile[separated] = 4 * steps * divergence[separated] / (total[separated] - 2 * divergence[separated])
    failing = [*np.flatnonzero(~close), *np.flatnonzero(close & ~separated)]
    reasons = tuple(_reason(i, eta[i], epsilon[i], ratio[i], total[i], divergence[i]) for i in failing)
    weights = float(mass / tau * profile.max())
    return SurrogateBounds(ratio, eta, divergence, 2 * divergence, profile, weights, reasons)


def _per_reward(*values: ArrayLike) -> tuple[Array, ...]:
    """KL, largest reward, mean reward and total gain, each (m,), checked and broadcast."""
    given = [np.atleast_1d(np.asarray(a, dtype=np.float64)) for a in values]
    if len({a.size for a in given} - {1}) > 1 or not all(np.isfinite(a).all() for a in given):
        raise RecastError(
            f"KL, largest reward, mean reward and total gain must be finite, one number per reward or one for all, "
            f"not of the sizes {[a.size for a in given]}"
        )
    epsilon, largest, mean, total = np.broadcast_arrays(*given)
    if (epsilon < 0).any() or (mean <= 0).any() or (largest < mean).any():
        raise RecastError("the bounds need KL >= 0 and 0 < E[r_i] <= max r_i for every reward")
    return epsilon, largest, mean, total


def _reason(i: int, eta: float, epsilon: float, ratio: float, total: float, divergence: float) -> str:
    """Why W is not bounded, for a reward whose condition fails."""
    if eta >= 1:
        return (
            f"reward {i}: eta = {eta:.4g} >= 1, so its divergence is not bounded; the proposal is too far from "
            f"its positive policy (KL {epsilon:.4g}, max/mean reward {ratio:.4g})"
        )
    return (
        f"reward {i}: its total gain {total:.4g} does not exceed 2b = {2 * divergence:.4g}, so its normalized "
        "profile and W are not bounded"
    )
