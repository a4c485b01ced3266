"""DeepSpeed's flat, divided optimizer against torch's own; DeepSpeed itself is run by deepspeed_run.py."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recast.errors import RecastError
from recast.train import checkpoint, zero
from recast.train.groups import Batches

SHAPES = ((2, 3), (3,), (1, 2))  # 11 numbers, 12 with the padding for two


class Part:
    """What one of two processes has of ZeRO's optimizer."""

    def __init__(self, flat: torch.Tensor, rank: int) -> None:
        self.single_partition_of_fp32_groups = [torch.nn.Parameter(flat.chunk(2)[rank].clone())]
        self.optimizer = torch.optim.AdamW(self.single_partition_of_fp32_groups, lr=0.1)
        self.refreshed = 0

    def refresh_fp32_params(self) -> None:
        self.refreshed += 1

    def step(self, gradient: torch.Tensor, rank: int) -> None:
        self.single_partition_of_fp32_groups[0].grad = gradient.chunk(2)[rank].clone()
        self.optimizer.step()


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.pad(torch.cat([each.detach().flatten() for each in tensors]), (0, 1))


def test_a_divided_optimizer_is_saved_and_loaded_as_a_whole_one() -> None:
    random = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=random)) for shape in SHAPES]
    whole, parts = torch.optim.AdamW(parameters, lr=0.1), [Part(flat(list(parameters)), rank) for rank in range(2)]
    waiting: list[torch.Tensor] = []
    first, second = (SimpleNamespace(process_index=rank, num_processes=2) for rank in range(2))
    second.gather = lambda value: waiting.append(value) or value.repeat(2)
    first.gather = lambda value: torch.cat([value, waiting.pop(0)])
    assert zero.optimizer_tensors(first, parts[0], parameters) == {}
    for _ in range(3):
        for each in parameters:
            each.grad = torch.randn(each.shape, generator=random)
        gradient = flat([each.grad for each in parameters if each.grad is not None])
        whole.step()
        for rank, part in enumerate(parts):
            part.step(gradient, rank)
    zero.optimizer_tensors(second, parts[1], parameters)
    found, wanted = zero.optimizer_tensors(first, parts[0], parameters), checkpoint.optimizer_tensors(whole)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    for rank, process in enumerate((first, second)):
        again = Part(flat(list(parameters)), rank)
        zero.restore_optimizer(process, again, wanted)
        again.step(gradient, rank)
        parts[rank].step(gradient, rank)
        assert again.refreshed == 1
        assert torch.equal(*(each.single_partition_of_fp32_groups[0] for each in (again, parts[rank])))


@pytest.mark.parametrize(
    ("config", "precision", "words"),
    [
        ({"stage": 3}, "no", "zero_stage 1 and 2, not 3"),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, "no", "without offload_optimizer"),
        ({"stage": 1}, "bf16", "bf16 and fp16 would round the adapters"),
    ],
)
def test_what_a_checkpoint_would_not_hold_is_refused(config: dict[str, Any], precision: str, words: str) -> None:
    plugin = SimpleNamespace(deepspeed_config={"zero_optimization": config})
    accelerator = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin), mixed_precision=precision)
    with pytest.raises(RecastError, match=words):
        zero.check(accelerator)


def test_deepspeed_is_told_the_recipe_s_numbers() -> None:
    plugin = SimpleNamespace(deepspeed_config={"gradient_clipping": 7.0})
    batches = Batches(processes=2, groups=2, images=4, batch=4, pairs=2, micro=2)
    zero.configure(SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin)), batches, 1.0)
    assert list(plugin.deepspeed_config.values()) == [1.0, 2, 2]


def test_a_step_that_overflowed_has_no_norm() -> None:
    engine = SimpleNamespace(step=lambda: None, get_global_grad_norm=lambda: 0.5)
    assert zero.step(engine, SimpleNamespace(overflow=True)) is None
    assert zero.step(engine, SimpleNamespace(overflow=False)) == 0.5
