"""Which process samples which prompt: order, claims, early stops, and errors while others are waited for."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recast import config, identity, processes
from recast.errors import RecastError
from recast.estimate import scheduler as module
from recast.estimate import stage
from recast.estimate.curves import prompt_names
from recast.estimate.scheduler import Scheduler
from recast.estimate.shards import Rollouts, Shards
from recast.progress import no_progress
from recast.propose.stage import propose
from recast.shapes import rewards

NAMES = ["a", "b", "c", "d"]
ELSEWHERE = "another-machine 1"
SHAPES = ["prompts.count=2", "estimate.samples=1", "estimate.noisings=1", "estimate.steps=2", "rewards={detail: {}}"]


@pytest.fixture
def shards(tmp_path: Path) -> Shards:
    return Shards(tmp_path, {})


def write(shards: Shards, name: str) -> None:
    shards.write(name, Rollouts(np.ones((1, 2, 1, 1)), 1), "")


def lock(shards: Shards, name: str) -> Path:
    return shards.path(name).with_suffix(".lock")


@pytest.mark.parametrize(("in_order", "order"), [(False, "cdab"), (True, "abcd")])
def test_processes_begin_apart_unless_an_early_stop_needs_the_first_prompts(
    shards: Shards, monkeypatch: pytest.MonkeyPatch, in_order: bool, order: str
) -> None:
    monkeypatch.setattr(processes, "RANK", 1)
    monkeypatch.setattr(processes, "COUNT", 2)
    scheduler, seen = Scheduler(shards, NAMES, in_order=in_order), ""
    for name in scheduler:
        assert lock(shards, name).exists()
        seen += name
        write(shards, name)
        scheduler.release(name)
        assert not lock(shards, name).exists()
    assert seen == order


def test_a_prompt_of_another_process_is_waited_for_and_not_done_again(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_POLL", 0.0)
    write(shards, "a")
    lock(shards, "b").write_text(ELSEWHERE)
    waits = itertools.count()

    def on_wait() -> None:
        if next(waits) == 3:  # the other process is done
            write(shards, "b")

    assert list(Scheduler(shards, NAMES, on_wait=on_wait)) == ["c", "d"]
    assert next(waits) == 4


def test_a_prompt_that_is_finished_while_it_is_claimed_is_given_back(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = shards.claim

    def late(name: str) -> Any:
        write(shards, name)
        return claim(name)

    monkeypatch.setattr(shards, "claim", late)
    assert list(Scheduler(shards, NAMES)) == []
    assert not list(shards.folder.glob("*.lock"))


def test_enough_ends_the_iteration_and_no_claim_is_left(shards: Shards) -> None:
    seen: list[str] = []
    scheduler = Scheduler(shards, NAMES, enough=lambda: len(seen) == 2)
    for name in scheduler:
        seen.append(name)  # noqa: PERF402  # `enough` looks at it on the way
    assert seen == ["a", "b"]
    assert len(list(shards.folder.glob("*.lock"))) == 2
    scheduler.release_all()
    assert not list(shards.folder.glob("*.lock"))


def test_a_failed_scoring_ends_the_run_although_another_process_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = config.load(Path(__file__).parents[2] / "recipes/shapes.yaml", SHAPES)
    propose(recipe, tmp_path, no_progress)
    monkeypatch.setattr(processes, "spare_core", lambda: True)  # scores in the background
    monkeypatch.setattr(rewards.Detail, "__call__", lambda *_: 1 / 0)
    shards = Shards(tmp_path / "shards", identity.rollouts(recipe))
    second = prompt_names(recipe)[1]
    lock(shards, second).write_text(ELSEWHERE)
    with pytest.raises(RecastError, match="the reward 'detail' failed on"):
        stage.estimate(recipe, tmp_path, no_progress)
    assert [path.name for path in shards.folder.glob("*.lock")] == [lock(shards, second).name]
