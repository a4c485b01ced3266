"""Every call that came back, one line each, on disk before anything else happens: what is paid for is never lost."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recast.errors import RecastError

FOR_GOOD = 10**6
"""Tries that a call has had which will never be answered."""
Key = tuple[int, int, str]
"""A call: the number of the pair, the order (0: the first run is shown as A), and what it is about."""


class Log:
    """calls.jsonl of one comparison: answers, failures and tokens; one process writes at a time.

    A line that a kill cut in half is dropped: its call is asked again.
    """

    def __init__(self, path: Path, forget: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._lock = path, threading.Lock()
        self._file = path.open("a+b")
        _claim(self._file.fileno(), path)
        self._file.seek(0)
        whole = self._file.read().rpartition(b"\n")
        self._file.truncate(len(whole[0]) + len(whole[1]))
        self.records: list[dict[str, Any]] = [self._read(n, line) for n, line in enumerate(whole[0].splitlines(), 1)]
        self.answers = {_key(each): each["answer"] for each in self.records if "answer" in each}
        self.failed: Counter[Key] = Counter()
        # Where nothing was ever answered, the settings were wrong and not the calls.
        for each in self.records if self.answers and not forget else []:
            if "failed" in each:
                self.failed[_key(each)] += FOR_GOOD if each.get("refused") else int(each["billed"])

    def _read(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            record = json.loads(line)
            _key(record)
        except (ValueError, TypeError, KeyError) as error:
            raise RecastError(
                f"{self.path}, line {number}: not a call ({error}); repair or remove that line"
            ) from error
        return dict(record)

    def answer(self, key: Key, answer: Any, tokens: tuple[int, int]) -> None:
        """Keep what a call gave."""
        self._append(key, {"answer": answer, "billed": True}, tokens)
        self.answers[key] = answer

    def failure(
        self, key: Key, reason: str, billed: bool, tokens: tuple[int, int] = (0, 0), refused: bool = False
    ) -> None:
        """Keep that a call gave nothing; what may have been billed counts among its tries, a refusal is the last."""
        self._append(key, {"failed": reason, "billed": billed} | ({"refused": True} if refused else {}), tokens)
        self.failed[key] += FOR_GOOD if refused else 1  # one call is on its way once at a time

    def _append(self, key: Key, fields: Mapping[str, Any], tokens: tuple[int, int]) -> None:
        pair, order, about = key
        record = {"pair": pair, "order": order, "about": about, **fields, "tokens": list(tokens)}
        line = json.dumps(record, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        with self._lock:
            self._file.write(line)
            self._file.flush()
            os.fsync(self._file.fileno())
            self.records.append(record)

    @property
    def calls(self) -> int:
        """Requests that may have been billed."""
        return sum(bool(record["billed"]) for record in self.records)

    @property
    def tokens(self) -> tuple[int, int]:
        """Of all that came back: sent and received, as the server counted."""
        return sum(each["tokens"][0] for each in self.records), sum(each["tokens"][1] for each in self.records)

    def close(self) -> None:
        """Let another process write."""
        self._file.close()


def _key(record: Mapping[str, Any]) -> Key:
    return int(record["pair"]), int(record["order"]), str(record["about"])


def _claim(descriptor: int, path: Path) -> None:
    """Refuse to pay twice: a second process in the same folder is an error, and a killed one leaves no trace."""
    try:
        import fcntl
    except ImportError:  # a system without such locks
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise RecastError(f"another recast judge is writing {path}: wait for it, or choose another --out") from None
