"""Runs flow_grpo's own `main` for one epoch on a CPU and keeps what it trained on: REPO MODEL OUT."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch


class Enough(Exception):  # noqa: N818 - not an error
    """Their loop has no end."""


def main(repository: Path, model: Path, out: Path) -> None:
    sys.path.insert(0, str(repository))
    import loops

    logged = loops.silence()
    module: Any = loops.script(repository / "scripts/train_sd3.py")
    module.flow_grpo.rewards.multi_score = loops.multi_score
    module.FLAGS = SimpleNamespace(config=settings(loops.dataset(out.parent / "data"), model, out.parent))
    kept: dict[str, Any] = {"slots": [], "tables": [], "logged": logged, "changed": 0.0}
    record(module, kept, loops)
    try:
        module.main(None)
    except Enough:
        torch.save(kept, out)


def settings(data: Path, model: Path, out: Path) -> Any:
    from config import base

    config = base.get_config()
    config.dataset, config.pretrained.model, config.logdir = str(data), str(model), str(out / "logs")
    config.prompt_fn, config.save_dir, config.mixed_precision, config.resolution = "general_ocr", str(out), "no", 64
    config.eval_freq, config.allow_tf32, config.reward_fn = 1, False, {"bright": 1.0, "contrast": 1.0}
    config.per_prompt_stat_tracking = True
    config.sample.update(
        num_steps=5, train_batch_size=6, num_image_per_prompt=3, num_batches_per_epoch=2, guidance_scale=1.0
    )
    config.train.update(batch_size=6, gradient_accumulation_steps=1, beta=0.0, timestep_fraction=0.99, cfg=False)
    return config


def record(module: Any, kept: dict[str, Any], loops: Any) -> None:
    """Keep the advantages where they meet their timestep, and stop at the second evaluation."""
    log_prob, update, calls = module.compute_log_prob, module.PerPromptStatTracker.update, []

    def compute_log_prob(transformer: Any, pipeline: Any, sample: Any, j: int, *args: Any) -> Any:
        here = sys._getframe(1).f_locals
        rows = torch.arange(len(here["mask"]))[here["mask"]][here["perm"]].reshape(len(here["samples_batched"]), -1)
        slot = {"advantages": sample["advantages"][:, j], "timesteps": sample["timesteps"][:, j], "slot": j}
        kept["slots"].append({key: loops.kept(value) for key, value in {**slot, "rows": rows[here["i"]]}.items()})
        return log_prob(transformer, pipeline, sample, j, *args)

    def tracked(self: Any, prompts: Any, rewards: Any, type: str = "grpo") -> Any:
        found = update(self, prompts, rewards, type)
        gathered = sys._getframe(1).f_locals["gathered_rewards"]
        kept["tables"].append({"prompts": list(prompts), "rewards": {k: np.array(v) for k, v in gathered.items()}})
        return found

    def evaluate(pipeline: Any, *_: Any) -> None:
        calls.append(loops.adapters(pipeline.transformer, "default"))
        if len(calls) > 1:
            kept["changed"] = max(float((calls[1][key] - value).abs().max()) for key, value in calls[0].items())
            raise Enough

    module.compute_log_prob, module.eval = compute_log_prob, evaluate
    module.PerPromptStatTracker.update = tracked


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
