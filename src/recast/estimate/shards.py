"""Stored rollouts: one file per prompt with the scores of all its rollouts, and a manifest of their settings.

A shard is written atomically, so a run can be killed at any moment. It holds the scores as the rewards return them;
the map to non-negative scores, α and the aggregation are applied when curves are made from the shards.
"""

from __future__ import annotations

import hashlib
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from recast import identity, versions
from recast.core import artifact
from recast.errors import RecastError

__all__ = ["STALE", "Claim", "Rollouts", "Shards"]

_FORMAT = "recast.shards"
STALE = 120.0
"""Seconds without a heartbeat after which a lock is stale."""


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
        self.versions: dict[str, Any] = dict(present or {})
        path = folder / "manifest.json"
        flat = identity.flatten(settings)
        if path.exists():
            content = artifact.read(path, _FORMAT)
            known = artifact.mapping(content, "settings", path)
            identity.require_same(known, flat, f"{folder} holds rollouts made")
            self.versions = artifact.mapping(content, "versions", path)
        else:
            artifact.write(path, _FORMAT, {"settings": flat} | ({"versions": self.versions} if self.versions else {}))

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

    def claim(self, name: str) -> Claim | None:
        """A claim of a prompt for this process alone, or None while another process holds one.

        A claim is a lock file that its owner touches regularly. The lock is stale, and is taken over, after `STALE`
        seconds without a touch or if its owner is known to be dead. Two owners at once would only waste time: they
        write the same bytes.
        """
        lock = self.path(name).with_suffix(".lock")
        return Claim(lock) if self._take(lock) else None

    def sweep(self, names: Sequence[str]) -> None:
        """Remove the locks of prompts that have a shard; their owners were killed before they could."""
        for name in names:
            if self.has(name):
                self.path(name).with_suffix(".lock").unlink(missing_ok=True)

    def _take(self, lock: Path) -> bool:
        for _ in range(2):
            try:
                handle = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
                os.write(handle, f"{socket.gethostname()} {os.getpid()}".encode())
                os.close(handle)
                return True
            except FileExistsError:
                with suppress(FileNotFoundError):  # its owner released it meanwhile
                    if self._now() - lock.stat().st_mtime < STALE and not _died_here(lock.read_text()):
                        return False
                lock.unlink(missing_ok=True)
            except OSError as error:
                raise RecastError(f"{lock}: the prompt cannot be claimed: {error.strerror or error}") from error
        return False

    def _now(self) -> float:
        """The time by the file system's clock: the clocks of machines that share it may differ."""
        probe = self.folder / f".clock-{os.getpid()}-{threading.get_ident()}"
        probe.touch()
        try:
            return probe.stat().st_mtime
        finally:
            probe.unlink(missing_ok=True)

    def write(self, name: str, rollouts: Rollouts, inputs: str) -> None:
        """Store a prompt's scores with `inputs`, the hash of the proposals they were made from."""
        tensors = {"scores": np.ascontiguousarray(rollouts.scores), "evaluations": np.array([rollouts.evaluations])}
        artifact.write_bytes(self.path(name), save(tensors, {"inputs": inputs}))

    def read(self, name: str, inputs: str | None = None) -> Rollouts:
        """A prompt's scores; an error if they were made from other `inputs`, where those are given."""
        path = self.path(name)
        try:
            with safe_open(path, "np") as file:
                found = (file.metadata() or {}).get("inputs")
                rollouts = Rollouts(file.get_tensor("scores"), int(file.get_tensor("evaluations")[0]))
        except (OSError, SafetensorError) as error:
            raise RecastError(f"{path}: not a readable shard ({error}): remove it and estimate again") from error
        if inputs is not None and found != inputs:
            raise RecastError(
                f"{path} was made from other proposals or metadata for the prompt {name!r}: "
                "remove it, or choose another --out"
            )
        return rollouts


class Claim:
    """A lock file that this process owns; a thread touches it regularly."""

    def __init__(self, lock: Path) -> None:
        self._lock, self._done = lock, threading.Event()
        self._beat = threading.Thread(target=self._keep, daemon=True)
        self._beat.start()

    def _keep(self) -> None:
        while not self._done.wait(STALE / 10):
            with suppress(OSError):
                os.utime(self._lock)

    def release(self) -> None:
        """Remove the lock."""
        self._done.set()
        self._beat.join()
        self._lock.unlink(missing_ok=True)


def _died_here(owner: str) -> bool:
    """Whether the owner of a lock was a process of this machine that has ended."""
    host, _, pid = owner.partition(" ")
    if host != socket.gethostname() or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
