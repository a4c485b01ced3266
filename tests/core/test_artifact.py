"""Artifacts are whole or absent, whatever happens while they are written."""

import os
from pathlib import Path

import numpy as np
import pytest

from recast.core import artifact
from recast.errors import RecastError


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = artifact.write(tmp_path / "a.json", "recast.test", {"x": 1})
    before = path.read_bytes()

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(RecastError, match=r"a\.json: cannot be written: No space left"):
        artifact.write(path, "recast.test", {"x": 2})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_reader_never_sees_half_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new content is complete under another name before the target is touched."""
    path = artifact.write(tmp_path / "a.json", "recast.test", {"x": 1})
    seen = []
    replace = os.replace

    def spy(source: str, target: str) -> None:
        seen.append((artifact.read(source, "recast.test")["x"], artifact.read(target, "recast.test")["x"]))
        replace(source, target)

    monkeypatch.setattr(os, "replace", spy)
    artifact.write(path, "recast.test", {"x": 2})
    assert seen == [(2, 1)]


def test_values_come_back_exactly(tmp_path: Path) -> None:
    values = {"a": np.array([1 / 3, np.nan, 1e-300]), "b": np.float64(0.1), "c": np.int64(3), "d": {"e": (1, "σ")}}
    content = artifact.read(artifact.write(tmp_path / "a.json", "recast.test", values), "recast.test")
    np.testing.assert_array_equal(artifact.array(content, "a", "a.json", 1), values["a"])
    assert (content["b"], content["c"], content["d"]) == (0.1, 3, {"e": [1, "σ"]})


def test_what_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    for value in (float("inf"), object()):
        with pytest.raises(RecastError, match="cannot be written as recast.test"):
            artifact.write(tmp_path / "a.json", "recast.test", {"x": value})
    assert list(tmp_path.iterdir()) == []
