"""The policy on its device against the same policy on the CPU: velocity, gradient, decoded and encoded images.

A tolerance is twice the relative error that independent roundings add up to: √n roundings of relative size u for a
network of n modules, where a product that sums K terms in float32 adds √K roundings of float32. u is that of the
policy's dtype, or of TF32 if the device's products use it. What matters is the order of magnitude: a wrong time,
prompt, adapter or layout is off by about 1.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recast.config import Recipe
from recast.errors import RecastError
from recast.flow import families
from recast.flow.generate import TILE, generate, start_noise
from recast.flow.lora import Adapters
from recast.flow.policy import Policy
from recast.selftest.report import Check

__all__ = ["against", "checks", "relative", "tolerance"]

_TF32 = 2.0**-11
_SIGMA = 0.7


def checks(recipe: Recipe, texts: Sequence[str]) -> Iterator[Check]:
    """The policy's checks, one at a time."""
    config = recipe.policy.model_copy(update={"lora": None})  # training adds adapters of its own
    policy = families.load(config)
    yield _timed("the same images twice", lambda: _repeated(policy, texts, recipe.estimate.steps))
    yield _timed("an image does not depend on its batch", lambda: _alone(policy, texts, recipe.estimate.steps))
    if policy.device.type == "cpu":
        yield Check("device against CPU", "not run", "the device is the CPU")
        return
    try:
        other = families.load(config.model_copy(update={"device": "cpu", "compile": False, "attention": None}))
    except RecastError as error:
        yield Check("device against CPU", "not run", f"the policy cannot be loaded on the CPU: {error}")
        return
    yield from against(policy, other, texts[:1])


def against(policy: Policy, other: Policy, texts: Sequence[str]) -> Iterator[Check]:
    """The checks of a policy against the same one on the CPU; both get adapters in the last one."""
    vae = getattr(getattr(policy, "pipe", None), "vae", None)

    def one(call: Callable[[Policy, Sequence[str]], Tensor], module: Any = None) -> Check:
        return Check.compared("", relative(call(policy, texts), call(other, texts)), tolerance(policy, module))

    yield _timed("velocity against CPU", lambda: one(_velocity))
    yield _timed("decoded images against CPU", lambda: one(_decoded, vae))
    yield _timed("encoded images against CPU", lambda: one(_encoded, vae))
    for each in (policy, other):
        Adapters(each.network, each.targets)
    yield _timed("gradient against CPU", lambda: one(_gradient))


def _timed(name: str, call: Callable[[], Check]) -> Check:
    """The check with its seconds; what it raises is its failure, since other checks may still tell more."""
    begun = time.perf_counter()
    try:
        made = replace(call(), name=name)
    except Exception as error:
        made = Check(name, "failed", f"{type(error).__name__}: {error}".replace(str(Path.home()), "~"))
    return replace(made, seconds=time.perf_counter() - begun)


def _repeated(policy: Policy, texts: Sequence[str], steps: int) -> Check:
    first, second = (generate(policy, texts, range(len(texts)), steps=steps) for _ in range(2))
    return Check.compared("", float((first - second).abs().max()), 0.0, f"{len(texts)} images at {steps} steps")


def _alone(policy: Policy, texts: Sequence[str], steps: int) -> Check:
    """An image among others and among copies of itself, in batches of TILE rows, as all stages make them."""
    seeds = [seed % len(texts) for seed in range(TILE)]
    many = generate(policy, [texts[seed] for seed in seeds], seeds, steps=steps, batch=TILE)
    one = generate(policy, [texts[0]] * TILE, [0] * TILE, steps=steps, batch=TILE)
    off = float((many[0] - one[0]).abs().max())
    # A GPU chooses other kernels for other sizes; on a CPU the bits are the same.
    allowed = 0.0 if policy.device.type == "cpu" else tolerance(policy)
    return Check.compared("", off, allowed, f"in a batch of {TILE}")


def _velocity(policy: Policy, texts: Sequence[str]) -> Tensor:
    x = start_noise(policy.latent_shape, range(len(texts))).to(policy.device)
    with torch.no_grad():
        return policy.velocity(x, _SIGMA, policy.condition(texts))


def _gradient(policy: Policy, texts: Sequence[str]) -> Tensor:
    """The gradient of all adapters; that of A is 0 as long as B is."""
    x = start_noise(policy.latent_shape, range(len(texts))).to(policy.device)
    target = start_noise(policy.latent_shape, [len(texts) + k for k in range(len(texts))]).to(policy.device)
    loss = (policy.velocity(x, _SIGMA, policy.condition(texts)) - target).square().mean()
    trained = [parameter for parameter in policy.network.parameters() if parameter.requires_grad]
    return torch.cat([each.float().flatten() for each in torch.autograd.grad(loss, trained)])


def _decoded(policy: Policy, texts: Sequence[str]) -> Tensor:
    return policy.decode(start_noise(policy.latent_shape, range(len(texts))).to(policy.device))


def _encoded(policy: Policy, texts: Sequence[str]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return policy.encode(torch.rand(len(texts), 3, *policy.image_size, generator=generator))


def relative(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖ / ‖expected‖, on the CPU in float64.

    >>> round(relative(torch.tensor([3.0, 4.1]), torch.tensor([3.0, 4.0])), 3)
    0.02
    """
    one, two = (each.detach().cpu().double() for each in (found, expected))
    return float((one - two).norm() / two.norm())


def tolerance(policy: Policy, module: Any = None) -> float:
    """The relative error that roundings explain in the network, or in another module of the policy.

    >>> from recast import config
    >>> policy = families.load(config.policy(model="shapes"))
    >>> 1e-5 < tolerance(policy) < 1e-3
    True
    """
    network = policy.network if module is None else module
    leaves = [each for each in network.modules() if not any(True for _ in each.children())]
    tensors = [each for each in network.parameters() if each.is_floating_point()]
    terms = max((each[0].numel() for each in tensors if each.ndim > 1), default=1)
    unit = max((torch.finfo(each.dtype).eps / 2 for each in tensors), default=0.0)
    cuda = policy.device.type == "cuda"
    if cuda and (torch.backends.cudnn.allow_tf32 if module is not None else torch.backends.cuda.matmul.allow_tf32):
        unit = max(unit, _TF32)
    return 2 * math.sqrt(len(leaves)) * (unit + math.sqrt(terms) * torch.finfo(torch.float32).eps / 2)
