"""Stored rollouts: one file per prompt with the scores of all its rollouts, and a manifest of their settings.

A shard is written atomically, so a run can be killed at any moment. It holds the scores as the rewards return them;
the map to non-negative scores, α and the aggregation are applied when curves are made from the shards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from recast import identity, lock, versions
from recast.core import artifact, strict
from recast.errors import RecastError

__all__ = ["Rollouts", "Shards"]

_FORMAT = "recast.shards"


class _Manifest(strict.Strict):
    """manifest.json: what decides the rollouts, and the versions of the rewards."""

    settings: dict[str, Any]
    versions: dict[str, dict[str, str]] = {}


@dataclass(frozen=True)
class Rollouts:
    """Scores of all rollouts of one prompt.

    Parameters
    ----------
    scores : ndarray, (m, T+1, S, K)
        Scores by m rewards of the K rollouts from each of the S noised samples, at every level. Level 0 needs no
        rollout: its entries repeat the score of the proposal itself. NaN where a reward does not apply.
    evaluations : int
        Velocity evaluations spent, one per sample and step.

    Examples
    --------
    >>> found = Rollouts(np.array([0.0, 1.0, 0.5, 0.7]).reshape(1, 1, 2, 2), evaluations=4)
    >>> found.mu
    array([[[0.5, 0.6]]])
    """

    scores: NDArray[np.float64]
    evaluations: int

    @property
    def mu(self) -> NDArray[np.float64]:
        """Conditional rewards μ̂ (m, T+1, S): the mean over rollouts."""
        return np.asarray(self.scores.mean(axis=-1), dtype=np.float64)


class Shards:
    """The shards of one run in `folder`; shards of other settings are refused, naming the setting that differs.

    `present` are the versions of the rewards that will score; a folder that exists keeps those it was begun with.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], present: versions.Versions | None = None) -> None:
        self.folder = folder
        artifact.sweep(folder)
        self.versions: dict[str, Any] = dict(present or {})
        path = folder / "manifest.json"
        flat = identity.flatten(settings)
        if path.exists():
            content = strict.read(path, _FORMAT, _Manifest, "remove the folder and estimate again")
            identity.require_same(content["settings"], flat, f"{folder} holds rollouts made")
            self.versions = content.get("versions", {})
        else:
            scored_by = {"versions": self.versions} if self.versions else {}
            strict.write(path, _FORMAT, _Manifest, {"settings": flat, **scored_by})

    def require_versions(self, present: versions.Versions) -> None:
        """Raise if the shards were scored by other versions of the rewards than those that will score."""
        known, wanted = versions.flat(self.versions), versions.flat(present)
        versions.require_same(known, wanted, f"{self.folder} has scores", "choose another --out")

    def path(self, name: str) -> Path:
        """The file of a prompt's shard, whether or not it exists."""
        return self.folder / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.safetensors"

    def has(self, name: str) -> bool:
        """Whether a prompt has its shard."""
        return self.path(name).is_file()

    def claim(self, name: str) -> lock.Claim | None:
        """A claim of a prompt for this process alone, or None while another process holds one.

        Two owners at once would only waste time: they write the same bytes.
        """
        return lock.claim(self.path(name).with_suffix(".lock"))

    def sweep(self, names: Sequence[str]) -> None:
        """Remove the locks of prompts that have a shard; their owners were killed before they could."""
        for name in names:
            if self.has(name):
                self.path(name).with_suffix(".lock").unlink(missing_ok=True)

    def write(self, name: str, rollouts: Rollouts, inputs: str) -> None:
        """Store a prompt's scores with `inputs`, the hash of the proposals they were made from."""
        tensors = {"scores": np.ascontiguousarray(rollouts.scores), "evaluations": np.array([rollouts.evaluations])}
        # Among the tensors, since the order of two facts in the header would differ from process to process.
        tensors |= {artifact.CHECKSUM: _checksum(name, inputs, tensors)}
        artifact.write_bytes(self.path(name), save(tensors, {"inputs": inputs}))

    def read(self, name: str, inputs: str | None = None) -> Rollouts:
        """A prompt's scores; an error if they were made from other `inputs`, where those are given."""
        path = self.path(name)
        try:
            with safe_open(path, "np") as file:
                found = (file.metadata() or {}).get("inputs")
                tensors = {key: file.get_tensor(key) for key in ("scores", "evaluations")}
                same = _checksum(name, found or "", tensors)
                written = file.get_tensor(artifact.CHECKSUM) if artifact.CHECKSUM in file.keys() else same  # noqa: SIM118
            _check(tensors)
        except (OSError, SafetensorError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise RecastError(f"{path}: not a readable shard ({error}): remove it and estimate again") from error
        if not np.array_equal(written, same):
            raise RecastError(f"{path}: the data do not have their checksum: remove the shard and estimate again")
        rollouts = Rollouts(tensors["scores"], int(tensors["evaluations"][0]))
        if inputs is not None and found != inputs:
            raise RecastError(
                f"{path} was made from other proposals or metadata for the prompt {name!r}: "
                "remove it, or choose another --out"
            )
        return rollouts


def _checksum(name: str, inputs: str, tensors: Mapping[str, NDArray[Any]]) -> NDArray[np.uint8]:
    """The bytes of a checksum of a shard: its prompt, its inputs, and the types, shapes and bytes of its tensors."""
    data = {
        key: [str(each.dtype), each.shape, hashlib.sha256(each.tobytes()).hexdigest()] for key, each in tensors.items()
    }
    return np.frombuffer(bytes.fromhex(artifact.checksum({"name": name, "inputs": inputs, **data})), np.uint8)


def _check(tensors: Mapping[str, NDArray[Any]]) -> None:
    """Raise a ValueError if tensors of a shard, which may have no checksum, have another type or shape."""
    scores, spent = tensors["scores"], tensors["evaluations"]
    if scores.dtype != np.float64 or scores.ndim != 4 or not scores.size or np.isinf(scores).any():
        raise ValueError(f"its scores are {scores.dtype} {scores.shape}, not finite float64 with four axes")
    if spent.dtype != np.int64 or spent.shape != (1,) or spent[0] < 0:
        raise ValueError("its number of velocity evaluations is none")
