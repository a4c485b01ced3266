"""The log of all calls, one line before each and one per reply: no paid answer is lost, and no call goes uncounted."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from recast.core import artifact, strict
from recast.errors import RecastError

__all__ = ["Key", "Log"]

Key = tuple[int, int, str]
"""A call: the number of the pair, the order (0: the first run is shown as A), and the subject of the question."""


class _Answer(strict.Strict):
    better: Literal["A", "B"]
    score: Annotated[int, Field(ge=1, le=6)]
    confidence: float | None = None
    reasoning: dict[str, str]
    rationale: str = ""


class _Call(strict.Strict):
    pair: strict.Count
    order: Annotated[int, Field(ge=0, le=1)]
    about: Literal["verdict", "faithfulness", "aesthetics"]


class _Sent(_Call):
    """A line before a call."""

    sent: Literal[True]


class _Reply(_Call):
    billed: bool
    tokens: Annotated[list[strict.Count], Field(min_length=2, max_length=2)]


class _Verdict(_Reply):
    answer: _Answer


class _Side(_Reply):
    answer: Literal["A", "B", "tie", "na"]


class _Failure(_Reply):
    failed: str
    refused: bool = False


class Log:
    """calls.jsonl of one comparison: answers, failures and tokens; its folder must be locked (`recast.lock`).

    An incomplete last line, as a kill leaves it, is removed and its call is made again. `failed` counts the attempts of
    a call that may have been billed, `gone` are the calls that will not be made again. Failures after the last answer
    come from an outage or wrong settings and do not count at the next start; with `forget`, no earlier failure counts.
    A call without a reply was on its way when its process was killed: it may have been billed, and is made again.
    """

    def __init__(self, path: Path, forget: bool = False) -> None:
        self.path, self._lock = path, threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
            self._file.seek(0)
            whole = self._file.read().rpartition(b"\n")
        except OSError as error:
            raise RecastError(f"{path}: cannot be written: {error.strerror or error}") from error
        lines = whole[0].split(b"\n") if whole[0] else []
        self.records: list[dict[str, Any]] = []
        self._open: Counter[Key] = Counter()  # calls that were sent and have no reply yet
        try:
            for number, line in enumerate(lines, 1):
                self._note(self._read(number, line))
            self._file.truncate(len(whole[0]) + len(whole[1]))  # last, since a log that is refused stays as it is
        except BaseException:
            self.close()
            raise
        self.answers = {_key(each): each["answer"] for each in self.records if "answer" in each}
        self.failed: Counter[Key] = Counter()
        last = max((k for k, each in enumerate(self.records) if "answer" in each), default=0)
        counted = [] if forget else [each for each in self.records[:last] if "failed" in each]
        self.failed.update(_key(each) for each in counted if each["billed"])
        self.gone = {_key(each) for each in counted if each.get("refused")}

    def _read(self, number: int, line: bytes) -> dict[str, Any]:
        where, remedy = f"{self.path}, line {number}", "not a call; remove that line"
        try:
            record, _ = artifact.read_row(line, where)
        except RecastError as error:
            raise RecastError(f"{error}: {remedy}") from error
        strict.require(_model(record), record, where, remedy)
        return record

    def _note(self, record: dict[str, Any]) -> None:
        key = _key(record)
        if "sent" in record:
            self._open[key] += 1
            return
        self._open[key] -= self._open[key] > 0  # the logs of earlier releases hold replies only
        self.records.append(record)

    def sent(self, key: Key) -> None:
        """Record that a call is about to be made, so that a kill does not hide it."""
        self._append(key, {"sent": True})

    def answer(self, key: Key, answer: Any, tokens: tuple[int, int]) -> None:
        """Record the answer of a call."""
        self._append(key, {"answer": answer, "billed": True, "tokens": list(tokens)})
        self.answers[key] = answer

    def failure(self, key: Key, reason: str, billed: bool, tokens: tuple[int, int]) -> None:
        """Record that a call failed; it counts as an attempt if it may have been billed."""
        self._append(key, {"failed": reason, "billed": billed, "tokens": list(tokens)})
        self.failed[key] += int(billed)  # no lock: a call is never made twice at the same time

    def refusal(self, key: Key, reason: str) -> None:
        """Record that the content of a call was refused: it is not made again."""
        self._append(key, {"failed": reason, "billed": False, "refused": True, "tokens": [0, 0]})
        self.gone.add(key)

    def _append(self, key: Key, fields: Mapping[str, Any]) -> None:
        pair, order, about = key
        record = {"pair": pair, "order": order, "about": about, **fields}
        strict.require(_model(record), record, self.path, "it is not written")
        line = artifact.line(record).encode() + b"\n"
        with self._lock:
            try:
                self._file.write(line)
                self._file.flush()
                os.fsync(self._file.fileno())
            except OSError as error:
                raise RecastError(f"{self.path}: cannot be written: {error.strerror or error}") from error
            self._note(record)

    @property
    def calls(self) -> int:
        """Number of requests that may have been billed, those without a reply included."""
        return sum(bool(record["billed"]) for record in self.records) + sum(self._open.values())

    @property
    def tokens(self) -> tuple[int, int]:
        """Tokens sent and received in all calls, as the server counted them."""
        return sum(each["tokens"][0] for each in self.records), sum(each["tokens"][1] for each in self.records)

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # a failed write has been reported already
            self._file.close()


def _model(record: Mapping[str, Any]) -> type[strict.Strict]:
    """The fields that a line must have."""
    if "sent" in record:
        return _Sent
    if "answer" not in record:
        return _Failure
    return _Verdict if record.get("about") == "verdict" else _Side


def _key(record: Mapping[str, Any]) -> Key:
    return int(record["pair"]), int(record["order"]), str(record["about"])
