"""Every model family at its published widths on a GPU that is not there: prompts, velocities, images, gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import real_size
from fake_gpu import DEVICE, FakeGpu
from recast.flow import flux, flux2, lora, qwen, sana, sd3, zimage
from recast.flow.generate import generate
from recast.flow.pipeline import PipelinePolicy

PROMPTS = ["a red circle", "a blue square and a red circle"]
FAMILIES: dict[str, tuple[Callable[[str], Any], type[PipelinePolicy], int]] = {
    "sd3": (real_size.sd35_medium, sd3.SD3Policy, 2),
    "flux": (real_size.flux, flux.FluxPolicy, 2),
    "flux2": (real_size.flux2_klein, flux2.Flux2KleinPolicy, 1),
    "qwen": (real_size.qwen_image, qwen.QwenImagePolicy, 1 + 3),  # three by the pipeline, for the template's tokens
    "sana": (real_size.sana, sana.SanaPolicy, 2),
    "zimage": (real_size.z_image, zimage.ZImagePolicy, 1 + 1),  # one by the pipeline, for the mask
}
"""Pipeline, policy, and the reads from the device that a new prompt may take: one per tensor that is cached."""


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family(gpu: FakeGpu, name: str) -> None:
    make, kind, per_prompt = FAMILIES[name]
    policy = kind(make(DEVICE), device=DEVICE, resolution=512, guidance=3.5)
    drawn = gpu.draws
    condition = policy.condition(PROMPTS)
    encoded = len(PROMPTS) + policy.needs_empty
    assert gpu.reads.total() == per_prompt * encoded
    gpu.reads.clear()
    assert len(policy.condition(PROMPTS * 3)) == 6  # cached
    assert not gpu.reads
    gpu.reads.clear()
    images = generate(policy, PROMPTS, [0, 1], steps=1)
    assert (images.device.type, images.dtype, images.shape) == ("cpu", torch.float32, (2, 3, 512, 512))
    assert gpu.reads == {"tolist": 1, "copy": 1}  # whether the latents are finite, and the images
    x = torch.rand(2, *policy.latent_shape).to(DEVICE)
    gpu.uploads = 0
    with torch.no_grad():
        policy.velocity(x, 0.5, condition)
    # Positions of tokens and the like are on the device since the first step; diffusers copies the length of a mask.
    assert gpu.uploads == (name == "qwen")
    gpu.reads.clear()
    clean = policy.encode(torch.rand(2, 3, 512, 512))
    assert (clean.device, clean.dtype, clean.shape[1:]) == (policy.device, torch.float32, policy.latent_shape)
    check_training(policy, clean, condition)
    assert not gpu.reads
    assert gpu.draws == drawn


def check_training(policy: PipelinePolicy, clean: torch.Tensor, condition: Any) -> None:
    """Float32 adapters on a bfloat16 base: every trained parameter has a gradient, which DDP waits for."""
    adapters = lora.Adapters(policy.network, policy.targets)
    sigma = torch.tensor([0.2, 0.7]).to(DEVICE)
    for who in ("base", "default"):
        adapters.use(who)  # type: ignore[arg-type]
        v = policy.velocity(clean, sigma, condition)
        assert (v.dtype, v.shape) == (torch.float32, clean.shape)
    v.square().mean().backward()
    assert {each.dtype for each in policy.network.parameters()} == {torch.bfloat16, torch.float32}
    for parameter in adapters.parameters:
        assert parameter.grad is not None
        assert (parameter.grad.dtype, parameter.grad.device) == (torch.float32, policy.device)
