"""The exact test of timing, and the identity behind it: a gain is the squared signal of DiffusionNFT's target."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from recast.flow.mixture import GaussianMixture, TiltReward, gaussian_divergence

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/method/when.md"


@pytest.fixture(scope="module")
def credit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("credit", ROOT / "benchmarks/credit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("sigma", [0.2, 0.5, 0.9])
def test_a_divergence_falls_by_the_squared_difference_of_the_velocities(alpha: float, sigma: float) -> None:
    """dD_α/dσ = −α·(1−σ)/σ · E‖v⁺ − v‖² over the law ∝ π^{1−α}·(π⁺)^α, in closed form for two Gaussians."""
    policy = GaussianMixture(*(torch.tensor(x, dtype=torch.float64) for x in ([1.0], [[0.5, -1.0]], [[0.3, 0.8]])))
    bump = (torch.tensor(x, dtype=torch.float64) for x in ([1.0], [[0.9, -0.2]], [[2.0, 0.7]]))
    reward = TiltReward(policy, *bump)
    step = 1e-5
    low, high = gaussian_divergence(reward, [sigma - step, sigma + step], alpha)
    plus, old = reward.positive().diffused(sigma), policy.diffused(sigma)
    precision = (1 - alpha) / old.variances + alpha / plus.variances
    mean = ((1 - alpha) * old.means / old.variances + alpha * plus.means / plus.variances) / precision
    zero, one = torch.zeros_like(mean), torch.ones_like(mean)
    offset, slope = (reward.positive()(x, sigma) - policy(x, sigma) for x in (zero, one))
    slope = slope - offset
    square = ((slope * mean + offset) ** 2 + slope**2 / precision).sum()
    assert float((high - low) / (2 * step)) == pytest.approx(float(-alpha * (1 - sigma) / sigma * square), rel=1e-6)


def test_the_signal_is_the_gradient_of_the_conditional_reward(credit: ModuleType) -> None:
    world, sigma = credit.world(4, 0), 0.4
    x = world.policy.diffused(sigma).sample(32, torch.Generator().manual_seed(1)).requires_grad_()
    for i, reward in enumerate(world.prompt.rewards):
        (gradient,) = torch.autograd.grad(reward.conditional(x, sigma).sum(), x)
        expected = -sigma / (1 - sigma) * gradient / world.scale[i]
        torch.testing.assert_close(world.signal(x, sigma)[:, i].detach(), expected)


def test_the_signal_of_every_reward_adds_up_to_one(credit: ModuleType) -> None:
    """∫ 2·(1−σ)/σ · E‖Δ‖² dσ is the variance of a standardized reward, whatever the reward."""
    world, generator = credit.world(4, 0), torch.Generator().manual_seed(0)
    total = torch.zeros(3, dtype=torch.float64)
    edges = torch.linspace(0, 1, 101, dtype=torch.float64).tolist()
    for low, high in zip(edges[:-1], edges[1:], strict=True):
        sigma = (low + high) / 2
        x = world.policy.diffused(sigma).sample(2048, generator)
        total += (high - low) * 2 * (1 - sigma) / sigma * world.signal(x, sigma).square().sum(-1).mean(0)
    assert total.tolist() == pytest.approx([1, 1, 1], abs=0.06)


def test_the_regression_finds_the_exact_signal(credit: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a noisy level the features contain it: the error of the fit is only its noise, which falls as 1/N."""
    monkeypatch.setattr(credit, "REPEATS", 2)
    world, sigmas = credit.world(4, 0), [0.0, 0.85, 1.0]
    x = world.policy.diffused(0.85).sample(1000, torch.Generator().manual_seed(2))
    exact, errors = world.signal(x, 0.85), []
    for images in (1000, 16000):
        fields = credit.solve(credit.normal_equations(world, sigmas, images, seed=3), 1e-6)
        fit = torch.einsum("nf,rfid->rnid", credit.features(world.policy, x, 0.85), fields[0])
        errors.append(float((fit - exact).square().sum(-1).mean() / exact.square().sum(-1).mean()))
        signal, noise = credit.energies(world, sigmas, fields, seed=4)[:, :, 0]
        assert signal.mean() == pytest.approx(float(exact.square().sum(-1).mean()), rel=0.15)
        assert noise.mean() == pytest.approx(float((fit - exact).square().sum(-1).mean()), rel=0.6)
    assert errors[1] < 0.03
    assert errors[0] / errors[1] == pytest.approx(16, rel=0.5)


def test_static_without_noise_is_the_tilt_of_the_summed_reward(
    credit: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To first order in η the sum of rewards rises by its covariance with the summed advantage."""
    monkeypatch.setattr(credit, "ETAS", (-0.02, 0.02))
    monkeypatch.setattr(credit, "SAMPLES", 2048)
    world, sigmas = credit.world(4, 1), np.linspace(0, 1, 61).tolist()
    update = credit.exact(world, sigmas, np.full((3, 60), 1 / 3))
    low, high = credit.score(world, sigmas, update, seed=0, repeats=1)[:, 0]
    scores = world.rewards(world.policy.sample(100_000, torch.Generator().manual_seed(5)))
    advantage = (scores / world.scale).mean(-1)
    covariance = float(torch.cov(torch.stack([advantage, scores.sum(-1)]))[0, 1])
    assert (high - low) / 0.04 == pytest.approx(covariance, rel=0.08)


def test_a_step_size_is_chosen_on_the_other_worlds(credit: ModuleType) -> None:
    values = np.zeros((4, len(credit.ETAS), 1))
    values[0::2, 1] = 1.0  # the even worlds favor the second η, the odd ones the third
    values[1::2, 2] = 1.0
    values[:, 5] = 0.4
    found = credit.summary({"static": values, "other": values + np.array([0.1, 0.3, 0.1, 0.3])[:, None, None]})
    assert found["static"]["mean"] == 0
    assert found["static"]["eta"] == [credit.ETAS[2], credit.ETAS[1]]
    assert found["other"]["difference"] == pytest.approx(0.2)
    assert found["other"]["interval"] == pytest.approx([0.2 - 0.18374, 0.2 + 0.18374], abs=1e-4)


def test_all_methods_act_with_the_same_strength(credit: ModuleType) -> None:
    worlds, sigmas = [credit.world(4, seed) for seed in range(2)], [0.0, 0.1, 0.4, 0.8, 1.0]
    shares = credit.shares(credit.curves(worlds, sigmas), 0)
    assert tuple(shares) == credit.METHODS
    assert shares["static"] == pytest.approx(np.full((3, 4), 1 / 3))
    for each in (*shares.values(), *credit.filters(np.random.default_rng(0).random((2, 3, 4))).values()):
        assert np.sqrt((each**2).mean()) == pytest.approx(1 / 3)
    fields = [credit.solve(credit.normal_equations(world, sigmas, 32, seed=0), 1.0) for world in worlds]
    update = credit.fitted(worlds[0], sigmas, fields[0], shares["matched"])
    found = credit.score(worlds[0], sigmas, update, seed=0)
    assert found.shape == (len(credit.ETAS), credit.REPEATS)
    assert ((found > 0) & (found < 3)).all()


def test_the_filter_follows_the_signal_in_noise_and_the_budget_without(credit: ModuleType) -> None:
    signal = np.array([[1.0, 2.0], [3.0, 2.0]])
    noisy = credit.filters(np.stack([signal, np.full((2, 2), 1e6)]))["filter"]
    assert noisy / noisy.sum() == pytest.approx(signal / signal.sum(), rel=1e-4)
    clear = credit.filters(np.stack([signal, np.full((2, 2), 1e-6)]))["filter"]
    assert clear == pytest.approx(np.full((2, 2), 0.5), rel=1e-5)


def test_the_break_even_is_interpolated_in_log_images(credit: ModuleType) -> None:
    cells = [
        {"images": images, "methods": {"matched": {"difference": difference}}}
        for images, difference in [(100, 0.2), (10000, -0.2), (None, -0.3)]
    ]
    assert credit.crossing(cells, "matched") == pytest.approx(1000)
    assert credit.crossing(cells[:1], "matched") is None


def results() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "benchmarks/results/credit.json").read_text(encoding="utf-8"))["grids"]
    return found


@pytest.mark.parametrize("cell", [0, 1])
def test_with_few_images_and_an_even_grid_timing_pays_and_its_controls_do_not(cell: int) -> None:
    found = results()["d 8, T 10, shift 1"]["cells"][cell]["methods"]
    assert all(found[method]["interval"][0] > 0 for method in ("sinkhorn", "matched"))
    assert all(found[method]["interval"][1] < 0 for method in ("reversed", "shuffled", "matched-reversed"))


def test_the_page_has_the_numbers_of_the_results() -> None:
    """Every row `| grid | N | … |` of the page's tables holds the numbers under the names of its header."""
    rows, header = 0, []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [part.strip() for part in line.strip("|").split("|")]
        if line.startswith("| grid |"):
            header = [name.strip("`") for name in cells]
        elif header and (found := results().get(cells[0])) is not None:
            images = None if cells[1] == "∞" else int(cells[1].replace(",", ""))
            methods = next(each["methods"] for each in found["cells"] if each["images"] == images)
            rows += 1
            for name, text in zip(header[2:], cells[2:], strict=True):
                assert text.replace("−", "-").strip("*") == printed(methods, name), line
    assert rows == sum(len(found["cells"]) for found in results().values()) * 2 - len(results())


def printed(methods: dict[str, Any], name: str) -> str:
    """A method's number as the page has it: the mean of static, and the difference of the others ± its half-width."""
    if name == "static":
        return f"{methods['static']['mean']:.3f}"
    found = methods["filter"]["over columns"] if name == "timing on top" else methods[name]
    return f"{found['difference']:+.3f} ± {found['interval'][1] - found['difference']:.3f}"


def test_no_number_of_a_row_is_left_out_of_the_table() -> None:
    assert len(re.findall(r"^\| grid \|", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)) == 2
