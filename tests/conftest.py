"""Settings for all tests; its being here also puts this folder on the path, for `paper_tables`."""

import os

import pytest
import torch
from hypothesis import settings

# rich fixes the width of a console that is made while COLUMNS is set, as by the first test that sets it for a command.
os.environ.pop("COLUMNS", None)
import recast.cli.console  # noqa: F401

# Small tensors: a second thread gains nothing, and costs a lot where tests run beside each other.
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))

# The same examples in every run: a test that fails, fails for everyone.
settings.register_profile("recast", derandomize=True, deadline=None)
settings.load_profile("recast")

SLOW = (
    "test_kill",
    "test_train_processes",
    "test_processes",
    "test_sweep",
    "test_shapes",
    "test_examples",
    "test_judge",
    "test_trainer",
)
"""Files that take longest: with two processes they come first, so that neither waits for the other at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of slow files first; the order within a file stays."""
    items.sort(key=lambda item: SLOW.index(item.path.stem) if item.path.stem in SLOW else len(SLOW))
