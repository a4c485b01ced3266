"""Images from a generator behind HTTP: the OpenAI images interface, and Gemini's image generation.

What may have been paid for is counted before it is asked for, and what came back is kept before anything else
happens, so that a run that is killed or runs into its cap loses no image and asks for none twice.
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


class Client(Endpoint):
    """One generator: `client.image(prompt)` returns the bytes of an image."""

    def __init__(self, config: ProposeConfig, sleep: Callable[[float], None] | None = None) -> None:
        self.kind, self.config = config.source, config
        base, model, variable = GENERATORS[config.source]
        self.model = config.model or model
        if self.kind == "gemini":
            self.key_header = ("x-goog-api-key", "")
        patience = {name: getattr(config, name) for name in ("concurrency", "retries", "backoff", "timeout")}
        super().__init__(config.base_url or base, variable, **patience, sleep=sleep)
        if not self.key():
            raise RecastError(f"the environment has no {variable}: set it to your key for {self.base}")

    def image(self, prompt: str) -> bytes:
        """The image that answers one request; a reply without one is worth asking again."""
        if self.kind == "openai":
            body: dict[str, Any] = {"model": self.model, "prompt": prompt, "n": 1, "size": self.config.size}
            body |= {"quality": self.config.quality} if self.config.quality else {}
            path = "images/generations"
        else:
            body = {
                "contents": [{"parts": [{"text": prompt}]}],
                "generationConfig": {"responseModalities": ["IMAGE"], "imageConfig": {"aspectRatio": "1:1"}},
            }
            path = f"models/{self.model}:generateContent"
        reply = self.post(path, body, f"the prompt {prompt!r}")
        try:
            if self.kind == "openai":
                return base64.b64decode(reply["data"][0]["b64_json"], validate=True)
            parts = reply["candidates"][0]["content"]["parts"]
            return base64.b64decode(next(p["inlineData"]["data"] for p in parts if "inlineData" in p), validate=True)
        except (ValueError, KeyError, IndexError, TypeError, StopIteration) as error:
            said = self.excerpt(json.dumps(reply))
            raise FailedError(f"the reply has no image ({type(error).__name__}): {said}") from error


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
        lambda done: progress(done, "asking for images", len(tasks)),
    )
