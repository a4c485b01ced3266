"""docs/guides/integrate.md: every block of it runs, and looks W up by σ where slots are shuffled."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import recast
from recast.train.advantage import advantages, by_sigma, optimality

PAGE = (Path(__file__).parents[1] / "docs/guides/integrate.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
GIVEN = {"np": np, "torch": torch, "advantages": advantages, "by_sigma": by_sigma, "optimality": optimality}


def run(words: str, **names: Any) -> dict[str, Any]:
    """What the one block with `words` in it leaves, run with `names`."""
    (code,) = [block for block in BLOCKS if words in block]
    names = {**GIVEN, **names} if names else {}
    exec(compile(code, f"docs/guides/integrate.md: {words}", "exec"), names)
    return names


@pytest.fixture(name="W")
def weights() -> recast.WeightMatrix:
    D = [[0.9, 0.8, 0.5, 0.2, 0], [0.9, 0.3, 0.1, 0.05, 0]]
    return recast.weigh(recast.GainCurves(("clip", "ocr"), [0, 0.3, 0.6, 0.8, 1], D), {"clip": 1, "ocr": 2})


@pytest.fixture
def slots(W: recast.WeightMatrix) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores (6, 2) of two prompts' three images, and each one's own order of the steps: W's columns (6, 4)."""
    generator = torch.Generator().manual_seed(3)
    order = torch.stack([torch.randperm(W.steps, generator=generator) for _ in range(6)])
    assert (order != torch.arange(W.steps)).any(1).all(), "one that is not shuffled would show nothing"
    return torch.randn(6, 2, generator=generator, dtype=torch.float64), order


def timesteps(W: recast.WeightMatrix, order: torch.Tensor) -> torch.Tensor:
    """A scheduler's, in its float32."""
    return torch.as_tensor(1000 * W.sigmas[1:], dtype=torch.float32)[order]


def unshuffled(values: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Slots back in the order of W's columns, by the permutation and not by σ."""
    return torch.empty_like(values).scatter_(1, order, values)


def test_no_block_is_forgotten() -> None:
    assert len(BLOCKS) == 6
    assert all(len(block.strip().splitlines()) <= 25 for block in BLOCKS)


def test_load_and_mix(W: recast.WeightMatrix, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    W.save(tmp_path / "weights.json")
    monkeypatch.chdir(tmp_path)
    r = run("WeightMatrix.load")["r"]
    assert r.shape == (2, 2)
    assert r[0] == pytest.approx(4 * np.array([0.31, 0.80]) @ W.matrix[:, [3, 0]])  # σ = 1 and 0.3
    assert r[1] == pytest.approx(0.29)  # the only reward that applies has all the weight


def test_own_loop() -> None:
    """Shuffled slots, put back in order, are the table; the table read by slot is something else."""
    left = run("np.random.default_rng")
    table, sigmas, advantage = left["table"] / left["scale"], left["sigmas"], left["advantage"]
    assert np.isfinite(advantage).all()
    in_order = np.take_along_axis(advantage, np.argsort(sigmas, 1), 1)
    np.testing.assert_allclose(in_order, table, rtol=1e-12)
    assert np.abs(advantage - table).max() > 0.1, "by slot"
    for group in range(3):
        np.testing.assert_allclose(in_order[left["groups"] == group].mean(0), 0, atol=1e-12)
    assert left["r"].min() >= 0
    assert left["r"].max() <= 1


def test_diffusion_nft(W: recast.WeightMatrix, slots: tuple[torch.Tensor, torch.Tensor]) -> None:
    scores, order = slots
    table = torch.randn(6, W.steps, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    collated = {"rewards": {"ocr": scores[:, 1], "clip": scores[:, 0], "avg": scores.sum(1), "accuracy": scores[:, 0]}}
    shuffled = {"advantages": table.clone(), "timesteps": timesteps(W, order)}
    run("collated_samples", W=W, collated_samples=collated, shuffled_filtered_samples=shuffled)
    assert torch.equal(collated["rewards"]["avg"], W.mix(scores))
    assert torch.equal(unshuffled(shuffled["advantages"], order), table)
    assert not torch.equal(shuffled["advantages"], table), "by slot"


def test_flow_grpo(W: recast.WeightMatrix) -> None:
    table = torch.arange(24.0).reshape(6, 4)
    samples = {"advantages": table.clone(), "timesteps": timesteps(W, torch.tensor([3, 2, 1, 0]).expand(6, 4))}
    run('samples["timesteps"] / 1000  # 2. right', W=W, samples=samples)
    assert torch.equal(samples["advantages"], table.flip(1)), "the sampler's first step is W's last column"
    window = {"advantages": table.clone(), "timesteps": timesteps(W, torch.tensor([2, 1]).expand(6, 2))}
    run('samples["timesteps"] / 1000  # 2. right', W=W, samples=window)
    assert torch.equal(window["advantages"], table[:, [2, 1]])


def test_flow_factory(W: recast.WeightMatrix, slots: tuple[torch.Tensor, torch.Tensor]) -> None:
    scores, order = slots
    groups = np.array([0, 0, 0, 1, 1, 1])
    found = {"ocr": scores[:, 1].numpy(), "clip": scores[:, 0].numpy()}
    processor = SimpleNamespace(
        collect_group_rewards=lambda samples, rewards: (rewards, groups, groups), _to_local=torch.as_tensor
    )
    step = SimpleNamespace(times=SimpleNamespace(sigma={"latent": timesteps(W, order)[:, 1] / 1000}))
    left = run("recast_advantages", W=W, step=step, adv=torch.arange(24.0).reshape(6, 4))
    assert torch.equal(left["adv"], torch.arange(24.0).reshape(6, 4)[torch.arange(6), order[:, 1]])

    samples = [SimpleNamespace(extra_kwargs={}) for _ in groups]
    table = left["recast_advantages"](processor, samples, found, True)
    assert torch.equal(table, advantages(scores, torch.as_tensor(groups), W, "reward", "group"))
    assert torch.equal(torch.stack([sample.extra_kwargs["advantage"] for sample in samples]), table)
    processor.collect_group_rewards = lambda samples, rewards: (rewards, groups)  # as it was earlier
    assert torch.equal(left["recast_advantages"](processor, [], found, False), table)


def test_verl_omni(W: recast.WeightMatrix, slots: tuple[torch.Tensor, torch.Tensor]) -> None:
    scores, order = slots
    uid = np.array(["b", "b", "b", "a", "a", "a"], dtype=object)
    extra = {f"reward/{name}": scores[:, i].numpy().astype(object) for i, name in enumerate(W.rewards)}
    held: dict[str, Any] = {"all_timesteps": timesteps(W, order), "train_timesteps": timesteps(W, order).long()}
    batch = SimpleNamespace(non_tensor_batch={"uid": uid, **extra}, batch=held)
    run("non_tensor_batch", W=W, batch=batch, adv_clip_max=5.0)
    table = advantages(scores, torch.tensor([1, 1, 1, 0, 0, 0]), W, "reward").float()
    assert torch.equal(unshuffled(held["advantages"], order), table)
    assert torch.equal(held["returns"], held["advantages"])
    assert unshuffled(held["reward_prob"], order).numpy() == pytest.approx(0.5 + table.numpy() / 10)
