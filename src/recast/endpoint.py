"""A model behind HTTP: one JSON request, which failures are worth another try, and many calls at once."""

from __future__ import annotations

import email.utils
import http.client
import json
import os
import random
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from heapq import heappop, heappush
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from recast.errors import RecastError

RETRIED = (408, 409, 425, 429, 500, 502, 503, 504, 529)
PERHAPS_MADE = (408, 500, 502, 504)
"""Of these, the ones after which an answer may have been made and billed all the same."""
BUSY = (429, 529)
"""Of these, the ones that are meant for everybody who asks, as is any that says when to come back."""
LONGEST_WAIT, LONGEST_ASKED = 60.0, 3600.0
"""Seconds between tries as we choose them, and as a server may ask for."""
Item = TypeVar("Item")
Answer = TypeVar("Answer")


class RefusedError(RecastError):
    """The server said no, and asking again would not change that; `single` where it is about this one request."""

    billed = False

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(reason)
        self.single = status in (400, 413, 422)


class FailedError(RecastError):
    """No answer: it may have been billed; the server asked to be left alone for `wait` seconds, by all if `busy`."""

    def __init__(self, reason: str, billed: bool = True, wait: float = 0.0, busy: bool = False) -> None:
        super().__init__(reason)
        self.billed, self.wait, self.busy = billed, wait, busy


class UnreadableError(FailedError):
    """An answer came in good time, but none that can be used: there is no reason to wait before the next try."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the key to another host: it is an error."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Follow none."""


class Endpoint:
    """A server that takes JSON under `base_url`, and a key where the environment has `variable`.

    The key is read when a request is made and appears nowhere else, even where the server repeats it. Calls are
    threads that wait for their sockets, `concurrency` of them; `retries` are the tries after the first.
    """

    key_header = ("Authorization", "Bearer ")

    def __init__(
        self,
        base_url: str,
        variable: str,
        *,
        concurrency: int,
        retries: int,
        backoff: float,
        timeout: float,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        if not _is_plain(base_url):  # not repeated: it may hold a key
            raise RecastError(
                f"base_url is http:// or https://, a host and a path, with no user or query in it; a key belongs in "
                f"the environment, as {variable}"
            )
        limits = {"concurrency": (1, 1024), "retries": (0, 1000), "backoff": (0, 3600), "timeout": (1e-3, 86400)}
        for value, (name, (least, most)) in zip((concurrency, retries, backoff, timeout), limits.items(), strict=True):
            if not least <= value <= most:
                raise RecastError(f"{name} lies between {least:g} and {most:g}, not at {value}")
        self.base, self.variable = base_url.rstrip("/"), variable
        self.concurrency, self.retries, self.backoff, self.timeout = concurrency, retries, backoff, timeout
        self._sleep = sleep
        self._random = random.Random()  # not seeded: processes that wait must not come back at the same moment
        self._opener = urllib.request.build_opener(_NoRedirect)
        self.key()

    def key(self) -> str:
        """The key, or "" where the environment has none."""
        key = os.environ.get(self.variable, "").strip()
        if not key.isascii() or not key.isprintable():
            raise RecastError(f"the key in {self.variable} has characters that no key has")
        return key

    def redact(self, text: str) -> str:
        """A text without the key, should it hold that, as it is or escaped once or twice."""
        key = self.key()
        return re.sub(r"\\*".join(map(re.escape, key)), "[key]", text) if key else text

    def excerpt(self, text: str | bytes, length: int = 200) -> str:
        """The beginning of what a server said, in one line and without the key."""
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return " ".join(self.redact(text).split())[:length]

    def post(self, path: str, body: Mapping[str, Any], about: str) -> Any:
        """The JSON that answers one request; `FailedError` where another try may help, `RefusedError` where not."""
        name, prefix = self.key_header
        key = self.key()
        headers = {"Content-Type": "application/json"} | ({name: prefix + key} if key else {})
        request = urllib.request.Request(f"{self.base}/{path}", json.dumps(body).encode(), headers, method="POST")
        try:
            with self._opener.open(request, timeout=self.timeout) as response:
                reply = response.read()
        except urllib.error.HTTPError as error:
            text = b""
            with suppress(OSError, http.client.HTTPException):  # half an error is an error all the same
                text = error.read()
            if error.code not in RETRIED:
                said = self.excerpt(text, 500)
                reason = f"{self.base} refused {about} with status {error.code}: {said}"
                raise RefusedError(reason, error.code) from None
            asked = _seconds(error.headers.get("Retry-After"))
            busy = error.code in BUSY or asked > 0
            raise FailedError(f"status {error.code}", error.code in PERHAPS_MADE, asked, busy) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            # Before the request was sent it is a URLError; a timeout, reset or half a reply comes after.
            sent = not isinstance(error, urllib.error.URLError)
            raise FailedError(self.excerpt(f"{type(error).__name__}: {error}"), sent) from None
        try:
            return json.loads(reply)
        except (ValueError, RecursionError):
            raise FailedError(f"the reply is not JSON: {self.excerpt(reply)}") from None

    def said(self, reply: Any) -> tuple[str, bool]:
        """The text of a chat's reply, and whether it was cut at its longest; `UnreadableError` without a text."""
        try:
            choice = reply["choices"][0]
            text, cut = choice["message"]["content"], choice.get("finish_reason") == "length"
        except (KeyError, IndexError, TypeError, AttributeError):
            text, cut = None, False
        if not isinstance(text, str):
            raise UnreadableError(f"the reply has no text: {self.excerpt(json.dumps(reply))}")
        return text, cut

    def pause(self, tries: int, asked: float) -> float:
        """Seconds to wait after so many tries: exponential backoff with jitter, or as long as the server asked for."""
        grown = self.backoff * float(2 ** min(tries, 16)) * (1 + self._random.random())
        return max(min(LONGEST_ASKED, asked), min(LONGEST_WAIT, grown))

    def each(
        self,
        ask: Callable[[Item], Answer],
        items: Sequence[Item],
        failure: Callable[[Item], str],
        progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
        *,
        used: Callable[[Item], int] = lambda item: 0,
        drop: Callable[[Item, FailedError], Answer] | None = None,
    ) -> list[Answer]:
        """`ask(item)` for every item, in their order, several on their way at once; a `FailedError` is tried again.

        An item that waits for its next try takes no place from the others; where the server is too busy for one, new
        requests wait with it, and that counts as a try only while nobody gets an answer. `used` are tries before. One
        without an answer after all tries gets `drop(item, error)`; without that it stops new requests and is the
        error: `failure(item)`, the tries, the reason. Those on their way are still waited for.
        """
        answers: dict[int, Answer] = dict(progress(self._answers(ask, items, failure, used, drop)))
        return [answers[number] for number in range(len(items))]

    def _answers(
        self,
        ask: Callable[[Item], Answer],
        items: Sequence[Item],
        failure: Callable[[Item], str],
        used: Callable[[Item], int],
        drop: Callable[[Item, FailedError], Answer] | None,
    ) -> Iterator[tuple[int, Answer]]:
        """Number and answer of every item, as they come."""
        tries, answered, seen = [used(item) for item in items], 0, [0] * len(items)
        hold = 0.0  # when the server may be asked again
        ready = deque(range(len(items)))
        waiting: list[tuple[float, int]] = []  # a heap: when to try again, and what
        running: dict[Future[Answer], int] = {}
        finished: SimpleQueue[Future[Answer]] = SimpleQueue()
        with ThreadPoolExecutor(self.concurrency) as pool:
            while ready or waiting or running:
                while waiting and waiting[0][0] <= time.monotonic():
                    ready.appendleft(heappop(waiting)[1])  # before new ones: else the slowest are all left to the end
                free = hold <= time.monotonic()
                while free and ready and len(running) < self.concurrency:
                    number = ready.popleft()
                    future = pool.submit(ask, items[number])
                    running[future] = number
                    future.add_done_callback(finished.put)
                next_times = [*(waiting[0][:1] if waiting else ()), *(() if free else (hold,))]
                patience = max(0.0, min(next_times) - time.monotonic()) if next_times else None
                try:
                    future = finished.get(timeout=patience)
                except Empty:
                    continue
                number, error = running.pop(future), future.exception()
                if not isinstance(error, FailedError):
                    answered += 1
                    yield number, future.result()
                    continue
                tries[number] += 0 if error.busy and answered > seen[number] else 1
                seen[number] = answered
                if tries[number] <= self.retries:
                    due = self._due(max(0, tries[number] - 1), error)
                    heappush(waiting, (due, number))
                    if error.busy:  # where the server says how long, all wait that long
                        hold = max(hold, min(due, time.monotonic() + error.wait) if error.wait else due)
                elif drop is not None:
                    yield number, drop(items[number], error)
                else:
                    raise FailedError(f"{failure(items[number])} after {tries[number]} tries: {error}")

    def _due(self, tries: int, error: FailedError) -> float:
        """When to try again, by the clock."""
        seconds = 0.0 if isinstance(error, UnreadableError) else self.pause(tries, error.wait)
        if self._sleep is not None:
            self._sleep(seconds)
            seconds = 0.0
        return time.monotonic() + seconds


def _is_plain(url: str) -> bool:
    with suppress(ValueError):  # a port or an address that is none
        parts = urllib.parse.urlsplit(url)
        plain = not (parts.username or parts.password or parts.query or parts.fragment)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and plain and parts.port != 0
    return False


def _seconds(header: str | None) -> float:
    """What a Retry-After header asks for: seconds, or a date."""
    with suppress(ValueError):
        return max(0.0, float(header or 0))
    with suppress(ValueError, OverflowError):
        return max(0.0, email.utils.parsedate_to_datetime(header or "").timestamp() - time.time())
    return 0.0
