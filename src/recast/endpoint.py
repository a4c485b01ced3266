"""A model behind HTTP: JSON requests, retries of failures that may pass, and concurrent calls."""

from __future__ import annotations

import base64
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
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from heapq import heappop, heappush
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from recast import transport
from recast.errors import RecastError

__all__ = ["Endpoint", "FailedError", "RefusedError", "UnreadableError"]

_RETRIED = (408, 409, 425, 429, 500, 502, 503, 504, 529)
_PERHAPS_BILLED = (408, 500, 502, 504)  # retried, but an answer may have been made and billed
_BUSY = (429, 529)  # concern all requests, as does every status with a Retry-After header
_LONGEST_MESSAGE = 2**16  # bytes of an error's body that are read
_LONGEST_BACKOFF, _LONGEST_RETRY_AFTER = 60.0, 3600.0  # seconds
_EXCERPT = 4096  # characters of an answer that are searched for the key before a few are shown
_SAID = 10.0  # seconds from which on the user is told that the server asked to wait
Item = TypeVar("Item")
Answer = TypeVar("Answer")


class RefusedError(RecastError):
    """The server rejected a request, and a retry would not change that; `single` if only this request is concerned."""

    billed = False

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(reason)
        self.single = status in (400, 413, 422)


class FailedError(RecastError):
    """A request has failed and may be retried.

    `billed`: an answer may have been made and billed. `wait`: seconds that the server asked to wait. `busy`: the
    server is too busy, and all requests should wait. `useless`: the answer is complete but of another kind than was
    asked for, which names the kind.
    """

    def __init__(
        self, reason: str, billed: bool = True, wait: float = 0.0, busy: bool = False, useless: str = ""
    ) -> None:
        super().__init__(reason)
        self.billed, self.wait, self.busy, self.useless = billed, wait, busy, useless


class UnreadableError(FailedError):
    """The server answered, but the answer cannot be used: it is retried without a pause."""


class Endpoint:
    """A server that accepts JSON under `base_url`.

    Its key, if it needs one, is in the environment variable `variable`. The key is read for every request and is
    written nowhere, even if the server repeats it. At most `concurrency` requests run at once, each in its own thread.
    A request that fails is retried up to `retries` times, `backoff` seconds after its first try and later each time.
    A whole reply must arrive within `timeout` seconds and have at most `transport.LARGEST` bytes.
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
        if not _is_plain(base_url):  # the message does not repeat it: it may contain a key
            raise RecastError(
                "base_url must be http:// or https://, a host and a path, without user or query; put the key into "
                f"the environment variable {variable}"
            )
        limits = {"concurrency": (1, 1024), "retries": (0, 1000), "backoff": (0, 3600), "timeout": (1e-3, 86400)}
        for value, (name, (least, most)) in zip((concurrency, retries, backoff, timeout), limits.items(), strict=True):
            if not least <= value <= most:
                raise RecastError(f"{name} must lie between {least:g} and {most:g}, but it is {value}")
        self.base, self.variable = base_url.rstrip("/"), variable
        self.concurrency, self.retries, self.backoff, self.timeout = concurrency, retries, backoff, timeout
        self._sleep = sleep
        self._random = random.Random()  # not seeded: waiting processes must not retry at the same moment
        self._opener = transport.opener()
        self.key()

    def key(self) -> str:
        """The key, or "" if the environment has none."""
        key = os.environ.get(self.variable, "").strip()
        if not key.isascii() or not key.isprintable():
            raise RecastError(f"the key in {self.variable} contains characters that are not allowed in a key")
        return key

    def redact(self, text: str) -> str:
        """A text in which the key is replaced by "[key]", also escaped, in base64, in hex and in other case."""
        key = self.key()
        return _forms(key).sub("[key]", text) if key else text

    def redacted(self, value: Any) -> Any:
        """A JSON value without the key in any of its texts: after parsing, nothing hides behind an escape."""
        if isinstance(value, str):
            return self.redact(value)
        if isinstance(value, Mapping):
            return {self.redacted(name): self.redacted(each) for name, each in value.items()}
        return [self.redacted(each) for each in value] if isinstance(value, list) else value

    def excerpt(self, text: str | bytes, length: int = 200) -> str:
        """The beginning of a server's answer in one line, without the key."""
        text = (text.decode("utf-8", "replace") if isinstance(text, bytes) else text)[:_EXCERPT]
        return " ".join(self.redact(text).split())[:length]

    def post(self, path: str, body: Mapping[str, Any], about: str) -> Any:
        """The JSON answer to one request; `FailedError` if a retry may help, otherwise `RefusedError`."""
        name, prefix = self.key_header
        key = self.key()
        headers = {"Content-Type": "application/json"} | ({name: prefix + key} if key else {})
        request = urllib.request.Request(f"{self.base}/{path}", json.dumps(body).encode(), headers, method="POST")
        reply = self._exchange(request, about)
        try:
            return json.loads(reply)
        except (ValueError, RecursionError):
            raise FailedError(f"the reply is not JSON: {self.excerpt(reply)}", useless="JSON") from None

    def get(self, url: str, about: str) -> bytes:
        """What a URL on the host of this endpoint holds; RefusedError for any other host. The key is not sent."""
        if _origin(url) != _origin(self.base):
            raise RefusedError(f"{self.excerpt(url)} is not on the host of {self.base}, and is not fetched")
        return self._exchange(urllib.request.Request(url), about)

    def _exchange(self, request: urllib.request.Request, about: str) -> bytes:
        """The body of the reply to one request."""
        try:
            with self._opener.open(request, timeout=self.timeout) as response:
                return transport.read(response)
        except urllib.error.HTTPError as error:
            text = b""
            with suppress(OSError, ValueError, http.client.HTTPException):  # an incomplete error message is enough
                text = error.read(_LONGEST_MESSAGE)
            if error.code not in _RETRIED:
                reason = f"{self.base} refused {about} with status {error.code}: {self.excerpt(text, 500)}"
                raise RefusedError(reason, error.code) from None
            wait = _seconds(error.headers.get("Retry-After"))
            busy = error.code in _BUSY or wait > 0
            raise FailedError(f"status {error.code}", error.code in _PERHAPS_BILLED, wait, busy) from None
        except transport.TooLargeError as error:
            raise FailedError(str(error), useless="size") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            # A URLError precedes the request; a timeout, a reset or an incomplete reply follows it.
            sent = not isinstance(error, urllib.error.URLError)
            raise FailedError(self.excerpt(f"{type(error).__name__}: {error}"), sent) from None

    def text_of(self, reply: Any) -> tuple[str, bool]:
        """The text of a chat completion, and whether it was cut at the limit; `UnreadableError` if it has no text."""
        try:
            choice = reply["choices"][0]
            text, cut = choice["message"].get("content"), choice.get("finish_reason") == "length"
        except (KeyError, IndexError, TypeError, AttributeError):
            reason = f"the reply has no text in choices[0].message: {self.excerpt(json.dumps(reply))}"
            raise UnreadableError(reason, useless="message") from None
        if not isinstance(text, str):
            raise UnreadableError(f"the reply has no text: {self.excerpt(json.dumps(reply))}")
        return text, cut

    def pause(self, retries: int, asked: float) -> float:
        """Seconds before the next try after so many retries: exponential backoff with jitter, but at least `asked`."""
        grown = self.backoff * float(2 ** min(retries, 16)) * (1 + self._random.random())
        return max(min(_LONGEST_RETRY_AFTER, asked), min(_LONGEST_BACKOFF, grown))

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
        """The answers `ask(item)` in the order of the items, several at once; a `FailedError` is retried.

        An item that waits for its retry occupies no thread. If the server is too busy, new requests wait too, and the
        failure counts as a try only if no item was answered since the item's last try. `used` is the number of tries
        that an item has had before. An item whose tries are used up gets `drop(item, error)`; without `drop`, no new
        request is made, running ones are awaited, and the error names `failure(item)`, the tries and the reason.
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
        """Number and answer of every item, as they arrive."""
        queue, tries = _Queue(len(items)), _Tries([used(item) for item in items])
        running: dict[Future[Answer], int] = {}
        finished: SimpleQueue[Future[Answer]] = SimpleQueue()
        with ThreadPoolExecutor(self.concurrency) as pool:
            while queue or running:
                numbers, patience = queue.take(self.concurrency - len(running))
                for number in numbers:
                    future = pool.submit(ask, items[number])
                    running[future] = number
                    future.add_done_callback(finished.put)
                try:
                    future = finished.get(timeout=patience)
                except Empty:
                    continue
                number, error = running.pop(future), future.exception()
                if not isinstance(error, FailedError):
                    tries.answered()
                    yield number, future.result()
                elif tries.failed(number, error) <= self.retries:
                    self._retry(queue, number, tries.count[number], error)
                elif drop is not None:
                    yield number, drop(items[number], error)
                else:
                    raise FailedError(f"{failure(items[number])} after {tries.count[number]} tries: {error}")

    def _retry(self, queue: _Queue, number: int, tries: int, error: FailedError) -> None:
        """Put a failed item back into the queue; if the server is busy, hold the other items too."""
        seconds = 0.0 if isinstance(error, UnreadableError) else self.pause(max(0, tries - 1), error.wait)
        if error.wait >= _SAID:
            asked = f"{self.base} asks to wait {error.wait:.0f} s before the next request (Retry-After)"
            limit = f"; waiting {seconds:.0f} s" if error.wait > seconds + 1 else ""
            warnings.warn(asked + limit, stacklevel=2)
        if self._sleep is not None:
            self._sleep(seconds)
            seconds = 0.0
        due = time.monotonic() + seconds
        queue.retry(number, due)
        if error.busy:  # where the server says how long to wait, the others wait that long without the backoff
            queue.hold(min(due, time.monotonic() + error.wait) if error.wait else due)


class _Queue:
    """Numbers of the items to ask: some ready, some waiting for the time of their retry, perhaps all on hold."""

    def __init__(self, count: int) -> None:
        self._ready = deque(range(count))
        self._waiting: list[tuple[float, int]] = []  # a heap of times and numbers
        self._hold = 0.0

    def __bool__(self) -> bool:
        return bool(self._ready or self._waiting)

    def take(self, room: int) -> tuple[list[int], float | None]:
        """At most `room` items to ask now, and the seconds until the queue may have more; None if time adds none."""
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            self._ready.appendleft(heappop(self._waiting)[1])  # retries first, or the slowest would all be left to last
        held = self._hold > now
        taken = [] if held else [self._ready.popleft() for _ in range(min(room, len(self._ready)))]
        times = [due for due, _ in self._waiting[:1]] + [self._hold] * held
        return taken, min(times) - now if times else None

    def retry(self, number: int, due: float) -> None:
        """Make an item ready again at the time `due`."""
        heappush(self._waiting, (due, number))

    def hold(self, until: float) -> None:
        """Hand out no item before a time."""
        self._hold = max(self._hold, until)


class _Tries:
    """Failed tries per item; a busy server does not count while it answers others."""

    def __init__(self, used: list[int]) -> None:
        self.count = used
        self._answered = 0
        self._seen = [0] * len(used)  # answers that there were at an item's last failure

    def answered(self) -> None:
        """Note that some item was answered."""
        self._answered += 1

    def failed(self, number: int, error: FailedError) -> int:
        """Note that an item has failed; returns its tries so far."""
        if not (error.busy and self._answered > self._seen[number]):
            self.count[number] += 1
        self._seen[number] = self._answered
        return self.count[number]


def _is_plain(url: str) -> bool:
    with suppress(ValueError):  # an invalid port or address
        parts = urllib.parse.urlsplit(url)
        plain = not (parts.username or parts.password or parts.query or parts.fragment)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and plain and parts.port != 0
    return False


@lru_cache(maxsize=4)
def _forms(key: str) -> re.Pattern[str]:
    """All forms of a key that are cheap to find: as it is or escaped (JSON, URL, HTML), in base64 and in hex."""
    escaped = []
    for letter in key:
        code = f"{ord(letter):02x}"
        ways = [re.escape(letter), rf"u00{code}", rf"x{code}", f"%{code}", f"&#{ord(letter)};", f"&#x{code};"]
        escaped.append(rf"\\{{0,8}}(?:{'|'.join(ways)})")
    content = key.encode()
    forms = ["".join(escaped), r"[\s:]*".join(f"{byte:02x}" for byte in content)]
    for before in range(3):  # the place of the key in the encoded text, modulo 3; letters shared with others are left
        text = base64.b64encode(b"\0" * before + content).decode().rstrip("=")
        whole = len(content) + before
        inner = text[(0, 2, 3)[before] : len(text) - (1 if whole % 3 else 0)]
        forms.append(re.escape(inner).replace(r"\+", "[+-]").replace("/", "[/_]"))
    return re.compile("|".join(forms if len(key) >= 8 else forms[:1]), re.IGNORECASE)  # short ones would be anywhere


def _origin(url: str) -> tuple[str, str | None, int | None] | None:
    """Scheme, host and port of a URL; None if it is none."""
    with suppress(ValueError):
        parts = urllib.parse.urlsplit(url)
        standard = {"http": 80, "https": 443}.get(parts.scheme)
        return None if standard is None else (parts.scheme, parts.hostname, parts.port or standard)
    return None


def _seconds(header: str | None) -> float:
    """Seconds that a Retry-After header asks for, as a number or as a date; 0 if there is none."""
    with suppress(ValueError):
        return max(0.0, float(header or 0))
    with suppress(ValueError, OverflowError):
        return max(0.0, email.utils.parsedate_to_datetime(header or "").timestamp() - time.time())
    return 0.0
