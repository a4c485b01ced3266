"""The rehearsal's own proof: each kind of fault, planted, is caught, and what a GPU accepts is not refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorDeviceMismatchError
from torch.nn import functional

from fake_gpu import DEVICE, NAME, FakeGpu, FaultError
from recast import device
from recast.errors import RecastError
from recast.flow.policy import Condition
from recast.rewards import base

CPU = torch.Generator()


def there(*shape: int, **options: Any) -> Tensor:
    """A tensor on the device, whose values nobody knows."""
    return torch.empty(shape, device=DEVICE, **options)


FAULTS: dict[str, tuple[Callable[[], object], type[Exception]]] = {
    "two devices": (lambda: there(2) + torch.ones(2), FakeTensorDeviceMismatchError),
    "two devices in a matrix product": (lambda: there(2, 2) @ torch.ones(2, 2), FakeTensorDeviceMismatchError),
    "two devices in a stack": (lambda: torch.stack([there(2), torch.ones(2)]), FakeTensorDeviceMismatchError),
    "an index on the device for the CPU": (lambda: torch.ones(2)[there(1, dtype=torch.long)], FaultError),
    "a module that was not moved": (lambda: torch.nn.Linear(2, 2)(there(1, 2)), FakeTensorDeviceMismatchError),
    "dtypes in a product": (lambda: there(2, 2) @ there(2, 2, dtype=torch.bfloat16), FaultError),
    "dtypes in a layer": (
        lambda: functional.linear(there(1, 2, dtype=torch.bfloat16), there(2, 2), there(2)),
        FaultError,
    ),
    "dtypes in attention": (
        lambda: functional.scaled_dot_product_attention(*[there(1, 2, 4, 8)] * 2, there(1, 2, 4, 8).bfloat16()),
        RuntimeError,
    ),
    "dtypes in a convolution": (lambda: functional.conv2d(there(1, 2, 4, 4).half(), there(2, 2, 1, 1)), FaultError),
    "numpy": (lambda: there(2).numpy(), FaultError),
    "numpy by its own function": (lambda: np.asarray(there(2)), FaultError),
    "a generator of the CPU": (lambda: torch.randn(2, generator=CPU, device=DEVICE), FaultError),
    "a generator of the CPU, in place": (lambda: there(2).normal_(generator=CPU), FaultError),
    "a permutation by the CPU": (lambda: torch.randperm(4, generator=CPU, device=DEVICE), FaultError),
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_planted_fault_is_an_error(gpu: FakeGpu, what: str) -> None:
    call, error = FAULTS[what]
    with pytest.raises(error):
        call()


READS: dict[str, tuple[Callable[[Tensor], object], str, object]] = {
    "item": (lambda x: x[0].item(), "item", 1.0),
    "float": (lambda x: float(x[0]), "item", 1.0),
    "bool": (lambda x: bool((x > 0).all()), "item", True),
    "if": (lambda x: "yes" if x.sum() > 0 else "no", "item", "yes"),
    "tolist": (lambda x: x.tolist(), "tolist", [1.0, 1.0, 1.0]),
    "cpu": (lambda x: x.cpu().tolist(), "copy", [1.0, 1.0, 1.0]),
    "to": (lambda x: x.to("cpu", torch.float64).numpy().tolist(), "copy", [1.0, 1.0, 1.0]),
    "copy_": (lambda x: torch.zeros(3).copy_(x).tolist(), "copy", [1.0, 1.0, 1.0]),
    "mask": (lambda x: x[x > 0].shape, "shape", (3,)),
    "nonzero": (lambda x: x.nonzero().shape, "shape", (0, 1)),
}


@pytest.mark.parametrize("what", READS)
def test_a_read_is_counted_and_gives_a_stand_in(gpu: FakeGpu, what: str) -> None:
    read, name, value = READS[what]
    assert read(there(3)) == value
    assert gpu.reads == {name: 1}


def test_values_from_the_cpu_are_read_as_they_are(gpu: FakeGpu) -> None:
    lengths = torch.tensor([3, 5]).to(DEVICE)
    assert int(lengths.max()) == 5
    assert torch.repeat_interleave(torch.tensor([7, 8], device=DEVICE), lengths).tolist() == [7] * 3 + [8] * 5
    assert torch.arange(4, device=DEVICE)[torch.tensor([True, False, True, False]).to(DEVICE)].tolist() == [0, 2]
    changed = torch.zeros(2, device=DEVICE)
    changed[0] = 4
    assert changed.tolist() == [4.0, 0.0]
    assert (changed + there(2)).tolist() == [1.0, 1.0]  # no longer known
    changed.copy_(there(2))
    assert changed.tolist() == [1.0, 1.0]


def test_what_a_gpu_accepts_is_accepted(gpu: FakeGpu) -> None:
    x = there(3, 4)
    assert x[torch.tensor([0, 2])].shape == (2, 4)  # indices of the CPU
    assert (x * torch.tensor(2.0)).device == x.device  # and its scalars
    assert torch.randn(2, generator=CPU).to(DEVICE).device == x.device
    with torch.autocast(NAME, torch.bfloat16):
        assert (x @ there(4, 2)).dtype == torch.bfloat16
        assert functional.softmax(there(2).bfloat16(), 0).dtype == torch.float32
        assert functional.linear(x.bfloat16(), there(2, 4)).dtype == torch.bfloat16
    assert not gpu.reads
    assert gpu.uploads == 2  # the indices, and the noise
    assert gpu.draws == 0


def test_draws_and_float64_on_the_device_are_counted(gpu: FakeGpu) -> None:
    torch.randn(2, device=DEVICE)
    assert gpu.draws == 1
    there(2).double()
    assert gpu.wide == 1


def test_gradients_flow_and_modules_move(gpu: FakeGpu) -> None:
    layer = torch.nn.Linear(2, 2).to(DEVICE)
    layer(there(1, 2)).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.device == torch.device(DEVICE)
    assert layer.to("cpu", torch.bfloat16).weight.dtype == torch.bfloat16
    assert layer.weight.device.type == "cpu"


def test_a_worker_has_the_device_too(gpu: FakeGpu) -> None:
    with device.worker(torch.device(DEVICE)) as worker:
        assert worker.submit(lambda: there(2).cpu().sum().item()).result() == 2
        with pytest.raises(FaultError):
            worker.submit(lambda: there(2).numpy()).result()
    assert gpu.reads == {"copy": 1}


def test_a_faulty_reward_and_a_condition_left_behind_are_caught(gpu: FakeGpu) -> None:
    def faulty(images: Tensor, prompts: list[str], metadata: object = None) -> Any:
        return images.mean((1, 2, 3)).numpy()

    with pytest.raises(RecastError, match="has to be copied to the CPU first"):
        base.score({"faulty": faulty}, there(2, 3, 8, 8), ["a", "b"])
    condition = Condition({"embeds": torch.zeros(1, 2, 4)})
    with pytest.raises(FakeTensorDeviceMismatchError):
        there(1, 2, 4) + condition.tensors["embeds"]
    assert (there(1, 2, 4) + condition.to(DEVICE).tensors["embeds"]).shape == (1, 2, 4)


@pytest.mark.parametrize("samples", [2, 5])
def test_a_read_per_sample_is_seen(gpu: FakeGpu, samples: int) -> None:
    scores = there(samples)
    [score.item() for score in scores]
    assert gpu.reads == {"item": samples}
