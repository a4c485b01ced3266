"""verl-omni's advantage, actor batch, engine step and losses with W by its external_lib.

Run against verl-project/verl-omni a1139ba with verl 8a69493, the commit it pins. Its rollout (vLLM, Ray, GPUs) was not.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkouts import checkout, run

from recast import WeightMatrix
from recast.train import advantage, nft

MEMBERS = torch.arange(12) // 4


@pytest.fixture(scope="module")
def kept(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    repository = checkout("verl-omni", "ray", "tensordict", "hydra", "transfer_queue")
    out = tmp_path_factory.mktemp("verl") / "kept.pt"
    return dict(run("run_verl_omni.py", repository, checkout("verl"), out, RECAST_WEIGHTS=str(weights)))


def table(kept: dict[str, Any], W: WeightMatrix) -> torch.Tensor:
    found: torch.Tensor = advantage.advantages(kept["scores"], MEMBERS, W, "reward")
    return found


def test_flow_grpo(kept: dict[str, Any], weights: Path) -> None:
    found, W = kept["grpo"], WeightMatrix.load(weights)
    expected = table(found, W).flip(1)  # its slots run from the noisiest step
    torch.testing.assert_close(found["advantages"], expected.float(), rtol=1e-6, atol=1e-7)
    assert torch.equal(found["returns"], found["advantages"])
    gradient = -expected.clamp(-5, 5).mean(0).float()  # of −A·exp(s) at s = 0
    torch.testing.assert_close(found["gradient"], gradient, rtol=1e-4, atol=1e-6)


def test_diffusion_nft(kept: dict[str, Any], weights: Path) -> None:
    """Shuffled slots have the advantage of their own timestep, which verl-omni cuts off to an integer."""
    found, W = kept["nft"], WeightMatrix.load(weights)
    sigmas = found["train_timesteps"] / 1000
    expected = advantage.by_sigma(table(found, W), W, sigmas)
    assert found["train_timesteps"].dtype == torch.long
    assert len({tuple(row) for row in found["train_timesteps"].tolist()}) > 1, "shuffled"
    torch.testing.assert_close(found["advantages"], expected.float(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found["reward_prob"], advantage.optimality(expected).float(), rtol=1e-6, atol=1e-7)


def test_an_engine_step_has_our_gradient(kept: dict[str, Any]) -> None:
    """Four slots of two micro-batches through their engine, over v = w·x."""
    found = kept["nft"]
    weight = torch.tensor(0.3, requires_grad=True)
    for slot in range(4):
        sigma, noise = found["train_timesteps"][:, slot].float() / 1000, found["noise"][:, slot]
        level = sigma[:, None, None, None]
        x = (1 - level) * found["clean"] + level * noise
        r = found["reward_prob"][:, slot]
        (nft.loss(weight * x, 0.2 * x, found["clean"], noise, sigma, r).total.mean() / 4).backward()
    assert weight.grad is not None
    print(f"engine step: gradient {abs(float(found['gradient'] / weight.grad) - 1):.0e}")
    torch.testing.assert_close(found["gradient"], weight.grad, rtol=1e-4, atol=1e-6)


def test_the_loss_is_ours_in_float64(kept: dict[str, Any]) -> None:
    """Value and gradient."""
    found = kept["loss"]
    inputs = {**found["inputs"], "v": found["inputs"]["v"].clone().requires_grad_(True)}
    ours = nft.loss(**inputs, kl_weight=1e-4).total.mean()
    ours.backward()
    off, steep = abs(float(ours.detach() / found["value"]) - 1), (inputs["v"].grad - found["gradient"]).abs().max()
    print(f"float64: loss {off:.0e}, gradient {float(steep):.0e}")
    torch.testing.assert_close(ours.detach(), found["value"], rtol=1e-13, atol=0)
    torch.testing.assert_close(inputs["v"].grad, found["gradient"], rtol=1e-11, atol=1e-15)
