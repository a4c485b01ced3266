"""Peak speeds and memory of GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from recast.errors import RecastError

__all__ = ["BY_MEMORY", "CARDS", "Card", "card"]


@dataclass(frozen=True)
class Card:
    """A GPU: its name, its memory in GiB, and its peak TFLOP/s without sparsity.

    Parameters
    ----------
    bfloat16 : float
        Products of 16-bit numbers on tensor cores, with sums in float32.
    tf32 : float
        Float32 convolutions, which PyTorch rounds to TF32 by default.
    float32 : float
        Float32 matrix products, which PyTorch does not round by default.
    """

    name: str
    memory: int
    bfloat16: float
    tf32: float
    float32: float

    def seconds(self, flops: Mapping[str, float], utilization: float) -> float:
        """Seconds of one GPU for FLOPs by kind, at a share `utilization` of the peak."""
        peaks = {"bfloat16": self.bfloat16, "tf32": self.tf32, "float32": self.float32}
        return sum(count / (peaks[kind] * 1e12 * utilization) for kind, count in flops.items())


# NVIDIA's data sheets and white papers, dense figures (those with sparsity are twice as high): RTX 4090: Ada GPU
# architecture white paper, app. A; A100, L40S, H100 SXM, H200 SXM: data sheets; B200: DGX B200 data sheet over 8.
CARDS = {
    "rtx4090": Card("RTX 4090", 24, 165.2, 82.6, 82.6),
    "a100-40": Card("A100 40 GB", 40, 312.0, 156.0, 19.5),
    "l40s": Card("L40S", 48, 362.05, 183.0, 91.6),
    "a100": Card("A100 80 GB", 80, 312.0, 156.0, 19.5),
    "h100": Card("H100 SXM", 80, 989.4, 494.7, 66.9),
    "h200": Card("H200 SXM", 141, 989.4, 494.7, 66.9),
    "b200": Card("B200", 180, 2250.0, 1125.0, 75.0),
}
"""Known GPUs by short name."""
BY_MEMORY = {24: "rtx4090", 40: "a100-40", 48: "l40s", 80: "h100", 141: "h200", 180: "b200"}
"""The GPU that a size of memory stands for."""


def card(name: str | None, memory: int | None) -> Card:
    """The GPU of a name, or the one that a size of memory in GB stands for; an H100 if neither is given.

    >>> card(None, 141).name, card("a100", None).memory
    ('H200 SXM', 80)
    """
    if name is not None:
        if name.lower() not in CARDS:
            raise RecastError(f"unknown card {name!r}: choose one of {', '.join(CARDS)}")
        return CARDS[name.lower()]
    if memory is None:
        return CARDS["h100"]
    if memory not in BY_MEMORY:
        sizes = ", ".join(map(str, BY_MEMORY))
        raise RecastError(f"--gpu {memory} stands for no known card: choose one of {sizes}, or add --card NAME")
    return CARDS[BY_MEMORY[memory]]
