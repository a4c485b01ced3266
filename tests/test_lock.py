"""Locks of folders: one process at a time, and none that a killed process holds for ever."""

import fcntl
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from recast import lock
from recast.core import artifact
from recast.errors import RecastError

HOLD = "import sys, time; from pathlib import Path; from recast import lock\n"
HOLD += "with lock.alone(Path(sys.argv[1]), 'working'): print('in', flush=True); time.sleep(60)"


def test_a_second_process_gets_a_sentence_and_a_killed_one_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run" / ".lock"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"in\n"
        who = f"{socket.gethostname()} {process.pid}"
        with pytest.raises(RecastError, match=rf"another process \({who}\) is working here: wait for it"):
            lock.alone(path, "working here").__enter__()
        process.kill()
    stray = path.with_name(f".gains.json.{artifact._HOST}.{process.pid}.tmp")
    probe = path.with_name(f".clock-{process.pid}-140")
    other = path.with_name(f".gains.json.00000000.{process.pid}.tmp")  # of another machine
    mine = path.with_name(f".gains.json.{artifact._HOST}.{os.getpid()}.tmp")
    for each in (stray, probe, other, mine):
        each.touch()
    with lock.alone(path, "working"):
        assert path.read_text() == f"{socket.gethostname()} {os.getpid()}"
        assert {each.name for each in path.parent.iterdir()} == {".lock", other.name, mine.name}
        with pytest.raises(RecastError, match="is working"):
            lock.alone(path, "working").__enter__()
    assert not path.exists()


@pytest.mark.parametrize("flock", [True, False])
def test_a_lock_of_another_machine_holds_while_it_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flock: bool
) -> None:
    path = tmp_path / ".lock"
    if not flock:  # a file system without the kernel's locks
        monkeypatch.setattr(lock, "_flock", lambda handle: False)
    path.write_text("another-machine 1")
    with pytest.raises(RecastError, match=r"\(another-machine 1\) is working"):
        lock.alone(path, "working").__enter__()
    for wrong in (-lock.STALE - 5, 366 * 86400.0):
        path.write_text("another-machine 1")
        os.utime(path, (time.time() + wrong,) * 2)
        with lock.alone(path, "working"):
            if not flock:
                with pytest.raises(RecastError, match="is working"):
                    lock.alone(path, "working").__enter__()
        assert not path.exists()


def test_a_folder_that_cannot_be_locked_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for place in ("file", "loop", "x" * 300):
        with pytest.raises(RecastError, match="cannot be locked: "):
            lock.alone(tmp_path / place / ".lock", "working").__enter__()


def test_a_lock_that_a_dead_process_still_holds_is_waited_for(tmp_path: Path) -> None:
    """As while the kernel closes the files of a process with several threads that was killed."""
    path = tmp_path / ".lock"
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    path.write_text(f"{socket.gethostname()} {ended.pid}")
    with path.open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        threading.Timer(0.3, lambda: fcntl.flock(held, fcntl.LOCK_UN)).start()
        with lock.alone(path, "working here"):
            assert path.read_text() == f"{socket.gethostname()} {os.getpid()}"
