"""Artifacts are whole or absent, whatever happens while they are written."""

import os
from pathlib import Path

import numpy as np
import pytest

from recast.core import artifact, strict
from recast.errors import RecastError


class Numbers(strict.Strict):
    """A list of numbers."""

    x: list[float]


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
    np.testing.assert_array_equal(np.array(content["a"], np.float64), values["a"])
    assert (content["b"], content["c"], content["d"]) == (0.1, 3, {"e": [1, "σ"]})


def test_what_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for value, reason in (
        ([1, "x"], "x.1 is 'x'"),
        (3, "x is 3"),
        ([float("inf")], "x.0 is inf"),
        ([None], "x.0 is None"),
    ):
        with pytest.raises(RecastError, match=f"a.json: the field {reason}: .*: it is not written"):
            strict.write(path, "recast.test", Numbers, {"x": value})
    with pytest.raises(RecastError, match="a.jsonl, line 2: the field y is unknown: it is not written"):
        strict.lines(Numbers, [{"x": [1]}, {"x": [1], "y": 2}], tmp_path / "a.jsonl")
    assert list(tmp_path.iterdir()) == []
    strict.write(path, "recast.test", Numbers, {"x": np.array([0.5, 2.0])})
    assert strict.read(path, "recast.test", Numbers, "again")["x"] == [0.5, 2.0]


def test_a_row_without_the_checksum_that_the_others_have_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    text = artifact.lines([{"x": [k]} for k in range(3)])
    last = text.splitlines()[-1]
    for changed in (last.replace("checksum", "chec9ksum"), last.partition(', "checksum"')[0] + "}"):
        path.write_text(text.replace(last, changed))
        with pytest.raises(RecastError, match="line 3: the field 'checksum' is missing, which the rows before it have"):
            artifact.read_rows(path, "recast evaluate")


def test_what_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    for value in (float("inf"), object()):
        with pytest.raises(RecastError, match="cannot be written as recast.test"):
            artifact.write(tmp_path / "a.json", "recast.test", {"x": value})
    assert list(tmp_path.iterdir()) == []


def test_numbers_are_numbers_and_keys_stand_once(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for value in ("true", '"1"', "9" * 400, '{"a": 1}', "null", "[]"):
        path.write_text(f'{{"format": "f", "version": 1, "x": [{value}, 1]}}')
        with pytest.raises(RecastError, match=r"a.json: the field x.0 is .*: input should be a valid number: again"):
            strict.read(path, "f", Numbers, "again")
    for text, reason in (('"y": 1', "y is unknown"), ("", "x is missing"), ('"x": null', "x is None")):
        path.write_text(f'{{"format": "f", "version": 1{", " if text else ""}{text}}}')
        with pytest.raises(RecastError, match=f"a.json: the field (x is missing|{reason})"):
            strict.read(path, "f", Numbers, "again")
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
