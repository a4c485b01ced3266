"""A tiny SD3 and W for it; without RECAST_PEERS all tests here are skipped."""

from pathlib import Path

import pytest
from checkouts import ROOT, made

from recast import config
from recast.flow import families


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import loops

    if not ROOT:
        pytest.skip("RECAST_PEERS is not set: tests/peers/README.md")
    return loops.folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def weights(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """W on the grid of diffusers' own scheduler."""
    grid = families.load(config.policy(model=str(model), guidance=1.0)).sigmas(5)
    return made(grid, tmp_path_factory.mktemp("weights") / "weights.json")
