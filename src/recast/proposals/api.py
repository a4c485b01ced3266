"""Images from a generator behind HTTP: the OpenAI images interface, and Gemini's image generation.

What may have been paid for is counted before it is asked for, and what came back is kept before anything else
happens, so that a run that is killed or runs into its cap loses no image and asks for none twice.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from recast.core import artifact
from recast.errors import RecastError
from recast.proposals.store import Store, UndecodableError

if TYPE_CHECKING:
    from recast.config import ProposeConfig

DEFAULTS = {
    "openai": ("https://api.openai.com/v1", "gpt-image-1.5", "OPENAI_API_KEY"),
    "gemini": ("https://generativelanguage.googleapis.com/v1beta", "gemini-3-pro-image-preview", "GEMINI_API_KEY"),
}
"""Base URL, model and the environment variable that holds the key; the two generators of the paper."""
RETRIED = (408, 409, 425, 429, 500, 502, 503, 504, 529)
PERHAPS_MADE = (408, 500, 502, 504)
"""Of these, the ones after which an image may have been made and billed all the same."""
_LONGEST_WAIT = 60.0
Progress = Callable[[Iterable[Any], str, int], Iterable[Any]]


class RefusedError(RecastError):
    """The server said no, and asking again would not change that."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the key to another host: it is an error."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Follow none."""


class Client:
    """One generator: `client(prompt)` returns the bytes of an image.

    The key is read from the environment when a request is made and appears nowhere else.
    """

    def __init__(self, config: ProposeConfig, sleep: Callable[[float], None] = time.sleep) -> None:
        self.kind = config.source
        base, model, self.variable = DEFAULTS[config.source]
        self.base, self.model = (config.base_url or base).rstrip("/"), config.model or model
        self.config, self._sleep, self._random = config, sleep, random.Random(0)
        if not self._key():
            raise RecastError(f"the environment has no {self.variable}: set it to your key for {self.base}")
        if not self._key().isascii() or not self._key().isprintable():
            raise RecastError(f"the key in {self.variable} has characters that no key has")
        self._opener = urllib.request.build_opener(_NoRedirect)

    def _key(self) -> str:
        return os.environ.get(self.variable, "").strip()

    def request(self, prompt: str) -> urllib.request.Request:
        """The HTTP request for one image."""
        secret = self._key()
        if self.kind == "openai":
            body: dict[str, Any] = {"model": self.model, "prompt": prompt, "n": 1, "size": self.config.size}
            body |= {"quality": self.config.quality} if self.config.quality else {}
            url, headers = f"{self.base}/images/generations", {"Authorization": f"Bearer {secret}"}
        else:
            body = {
                "contents": [{"parts": [{"text": prompt}]}],
                "generationConfig": {"responseModalities": ["IMAGE"], "imageConfig": {"aspectRatio": "1:1"}},
            }
            url, headers = f"{self.base}/models/{self.model}:generateContent", {"x-goog-api-key": secret}
        headers["Content-Type"] = "application/json"
        return urllib.request.Request(url, json.dumps(body).encode(), headers, method="POST")

    def image(self, reply: bytes) -> bytes:
        """The image in a reply; a reply without one is worth asking again."""
        try:
            content = json.loads(reply)
            if self.kind == "openai":
                return base64.b64decode(content["data"][0]["b64_json"], validate=True)
            parts = content["candidates"][0]["content"]["parts"]
            return base64.b64decode(next(p["inlineData"]["data"] for p in parts if "inlineData" in p), validate=True)
        except (ValueError, KeyError, IndexError, TypeError, StopIteration) as error:
            raise RecastError(f"the reply has no image ({error!r}): {reply[:200]!r}") from error

    def attempt(self, prompt: str) -> tuple[bytes | None, bool, str, float]:
        """One request: an image or none, whether it may have been billed, why it failed, and how long to wait."""
        try:
            with self._opener.open(self.request(prompt), timeout=self.config.timeout) as response:
                return self.image(response.read()), True, "", 0.0
        except urllib.error.HTTPError as error:
            text = ""
            with suppress(OSError, http.client.HTTPException):  # half an error is an error all the same
                text = error.read()[:500].decode("utf-8", "replace")
            if error.code not in RETRIED:
                raise RefusedError(
                    f"{self.base} refused the prompt {prompt!r} with status {error.code}: {' '.join(text.split())}"
                ) from None
            sent = error.code in PERHAPS_MADE
            return None, sent, f"status {error.code}", _seconds(error.headers.get("Retry-After"))
        except RecastError as error:
            return None, True, str(error), 0.0
        except (OSError, ValueError, http.client.HTTPException) as error:
            # Before the request was sent it is a URLError; a timeout, reset or half a reply comes after.
            sent = not isinstance(error, urllib.error.URLError)
            return None, sent, f"{type(error).__name__}: {error}", 0.0

    def wait(self, tries: int, asked: float) -> None:
        """Exponential backoff with jitter, or as long as the server asked for."""
        self._sleep(min(_LONGEST_WAIT, max(asked, self.config.backoff * 2**tries * (1 + self._random.random()))))


def _seconds(header: str | None) -> float:
    try:
        return max(0.0, float(header or 0))
    except ValueError:  # a date: the backoff will do
        return 0.0


class Ledger:
    """How many images may have been paid for, kept in a file and never above the cap."""

    def __init__(self, store: Store, cap: int | None) -> None:
        self.path, self.cap, self._lock = store.folder / "ledger.json", cap, threading.Lock()
        self.spent = artifact.read(self.path, "recast.ledger")["images"] if self.path.exists() else 0

    def take(self) -> None:
        """Count an image before it is asked for."""
        with self._lock:
            if self.cap is not None and self.spent >= self.cap:
                raise RecastError(f"the cap of {self.cap} images is reached: raise propose.cap to go on from here")
            self._write(self.spent + 1)

    def give_back(self) -> None:
        """Uncount an image that was certainly not made."""
        with self._lock:
            self._write(self.spent - 1)

    def _write(self, spent: int) -> None:
        artifact.write(self.path, "recast.ledger", {"images": spent})
        self.spent = spent


def fetch(client: Client, store: Store, tasks: list[tuple[str, int]], progress: Progress) -> None:
    """Get the images of the (prompt, number) tasks, several at a time, each kept as soon as it is there.

    The first refusal, or the cap, stops new requests; those on their way are still waited for and kept.
    """
    ledger = Ledger(store, client.config.cap)
    stop = threading.Event()

    def one(task: tuple[str, int]) -> None:
        try:
            get(*task)
        except BaseException:
            stop.set()
            raise

    def get(prompt: str, number: int) -> None:
        reason = ""
        for tries in range(client.config.retries + 1):
            if stop.is_set():
                return
            ledger.take()
            try:
                content, billed, reason, asked = client.attempt(prompt)
            except RefusedError:
                ledger.give_back()
                raise
            if not billed:
                ledger.give_back()
            if content is not None:
                try:
                    store.add(prompt, number, content)
                    return
                except UndecodableError as error:
                    reason = str(error)
            if tries < client.config.retries:
                client.wait(tries, asked)
        raise RecastError(f"no image for the prompt {prompt!r} after {client.config.retries + 1} tries: {reason}")

    with ThreadPoolExecutor(client.config.concurrency) as pool:
        futures = [pool.submit(one, task) for task in tasks]
        try:
            for future in progress(as_completed(futures), "asking for images", len(tasks)):
                future.result()
        finally:
            stop.set()
            for future in futures:
                future.cancel()
