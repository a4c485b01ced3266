"""W in verl-project/verl-omni, without an edit: DiffusionNFT and Flow-GRPO, tried at commit a1139ba.

    export RECAST_WEIGHTS=weights.json
    python -m verl_omni.trainer.main_diffusion … actor_rollout_ref.model.external_lib=recast.integrations.verl_omni

verl-omni imports this module before training, and the import installs two hooks: after `compute_advantage` (Flow-GRPO)
the advantages are W's, at each slot's own timestep; after `DiffusionNFTLoss.prepare_actor_batch` so are the advantages
and the probabilities that the loss reads. Elsewhere, importing the module does nothing. Rewards are those of
`MultiVisualRewardManager`, under the names of `reward.reward_functions`.
"""

from __future__ import annotations

import functools
import importlib
import sys
from functools import cache
from typing import Any

import numpy as np

from recast.errors import RecastError
from recast.integrations.mixer import Mixer, levels

__all__ = ["install"]

_TRAINER = "verl_omni.trainer.diffusion.ray_diffusion_trainer"
_SECOND = "verl_omni.trainer.diffusion.v1.trainer_base"
_ALGORITHMS = "verl_omni.trainer.diffusion.diffusion_algos"


def install() -> None:
    """Install the hooks, once; an error if RECAST_WEIGHTS is not set or is not a weights.json."""
    _mixer()
    trainer, loss = importlib.import_module(_TRAINER), importlib.import_module(_ALGORITHMS).DiffusionNFTLoss
    if hasattr(trainer.compute_advantage, "__wrapped__"):
        return
    hooked = _after_advantage(trainer.compute_advantage)
    for name in (_TRAINER, _SECOND):  # the second has imported the function by its name, if it is there
        if name in sys.modules:
            sys.modules[name].compute_advantage = hooked  # type: ignore[attr-defined]
    loss.prepare_actor_batch = staticmethod(_after_preparation(loss.prepare_actor_batch, loss))


@cache
def _mixer() -> Mixer:
    return Mixer.from_environment(mode="reward")


def _after_advantage(compute: Any) -> Any:
    @functools.wraps(compute)
    def compute_advantage(
        data: Any, adv_estimator: Any, norm_adv_by_std_in_grpo: bool = True, global_std: bool = True, config: Any = None
    ) -> Any:
        _scaled(norm_adv_by_std_in_grpo)
        data = compute(data, adv_estimator, norm_adv_by_std_in_grpo, global_std, config)
        found = _slots(data, "all_timesteps", global_std)
        old = data.batch["advantages"]
        if found.shape != old.shape:
            raise RecastError(
                f"{found.shape[1]} timesteps are stored, but {old.shape[1]} are trained: report this model"
            )
        data.batch["advantages"] = data.batch["returns"] = found.to(old)
        return data

    return compute_advantage


def _after_preparation(prepare: Any, loss: Any) -> Any:
    @functools.wraps(prepare)
    def prepare_actor_batch(batch: Any, reward_tensor: Any, config: Any) -> Any:
        batch = prepare(batch, reward_tensor, config)
        _scaled(config.algorithm.norm_adv_by_std_in_grpo)
        found = _slots(batch, "train_timesteps", config.algorithm.global_std).to(batch.batch["advantages"])
        batch.batch["advantages"] = batch.batch["returns"] = found
        batch.batch["reward_prob"] = loss._advantage_to_reward_prob(
            found,
            adv_clip_max=config.actor_rollout_ref.actor.diffusion_loss.adv_clip_max,
            adv_mode=config.algorithm.adv_mode,
        )
        return batch

    return prepare_actor_batch


def _scaled(by_std: bool) -> None:
    if not by_std:
        raise RecastError("algorithm.norm_adv_by_std_in_grpo=False leaves rewards unscaled, which W needs: set True")


def _slots(data: Any, key: str, global_std: bool) -> Any:
    """Advantages (B, k) at the timesteps that the batch holds under `key`."""
    import torch

    found = data.non_tensor_batch
    rewards = {
        name.removeprefix("reward/"): torch.as_tensor(np.asarray(found[name]).astype(np.float64))
        for name in found
        if name.startswith("reward/") and "/" not in name.removeprefix("reward/")
    }
    prompts = [
        str(getattr(uid, "data", uid)) if not isinstance(uid, (str, np.generic)) else str(uid) for uid in found["uid"]
    ]
    table = _mixer().table(rewards, prompts, "batch" if global_std else "group")
    return _mixer().slots(table, levels(data.batch[key].cpu()))


if "verl_omni" in sys.modules:  # imported as its external_lib
    install()
