"""Runs DiffusionNFT's own `main` for two epochs on a CPU and keeps what it trained on: REPO MODEL OUT."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch


def main(repository: Path, model: Path, out: Path) -> None:
    sys.path.insert(0, str(repository))
    import loops

    logged = loops.silence()
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    module: Any = loops.script(repository / "scripts/train_nft_sd3.py", **{'f"cuda:{local_rank}"': '"cpu"'})
    module.flow_grpo.rewards.multi_score = loops.multi_score
    module.setup_distributed = lambda *_: None
    module.gather_tensor_to_all = lambda tensor, _: tensor.cpu()
    module.DDP = Alone
    module.dist = SimpleNamespace(
        all_reduce=lambda *_, **__: None,
        barrier=lambda: None,
        destroy_process_group=lambda: None,
        ReduceOp=SimpleNamespace(AVG=None),
    )
    module.FLAGS = SimpleNamespace(config=settings(loops.dataset(out.parent / "data"), model, out.parent))
    kept: dict[str, Any] = {"pairs": [], "gradients": [], "tables": [], "logged": logged, "start": None}
    record(module, kept, loops)
    module.main(None)
    torch.save(kept, out)


class Alone(torch.nn.Module):
    """DistributedDataParallel for one process."""

    def __init__(self, module: Any, **_: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **named: Any) -> Any:
        return self.module(*args, **named)


def settings(data: Path, model: Path, out: Path) -> Any:
    """Their configuration for several rewards, at a tiny size."""
    from config import base

    config = base.get_config()
    config.dataset, config.pretrained.model, config.logdir = str(data), str(model), str(out / "logs")
    config.prompt_fn, config.save_dir, config.mixed_precision, config.resolution = "general_ocr", str(out), "no", 64
    config.num_epochs, config.debug, config.allow_tf32 = 2, True, False
    config.sample.update(
        num_steps=5, train_batch_size=6, num_image_per_prompt=3, num_batches_per_epoch=2, guidance_scale=1.0
    )
    config.sample.deterministic, config.sample.solver, config.sample.noise_level = True, "dpm2", 0.7
    config.train.update(batch_size=6, gradient_accumulation_steps=1, beta=1e-4)
    config.train.adv_mode = "all"
    config.decay_type, config.beta, config.reward_fn = 1, 0.1, {"bright": 1.0, "contrast": 1.0}
    return config


def record(module: Any, kept: dict[str, Any], loops: Any) -> None:
    """Keep what goes into the loss when its noise is drawn, the gradients when they are clipped, and the tables."""
    draw, clip, update = torch.randn_like, torch.nn.utils.clip_grad_norm_, module.PerPromptStatTracker.update

    def randn_like(values: Any, *args: Any, **named: Any) -> Any:
        noise = draw(values, *args, **named)
        frame = sys._getframe(1)
        if frame.f_code.co_filename == module.__file__:
            here = frame.f_locals
            if kept["start"] is None:
                kept["start"] = loops.adapters(here["transformer_ddp"].module, "default")
            batch, slot = here["train_sample_batch"], here["j_idx"]
            size = here["training_batch_size"]
            pair = {
                "noise": noise,
                "x0": batch["latents_clean"],
                "timesteps": batch["timesteps"][:, slot],
                "advantages": batch["advantages"][:, slot],
                "embeds": here["embeds"],
                "pooled": here["pooled_embeds"],
                "rows": here["perm"][here["i"] * size : (here["i"] + 1) * size],
                "epoch": here["epoch"],
                "slot": slot,
            }
            kept["pairs"].append({key: loops.kept(value) for key, value in pair.items()})
        return noise

    def clip_grad_norm_(parameters: Any, *args: Any, **named: Any) -> Any:
        model = sys._getframe(1).f_locals["transformer_ddp"].module
        found = {key.removeprefix("base_model.model."): value.grad for key, value in model.named_parameters()}
        grads = {k.replace(".default.", "."): loops.kept(g) for k, g in found.items() if ".default." in k}
        kept["gradients"].append(grads)
        return clip(parameters, *args, **named)

    def tracked(self: Any, prompts: Any, rewards: Any, exp: bool = False) -> Any:
        found = update(self, prompts, rewards, exp)
        gathered = {
            name: np.array(values) for name, values in sys._getframe(1).f_locals["gathered_rewards_dict"].items()
        }
        kept["tables"].append({"prompts": list(prompts), "rewards": gathered, "theirs": np.array(found)})
        return found

    torch.randn_like, torch.nn.utils.clip_grad_norm_ = randn_like, clip_grad_norm_
    module.PerPromptStatTracker.update = tracked


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
