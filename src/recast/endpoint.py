"""A model behind HTTP: one JSON request, which failures are worth another try, and many calls at once."""

from __future__ import annotations

import email.utils
import http.client
import json
import os
import random
import re
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from typing import Any, TypeVar, cast

from recast.errors import RecastError

RETRIED = (408, 409, 425, 429, 500, 502, 503, 504, 529)
PERHAPS_MADE = (408, 500, 502, 504)
"""Of these, the ones after which an answer may have been made and billed all the same."""
LONGEST_WAIT = 60.0
Item = TypeVar("Item")
Answer = TypeVar("Answer")


class RefusedError(RecastError):
    """The server said no, and asking again would not change that."""

    billed = False


class FailedError(RecastError):
    """No answer: it may have been billed, and the server asked to be left alone for `wait` seconds."""

    def __init__(self, reason: str, billed: bool = True, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.billed, self.wait = billed, wait


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

    def excerpt(self, text: str | bytes, length: int = 200) -> str:
        """The beginning of what a server said, in one line and without the key."""
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        if key := self.key():
            text = re.sub(r"\\*".join(map(re.escape, key)), "[key]", text)  # as it is, or escaped once or twice
        return " ".join(text.split())[:length]

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
                raise RefusedError(f"{self.base} refused {about} with status {error.code}: {said}") from None
            asked = _seconds(error.headers.get("Retry-After"))
            raise FailedError(f"status {error.code}", error.code in PERHAPS_MADE, asked) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            # Before the request was sent it is a URLError; a timeout, reset or half a reply comes after.
            sent = not isinstance(error, urllib.error.URLError)
            raise FailedError(self.excerpt(f"{type(error).__name__}: {error}"), sent) from None
        try:
            return json.loads(reply)
        except (ValueError, RecursionError):
            raise FailedError(f"the reply is not JSON: {self.excerpt(reply)}") from None

    def wait(self, tries: int, asked: float, stop: threading.Event | None = None) -> None:
        """Exponential backoff with jitter, or as long as the server asked for; `stop` ends it early."""
        grown = self.backoff * 2 ** min(tries, 16) * (1 + self._random.random())
        sleep = self._sleep or (stop or threading.Event()).wait
        sleep(min(LONGEST_WAIT, max(asked, grown)))

    def each(
        self,
        ask: Callable[[Item], Answer],
        items: Sequence[Item],
        failure: Callable[[Item], str],
        progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
    ) -> list[Answer]:
        """`ask(item)` for every item, in their order, several on their way at once; a `FailedError` is tried again.

        The first item without an answer stops new requests, and is the error: `failure(item)`, the tries, the reason.
        Those on their way are still waited for.
        """
        stop = threading.Event()

        def one(item: Item) -> Answer | None:
            try:
                return self._persist(ask, item, failure, stop)
            except BaseException:
                stop.set()
                raise

        with ThreadPoolExecutor(self.concurrency) as pool:
            futures = [pool.submit(one, item) for item in items]
            try:
                for future in progress(as_completed(futures)):
                    future.result()
            finally:
                stop.set()
                for future in futures:
                    future.cancel()
        return [cast(Answer, future.result()) for future in futures]

    def _persist(
        self, ask: Callable[[Item], Answer], item: Item, failure: Callable[[Item], str], stop: threading.Event
    ) -> Answer | None:
        """The answer to one item, after as many tries as it takes; None once another item has failed."""
        reason = ""
        for tries in range(self.retries + 1):
            if stop.is_set():
                return None
            try:
                return ask(item)
            except FailedError as error:
                reason, asked = str(error), error.wait
            if tries < self.retries:
                self.wait(tries, asked, stop)
        raise FailedError(f"{failure(item)} after {self.retries + 1} tries: {reason}")


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
