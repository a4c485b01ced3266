"""DeepSpeed's ZeRO, stages 1 and 2: every process keeps Adam's moments of its part of the adapters.

Its optimizer has one flat float32 vector of all parameters, in their order and padded at the end; each process updates
one part of it. Checkpoints hold the whole state by parameter, as without DeepSpeed, so a run may be resumed with or
without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor

from recast.errors import RecastError
from recast.train.groups import Batches

__all__ = ["check", "configure", "optimizer_tensors", "restore_optimizer", "step", "used"]


def used(accelerator: Any) -> bool:
    """Whether accelerate was started with DeepSpeed."""
    return bool(accelerator.distributed_type == DistributedType.DEEPSPEED)


def check(accelerator: Any) -> None:
    """Raise an error for settings that would round the adapters, or whose state a checkpoint would not hold."""
    config = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
    if accelerator.mixed_precision != "no":
        raise RecastError("under DeepSpeed, bf16 and fp16 would round the adapters: set train.precision to float32")
    if config["stage"] not in (1, 2):
        raise RecastError(
            f"training runs under DeepSpeed's zero_stage 1 and 2, not {config['stage']} (docs/guides/scale.md)"
        )
    if (config.get("offload_optimizer") or {}).get("device", "none") != "none" or config.get("round_robin_gradients"):
        raise RecastError("training needs DeepSpeed without offload_optimizer and round_robin_gradients")


def configure(accelerator: Any, batches: Batches, clip: float) -> None:
    """Pass the recipe's sizes to DeepSpeed, which accumulates and clips gradients itself."""
    accelerator.state.deepspeed_plugin.deepspeed_config |= {
        "train_micro_batch_size_per_gpu": batches.micro,
        "gradient_accumulation_steps": batches.accumulation,
        "gradient_clipping": clip,
    }


def step(engine: Any, optimizer: Any) -> Tensor | None:
    """Clip and step: the gradient's norm before clipping, or None, with nothing changed, if it is not finite."""
    engine.step()
    return None if optimizer.overflow else torch.as_tensor(engine.get_global_grad_norm())


def optimizer_tensors(accelerator: Any, optimizer: Any, parameters: Sequence[Tensor]) -> dict[str, Tensor]:
    """The optimizer's state by parameter number and name, as `checkpoint.optimizer_tensors`; all processes call it."""
    state = optimizer.optimizer.state.get(optimizer.single_partition_of_fp32_groups[0], {})
    sizes = [each.numel() for each in parameters]
    found: dict[str, Tensor] = {}
    for key, value in sorted(state.items()):  # every process gathers in the same order
        parts = accelerator.gather(value)[: sum(sizes)].split(sizes) if value.dim() else [value] * len(sizes)
        for number, (part, parameter) in enumerate(zip(parts, parameters, strict=True)):
            found[f"{number}.{key}"] = part.view_as(parameter) if value.dim() else part.clone()
    return found


def restore_optimizer(accelerator: Any, optimizer: Any, tensors: Mapping[str, Tensor]) -> None:
    """Restore the state saved by `optimizer_tensors`, and copy the loaded adapters to DeepSpeed's flat vector."""
    optimizer.refresh_fp32_params()
    mine = optimizer.single_partition_of_fp32_groups[0]
    count = len({key.partition(".")[0] for key in tensors})
    for key in {key.partition(".")[2] for key in tensors}:
        value = tensors[f"0.{key}"].clone()
        if value.dim():  # not the number of steps
            flat = torch.cat([tensors[f"{number}.{key}"].flatten() for number in range(count)])
            flat = torch.nn.functional.pad(flat, (0, mine.numel() * accelerator.num_processes - flat.numel()))
            value = flat.chunk(accelerator.num_processes)[accelerator.process_index].to(mine)
        optimizer.optimizer.state[mine][key] = value
