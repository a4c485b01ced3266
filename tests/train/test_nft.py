"""The loss: values by hand, gradients that go where they should, and the optimum of the paper's theorem."""

import numpy as np
import pytest
import torch

from recast.flow.mixture import GaussianMixture, TiltReward
from recast.train import nft


def one(value: float) -> torch.Tensor:
    return torch.tensor([[value, 2 * value]], dtype=torch.float64)


def test_x0_form_by_hand() -> None:
    # β = ½, σ = ½: target = (1, 2) − (0.5, 1) = (0.5, 1); v⁺ = ½ v_old + ½ v, v⁻ = 1.5 v_old − ½ v.
    terms = nft.loss(one(0.4), one(0.2), one(0.5), one(1.0), torch.tensor([0.5]), torch.tensor([0.8]), beta=0.5, clip=5)
    plus, minus = np.array([0.5, 1.0]) - [0.3, 0.6], np.array([0.5, 1.0]) - [0.1, 0.2]
    expected = [np.mean((0.5 * error) ** 2) / np.mean(np.abs(0.5 * error)) for error in (plus, minus)]
    assert terms.positive.item() == pytest.approx(expected[0], rel=1e-12)
    assert terms.negative.item() == pytest.approx(expected[1], rel=1e-12)
    assert terms.policy.item() == pytest.approx((0.8 * expected[0] + 0.2 * expected[1]) * 5 / 0.5, rel=1e-7)
    assert terms.kl.item() == 0
    assert terms.total.item() == terms.policy.item()


def test_velocity_form_and_kl_term_by_hand() -> None:
    terms = nft.loss(
        *(one(0.4), one(0.2), one(0.5), one(1.0), torch.tensor([0.5]), torch.tensor([0.8], dtype=torch.float64)),
        beta=0.5,
        form="velocity",
        v_base=one(0.1),
        kl_weight=2.0,
    )
    plus, minus = np.array([0.5, 1.0]) - [0.3, 0.6], np.array([0.5, 1.0]) - [0.1, 0.2]
    assert terms.policy.item() == pytest.approx(0.8 * np.mean(plus**2) + 0.2 * np.mean(minus**2), rel=1e-12)
    assert terms.kl.item() == pytest.approx(2 * np.mean(np.array([0.3, 0.6]) ** 2), rel=1e-12)
    assert terms.total.item() == terms.policy.item() + terms.kl.item()


def test_the_self_normalizing_weight_is_a_constant_and_has_a_floor() -> None:
    v = one(0.4).requires_grad_()
    terms = nft.loss(v, one(0.2), one(0.5), one(1.0), torch.tensor([0.5]), torch.tensor([1.0]), beta=0.5, clip=1)
    (gradient,) = torch.autograd.grad(terms.total.sum(), v)
    error = np.array([0.1, 0.2])  # σ (target − v⁺), whose derivative by v is −σ β = −0.25
    weight = np.mean(np.abs(error))
    expected = 2 * error * -0.25 / 2 / weight / 0.5
    np.testing.assert_allclose(gradient[0].numpy(), expected, rtol=1e-6)
    exact = nft.loss(one(1.0), one(1.0), one(0.0), one(1.0), torch.tensor([0.5]), torch.tensor([0.5]))
    assert exact.positive.item() == pytest.approx(0.0, abs=1e-20)  # 0 / floor, not 0 / 0


def test_the_old_policy_and_the_base_get_no_gradient() -> None:
    v, old, base = (one(value).requires_grad_() for value in (0.4, 0.2, 0.1))
    terms = nft.loss(
        v, old, one(0.5), one(1.0), torch.tensor([0.5]), torch.tensor([0.3]), v_base=base, kl_weight=1.0, form="x0"
    )
    terms.total.sum().backward()
    assert v.grad is not None
    assert old.grad is None
    assert base.grad is None


def test_an_indifferent_sample_moves_nothing_from_the_old_policy() -> None:
    v = one(0.2).requires_grad_()
    terms = nft.loss(v, one(0.2), one(0.5), one(1.0), torch.tensor([0.7]), torch.tensor([0.5]))
    (gradient,) = torch.autograd.grad(terms.total.sum(), v)
    assert gradient.abs().max() < 1e-12


@pytest.mark.parametrize("beta", [0.1, 1.0])
@pytest.mark.parametrize("sigma", [0.2, 0.6, 0.9])
def test_the_optimum_is_the_old_velocity_plus_two_over_beta_times_delta(beta: float, sigma: float) -> None:
    """Eq. (nft-optimal), fitted in a mixture whose reward is a number a mode, so that Δ = α (v⁺ − v_old) is known."""
    old = GaussianMixture(
        torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64),
        torch.tensor([[-1.0], [0.5], [2.0]], dtype=torch.float64),
        torch.tensor([[0.2], [0.1], [0.3]], dtype=torch.float64),
    )
    zero = torch.zeros_like(old.means)
    reward = TiltReward(old, torch.tensor([0.1, 0.9, 0.5], dtype=torch.float64), zero, zero)
    x = torch.linspace(-1.5, 2.0, 7, dtype=torch.float64)[:, None]
    delta = reward.conditional(x, sigma)[:, None] * (reward.positive()(x, sigma) - old(x, sigma))
    expected = old(x, sigma) + 2 / beta * delta

    # x_0 | x_t on a fine grid around every mode: an exact expectation, not a sample.
    nodes = torch.linspace(-9, 9, 401, dtype=torch.float64)
    mass = torch.exp(-0.5 * nodes**2)
    slope, intercept, variances = (part[:, 0] for part in old.posterior(sigma))
    clean = (slope * x + intercept)[:, :, None] + variances.sqrt()[None, :, None] * nodes
    weights = old.responsibilities(x, sigma)[:, :, None] * (mass / mass.sum())
    noise = (x[:, :, None] - (1 - sigma) * clean) / sigma
    shape = clean.shape
    r = reward(clean.reshape(-1, 1))

    fitted = old(x, sigma).clone().requires_grad_()
    optimizer = torch.optim.LBFGS([fitted], max_iter=200, tolerance_grad=1e-13, tolerance_change=1e-16)

    def objective() -> torch.Tensor:
        optimizer.zero_grad()
        v, v_old = (each[:, :, None].expand(shape).reshape(-1, 1) for each in (fitted, old(x, sigma)))
        flat = (clean.reshape(-1, 1), noise.reshape(-1, 1))
        terms = nft.loss(v, v_old, *flat, torch.tensor([sigma]), r, beta=beta, form="velocity")
        value = (terms.total * weights.reshape(-1)).sum() / beta**2
        value.backward()
        return value

    optimizer.step(objective)
    assert expected.sub(old(x, sigma)).abs().max() > 0.1  # there is something to find
    torch.testing.assert_close(fitted.detach(), expected, rtol=1e-6, atol=1e-6)
