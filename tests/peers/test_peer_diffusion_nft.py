"""DiffusionNFT's own code beside ours: solver, tracker, decay, and its `main` with W, replayed by our loss.

Run against NVlabs/DiffusionNFT 24af555. Tolerances are those of float32 sums of some hundred terms; `pytest -s` prints
what is found.
"""

import ast
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkouts import checkout, copied, run

from recast import WeightMatrix, config
from recast.config import TrainConfig
from recast.flow import families, sampling
from recast.flow.lora import Adapters
from recast.flow.policy import Condition
from recast.integrations import diffusion_nft, scripts
from recast.train import advantage, nft, optimizers
from recast.train.decay import old_decay

NAME = "DiffusionNFT"


def theirs(file: str) -> Any:
    """One file of the checkout as a module."""
    path = checkout(NAME) / file
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_solver(weights: Path) -> None:
    """dpm2 over a velocity with a closed form."""
    solver = theirs("flow_grpo/diffusers_patch/solver.py")
    grid = WeightMatrix.load(weights).sigmas.tolist()
    start = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))

    def velocity(x: torch.Tensor, sigma: Any) -> torch.Tensor:
        return torch.tanh(x) * (0.3 + float(sigma)) - 0.5 * x

    down = torch.tensor(grid[::-1])
    found, _, _ = solver.run_sampling(velocity, start, down, "dpm2", True, 0.7)
    ours = sampling.sample(velocity, start, grid, method="dpm2")
    print(f"solver {float((found - ours).abs().max() / ours.abs().max()):.0e}")
    torch.testing.assert_close(found, ours, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("global_std", [True, False])
def test_tracker(global_std: bool, weights: Path) -> None:
    """The mode `step` is their tracker on the mixed rewards, in float64."""
    tracker = theirs("flow_grpo/stat_tracking.py").PerPromptStatTracker(global_std)
    W, rng = WeightMatrix.load(weights), np.random.default_rng(0)
    values, groups = rng.normal(size=(24, 2)), np.repeat(np.arange(6), 4)
    found = tracker.update([f"prompt {group}" for group in groups], W.mix(values))
    ours = advantage.advantages(values, groups, W, "step", "batch" if global_std else "group")
    print(f"tracker {np.abs(found - ours).max():.0e}")
    np.testing.assert_allclose(found, ours, rtol=1e-11, atol=1e-12)


def test_decay() -> None:
    """All three schedules, exactly."""
    text = (checkout(NAME) / "scripts/train_nft_sd3.py").read_text(encoding="utf-8")
    (node,) = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name == "return_decay"]
    names: dict[str, Any] = {}
    exec(compile(ast.Module([node], []), "return_decay", "exec"), names)
    for kind in range(3):
        assert [names["return_decay"](step, kind) for step in range(600)] == [
            old_decay(step, kind) for step in range(600)
        ]


@pytest.fixture(scope="module")
def trained(model: Path, weights: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two epochs of their `main` with the lines that `recast integrate` inserts."""
    checkout(NAME, "absl", "ml_collections")
    folder = copied(NAME, tmp_path_factory.mktemp("nft") / "repository", "scripts", "flow_grpo", "config")
    scripts.apply(diffusion_nft.PEER, folder / diffusion_nft.PEER.script)
    out = folder.parent / "kept.pt"
    return dict(run("run_diffusion_nft.py", folder, model, out, RECAST_WEIGHTS=str(weights)))


def test_advantages_are_those_of_w_at_each_slot(trained: dict[str, Any], weights: Path) -> None:
    W = WeightMatrix.load(weights)
    by_slot = 0.0
    for pair in trained["pairs"]:
        table = trained["tables"][pair["epoch"]]
        rewards = np.stack([table["rewards"][name] for name in W.rewards], 1)
        assert np.isnan(rewards).any(), "a reward that does not apply is part of this"
        members = np.unique(table["prompts"], return_inverse=True)[1]
        ours = torch.from_numpy(advantage.advantages(rewards, members, W, "step"))[pair["rows"]]
        expected = advantage.by_sigma(ours, W, pair["timesteps"][:, None] / 1000)[:, 0]
        torch.testing.assert_close(pair["advantages"], expected, rtol=1e-9, atol=1e-9)
        by_slot = max(by_slot, float((ours[:, pair["slot"]] - expected).abs().max()))
    assert by_slot > 0.1, "a table read by slot is something else"


def test_two_epochs_have_our_gradients(trained: dict[str, Any], model: Path) -> None:
    """Our loss, optimizer, decay and adapters on what they trained on: every gradient and loss."""
    policy, adapters, keys = started(trained, model)
    optimizer = optimizers.make(TrainConfig(), adapters.parameters)
    losses = [each["total_loss"] for each in trained["logged"] if "total_loss" in each]
    slots = len(trained["pairs"]) // len(trained["gradients"])
    for step, expected in enumerate(trained["gradients"]):
        total = 0.0
        for pair in trained["pairs"][slots * step : slots * (step + 1)]:
            loss = terms(policy, adapters, pair)
            (loss / slots).backward()
            total += float(loss.detach()) / slots
        ours = torch.cat([each.grad.flatten() for each in adapters.parameters])
        reference = torch.cat([expected[key].flatten() for key in keys])
        assert float(reference.norm()) > 0
        off = float((ours - reference).norm() / reference.norm())
        print(f"step {step}: gradient {off:.0e}, loss {abs(total / losses[step] - 1):.0e}")
        assert off < 1e-4
        assert total == pytest.approx(losses[step], rel=1e-5)
        torch.nn.utils.clip_grad_norm_(adapters.parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        last = step + 1 == len(trained["gradients"]) or trained["pairs"][slots * (step + 1)]["epoch"] > pair["epoch"]
        if last:
            adapters.update_old(old_decay(step + 1, 1))


def test_without_the_lookup_the_gradient_is_another(trained: dict[str, Any], model: Path, weights: Path) -> None:
    """The table read by slot, as if DiffusionNFT did not shuffle: the first optimizer step."""
    W, table = WeightMatrix.load(weights), trained["tables"][0]
    rewards = np.stack([table["rewards"][name] for name in W.rewards], 1)
    members = np.unique(table["prompts"], return_inverse=True)[1]
    ours = torch.from_numpy(advantage.advantages(rewards, members, W, "step"))
    policy, adapters, keys = started(trained, model)
    slots = len(trained["pairs"]) // len(trained["gradients"])
    for pair in trained["pairs"][:slots]:
        (terms(policy, adapters, {**pair, "advantages": ours[pair["rows"], pair["slot"]]}) / slots).backward()
    found = torch.cat([each.grad.flatten() for each in adapters.parameters])
    reference = torch.cat([trained["gradients"][0][key].flatten() for key in keys])
    off = float((found - reference).norm() / reference.norm())
    print(f"by slot: gradient {off:.0%}")
    assert off > 0.01


def started(trained: dict[str, Any], model: Path) -> tuple[Any, Adapters, list[str]]:
    """Our policy with the adapters that they started from, and the names of their parameters."""
    policy = families.load(config.policy(model=str(model), guidance=1.0))
    adapters = Adapters(policy.network, policy.targets, 32, 64)
    names = {id(each): name for name, each in policy.network.named_parameters()}
    keys = [names[id(each)].replace(".default.", ".") for each in adapters.parameters]
    assert sorted(keys) == sorted(trained["start"])
    with torch.no_grad():
        for key, each in zip(keys, adapters.parameters, strict=True):
            each.copy_(trained["start"][key])
    adapters.update_old()
    return policy, adapters, keys


def terms(policy: Any, adapters: Adapters, pair: dict[str, Any]) -> torch.Tensor:
    """Our loss of the pairs of one of their micro-batches."""
    condition = Condition({"embeds": pair["embeds"], "pooled": pair["pooled"]})
    clean, noise, sigma = pair["x0"], pair["noise"], pair["timesteps"] / 1000
    level = sigma[:, None, None, None]
    x = (1 - level) * clean + level * noise
    with torch.no_grad():
        with adapters.using("old"):
            old = policy.velocity(x, sigma, condition)
        with adapters.using("base"):
            base = policy.velocity(x, sigma, condition)
    v = policy.velocity(x, sigma, condition)
    r = advantage.optimality(pair["advantages"]).float()
    return nft.loss(v, old, clean, noise, sigma, r, v_base=base, kl_weight=1e-4).total.mean()
