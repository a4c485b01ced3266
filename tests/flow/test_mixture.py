"""The exact world against quadrature, Bayes' rule, and the paper's Theorem 1."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from recast.errors import RecastError
from recast.flow.mixture import GaussianMixture, TiltReward, gaussian_divergence, score_all

F = torch.float64
LINE = torch.linspace(-12, 12, 24_001, dtype=F)[:, None]
STEP = float(LINE[1, 0] - LINE[0, 0])
ALPHAS = (0.25, 0.5, 0.75, 1.5, 2.0, 4.0)


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F)


def mixture() -> GaussianMixture:
    return GaussianMixture(tensor(0.3, 0.5, 0.2), tensor(-1.5, 0.2, 1.8)[:, None], tensor(0.1, 0.3, 0.05)[:, None])


def rewards() -> dict[str, TiltReward]:
    policy = mixture()
    centers, none = policy.means + 0.3, torch.zeros(3, 1, dtype=F)
    return {
        "mode": TiltReward(policy, tensor(1.0, 0.1, 0.4), centers, none),
        "mixed": TiltReward(policy, tensor(1.0, 0.2, 0.4), centers, none + 2.0),
        "fine": TiltReward(policy, torch.ones(3, dtype=F), centers, none + 8.0),
    }


def integrate(values: Tensor) -> float:
    return float(values.sum() * STEP)


def divergence(reward: TiltReward, sigma: float, alpha: float) -> float:
    """D_α(π⁺_σ ‖ π_σ) by quadrature over the densities."""
    plus, old = (law.diffused(sigma).log_density(LINE) for law in (reward.positive(), reward.policy))
    return math.log(integrate((alpha * plus + (1 - alpha) * old).exp())) / (alpha - 1)


@pytest.mark.parametrize("sigma", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_velocity_is_the_regression_target(sigma: float) -> None:
    """v(x) = E[ε − x_0 | x_σ = x], by quadrature over x_0."""
    policy = mixture()
    x = torch.linspace(-2, 2, 9, dtype=F)[:, None]
    if sigma == 0:
        torch.testing.assert_close(policy(x, 0.0), -x)
        return
    x0 = LINE[:, 0]
    log_joint = policy.log_density(LINE) - 0.5 * ((x - (1 - sigma) * x0) / sigma) ** 2
    weights = log_joint.softmax(-1)
    noise = (x - (1 - sigma) * x0) / sigma
    expected = (weights * (noise - x0)).sum(-1, keepdim=True)
    torch.testing.assert_close(policy(x, sigma), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["mode", "mixed", "fine"])
def test_the_density_ratio_is_the_conditional_reward_over_its_mean(name: str) -> None:
    """Eq. alpha-reward, pointwise: π⁺_t / π_t = μ_t / Z."""
    reward = rewards()[name]
    mean = integrate(reward(LINE) * reward.policy.log_density(LINE).exp())
    x = torch.linspace(-2, 2, 21, dtype=F)[:, None]
    for sigma in (0.0, 0.05, 0.4, 0.95, 1.0):
        plus, old = (law.diffused(sigma).log_density(x) for law in (reward.positive(), reward.policy))
        torch.testing.assert_close((plus - old).exp(), reward.conditional(x, sigma) / mean, atol=1e-9, rtol=1e-7)


def test_positive_is_reward_times_policy() -> None:
    for reward in rewards().values():
        product = reward(LINE) * reward.policy.log_density(LINE).exp()
        torch.testing.assert_close(
            reward.positive().log_density(LINE).exp(), product / integrate(product), atol=1e-9, rtol=1e-6
        )


@pytest.mark.parametrize("name", ["mode", "mixed", "fine"])
@pytest.mark.parametrize("alpha", [0.5, 2.0, 4.0])
def test_theorem_1_by_finite_differences(name: str, alpha: float) -> None:
    """dD_α/dσ = −(g²/2)·α·E_tilted[‖∇ log π⁺/π‖²] with g² = 2σ/(1−σ) (σ itself as time)."""
    reward = rewards()[name]
    for sigma in (0.15, 0.4, 0.8):
        left = (divergence(reward, sigma + 1e-4, alpha) - divergence(reward, sigma - 1e-4, alpha)) / 2e-4
        x = LINE.clone().requires_grad_()
        plus, old = (law.diffused(sigma).log_density(x) for law in (reward.positive(), reward.policy))
        (score,) = torch.autograd.grad((plus - old).sum(), x)
        tilted = (alpha * plus + (1 - alpha) * old).detach().exp()
        fisher = integrate(tilted * score[:, 0] ** 2) / integrate(tilted)
        right = -0.5 * (2 * sigma / (1 - sigma)) * alpha * fisher
        assert left < 0
        np.testing.assert_allclose(left, right, rtol=1e-4)


@pytest.mark.parametrize("name", ["mode", "mixed", "fine"])
def test_divergence_falls_with_noise_and_rises_with_alpha(name: str) -> None:
    reward = rewards()[name]
    table = np.array([[divergence(reward, s, a) for s in (0, 0.1, 0.3, 0.6, 0.9, 1.0)] for a in ALPHAS])
    assert (np.diff(table, axis=1) <= 1e-9).all()
    assert (np.diff(table, axis=0) >= -1e-9).all()
    np.testing.assert_allclose(table[:, -1], 0, atol=1e-9)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.5, 2.0, 8.0])
def test_gaussian_closed_form_against_quadrature(alpha: float) -> None:
    policy = GaussianMixture(tensor(1.0), tensor(0.4)[:, None], tensor(0.5)[:, None])
    reward = TiltReward(policy, tensor(1.0), tensor(1.2)[:, None], tensor(3.0)[:, None])
    sigmas = [0.0, 0.2, 0.5, 0.9, 1.0]
    exact = gaussian_divergence(reward, sigmas, alpha).numpy()
    near = [0.99999, 1.00001] if alpha == 1 else [alpha]  # the KL limit from both sides
    quadrature = np.mean([[divergence(reward, s, a) for s in sigmas] for a in near], axis=0)
    np.testing.assert_allclose(exact, quadrature, atol=1e-7)


def test_samples_have_the_mixtures_moments() -> None:
    policy = mixture()
    x = policy.sample(200_000, torch.Generator().manual_seed(0))
    mean = float((policy.weights[:, None] * policy.means).sum())
    second = float((policy.weights[:, None] * (policy.means**2 + policy.variances)).sum())
    np.testing.assert_allclose([x.mean(), (x**2).mean()], [mean, second], atol=0.02)


def test_shapes_and_errors() -> None:
    scores = score_all(list(rewards().values()))(LINE[:7])
    assert scores.shape == (3, 7)
    assert ((scores >= 0) & (scores <= 1)).all()
    with pytest.raises(RecastError, match="positive"):
        GaussianMixture(tensor(0.5, -0.5), torch.zeros(2, 1), torch.ones(2, 1))
    with pytest.raises(RecastError, match=r"means \(k, d\)"):
        GaussianMixture(tensor(0.5), torch.zeros(2, 1), torch.ones(2, 1))
    with pytest.raises(RecastError, match="not of 3 modes"):
        gaussian_divergence(rewards()["fine"], [0.0, 1.0], 2.0)
