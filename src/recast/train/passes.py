"""The velocities that a loss compares, of the trained policy, the old one and the base, without passes that are known.

Of the three passes per pair, two can be left out where their result is known exactly: the old policy's as long as its
adapter equals the trained one, and the base's as long as the trained adapter is zero. The base's is also left out if
the KL term does not count, and computed for a part of the pairs by `train.kl_every`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recast.flow.lora import Adapters
from recast.flow.policy import Condition, Policy
from recast.flow.sharded import part

__all__ = ["Needed", "Velocities", "differing", "velocities"]


@dataclass(frozen=True)
class Needed:
    """Whether an optimizer step needs the pass of the old policy, and that of the base."""

    old: bool = True
    base: bool = True


@dataclass(frozen=True)
class Velocities:
    """Velocities (B, ...) of the trained policy, of the old one, and of the base if the KL term needs it."""

    trained: Tensor
    old: Tensor
    base: Tensor | None


@torch.no_grad()
def differing(adapters: Adapters) -> Tensor:
    """1 or 0 for the old policy and for the base (2,): whether they differ from the trained one, on the device.

    Under FSDP this is about the shard of this process.

    >>> from recast import config
    >>> from recast.flow import families
    >>> policy = families.load(config.policy(model="shapes"))
    >>> differing(Adapters(policy.network, policy.targets, rank=4, alpha=8))
    tensor([0., 0.])
    """
    pairs = zip(adapters.parameters, adapters.old_parameters, strict=True)
    old = torch.stack([(part(new) != part(old)).any() for new, old in pairs]).any()
    second = adapters.parameters[1::2]  # A and B of each layer: the adapter is zero if every B is
    return torch.stack([old, torch.stack([part(each).any() for each in second]).any()]).float()


def velocities(
    policy: Policy,
    adapters: Adapters,
    x: Tensor,
    sigma: Tensor,
    condition: Condition,
    passes: Needed,
    anchored: Tensor,
) -> Velocities:
    """Velocities at noised latents `x` (B, ...), where only the trained policy's has a gradient.

    `anchored` (B,) marks the pairs whose distance to the base counts. For the others the base's velocity is the trained
    one, at a distance of 0 and without a gradient.
    """
    old: Tensor | None = None
    base: Tensor | None = None
    rows = anchored.nonzero()[:, 0]
    with torch.no_grad():
        if passes.old:
            adapters.use("old")
            old = policy.velocity(x, sigma, condition)
        if passes.base and len(rows):
            adapters.use("base")
            if len(rows) == len(x):
                base = policy.velocity(x, sigma, condition)
            else:
                here = rows.to(x.device)
                base = policy.velocity(x[here], sigma[here], condition.rows(rows))
    adapters.use("default")
    v = policy.velocity(x, sigma, condition)
    if base is not None and len(base) < len(v):
        base = v.detach().index_copy(0, rows.to(v.device), base)
    return Velocities(v, v.detach() if old is None else old, base)
