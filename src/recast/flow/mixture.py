"""The exact world: a Gaussian-mixture policy, and rewards whose gain curves are known.

Every quantity that the estimator approximates by rollouts has a closed form here: the velocity, the
conditional reward μ_{i,t}(x_t), the positive policy π_i⁺ and, for one component, D_{i,t} itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from recast.errors import RecastError

__all__ = ["GaussianMixture", "TiltReward", "gaussian_divergence", "score_all"]


@dataclass(frozen=True)
class GaussianMixture:
    """π(x_0) = Σ_k weights_k N(means_k, diag(variances_k)): a policy with an exact velocity.

    An instance is a `recast.flow.policy.Velocity`.

    Parameters
    ----------
    weights : Tensor, shape (k,)
        Weights of the modes, positive; normalized where probabilities are needed.
    means, variances : Tensor, shape (k, d)
        Means, and diagonals of the covariances.

    Raises
    ------
    RecastError
        If the shapes disagree, or a weight or variance is not positive.

    Examples
    --------
    >>> from recast.flow import sampling
    >>> policy = GaussianMixture(torch.tensor([0.5, 0.5]), torch.tensor([[-2.0], [2.0]]), torch.full((2, 1), 0.01))
    >>> ends = sampling.sample(policy, torch.tensor([[-1.0], [1.0]]), torch.linspace(0, 1, 26).tolist())
    >>> ends.round(decimals=1).tolist()
    [[-2.0], [2.0]]
    """

    weights: Tensor
    means: Tensor
    variances: Tensor

    def __post_init__(self) -> None:
        if self.means.shape != self.variances.shape or self.weights.shape != self.means.shape[:1]:
            raise RecastError(
                f"a mixture needs weights (k,), means (k, d) and variances (k, d), not {tuple(self.weights.shape)}, "
                f"{tuple(self.means.shape)} and {tuple(self.variances.shape)}"
            )
        if not bool((self.weights > 0).all() and (self.variances > 0).all()):
            raise RecastError("a mixture's weights and variances must all be positive")

    def __call__(self, x: Tensor, sigma: float) -> Tensor:
        """Velocity v = E[ε | x_σ] − E[x_0 | x_σ] in the shape of `x` (B, d), without a division by σ."""
        alpha = 1 - sigma
        slope = (sigma - alpha * self.variances) / (alpha**2 * self.variances + sigma**2)
        modes = self.responsibilities(x, sigma)
        return x * (modes @ slope) - modes @ (self.means * (1 + alpha * slope))

    def responsibilities(self, x: Tensor, sigma: float) -> Tensor:
        """P(mode k | x_σ = x), shape (B, k)."""
        spread = (1 - sigma) ** 2 * self.variances + sigma**2
        distance = _quadratic(x, 1 / spread, torch.ones_like(spread), -(1 - sigma) * self.means)
        return (self.weights.log() - 0.5 * (distance + spread.log().sum(-1))).softmax(-1)

    def posterior(self, sigma: float) -> tuple[Tensor, Tensor, Tensor]:
        """Slopes, intercepts and variances, each (k, d), of the law N(slope_k x + intercept_k, variances_k) of x_0.

        It is conditional on x_σ = x and the mode k.
        """
        spread = (1 - sigma) ** 2 * self.variances + sigma**2
        slope = (1 - sigma) * self.variances / spread
        return slope, self.means * (1 - (1 - sigma) * slope), self.variances * sigma**2 / spread

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """`count` exact draws of x_0, shape (count, d)."""
        modes = torch.multinomial(self.weights, count, replacement=True, generator=generator)
        noise = torch.randn(count, self.means.shape[1], generator=generator, dtype=self.means.dtype)
        return self.means[modes] + self.variances[modes].sqrt() * noise

    def diffused(self, sigma: float) -> GaussianMixture:
        """The marginal law of x_σ = (1−σ) x_0 + σ ε."""
        return GaussianMixture(self.weights, (1 - sigma) * self.means, (1 - sigma) ** 2 * self.variances + sigma**2)

    def log_density(self, x: Tensor) -> Tensor:
        """log π(x), shape (B,)."""
        distance = _quadratic(x, 1 / self.variances, torch.ones_like(self.means), -self.means)
        constant = (2 * torch.pi * self.variances).log().sum(-1)
        log_weights = (self.weights / self.weights.sum()).log()
        return (log_weights - 0.5 * (distance + constant)).logsumexp(-1)


@dataclass(frozen=True)
class TiltReward:
    """r(x_0) = Σ_k values_k · P(mode k | x_0) · exp(−½ Σ_d precisions_kd (x_d − centers_kd)²).

    Precisions of zero give a mode-level reward, equal values a Gaussian bump (fine detail), and other choices a
    mixed one. The reward lies in [0, max(values)], its conditional mean under the policy is exact at every σ, and
    π⁺ ∝ r·π is again a mixture.

    Parameters
    ----------
    policy : GaussianMixture
        π, with k modes in d dimensions.
    values : Tensor, shape (k,)
        Value of each mode, non-negative.
    centers, precisions : Tensor, shape (k, d)
        Center and precisions of each mode's bump.

    Examples
    --------
    >>> policy = GaussianMixture(torch.tensor([0.5, 0.5]), torch.tensor([[-2.0], [2.0]]), torch.full((2, 1), 0.01))
    >>> reward = TiltReward(policy, torch.tensor([0.0, 1.0]), policy.means, torch.zeros(2, 1))
    >>> reward(torch.tensor([[-2.0], [2.0]])).round(decimals=3).tolist()
    [0.0, 1.0]
    >>> reward.conditional(torch.tensor([[0.0]]), sigma=0.5).round(decimals=3).tolist()
    [0.5]
    """

    policy: GaussianMixture
    values: Tensor
    centers: Tensor
    precisions: Tensor

    def __call__(self, x0: Tensor) -> Tensor:
        """Reward of clean samples, shape (B,)."""
        return self.conditional(x0, 0.0)

    def conditional(self, x: Tensor, sigma: float) -> Tensor:
        """μ_{i,t}(x) = E[r(x_0) | x_σ = x] in closed form, shape (B,)."""
        slope, intercept, variances = self.policy.posterior(sigma)
        modes = self.policy.responsibilities(x, sigma)
        return (modes * self.values * self._bump_mean(x, slope, intercept, variances)).sum(-1)

    def positive(self) -> GaussianMixture:
        """π⁺ = r·π / E[r] (Eq. pi+def), a mixture with the same number of modes."""
        policy = self.policy
        origin = torch.zeros_like(policy.means[:1])
        bump = self._bump_mean(origin, torch.zeros_like(policy.means), policy.means, policy.variances)
        mass = policy.weights * self.values * bump[0]
        keep = mass > 0
        variances = 1 / (1 / policy.variances + self.precisions)
        means = variances * (policy.means / policy.variances + self.precisions * self.centers)
        return GaussianMixture(mass[keep] / mass.sum(), means[keep], variances[keep])

    def _bump_mean(self, x: Tensor, slope: Tensor, intercept: Tensor, variances: Tensor) -> Tensor:
        """E[bump_k(y)] for y ~ N(slope_k x + intercept_k, variances_k), shape (B, k)."""
        widened = 1 + self.precisions * variances
        distance = _quadratic(x, self.precisions / widened, slope, intercept - self.centers)
        return torch.exp(-0.5 * (distance + widened.log().sum(-1)))


def _quadratic(x: Tensor, weight: Tensor, slope: Tensor, intercept: Tensor) -> Tensor:
    """Σ_d weight_kd (slope_kd x_d + intercept_kd)² as matrix products, shape (B, k)."""
    square = x**2 @ (weight * slope**2).T
    return square + 2 * x @ (weight * slope * intercept).T + (weight * intercept**2).sum(-1)


def score_all(rewards: list[TiltReward]) -> Callable[[Tensor], Tensor]:
    """One scorer for several rewards: clean samples (B, d) to an (m, B) tensor."""
    return lambda x0: torch.stack([reward(x0) for reward in rewards])


def gaussian_divergence(reward: TiltReward, sigmas: list[float], alpha: float) -> Tensor:
    """D_{i,t} = D_α(π_{i,t}⁺ ‖ π_t) in closed form for a policy of one Gaussian, shape (T+1,).

    This is the Rényi divergence of two diagonal Gaussians; at α = 1 it is the KL divergence.
    """
    if reward.policy.weights.numel() != 1:
        raise RecastError(
            f"the closed form needs a policy of one Gaussian, not of {reward.policy.weights.numel()} modes"
        )
    levels = []
    for sigma in sigmas:
        tilted, base = reward.positive().diffused(sigma), reward.policy.diffused(sigma)
        distance = (tilted.means - base.means) ** 2
        if alpha == 1:
            ratio = tilted.variances / base.variances
            terms = 0.5 * (ratio - 1 - ratio.log() + distance / base.variances)
        else:
            mixed = alpha * base.variances + (1 - alpha) * tilted.variances
            logs = mixed.log() - (1 - alpha) * tilted.variances.log() - alpha * base.variances.log()
            terms = 0.5 * alpha * distance / mixed - 0.5 * logs / (alpha - 1)
        levels.append(terms.sum())
    return torch.stack(levels)
