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


def test_numbers_are_numbers_and_keys_stand_once(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for values in ("[true, 1]", '["1", 2]', f"[{'9' * 400}]", '[{"a": 1}]'):
        path.write_text(f'{{"format": "f", "version": 1, "x": {values}}}')
        with pytest.raises(RecastError, match="a.json: the field 'x' is not a number or a rectangular array"):
            artifact.array(artifact.read(path, "f"), "x", path, 1)
    for text in ('"x": 1, "x": 2', '"x": NaN', '"x": {"y": [Infinity]}', '"x": {"y": 1, "y": 1}', f'"x": {"9" * 5000}'):
        path.write_text(f'{{"format": "f", "version": 1, {text}}}')
        with pytest.raises(RecastError, match="a.json: not valid JSON"):
            artifact.read(path, "f")
    rows = tmp_path / "rows.jsonl"
    for line in (b"[1]", b"7", b'{"a": 1, "a": 2}', b"[" * 100_000):
        rows.write_bytes(b"{}\n" + line + b"\n")
        with pytest.raises(RecastError, match="rows.jsonl, line 2: not valid JSON"):
            artifact.read_rows(rows, "recast evaluate")
    rows.write_bytes(b"\xff")
    with pytest.raises(RecastError, match="rows.jsonl: not UTF-8 text"):
        artifact.read_rows(rows, "recast evaluate")


def test_places_where_no_file_can_be_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").touch()
    for place in ("loop", "x" * 300, "file/below.json", "."):
        with pytest.raises(RecastError, match="cannot be written: "):
            artifact.write_text(tmp_path / place, "text")
    assert {path.name for path in tmp_path.iterdir()} == {"loop", "file"}
