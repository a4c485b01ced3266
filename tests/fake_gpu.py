"""A GPU that is not there: the product's code runs on it, tensors have a shape, a dtype and a device but no values.

Tensors on the CPU stay real. What is on the device is one of torch's fake tensors, on a device that torch registers
for backends written in Python. So a program runs as on a GPU, at any size, for the cost of its shapes, and what a GPU
would refuse is an error: tensors of two devices in one operation, matrices of two dtypes, `.numpy()` of a tensor on
the device, a draw on the device from a generator of the CPU. Reading a value from the device is counted, since it
makes the CPU wait: `.item()`, `bool()`, `.tolist()`, `.cpu()`, `.to("cpu")`, and operations whose result has a size
that depends on values (boolean indices, `nonzero`).

What is read is a stand-in: True, or ones; a boolean index selects as many rows as the mask has, and `nonzero` finds
nothing. Small tensors that come from the CPU, and what is computed from these alone, keep their values and are read
truthfully: lengths, masks, flags, noise levels.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

from recast import device

aten = torch.ops.aten
COPIES = (aten._to_copy.default, aten.copy_.default)
NAME = "fgpu"
DEVICE = f"{NAME}:0"
SMALL = 4096
"""Most elements of a tensor on the device whose values are kept."""
LARGE = 2**20
"""Most elements of a stand-in that has memory of its own."""
ONE_DTYPE = {
    *(aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution, aten.native_layer_norm, aten.native_group_norm),
    *(aten._scaled_dot_product_fused_attention_overrideable, aten._scaled_dot_product_flash_attention_for_cpu),
    *(aten.index_put, aten.index_put_, aten.index_add, aten.index_add_, aten.lerp, aten.lerp_),
}
"""Operations that CUDA refuses for floats of different dtypes; fake tensors do not check it."""
NARROW = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "conv2d", "conv3d", "scaled_dot_product_attention")
WIDE = ("layer_norm", "group_norm", "rms_norm", "softmax.int", "norm.ScalarOpt_dim", "pow.Tensor_Scalar", "exp", "sum")
"""Operations that autocast on CUDA runs in the narrow dtype and in float32; those that the models here use."""


class FaultError(RuntimeError):
    """What would fail on a GPU."""


class _Shapes(FakeTensorMode):
    """Fake tensors that never touch the device, not even to copy a constant to it."""

    avoid_device_init = True  # type: ignore[assignment]


class FakeGpu(TorchDispatchMode):
    """The device while its `with` block lasts.

    Attributes
    ----------
    reads : Counter
        How often values were read from the device, by the name of the operation.
    uploads : int
        Copies from the CPU to the device. From memory that is not pinned, CUDA waits for these as well.
    draws : int
        Random draws on the device, the initialization of modules included.
    wide : int
        Operations on the device with a float64 result, of which consumer GPUs make 1/64 of their float32 rate.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fake = _Shapes(allow_non_fake_inputs=True)
        self.reads: Counter[str] = Counter()
        self.draws = self.uploads = self.wide = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = pytree.arg_tree_leaves(*args, **kwargs)
        mine = [each for each in leaves if isinstance(each, FakeTensor)]
        target = kwargs.get("device") or torch.device(DEVICE if mine else "cpu")
        if not mine and target.type != NAME:
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            return self._read("item", mine[0]).item()
        if func in COPIES and _leaves_device(func, args, target):
            return self._copied(func, args, kwargs)
        self._check(func, leaves, mine)
        self.uploads += func in (*COPIES, aten.index.Tensor) and any(_has_values(each) for each in leaves)
        if _masks(func, args) or (torch.Tag.dynamic_output_shape in func.tags and func is not aten.index.Tensor):
            return self._selected(func, args, kwargs, mine)
        with self.fake:
            found = func(*args, **kwargs)
        made = [found] if isinstance(found, Tensor) else pytree.tree_leaves(found)
        made = [each for each in made if isinstance(each, Tensor)]
        if any(each.device.type != NAME for each in made):
            raise FaultError(f"{func}: a tensor on the CPU and one on the device")
        self.wide += any(each.dtype == torch.float64 for each in made)
        _keep_values(func, args, kwargs, leaves, made)
        return found

    def _read(self, name: str, tensor: Tensor) -> Tensor:
        """The values of a tensor on the device, in a tensor on the CPU; counted."""
        self.reads[name] += 1
        if (known := getattr(tensor, "known", None)) is not None:
            return known.clone()
        one = torch.ones((), dtype=tensor.dtype).expand(tensor.shape)
        return one if one.numel() > LARGE else one.contiguous()

    def _copied(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """A copy from the device to the CPU."""
        if func is aten.copy_.default:
            return args[0].copy_(self._read("copy", args[1]))
        options = {name: value for name, value in kwargs.items() if name in ("dtype", "memory_format")}
        return aten._to_copy.default(self._read("copy", args[0]), **options)

    def _check(self, func: Any, leaves: list[Any], mine: list[FakeTensor]) -> None:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draws += 1
        if any(isinstance(each, torch.Generator) and each.device.type != NAME for each in leaves):
            raise FaultError(f"{func}: a draw on the device from a generator of the CPU")
        if func.overloadpacket in ONE_DTYPE:
            kinds = {each.dtype for each in mine if each.is_floating_point()}
            if len(kinds) > 1:
                raise FaultError(f"{func}: floats of different dtypes, {sorted(map(str, kinds))}")

    def _selected(self, func: Any, args: Any, kwargs: Any, mine: list[FakeTensor]) -> Tensor:
        """The result of an operation whose shape depends on values."""
        self.reads["shape"] += 1
        masks, first, values = _masks(func, args), args[0], None
        if all(hasattr(each, "known") for each in masks or mine if isinstance(each, FakeTensor)):
            like = getattr(first, "known", torch.empty((), dtype=first.dtype).expand(first.shape))
            values = func(like, *pytree.tree_map(_real, args[1:]), **kwargs)
            shape = tuple(values.shape)
        elif masks:
            shape = (len(masks[0]), *first.shape[masks[0].ndim :])
        else:
            assert func is aten.nonzero.default, f"{func} needs values that are not known"
            shape = (0, first.ndim)
        with self.fake:
            found = torch.empty(shape, dtype=first.dtype if masks else torch.long, device=DEVICE)
        if values is not None and hasattr(first, "known"):
            found.known = values  # type: ignore[attr-defined]
        return found


def _masks(func: Any, args: Any) -> list[Tensor]:
    """The boolean indices of an operation."""
    indices = args[1] if func is aten.index.Tensor else ()
    return [each for each in indices if each is not None and each.dtype == torch.bool]


def _real(each: Any) -> Any:
    """An argument on the CPU, with its values."""
    return torch.device("cpu") if isinstance(each, torch.device) else getattr(each, "known", each)


def _has_values(each: Any) -> bool:
    return isinstance(each, Tensor) and not isinstance(each, FakeTensor)


def _leaves_device(func: Any, args: Any, target: torch.device) -> bool:
    if func is aten.copy_.default:
        return args[0].device.type == "cpu" and args[1].device.type == NAME
    return target.type == "cpu"


def _keep_values(func: Any, args: Any, kwargs: Any, leaves: list[Any], made: list[Tensor]) -> None:
    """Compute the values of a result on the CPU too, if it is small and those of all arguments are known."""
    tensors = [each for each in leaves if isinstance(each, Tensor)]
    known = all(not isinstance(each, FakeTensor) or hasattr(each, "known") for each in tensors)
    unset = (not tensors and "empty" in func.name()) or torch.Tag.nondeterministic_seeded in func.tags
    if not known or unset or any(each.numel() > SMALL for each in [*tensors, *made]):
        for each in tensors if func._schema.is_mutable else ():
            vars(each).pop("known", None)
        return
    values = func(*pytree.tree_map(_real, args), **pytree.tree_map(_real, kwargs))
    for each, value in zip(
        made, (each for each in pytree.tree_leaves(values) if isinstance(each, Tensor)), strict=True
    ):
        each.known = value  # type: ignore[attr-defined]


class _Calls(TorchFunctionMode):
    """What torch decides before any operation."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.numpy, Tensor.__array__) and isinstance(args[0], FakeTensor):
            raise FaultError(f"{func.__name__}: a tensor on the device has to be copied to the CPU first")
        return func(*args, **(kwargs or {}))


class _Worker(ThreadPoolExecutor):
    """One thread that uses the device, for which the other one waits; torch's modes belong to a thread."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__(1, initializer=lambda: (gpu.__enter__(), _Calls().__enter__()))

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:  # type: ignore[override]
        """The call, which has ended."""
        future = super().submit(*args, **kwargs)
        wait([future])
        return future


def _applied(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """`Module._apply`, which torch has for real parameters only; new ones take the places of the old."""
    for module in self.children() if recurse else ():
        module._apply(fn)
    with torch.no_grad():
        for key, old in self._parameters.items():
            if old is not None and (new := fn(old)) is not old:
                self._parameters[key] = nn.Parameter(new, old.requires_grad)
        for key, buffer in self._buffers.items():
            self._buffers[key] = None if buffer is None else fn(buffer)
    return self


@contextmanager
def running() -> Iterator[FakeGpu]:
    """The device, in this thread and in those of `recast.device.worker`."""
    _register()
    gpu, lifted = FakeGpu(), torch._C._only_lift_cpu_tensors()
    # A thread of the device's own for gradients may abort the process if it ends at the same time.
    with torch.autograd.set_multithreading_enabled(False), pytest.MonkeyPatch.context() as patch, gpu, _Calls():
        patch.setattr(FakeTensor, "tolist", lambda self: gpu._read("tolist", self).tolist())
        patch.setattr(nn.Module, "_apply", _applied)
        patch.setattr(device, "worker", lambda _where: _Worker(gpu))
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(…, device=…) is made on the CPU and copied
        try:
            yield gpu
        finally:
            torch._C._set_only_lift_cpu_tensors(lifted)


@functools.cache
def _register() -> list[Any]:
    """Give the device its name, and autocast its rules for it; both stay until the process ends."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, _Module())
    rules = torch.library.Library("aten", "IMPL")
    rest = torch.library.Library("_", "IMPL")
    rest.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name in NARROW + WIDE:
        rules.impl(name, _cast(name, name in NARROW), "AutocastPrivateUse1")
    return [rules, rest]


def _cast(name: str, narrow: bool) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    func = getattr(getattr(aten, packet), overload or "default")

    def call(*args: Any, **kwargs: Any) -> Any:
        to = torch.get_autocast_dtype(NAME) if narrow else torch.float32

        def cast(each: Any) -> Any:
            mine = isinstance(each, Tensor) and each.is_floating_point() and each.device.type == NAME
            return each.to(to) if mine and each.dtype != torch.float64 else each

        with torch.autocast(NAME, enabled=False):
            return func(*pytree.tree_map(cast, args), **pytree.tree_map(cast, kwargs))

    return call


class _Module(backend_registration._DummyBackendModule):
    """What torch asks of the module of a device."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, _device: Any = None) -> Tensor:
        return torch.zeros(1, dtype=torch.uint8)

    def set_rng_state(self, _state: Tensor, _device: Any = None) -> None:
        """There is no state."""

    def device(self, _index: Any) -> Any:
        return nullcontext()
