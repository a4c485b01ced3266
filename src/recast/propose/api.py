"""Proposals from an image API: OpenAI's image generation, or Gemini's.

An image is counted before it is requested and stored as soon as it arrives, so that a run that is killed or reaches its
cap loses no image and pays for none twice. Two answers that are useless in the same way stop the run.
"""

from __future__ import annotations

import base64
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from recast.config import GENERATORS, ProposeConfig
from recast.core import strict
from recast.endpoint import Endpoint, FailedError, RefusedError
from recast.errors import RecastError
from recast.images import UndecodableError
from recast.progress import Progress
from recast.propose.store import Store

__all__ = ["Client", "fetch"]

_EXPECTED = {
    "openai": "data[0].b64_json, and no url on the same host",
    "gemini": "inlineData in candidates[0].content.parts",
}
"""Where a reply has its image."""


class Client(Endpoint):
    """An image API: `client.image(prompt)` returns the bytes of an image."""

    def __init__(self, config: ProposeConfig, sleep: Callable[[float], None] | None = None) -> None:
        self._kind, self.config = config.source, config
        base, model, variable = GENERATORS[config.source]
        self._model = config.model or model
        if self._kind == "gemini":
            self.key_header = ("x-goog-api-key", "")
        patience = {name: getattr(config, name) for name in ("concurrency", "retries", "backoff", "timeout")}
        super().__init__(config.base_url or base, variable, **patience, sleep=sleep)
        if not self.key():
            raise RecastError(f"the environment variable {variable} is not set: set it to your key for {self.base}")

    def image(self, prompt: str) -> bytes:
        """The image in the reply to one request; a reply without an image is a `FailedError`."""
        if self._kind == "openai":
            body: dict[str, Any] = {"model": self._model, "prompt": prompt, "n": 1, "size": self.config.size}
            body |= {"quality": self.config.quality} if self.config.quality else {}
            path = "images/generations"
        else:
            body = {
                "contents": [{"parts": [{"text": prompt}]}],
                "generationConfig": {"responseModalities": ["IMAGE"], "imageConfig": {"aspectRatio": "1:1"}},
            }
            path = f"models/{self._model}:generateContent"
        about = f"the prompt {prompt!r}"
        reply = self.post(path, body, about)
        try:
            if self._kind == "openai":
                made = reply["data"][0]
                if "b64_json" not in made and isinstance(made.get("url"), str):
                    return self._download(made["url"], about)
                return base64.b64decode(made["b64_json"], validate=True)
            parts = reply["candidates"][0]["content"]["parts"]
            return base64.b64decode(next(p["inlineData"]["data"] for p in parts if "inlineData" in p), validate=True)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, StopIteration) as error:
            if isinstance(error, FailedError):
                raise
            text = self.excerpt(json.dumps(reply))
            raise FailedError(f"the reply has no {_EXPECTED[self._kind]}: {text}", useless="image") from error

    def _download(self, url: str, about: str) -> bytes:
        """An image that is paid for and waits on the same host; only its download is tried again."""
        for tries in range(self.retries + 1):
            try:
                return self.get(url, about)
            except FailedError as error:
                if tries == self.retries:
                    raise
                time.sleep(self.pause(tries, error.wait))
        raise AssertionError("unreachable")


class _Useless:
    """Answers that are useless, by kind: a second one of the same kind stops the run, because more only cost more.

    An image in between shows that the server can answer, and the count starts again; not so for one prompt, whose
    second answer of a kind will be followed by a third.
    """

    def __init__(self, base: str) -> None:
        self._base, self._seen, self._lock = base, Counter[Any](), threading.Lock()

    def note(self, task: tuple[str, int], error: FailedError) -> None:
        """Count an answer; RecastError if it is the second one of its kind."""
        with self._lock:
            self._seen.update([error.useless, (task, error.useless)])
            if max(self._seen[error.useless], self._seen[task, error.useless]) > 1:
                raise RecastError(
                    f"{self._base} gave two answers that cannot be used, which may have been billed, the last for the "
                    f"prompt {task[0]!r}: {error}; check propose.source, propose.model and propose.base_url"
                )

    def image(self) -> None:
        """Note that there was an image."""
        with self._lock:
            for kind in [kind for kind in self._seen if isinstance(kind, str)]:
                del self._seen[kind]


_LEDGER = "recast.ledger"


class _Spent(strict.Strict):
    images: strict.Count


class _Ledger:
    """The number of images that may have been paid for, stored in a file and never above the cap."""

    def __init__(self, store: Store, cap: int | None) -> None:
        self._path, self._cap, self._lock = store.folder / "ledger.json", cap, threading.Lock()
        remedy = "write the number of images that were paid for into it"
        known = strict.read(self._path, _LEDGER, _Spent, remedy) if self._path.exists() else {"images": 0}
        self._spent: int = known["images"]

    def take(self) -> None:
        """Count an image before it is requested."""
        with self._lock:
            if self._cap is not None and self._spent >= self._cap:
                raise RecastError(f"the cap of {self._cap} images is reached: raise propose.cap to continue")
            self._write(self._spent + 1)

    def give_back(self) -> None:
        """Subtract an image that was certainly not billed."""
        with self._lock:
            self._write(self._spent - 1)

    def _write(self, spent: int) -> None:
        strict.write(self._path, _LEDGER, _Spent, {"images": spent})
        self._spent = spent


def fetch(client: Client, store: Store, tasks: list[tuple[str, int]], progress: Progress) -> None:
    """Request the images of the (prompt, number) tasks, several at a time, and store each as soon as it arrives.

    A refusal or the cap stops new requests; images of running requests are still stored.
    """
    ledger, useless = _Ledger(store, client.config.cap), _Useless(client.base)

    def get(task: tuple[str, int]) -> None:
        ledger.take()
        try:
            content = client.image(task[0])
        except (FailedError, RefusedError) as error:
            if not error.billed:
                ledger.give_back()
            if isinstance(error, FailedError) and error.useless:
                useless.note(task, error)
            raise
        try:
            store.add(*task, content)
        except UndecodableError as error:
            failure = FailedError(str(error), useless="decodable")
            useless.note(task, failure)
            raise failure from error
        useless.image()

    client.each(
        get,
        tasks,
        lambda task: f"no image for the prompt {task[0]!r}",
        lambda done: progress(done, "requesting images", len(tasks)),
    )
