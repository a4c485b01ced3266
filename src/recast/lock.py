"""Locks: a file that says which process works on something, and that a killed process does not hold for long.

A lock file has the host and the number of its owner, who touches it regularly. It is stale, and is taken over, after
`STALE` seconds without a touch or if its owner is known to be dead. On one machine, `alone` uses the kernel's lock.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from recast import processes
from recast.core import artifact
from recast.errors import RecastError

__all__ = ["STALE", "Claim", "alone", "claim"]

STALE = 120.0
"""Seconds without a heartbeat after which a lock is stale."""
_ENDING = 5.0
"""Seconds to wait for the kernel's lock of a process that has ended, which its threads may hold a moment longer."""
_EMPTY = 5.0
"""Seconds after which a lock without an owner is stale: its process was killed before it could write its name."""


class Claim:
    """A lock file that this process owns; a thread touches it regularly."""

    def __init__(self, path: Path) -> None:
        self._path, self._done = path, threading.Event()
        self._beat = threading.Thread(target=self._keep, daemon=True)
        self._beat.start()

    def _keep(self) -> None:
        while not self._done.wait(STALE / 10):
            with suppress(OSError):
                os.utime(self._path)

    def release(self) -> None:
        """Remove the lock."""
        self._done.set()
        self._beat.join()
        with suppress(OSError):  # a folder that is gone has no lock
            self._path.unlink(missing_ok=True)


def claim(path: Path) -> Claim | None:
    """A lock of something that several processes share, or None while another one holds it.

    Two owners at once, as after a clock was changed, must do no harm: see `alone` where they would.
    """
    for _ in range(2):
        try:
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            os.write(handle, _me())
            os.close(handle)
            return Claim(path)
        except FileExistsError:
            with suppress(FileNotFoundError):  # its owner released it meanwhile
                owner = path.read_text(errors="replace")
                if _fresh(path, owner) and not _died_here(owner):
                    return None
            path.unlink(missing_ok=True)
        except OSError as error:
            raise RecastError(f"{path}: cannot be claimed: {error.strerror or error}") from error
    return None


@contextmanager
def alone(path: Path, doing: str) -> Iterator[None]:
    """Hold the lock file `path` during the block; RecastError if another process does what `doing` says.

    Of the processes of a launcher, the first one holds it for all of them. Temporary files that killed processes have
    left beside the lock, or in a folder there, are removed.
    """
    if processes.RANK > 0:
        yield
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = _take(path, doing)
    except OSError as error:
        raise RecastError(f"{path.parent}: cannot be locked: {error.strerror or error}") from error
    for folder in (path.parent, *(each for each in path.parent.iterdir() if each.is_dir())):
        artifact.sweep(folder)
    if os.name == "nt":  # which cannot remove an open file, and has no kernel's lock here
        os.close(handle)
    mine = Claim(path)
    try:
        yield
    finally:
        mine.release()  # before the kernel's lock: whoever opened the file meanwhile sees that it is gone
        if os.name != "nt":
            os.close(handle)


def _take(path: Path, doing: str) -> int:
    """An open lock file that is locked and has our name."""
    patience = time.monotonic() + _ENDING
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            local = _flock(handle)
            owner = os.read(handle, 300).decode(errors="replace")
            here = owner.partition(" ")[0] == socket.gethostname()
            free = not owner.strip() or (local and here) or _died_here(owner) or not _fresh(path, owner)
            if local is None and _died_here(owner) and time.monotonic() < patience:
                os.close(handle)  # a process that was killed closes its files last
                time.sleep(0.05)
                continue
            if local is None or not free:
                who = f" ({owner.strip()})" if owner.strip() else ""
                raise RecastError(f"another process{who} is {doing}: wait for it to finish, or choose another --out")
            if _same(handle, path):
                os.ftruncate(handle, 0)
                os.lseek(handle, 0, os.SEEK_SET)
                os.write(handle, _me())
                return handle
        except BaseException:
            with suppress(OSError):
                os.close(handle)
            raise
        os.close(handle)  # its owner has removed it meanwhile


def _flock(handle: int) -> bool | None:
    """Whether the kernel's lock was taken; None if another process holds it, False where there is none."""
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except (ImportError, OSError):  # Windows, or a network file system without locks
        return False
    return True


def _same(handle: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), path.stat())
    return False


def _me() -> bytes:
    return f"{socket.gethostname()} {os.getpid()}".encode()


def _fresh(path: Path, owner: str) -> bool:
    """Whether a lock was touched lately; a time in the future is as wrong as one long ago."""
    return abs(_now(path.parent) - path.stat().st_mtime) < (STALE if owner.strip() else _EMPTY)


def _now(folder: Path) -> float:
    """The time by the file system's clock: the clocks of machines that share it may differ."""
    probe = folder / f".clock-{os.getpid()}-{threading.get_ident()}"
    probe.touch()
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _died_here(owner: str) -> bool:
    """Whether the owner of a lock was a process of this machine that has ended."""
    host, _, pid = owner.strip().partition(" ")
    if host != socket.gethostname() or not (pid.isascii() and pid.isdigit()) or len(pid) > 9:
        return False
    return not artifact.running(int(pid))
