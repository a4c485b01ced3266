"""`recast run` shares the prompts of an estimate between the local devices."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from forked import Command
from recast import config
from recast.errors import RecastError
from recast.sweep import stage, workers

RECIPE = """
policy: {model: shapes}
rewards: {detail: {}, background: {}}
estimate: {steps: 3, samples: 2, noisings: 1}
prompts: {source: shapes:train, count: 8}
"""


class Forked:
    """What `beside` needs of a process, around a forked command."""

    def __init__(self, words: Sequence[str], folder: Path) -> None:
        self._command = Command(words, folder)

    def wait(self) -> None:
        assert self._command.wait() == 0

    def kill(self) -> None:
        self._command.kill()


def test_two_processes_make_the_curves_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    settings = config.load(tmp_path / "recipe.yaml")
    started: list[tuple[Any, ...]] = []

    def start(words: Sequence[str], slot: int, count: int, errors: int) -> Forked:
        assert errors == subprocess.DEVNULL  # a pipe that nobody reads stops a process that prints much
        started.append((words[0], slot, count))
        return Forked(words, tmp_path / "log")

    monkeypatch.setattr(workers, "_begin", start)
    for count, name in ((1, "one"), (2, "two")):
        monkeypatch.setattr(workers, "workers_here", lambda count=count: count)
        stage.curves_of(settings, tmp_path / name, stage.Observer())
    assert started == [("estimate", 1, 2)]
    one, two = ((tmp_path / name / "gains.json").read_bytes() for name in ("one", "two"))
    assert one == two


@pytest.mark.parametrize(("prompts", "devices", "expected"), [(8, 8, 2), (7, 8, None), (16, 3, 3), (16, 1, None)])
def test_a_process_is_started_only_for_enough_prompts(
    prompts: int, devices: int, expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    settings = config.load(tmp_path / "recipe.yaml", [f"prompts.count={prompts}"])
    seen: list[int] = []

    def beside(_: Sequence[str], count: int) -> contextlib.nullcontext[None]:
        seen.append(count)
        return contextlib.nullcontext()

    monkeypatch.setattr(workers, "workers_here", lambda: devices)
    monkeypatch.setattr(workers, "beside", beside)
    stage._sharing(settings, tmp_path / "run")
    assert seen == ([] if expected is None else [expected])
    stage._sharing(settings, tmp_path / "run", most=1)
    assert len(seen) == (expected is not None)


@contextlib.contextmanager
def sleeping(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Processes that sleep for a minute instead of the commands."""
    made: list[Any] = []

    def start(*_: object) -> subprocess.Popen[str]:
        made.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], text=True))
        return made[-1]

    monkeypatch.setattr(workers, "_begin", start)
    yield made


def test_processes_beside_end_when_the_block_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with sleeping(monkeypatch) as made:
        with pytest.raises(RecastError, match="no reward"), workers.beside(["estimate"], 3):
            raise RecastError("no reward")
        assert [process.returncode for process in made] == [-9, -9]
