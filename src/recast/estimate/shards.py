"""One file a prompt with the scores of all its rollouts, and a manifest of the settings they were made with.

A shard appears whole or not at all, so a run can be killed at any moment. It holds scores, not moments: α,
aggregation and clipping are applied when curves are made, from the shards alone.
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

from recast import identity
from recast.core import artifact
from recast.errors import RecastError

FORMAT = "recast.shards"
STALE = 120.0
"""Seconds without a sign of life after which a claim is anyone's."""


@dataclass(frozen=True)
class Rollouts:
    """Scores (m, T+1, S, K) of K rollouts from each of the S noised samples of a prompt, at every level.

    Level 0 needs no rollout: its entries repeat the score of the proposal itself. `evaluations` is the number of
    velocity evaluations spent, one per sample and step.
    """

    scores: NDArray[np.float64]
    evaluations: int

    @property
    def mu(self) -> NDArray[np.float64]:
        """Conditional rewards μ̂ (m, T+1, S): the mean over rollouts."""
        return np.asarray(self.scores.mean(axis=-1), dtype=np.float64)


class Shards:
    """The shards of one run in `folder`; those of other settings are refused, by the key that differs."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder = folder
        path = folder / "manifest.json"
        flat = identity.flatten(settings)
        if path.exists():
            known = artifact.mapping(artifact.read(path, FORMAT), "settings", path)
            identity.require_same(known, flat, f"{folder} holds rollouts made")
        else:
            artifact.write(path, FORMAT, {"settings": flat})

    def path(self, name: str) -> Path:
        """Where a prompt's shard is, or will be."""
        return self.folder / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.safetensors"

    def has(self, name: str) -> bool:
        """Whether a prompt is done."""
        return self.path(name).is_file()

    def claim(self, name: str) -> Claim | None:
        """A prompt for this process alone, until it is released; None where another process has it.

        A claim is a lock file that is touched while its owner lives. One that was not touched for `STALE` seconds, or
        whose owner is known to be dead, is taken over. Two owners at once would be wasteful, not wrong: they write the
        same bytes.
        """
        lock = self.path(name).with_suffix(".lock")
        return Claim(lock) if self._take(lock) else None

    def sweep(self, names: Sequence[str]) -> None:
        """Remove the claims of prompts that are done: their owners were killed before they could."""
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
                with suppress(FileNotFoundError):  # its owner was done in between
                    if self._now() - lock.stat().st_mtime < STALE and not _died_here(lock.read_text()):
                        return False
                lock.unlink(missing_ok=True)
            except OSError as error:
                raise RecastError(f"{lock}: the prompt cannot be claimed: {error.strerror or error}") from error
        return False

    def _now(self) -> float:
        """The file system's own clock: machines that share it may disagree about the time."""
        probe = self.folder / f".clock-{os.getpid()}-{threading.get_ident()}"
        probe.touch()
        try:
            return probe.stat().st_mtime
        finally:
            probe.unlink(missing_ok=True)

    def write(self, name: str, rollouts: Rollouts, inputs: str) -> None:
        """Keep a prompt's scores; `inputs` is the hash of the proposals they came from."""
        tensors = {"scores": np.ascontiguousarray(rollouts.scores), "evaluations": np.array([rollouts.evaluations])}
        artifact.write_bytes(self.path(name), save(tensors, {"inputs": inputs}))

    def read(self, name: str, inputs: str | None = None) -> Rollouts:
        """A prompt's scores, once it is sure that they came from these proposals."""
        path = self.path(name)
        try:
            with safe_open(path, "np") as file:
                found = (file.metadata() or {}).get("inputs")
                rollouts = Rollouts(file.get_tensor("scores"), int(file.get_tensor("evaluations")[0]))
        except (OSError, SafetensorError) as error:
            raise RecastError(f"{path}: not a readable shard ({error}): remove it to have it made again") from error
        if inputs is not None and found != inputs:
            raise RecastError(
                f"{path} was made from other proposals or metadata for the prompt {name!r}: "
                "remove it, or choose another --out"
            )
        return rollouts


class Claim:
    """A lock file that this process owns, kept alive by a thread."""

    def __init__(self, lock: Path) -> None:
        self._lock, self._done = lock, threading.Event()
        self._beat = threading.Thread(target=self._keep, daemon=True)
        self._beat.start()

    def _keep(self) -> None:
        while not self._done.wait(STALE / 10):
            with suppress(OSError):
                os.utime(self._lock)

    def release(self) -> None:
        """Let others have the prompt, or see that it is done."""
        self._done.set()
        self._beat.join()
        self._lock.unlink(missing_ok=True)


def _died_here(owner: str) -> bool:
    """Whether a claim's owner was a process of this machine that is no more."""
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
