"""What a velocity call really holds, beside what `estimate.memory` reckons with."""

import weakref
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recast.flow import configurations
from recast.flow.sd3 import SD3Policy


class Peak(TorchDispatchMode):
    """The most bytes that tensors made inside the block held at once."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.sizes = {weight.untyped_storage()._cdata: 0 for weight in [*model.parameters(), *model.buffers()]}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.sizes:
                storage = tensor.untyped_storage()
                self.sizes[storage._cdata] = storage.nbytes()
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self.free, storage._cdata)
        return found

    def free(self, key: int) -> None:
        self.live -= self.sizes.pop(key, 0)


# bfloat16 at 256²: processors without its instructions take minutes for 512².
@pytest.mark.parametrize(("dtype", "latents"), [(torch.float32, 64), (torch.bfloat16, 32)])
def test_a_row_takes_what_the_memory_budget_reckons_with(dtype: torch.dtype, latents: int) -> None:
    # SD3.5-Medium's own widths and tokens, two of its blocks: the peak does not grow with depth.
    with torch.device("meta"):
        sizes = configurations.transformer("stabilityai/stable-diffusion-3.5-medium")
        model = SD3Transformer2DModel(**(sizes | {"num_layers": 2, "dual_attention_layers": (0,)}))
    model = model.to(dtype).to_empty(device="cpu")
    for parameter in model.parameters():  # what memory happens to hold may be denormal, and a hundred times slower
        parameter.data.zero_()

    class Medium:
        _dtype, width, needs_empty, joint, vectors = dtype, 24 * 64, False, True, SD3Policy.vectors
        image_tokens, text_tokens = (latents // 2) ** 2, 77 + 256

    inputs = {
        "hidden_states": torch.zeros(1, 16, latents, latents, dtype=dtype),
        "encoder_hidden_states": torch.zeros(1, 77 + 256, 4096, dtype=dtype),
        "pooled_projections": torch.zeros(1, 2048, dtype=dtype),
        "timestep": torch.zeros(1),
    }
    given = sum(tensor.nbytes for tensor in inputs.values())
    with torch.no_grad(), Peak(model) as memory:
        model(**inputs)
    reckoned = SD3Policy.row_bytes.fget(Medium)  # type: ignore[attr-defined]
    assert 0.8 * reckoned < memory.peak + given < reckoned
