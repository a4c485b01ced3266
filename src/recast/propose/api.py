"""Proposals from an image API: OpenAI's image generation, or Gemini's.

An image is counted before it is requested and stored as soon as it arrives, so that a run that is killed or reaches its
cap loses no image and pays for none twice.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable
from typing import Any

from recast.config import GENERATORS, ProposeConfig
from recast.core import artifact
from recast.endpoint import Endpoint, FailedError, RefusedError
from recast.errors import RecastError
from recast.images import UndecodableError
from recast.progress import Progress
from recast.propose.store import Store

__all__ = ["Client", "fetch"]


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
        reply = self.post(path, body, f"the prompt {prompt!r}")
        try:
            if self._kind == "openai":
                return base64.b64decode(reply["data"][0]["b64_json"], validate=True)
            parts = reply["candidates"][0]["content"]["parts"]
            return base64.b64decode(next(p["inlineData"]["data"] for p in parts if "inlineData" in p), validate=True)
        except (ValueError, KeyError, IndexError, TypeError, StopIteration) as error:
            text = self.excerpt(json.dumps(reply))
            raise FailedError(f"the reply has no image ({type(error).__name__}): {text}") from error


class _Ledger:
    """The number of images that may have been paid for, stored in a file and never above the cap."""

    def __init__(self, store: Store, cap: int | None) -> None:
        self._path, self._cap, self._lock = store.folder / "ledger.json", cap, threading.Lock()
        self._spent = artifact.read(self._path, "recast.ledger")["images"] if self._path.exists() else 0

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
        artifact.write(self._path, "recast.ledger", {"images": spent})
        self._spent = spent


def fetch(client: Client, store: Store, tasks: list[tuple[str, int]], progress: Progress) -> None:
    """Request the images of the (prompt, number) tasks, several at a time, and store each as soon as it arrives.

    A refusal or the cap stops new requests; images of running requests are still stored.
    """
    ledger = _Ledger(store, client.config.cap)

    def get(task: tuple[str, int]) -> None:
        ledger.take()
        try:
            content = client.image(task[0])
        except (FailedError, RefusedError) as error:
            if not error.billed:
                ledger.give_back()
            raise
        try:
            store.add(*task, content)
        except UndecodableError as error:
            raise FailedError(str(error)) from error

    client.each(
        get,
        tasks,
        lambda task: f"no image for the prompt {task[0]!r}",
        lambda done: progress(done, "requesting images", len(tasks)),
    )
