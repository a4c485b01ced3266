"""No damaged file becomes a result: a few hundred cases of `make fuzz`; and the driver tells outcomes apart."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from driver import ALLOWED, fuzz
from targets import Target, targets

from recast.errors import RecastError


def test_damaged_files_are_refused_or_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "loopback")
    with targets(tmp_path) as found:
        cases = list(fuzz(found, 10 * len(found)))
    assert [case for case in cases if case.outcome not in ALLOWED] == []
    refused = {case.target for case in cases if case.outcome == "refused"}
    assert refused >= {each.name for each in found if not (each.own or each.made)}


def _raises(error: BaseException) -> Any:
    raise error


@pytest.mark.parametrize(
    ("read", "outcome"),
    [
        (lambda path: path.read_text(), "silent"),
        (lambda path: 7, "same"),
        (lambda path: path.read_text() == "12345" or _raises(RecastError("no")), "refused"),
        (lambda path: path.read_text() == "12345" or _raises(RecastError("no\nmore")), "traceback"),
        (lambda path: path.read_text() == "12345" or _raises(KeyError("no")), "traceback"),
        (lambda path: path.read_text() == "12345" or _raises(SystemExit(0)), "traceback"),
        (lambda path: path.read_text() == "12345" or (path.write_text("1"), _raises(RecastError("no"))), "dirty"),
        (lambda path: path.read_text() == "12345" or [None for _ in iter(int, 1)], "hang"),
    ],
)
def test_outcomes_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], Any], outcome: str
) -> None:
    monkeypatch.setattr(sys.modules["driver"], "LIMIT", 0.2)
    path = tmp_path / "file.json"
    path.write_text("12345")
    target = Target("file", tmp_path, "file.json", lambda: read(path))
    monkeypatch.setattr(sys.modules["driver"], "damaged", lambda *_: (b"12346", "flip"))
    assert [case.outcome for case in fuzz([target], 2)] == [outcome] * 2
    assert path.read_text() == "12345"
