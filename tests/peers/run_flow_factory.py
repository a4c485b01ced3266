"""Runs Flow-Factory's own command for one epoch on a CPU and keeps what it trained on: SOURCE MODEL ALGORITHM OUT."""

import contextlib
import importlib
import sys
from pathlib import Path
from typing import Any

import torch
import yaml


def main(source: Path, model: Path, algorithm: str, out: Path) -> None:
    sys.path.insert(0, str(source))
    import loops

    loops.silence()
    from recast.integrations import Mixer, flow_factory

    file = out.parent / f"{algorithm}.yaml"
    file.write_text(yaml.safe_dump(settings(loops.dataset(out.parent / "data"), model, algorithm, out.parent)))
    kept: dict[str, Any] = {"slots": [], "tables": []}
    record(Mixer, kept, loops)
    train: Any = importlib.import_module("flow_factory.train")
    load = train.load_trainer

    def load_in_float32(config: Any) -> Any:
        trainer = load(config)
        trainer.autocast = contextlib.nullcontext  # theirs is bfloat16 without mixed precision too
        kept["trainer"] = trainer
        return trainer

    train.load_trainer = load_in_float32
    sys.argv = ["train", str(file)]
    flow_factory.main()
    model = kept.pop("trainer").adapter.transformer
    kept["moved"] = max(float(each.detach().abs().max()) for name, each in model.named_parameters() if "lora_B" in name)
    torch.save(kept, out)


def settings(data: Path, model: Path, algorithm: str, out: Path) -> dict[str, Any]:
    train = {
        "trainer_type": algorithm,
        "max_epochs": 1,
        "resolution": 64,
        "num_inference_steps": 5,
        "guidance_scale": 1.0,
        "per_device_batch_size": 5,  # as many as steps: a table in place of a column would not fail
        "group_size": 5,
        "global_std": True,
        "unique_sample_num_per_epoch": 4,
        "gradient_step_per_epoch": 2,
        "learning_rate": 1e-4,
        "ema_device": "cpu",
        "enable_gradient_checkpointing": False,
        "latent_storage_dtype": "fp32",
        "seed": 42,
    }
    if algorithm == "nft":
        train |= {
            "num_train_timesteps": 4,
            "timestep_range": 0.9,
            "time_sampling_strategy": "discrete",
            "nft_beta": 0.1,
        }
    return {
        "mixed_precision": "no",
        "num_processes": 1,
        "data": {
            "dataset_dir": str(data),
            "preprocessing_batch_size": 4,
            "dataloader_num_workers": 0,
            "cache_dir": str(out / "cache"),
            "sampler_type": "auto",
        },
        "model": {
            "finetune_type": "lora",
            "master_weight_dtype": "fp32",
            "lora_rank": 4,
            "lora_alpha": 8,
            "target_modules": "default",
            "model_name_or_path": str(model),
            "model_type": "sd3-5",
        },
        "log": {"run_name": "peer", "logging_backend": "none", "save_dir": str(out / "saves"), "save_freq": 0},
        "train": train,
        "scheduler": {"dynamics_type": "ODE"}
        if algorithm == "nft"
        else {"dynamics_type": "Flow-SDE", "num_sde_steps": 3},
        "eval": {"eval_freq": 0, "resolution": 64, "num_inference_steps": 5},
        "rewards": [
            {"name": name, "reward_model": f"factory_rewards.{name}", "weight": 1, "batch_size": 5, "device": "cpu"}
            for name in ("bright", "contrast")
        ],
    }


def record(mixer: Any, kept: dict[str, Any], loops: Any) -> None:
    """Keep every table of advantages, and what is clamped in the loss beside its timestep."""
    clamp, table = torch.clamp, mixer.table

    def recorded(values: Any, *args: Any, **named: Any) -> Any:
        frame = sys._getframe(1)
        here = frame.f_locals
        if frame.f_code.co_filename.endswith(("nft.py", "grpo.py")) and here.get("adv") is values:
            time = here["t_flat"] if "t_flat" in here else here["t"]
            rows = dict.__getitem__(here["batch"], "advantage")
            kept["slots"].append(
                {"advantages": loops.kept(values), "timesteps": loops.kept(time), "rows": loops.kept(rows)}
            )
        return clamp(values, *args, **named)

    def tabled(self: Any, rewards: Any, groups: Any, spread: Any = None) -> Any:
        found = table(self, rewards, groups, spread)
        kept["tables"].append({"rewards": rewards, "groups": groups, "table": found, "spread": spread or self.spread})
        return found

    torch.clamp, mixer.table = recorded, tabled


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
