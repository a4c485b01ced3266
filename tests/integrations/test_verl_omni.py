"""verl-omni's hooks on stand-ins for its modules; tests/peers has the real ones."""

import importlib
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from recast import RecastError, WeightMatrix
from recast.core.advantage import advantages
from recast.integrations import verl_omni

W = WeightMatrix(("clip", "ocr"), [0, 0.3, 0.6, 1], [[0.2, 0.1, 0.1], [0.1, 0.2, 0.3]], [0.4, 0.6])
DOWN = 1000 * torch.tensor(W.sigmas[:0:-1].copy(), dtype=torch.float32)


class Loss:
    """DiffusionNFTLoss: a permutation per row, integers, one number per sample."""

    @staticmethod
    def prepare_actor_batch(batch: Any, reward_tensor: Any, config: Any) -> Any:
        batch.batch["train_timesteps"] = torch.stack([DOWN[torch.randperm(3)] for _ in reward_tensor]).long()
        batch.batch["advantages"] = reward_tensor[:, None].expand(-1, 3)
        return batch

    @staticmethod
    def _advantage_to_reward_prob(advantages: torch.Tensor, adv_clip_max: float, adv_mode: str) -> torch.Tensor:
        assert adv_mode == "all"
        return advantages / adv_clip_max


def compute_advantage(
    data: Any, adv_estimator: Any, norm_adv_by_std_in_grpo: bool = True, global_std: bool = True, config: Any = None
) -> Any:
    data.batch["advantages"] = data.batch["returns"] = torch.zeros(12, data.batch["old_log_probs"].shape[1])
    return data


@pytest.fixture(name="peer")
def modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The modules that the hooks go into, with W in RECAST_WEIGHTS."""
    made: Any = {}
    for name in (verl_omni._TRAINER, verl_omni._SECOND, verl_omni._ALGORITHMS):
        made[name] = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, made[name])
        for end in range(1, name.count(".") + 1):
            parent = ".".join(name.split(".")[:end])
            monkeypatch.setitem(sys.modules, parent, sys.modules.get(parent) or types.ModuleType(parent))
    trainer, second, algorithms = made.values()
    trainer.compute_advantage = second.compute_advantage = compute_advantage
    algorithms.DiffusionNFTLoss = type("DiffusionNFTLoss", (Loss,), {})
    monkeypatch.setenv("RECAST_WEIGHTS", str(W.save(tmp_path / "weights.json")))
    verl_omni._mixer.cache_clear()
    yield SimpleNamespace(trainer=trainer, second=second, loss=algorithms.DiffusionNFTLoss)
    verl_omni._mixer.cache_clear()


def batch(**tensors: Any) -> tuple[Any, np.ndarray]:
    scores = np.random.default_rng(0).normal(size=(12, 2))
    scores[8:, 1] = np.nan
    wrapped = [SimpleNamespace(data=f"prompt {k // 4}") if k % 2 else f"prompt {k // 4}" for k in range(12)]
    uid = np.empty(12, dtype=object)
    uid[:] = wrapped
    extra = {"reward/clip": scores[:, 0], "reward/ocr": scores[:, 1].astype(object), "reward/combined": scores[:, 0]}
    extra["reward/clip/detail"] = uid
    return SimpleNamespace(non_tensor_batch={"uid": uid, **extra}, batch=tensors), scores


@pytest.mark.parametrize("global_std", [True, False])
@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_flow_grpo(peer: Any, global_std: bool, scale: float) -> None:
    """Slots from the noisiest step, as timesteps, or as levels (BAGEL); in both trainers."""
    verl_omni.install()
    verl_omni.install()
    assert peer.trainer.compute_advantage is peer.second.compute_advantage
    assert peer.trainer.compute_advantage.__wrapped__ is compute_advantage, "once"
    times = (DOWN / 1000 * scale).expand(12, 3)
    data, scores = batch(all_timesteps=times, old_log_probs=torch.zeros(12, 3))
    found = peer.second.compute_advantage(data, adv_estimator="flow_grpo", global_std=global_std)
    spread = "batch" if global_std else "group"
    expected = torch.as_tensor(advantages(scores, np.arange(12) // 4, W, "reward", spread)).flip(1).float()  # type: ignore[arg-type]
    assert torch.equal(found.batch["advantages"], expected)
    assert torch.equal(found.batch["returns"], expected)


def test_diffusion_nft(peer: Any) -> None:
    verl_omni.install()
    torch.manual_seed(0)
    data, scores = batch()
    algorithm = SimpleNamespace(norm_adv_by_std_in_grpo=True, global_std=True, adv_mode="all")
    actor = SimpleNamespace(diffusion_loss=SimpleNamespace(adv_clip_max=4.0))
    config = SimpleNamespace(algorithm=algorithm, actor_rollout_ref=SimpleNamespace(actor=actor))
    found = peer.loss().prepare_actor_batch(data, torch.zeros(12), config).batch
    columns = (found["train_timesteps"][:, :, None] - torch.tensor(1000 * W.sigmas[1:])).abs().argmin(2)
    expected = torch.as_tensor(advantages(scores, np.arange(12) // 4, W, "reward")).gather(1, columns).float()
    assert torch.equal(found["advantages"], expected)
    assert torch.equal(found["reward_prob"], expected / 4)
    algorithm.norm_adv_by_std_in_grpo = False
    with pytest.raises(RecastError, match="norm_adv_by_std_in_grpo=False leaves rewards unscaled"):
        peer.loss().prepare_actor_batch(data, torch.zeros(12), config)


def test_what_cannot_be_right_is_refused(peer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    verl_omni.install()
    data, _ = batch(all_timesteps=DOWN.expand(12, 3) - 100, old_log_probs=torch.zeros(12, 3))
    with pytest.raises(RecastError, match="are not steps of W"):
        peer.trainer.compute_advantage(data, "flow_grpo")
    data, _ = batch(all_timesteps=DOWN.expand(12, 3), old_log_probs=torch.zeros(12, 2))
    with pytest.raises(RecastError, match="3 timesteps are stored, but 2 are trained"):
        peer.trainer.compute_advantage(data, "flow_grpo")
    monkeypatch.delenv("RECAST_WEIGHTS")
    verl_omni._mixer.cache_clear()
    with pytest.raises(RecastError, match="RECAST_WEIGHTS is not set"):
        verl_omni.install()


def test_it_installs_itself_inside_verl_omni_only(peer: Any) -> None:
    importlib.reload(verl_omni)
    assert hasattr(peer.trainer.compute_advantage, "__wrapped__")
