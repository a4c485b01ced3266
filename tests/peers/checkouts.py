"""Checkouts of the peers, from the folder that RECAST_PEERS names, and their loops in processes of their own."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import recast

HERE = Path(__file__).parent
ROOT = os.environ.get("RECAST_PEERS")


def checkout(name: str, *packages: str) -> Path:
    """The checkout of a peer; a skip says what is missing."""
    if not ROOT:
        pytest.skip("RECAST_PEERS is not set: tests/peers/README.md")
    path = Path(ROOT) / name
    if not path.is_dir():
        pytest.skip(f"{path} is not there: tests/peers/README.md")
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: tests/peers/README.md")
    return path


def copied(name: str, to: Path, *parts: str) -> Path:
    """A copy of some folders of a checkout, to be edited."""
    source = checkout(name)
    for part in parts:
        shutil.copytree(source / part, to / part)
    return to


def run(script: str, *arguments: Path, **environment: str) -> Any:
    """What a peer's own loop leaves, run in a process of its own."""
    out = arguments[-1]
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    done = subprocess.run(command, env=settings, cwd=out.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(out, weights_only=False)


def made(grid: Any, path: Path) -> Path:
    """W for the two rewards of `loops`, on a grid of five steps."""
    matrix = np.array([[0.16, 0.04, 0.1, 0.06, 0.04], [0.04, 0.16, 0.1, 0.14, 0.16]])
    return recast.WeightMatrix(("bright", "contrast"), grid, matrix, [0.4, 0.6]).save(path)
