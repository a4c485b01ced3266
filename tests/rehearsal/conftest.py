"""The device of all rehearsals."""

from collections.abc import Iterator

import pytest

import fake_gpu


@pytest.fixture
def gpu() -> Iterator[fake_gpu.FakeGpu]:
    """A GPU that is not there."""
    with fake_gpu.running() as found:
        yield found
