"""Stages that are killed a dozen times each end with the files of an undisturbed run: `make kill` with fewer kills."""

import os
import subprocess
import sys
from pathlib import Path


def test_killed_stages_end_with_the_same_files() -> None:
    words = [sys.executable, str(Path(__file__).parent), "12"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line[20:].split() for line in done.stdout.splitlines()[1:]]
    assert [sum(map(int, row[:3])) for row in rows] == [12] * 9
    assert all(int(row[3]) for row in rows)
