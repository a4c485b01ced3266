"""Run by torchrun: the same training replicated (DDP) and sharded (FSDP2), stopped and resumed in between.

Accelerate starts FSDP on GPUs only, so the sharding it would do, every block and then the root, is done here.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.fsdp import fully_shard

from recast import WeightMatrix, config, prompts
from recast.flow import families
from recast.flow.sharded import whole
from recast.train import stage
from recast.train.trainer import Trainer

ROOT = Path(__file__).parents[2]
SMALL = [
    *("train.prompts_per_epoch=2", "train.images_per_prompt=4", "train.batch=4", "train.fraction=0.5", "train.rank=4"),
    *(
        "train.alpha=8",
        "train.sample_batch=4",
        "train.micro_batch=4",
        "train.learning_rate=1e-3",
        "train.kl_weight=0.1",
    ),
]


def make(folder: Path, sharded: bool) -> Trainer:
    recipe = config.load(ROOT / "recipes/shapes.yaml", SMALL)
    sigmas = families.load(recipe.policy).sigmas(4)
    weights = WeightMatrix(("detail",), sigmas, np.full((1, 4), 0.25), [1.0])
    accelerator = stage.accelerator_of(recipe, folder)
    prepare = accelerator.prepare

    def shard(model: Any, optimizer: torch.optim.Optimizer, device_placement: Any) -> tuple[Any, Any]:
        names = {each: name for name, each in model.named_parameters()}
        trained = [names[each] for each in optimizer.param_groups[0]["params"]]
        for block in model.transformer_blocks:
            fully_shard(block)
        fully_shard(model)
        new = dict(model.named_parameters())
        optimizer.param_groups[0]["params"] = [new[name] for name in trained]
        return model, prepare(optimizer)

    if sharded:
        accelerator.prepare = shard
    made = stage.build(recipe, weights, prompts.load("shapes:train"), accelerator)
    accelerator.prepare = prepare
    return made


def tensors(made: Trainer) -> list[torch.Tensor]:
    every = [*made.adapters.parameters, *made.adapters.old_parameters, *made.ema.shadow_params]
    return [whole(each.detach()).clone() for each in every]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    replicated = make(folder, False)
    losses = [replicated.epoch()["loss"] for _ in range(3)]
    first = make(folder, True)
    assert all(hasattr(each, "full_tensor") for each in first.adapters.parameters)
    found = [first.epoch()["loss"] for _ in range(2)]
    torch.manual_seed(first.accelerator.process_index)
    path = first.save(folder / "checkpoints", {}, keep=1)
    drawn = torch.rand(3)  # a reward's: every process has generators of its own
    found.append(first.epoch()["loss"])
    resumed = make(folder, True)
    resumed.load(path, {})
    assert torch.equal(torch.rand(3), drawn)
    again = resumed.epoch()["loss"]
    assert again == found[-1], (again, found)
    assert all(torch.equal(a, b) for a, b in zip(tensors(first), tensors(resumed), strict=True))
    np.testing.assert_allclose(found, losses, rtol=2e-3)
    off = max((a - b).abs().max().item() for a, b in zip(tensors(first), tensors(replicated), strict=True))
    assert off < 6e-3, off  # six steps of Adam at 1e-3, each of which may turn rounding into a step of its own
    print(f"sharded and replicated agree: {found} and {losses}, off by at most {off:.2g}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
