"""Gradients reduced to fewer numbers, and their files and inner products."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_bytes
from torch import Tensor

from recast.core import artifact
from recast.errors import RecastError
from recast.train import checkpoint

__all__ = ["Sketch", "file", "products", "save"]

_CHUNK = 4096
"""Entries of the vectors whose products are summed at a time: in float64 they take twice their memory."""


class Sketch:
    """A count sketch: a random sum of ± the entries of a vector, which preserves inner products on average.

    Parameters
    ----------
    size : int
        Entries of a vector.
    kept : int
        Numbers that are kept; a vector of at most so many is kept as it is.
    device : torch.device or str, default "cpu"
        Where the vectors are.

    Examples
    --------
    >>> one, two = torch.ones(3), torch.tensor([1.0, 2.0, 3.0])
    >>> float(Sketch(3, 8)(one) @ Sketch(3, 8)(two))
    6.0
    >>> Sketch(1000, 64)(torch.ones(1000)).shape
    torch.Size([64])
    """

    def __init__(self, size: int, kept: int, device: Any = "cpu") -> None:
        self.size = min(size, kept)
        self._place: Tensor | None = None
        if size > kept:
            generator = torch.Generator().manual_seed(0)  # one sketch for all vectors, or no inner product is preserved
            self._place = torch.randint(kept, (size,), generator=generator).to(device)
            self._sign = (2 * torch.randint(2, (size,), generator=generator, dtype=torch.int8) - 1).to(device)

    def __call__(self, vector: Tensor) -> Tensor:
        """The sketch of a vector."""
        if self._place is None:
            return vector
        return vector.new_zeros(self.size).index_add_(0, self._place, vector * self._sign)


def file(folder: Path, split: int) -> Path:
    """The file of a split's gradients."""
    return folder / f"split-{split:02d}.safetensors"


def save(folder: Path, split: int, gradients: Tensor) -> None:
    """Write the gradients (m, T, k) of a split, atomically."""
    kept = gradients.detach().cpu().contiguous()
    artifact.write_bytes(file(folder, split), to_bytes({"gradients": kept, artifact.CHECKSUM: _checksum(kept)}))


def _checksum(gradients: Tensor) -> Tensor:
    """SHA-256 of the type, shape and numbers of a split's gradients, as bytes."""
    content = f"{gradients.dtype} {tuple(gradients.shape)}".encode() + gradients.numpy().tobytes()
    return torch.tensor(list(hashlib.sha256(content).digest()), dtype=torch.uint8)


def _read(path: Path) -> Tensor:
    """The gradients (m·T, k) of a split."""
    found = checkpoint.load_tensors(path)
    gradients = found["gradients"]
    if artifact.CHECKSUM in found and not torch.equal(found[artifact.CHECKSUM], _checksum(gradients)):
        raise RecastError(f"{path}: the data do not have their checksum")
    return gradients.flatten(0, 1)


def products(folder: Path, splits: int) -> Any:
    """Inner products (Q, Q, n, n) of the gradients of all splits, with n = m·T, in float64."""
    try:
        flat = torch.cat([_read(file(folder, split)) for split in range(splits)])
    except (RecastError, KeyError, RuntimeError, IndexError) as error:
        raise RecastError(f"{folder}: the gradients cannot be read ({error}): remove the folder") from error
    found = torch.zeros(len(flat), len(flat), dtype=torch.float64)
    for part in flat.split(_CHUNK, dim=1):
        found += part.double() @ part.double().T
    return found.view(splits, -1, splits, len(flat) // splits).transpose(1, 2).numpy()
