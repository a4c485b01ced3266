"""Runs verl-omni's advantage, actor batch, engine step and losses on a CPU, with W by external_lib: REPO VERL OUT."""

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import absent
import numpy as np
import torch

STEPS = 5


def main(repository: Path, verl: Path, out: Path) -> None:
    sys.path[:0] = [str(repository), str(verl)]
    absent.stand_in("vllm_omni", "vllm", "wandb")
    import verl_omni.trainer.diffusion.diffusion_algos as algorithms
    import verl_omni.trainer.diffusion.ray_diffusion_trainer as trainer
    from verl.utils.import_utils import import_external_libs

    plain = trainer.compute_advantage
    import_external_libs("recast.integrations.verl_omni")
    assert trainer.compute_advantage is not plain
    kept = {"grpo": grpo(trainer, algorithms), "nft": nft(algorithms), "loss": loss(algorithms)}
    torch.save(kept, out)


def samples(wrapped: bool) -> tuple[Any, np.ndarray, torch.Tensor]:
    """Scores, prompts and timesteps of 12 images; in Flow-GRPO a uid may be wrapped."""
    from tensordict.tensorclass import NonTensorData

    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(12, 2, generator=generator, dtype=torch.float64)
    scores[8:, 1] = float("nan")
    uid = np.empty(12, dtype=object)
    uid[:] = [NonTensorData(f"prompt {k // 4}") if wrapped and k % 2 else f"prompt {k // 4}" for k in range(12)]
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(STEPS)
    return scores, uid, scheduler.timesteps.repeat(12, 1)


def proto(scores: Any, uid: Any, **tensors: Any) -> Any:
    from verl import DataProto

    extra = {f"reward/{name}": scores[:, k].numpy() for k, name in enumerate(("bright", "contrast"))}
    others = {"uid": uid, **extra, "reward/combined": scores.nansum(1).numpy(), "reward/bright/detail": uid}
    return DataProto.from_dict(tensors=tensors, non_tensors=others)


def grpo(trainer: Any, algorithms: Any) -> dict[str, Any]:
    """compute_advantage, and Flow-GRPO's loss at every slot."""
    from omegaconf import OmegaConf

    scores, uid, timesteps = samples(wrapped=True)
    shift = torch.zeros(STEPS, requires_grad=True)
    rewards = scores.nansum(1)[:, None].float().expand(-1, STEPS)
    old = torch.zeros(12, STEPS)
    data = proto(scores, uid, all_timesteps=timesteps, sample_level_rewards=rewards, old_log_probs=old)
    data = trainer.compute_advantage(
        data, adv_estimator="flow_grpo", norm_adv_by_std_in_grpo=True, global_std=True, config=None
    )
    config = OmegaConf.create({"diffusion_loss": {"adv_clip_max": 5.0, "clip_ratio": 1e-3}})
    for step in range(STEPS):
        value, _ = algorithms.FlowGRPOLoss.compute_loss(
            old_log_prob=old[:, step],
            log_prob=old[:, step] + shift[step],
            advantages=data.batch["advantages"][:, step],
            config=config,
        )
        value.backward()
    return {
        "scores": scores,
        "timesteps": timesteps,
        "advantages": data.batch["advantages"],
        "returns": data.batch["returns"],
        "gradient": shift.grad,
    }


def nft(algorithms: Any) -> dict[str, Any]:
    """prepare_actor_batch, then forward and backward passes of the engine, over a network of one number."""
    from omegaconf import OmegaConf

    scores, uid, timesteps = samples(wrapped=False)
    clean = torch.randn(12, 2, 4, 4, generator=torch.Generator().manual_seed(1))
    data = proto(scores, uid, latents_clean=clean, train_timesteps=timesteps)
    settings = {"adv_clip_max": 5.0, "mix_beta": 0.1, "adaptive_weight_min": 1e-5, "ref_kl_coef": 0.0}
    config = OmegaConf.create(
        {
            "algorithm": {
                "norm_adv_by_std_in_grpo": True,
                "global_std": True,
                "adv_mode": "all",
                "timestep_fraction": 0.99,
            },
            "actor_rollout_ref": {"actor": {"diffusion_loss": settings, "data_loader_seed": 7}},
        }
    )
    fn = algorithms.get_diffusion_loss_fn("diffusion_nft")
    data = fn.prepare_actor_batch(data, scores.nansum(1).float(), config)
    noise = torch.randn(12, 4, 2, 4, 4, generator=torch.Generator().manual_seed(2))
    weight = engine_step(fn, config.actor_rollout_ref.actor, data, noise)
    found = {key: data.batch[key] for key in ("train_timesteps", "advantages", "reward_prob")}
    return {"scores": scores, "clean": clean, "noise": noise, "gradient": weight.grad, **found}


def engine_step(fn: Any, config: Any, data: Any, noise: torch.Tensor) -> torch.Tensor:
    """NFTDiffusersFSDPEngine's own loop over micro-batches and slots; v = w·x, with w = .2 old, .3 new, .1 base."""
    from verl.utils import tensordict_utils as tu
    from verl_omni.workers.engine.fsdp import diffusers_impl as module

    weight, active = torch.tensor(0.3, requires_grad=True), ["default"]
    values = {"default": weight, "old": torch.tensor(0.2), "base": torch.tensor(0.1)}
    module.prepare_model_inputs = lambda latents, **_: (latents, None)
    module.forward = lambda model_inputs, **_: values[active[0]] * model_inputs
    module.get_device_id = lambda: "cpu"
    engine: Any = object.__new__(module.NFTDiffusersFSDPEngine)

    @contextlib.contextmanager
    def using(name: str) -> Any:
        active[0] = name
        yield
        active[0] = "default"

    vars(engine).update(
        module=None,
        model_config=None,
        use_ulysses_sp=False,
        ulysses_sequence_parallel_size=1,
        use_adapter=using,
        disable_adapter=lambda: using("base"),
        _set_adapter=lambda _: None,
        get_data_parallel_group=lambda: None,
        postprocess_batch_func=lambda output_lst, **_: output_lst,
    )
    batch = tu.get_tensordict(
        {
            **{key: data.batch[key] for key in ("latents_clean", "train_timesteps", "reward_prob")},
            "forward_noise": noise,
            "prompt_embeds": torch.zeros(12, 1, 1),
            "prompt_embeds_mask": torch.ones(12, 1),
        }
    )
    tu.assign_non_tensor(batch, micro_batch_size_per_gpu=6)

    def loss_function(model_output: Any, data: Any, dp_group: Any = None) -> Any:
        result = fn(config=SimpleNamespace(diffusion_loss=config.diffusion_loss), model_output=model_output, data=data)
        return result.loss / 8, result.metrics  # two micro-batches of four slots

    engine.forward_backward_batch(batch, loss_function)
    return weight


def loss(algorithms: Any) -> dict[str, Any]:
    """DiffusionNFTLoss in float64, and its gradient."""
    generator = torch.Generator().manual_seed(3)
    v, old, base, clean, noise = (torch.randn(6, 2, 4, 4, generator=generator, dtype=torch.float64) for _ in range(5))
    sigma, r = (torch.rand(6, generator=generator, dtype=torch.float64) for _ in range(2))
    v.requires_grad_(True)
    level = sigma[:, None, None, None]
    settings = SimpleNamespace(mix_beta=0.1, adv_clip_max=5.0, adaptive_weight_min=1e-5, ref_kl_coef=1e-4)
    value, _ = algorithms.DiffusionNFTLoss.compute_loss(
        forward_prediction=v,
        old_prediction=old,
        ref_forward_prediction=base,
        x0=clean,
        xt=(1 - level) * clean + level * noise,
        t_expanded=level,
        reward_prob=r,
        config=SimpleNamespace(diffusion_loss=settings),
    )
    value.backward()
    inputs = {"v": v.detach(), "v_old": old, "v_base": base, "x_0": clean, "noise": noise, "sigma": sigma, "r": r}
    return {"inputs": inputs, "value": value.detach(), "gradient": v.grad}


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
