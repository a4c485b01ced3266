"""From rewards and W to how good a sample is at each step.

Three ways to put rewards on one scale: `step` divides every step's mixed reward by its own standard deviation (what
DiffusionNFT does to its one reward), `shared` divides all steps by one, so that the scale of W's columns survives, and
`reward` standardises each reward first and mixes then (GDPO), so that a budget means a share of the advantage whatever
the rewards' units are.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from recast.core.weights import WeightMatrix
from recast.errors import RecastError

Mode = Literal["step", "shared", "reward"]
Spread = Literal["batch", "group"]
EPSILON = 1e-4
"""Added to standard deviations, as DiffusionNFT does."""


def advantages(
    rewards: Tensor, groups: Tensor, weights: WeightMatrix, mode: Mode = "step", spread: Spread = "batch"
) -> Tensor:
    """Advantages (B, T) of samples with `rewards` (B, m), each against the mean of its group (B,) of one prompt.

    Column j belongs to the step t = j+1; a trainer that shuffles steps looks its columns up by σ (`by_sigma`). NaN
    means that a reward does not apply: it drops out with its weight, and a sample with no reward at all has the
    advantage 0. `spread` is where the standard deviation comes from: all samples, or those of the same group.
    """
    return parts(rewards, groups, weights, mode, spread).sum(1)


def parts(
    rewards: Tensor, groups: Tensor, weights: WeightMatrix, mode: Mode = "step", spread: Spread = "batch"
) -> Tensor:
    """What each reward contributes to the advantages: (B, m, T), which sums to them over the rewards."""
    if mode not in ("step", "shared", "reward"):
        raise RecastError(f"unknown normalisation {mode!r}: choose step, shared or reward")
    if spread not in ("batch", "group"):
        raise RecastError(f"the spread is that of the batch or of the group, not {spread!r}")
    groups = groups.unique(return_inverse=True)[1]
    raw = rewards.double()
    # Before they are mixed: else "this reward applies" would count as an advantage where it does for some images only.
    values = _centred(raw, groups)
    if mode == "reward":
        values = values / (_std(values, groups, spread) + EPSILON)
    missing = values.isnan()
    zero = values.new_zeros(())
    # A reward alone, the others at 0 but not missing: its term of the mix, with the weights the mix gives it.
    lone = torch.eye(values.shape[1], dtype=torch.bool, device=values.device)
    found = torch.stack([weights.mix(torch.where(missing | mine, values, zero)) for mine in lone], 1)
    if mode == "reward":
        mixed = found.sum(1)
    else:  # as DiffusionNFT has it, prompts' differences included; what is missing adds no spread
        mixed = weights.mix(torch.where(raw.isnan(), raw.nanmean(0).nan_to_num(0.0), raw))
    scale = _std(mixed, groups, spread)
    if mode != "step":  # one for all steps: the root of their mean variance
        scale = (scale**2).mean(1, keepdim=True).sqrt()
    return (found / (scale + EPSILON).unsqueeze(1)).nan_to_num(0.0)


def by_sigma(table: Tensor, weights: WeightMatrix, sigmas: Tensor) -> Tensor:
    """Columns of `table` (B, T) for slots at `sigmas` (B, k), each sample's in any order: (B, k)."""
    return table.gather(1, weights.columns(sigmas).to(table.device))


def optimality(advantages: Tensor, clip: float = 5.0) -> Tensor:
    """r = ½ + adv / (2·clip) in [0, 1]: the probability that a sample is a good one."""
    return (0.5 + advantages.clamp(-clip, clip) / (2 * clip)).clamp(0, 1)


def shares(parts: Tensor) -> tuple[Tensor, Tensor]:
    """Each reward's share of the advantage's variance, overall (m,) and at each step (m, T); each sums to 1.

    Cov(part, whole) / Var(whole): below its budget where a reward hardly varies, negative where it works against the
    others. 0 where nothing varies.
    """
    whole = parts.sum(1, keepdim=True)
    joint, total = (parts * whole).sum(0), (whole * whole).sum(0)
    overall = joint.sum(1) / total.sum().clamp(min=torch.finfo(parts.dtype).tiny)
    return overall, joint / total.clamp(min=torch.finfo(parts.dtype).tiny)


def group_mean(values: Tensor, groups: Tensor) -> Tensor:
    """The mean (B, …) over each sample's group; NaN entries do not count."""
    known = ~values.isnan()
    shape = (int(groups.max()) + 1, *values.shape[1:])
    sums = values.new_zeros(shape).index_add_(0, groups, torch.where(known, values, 0.0))
    counts = values.new_zeros(shape).index_add_(0, groups, known.to(values.dtype))
    return (sums / counts)[groups]


def group_std(values: Tensor, groups: Tensor) -> Tensor:
    """The population standard deviation (B, …) within each sample's group; NaN entries do not count."""
    return group_mean(_centred(values, groups) ** 2, groups).sqrt()


def _centred(values: Tensor, groups: Tensor) -> Tensor:
    return values - group_mean(values, groups)


def _std(values: Tensor, groups: Tensor, spread: Spread) -> Any:
    """Standard deviations that broadcast over `values` (B, k)."""
    if spread == "group":
        return group_std(values, groups)
    return group_std(values, torch.zeros_like(groups))[:1].expand_as(values) if len(values) else values
