"""FLOPs and live bytes of a computation on tensors without values, as the kernels of a GPU would have them."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

__all__ = ["LOWER", "PROMOTED", "Measured", "measure"]

LOWER = frozenset(
    ("__matmul__", "addbmm", "addmm", "baddbmm", "bmm", "conv1d", "conv2d", "conv3d", "linear", "matmul", "mm")
)
"""Functions that autocast runs in the lower precision on a GPU (documentation of torch.amp)."""
PROMOTED = frozenset(
    (
        *("__pow__", "__rpow__", "cumsum", "exp", "group_norm", "layer_norm", "log", "log_softmax", "mse_loss", "norm"),
        *("normalize", "pow", "prod", "reciprocal", "rsqrt", "softmax", "softplus", "sum"),
    )
)
"""Functions that autocast runs in float32 on a GPU."""
_CONVOLUTIONS = ("convolution", "convolution_backward")


@dataclass(frozen=True)
class Measured:
    """What a computation takes.

    Parameters
    ----------
    flops : mapping of str to int
        FLOPs by kind: "bfloat16" (any 16-bit format), "tf32" (float32 convolutions) and "float32" (float32 products).
    peak : int
        Most bytes that tensors made by the computation held at once.
    saved : int
        Bytes of these tensors that autograd kept for the backward pass.
    """

    flops: Mapping[str, int] = field(default_factory=dict)
    peak: int = 0
    saved: int = 0

    @property
    def total(self) -> int:
        """FLOPs of all kinds."""
        return sum(self.flops.values())


class _Meter(TorchDispatchMode):
    """Counts FLOPs by torch's own formulas, and the bytes of all storages that are made and not yet freed."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops: Counter[str] = Counter()
        self.live = self.peak = 0
        self.sizes = {each.untyped_storage()._cdata: (0, 0) for each in known}
        self.made = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        self._count(function._overloadpacket, args, kwargs or {}, found)
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                self.hold(tensor)
        return found

    def _count(self, packet: Any, args: Any, kwargs: Any, found: Any) -> None:
        if packet not in flop_registry:
            return
        first = next(each for each in tree_leaves(args) if isinstance(each, Tensor))
        kind = "float32" if first.dtype in (torch.float32, torch.float64) else "bfloat16"
        if kind == "float32" and packet.__name__ in _CONVOLUTIONS:
            kind = "tf32"
        self.flops[kind] += int(flop_registry[packet](*args, **kwargs, out_val=found))

    def hold(self, tensor: Tensor) -> None:
        """Count a tensor's storage until it is freed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.sizes:
            self.made += 1
            self.sizes[key] = (self.made, storage.nbytes())
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.live -= self.sizes.pop(key, (0, 0))[1]


class _Kernels(TorchFunctionMode):
    """Fused attention and autocast, which tensors without a device do not get from torch.

    On the meta device, attention would form its matrix, which no kernel of a GPU does; and autocast has no effect.
    """

    def __init__(self, lower: torch.dtype | None, lists: tuple[frozenset[str], frozenset[str]]) -> None:
        super().__init__()
        self.lower, self.lists = lower, lists

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is functional.scaled_dot_product_attention:
            if self.lower is not None:
                args, kwargs = _cast((args, kwargs), self.lower)
            query = args[0] if args else kwargs["query"]
            return _attention(*args, **kwargs) if query.is_meta else function(*args, **kwargs)
        if function is Tensor.backward:  # torch would leave this mode for its duration, in which blocks are recomputed
            with _Kernels(self.lower, self.lists):
                one = (torch.ones_like(args[0]),)
                return torch.autograd.Variable._execution_engine.run_backward(
                    args[:1], one, False, False, (), allow_unreachable=True, accumulate_grad=True
                )
        name = getattr(function, "__name__", "")
        if self.lower is not None:
            for names, dtype in zip(self.lists, (self.lower, torch.float32), strict=True):
                if name in names:
                    args, kwargs = _cast((args, kwargs), dtype)
                    break
        return function(*args, **kwargs)


def _cast(values: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in another precision; autocast keeps those of parameters, which one call uses once."""
    return tree_map(
        lambda each: each.to(dtype) if isinstance(each, Tensor) and each.is_floating_point() else each, values
    )


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention by the fused kernels of a GPU: flash attention, or the memory-efficient one if there is a mask."""
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        times = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    if query.ndim != 4:
        added = 4 - query.ndim
        query, key, value = (each[(None,) * added] for each in (query, key, value))
        return _attention(query, key, value, attn_mask, dropout_p, is_causal, scale)[(0,) * added]
    keep = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    if attn_mask is None and query.dtype != torch.float32:
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[
            0
        ]
    bias = None
    if attn_mask is not None:
        bias = attn_mask if attn_mask.is_floating_point() else torch.empty_like(attn_mask, dtype=query.dtype)
        bias = bias.to(query.dtype).expand(*query.shape[:3], key.shape[2])
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, keep, dropout_p, is_causal, scale=scale
    )[0]


def measure(
    call: Callable[[], object],
    known: Iterable[Tensor] = (),
    autocast: torch.dtype | None = None,
    lists: tuple[frozenset[str], frozenset[str]] = (LOWER, PROMOTED),
) -> Measured:
    """FLOPs, peak and saved bytes of a computation on meta tensors.

    Parameters
    ----------
    call : callable
        The computation; what it returns is kept until it is counted.
    known : iterable of Tensor, optional
        Tensors that exist already, such as parameters, and are not counted.
    autocast : torch.dtype, optional
        Lower precision of autocast; by default none.
    lists : tuple of frozenset of str
        Names of the functions that autocast runs in the lower precision, and in float32.

    Examples
    --------
    >>> a, b = torch.empty(4, 8, device="meta"), torch.empty(8, 2, device="meta")
    >>> made = measure(lambda: a @ b, [a, b])
    >>> made.total, made.peak
    (128, 32)
    """
    meter = _Meter(known)
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        number, size = meter.sizes.get(tensor.untyped_storage()._cdata, (0, 0))
        saved[number] = size  # by its number, since an address may serve again
        return tensor

    with ExitStack() as modes:
        modes.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))
        modes.enter_context(meter)
        modes.enter_context(_Kernels(autocast, lists))
        kept = call()
    del kept
    return Measured(dict(meter.flops), meter.peak, sum(saved.values()))
