"""The calls: two images and a rubric to a multimodal model, or one criterion's text to the same model."""

from __future__ import annotations

import threading
import urllib.parse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recast.endpoint import Endpoint, FailedError, RefusedError, UnreadableError
from recast.errors import RecastError
from recast.judge import protocol
from recast.judge.log import Key, Log

GEMINI = "https://generativelanguage.googleapis.com/v1beta/openai"
MODEL = "gemini-3.5-flash"
"""The paper's judge, at its OpenAI-compatible address."""
_VARIABLES = {"generativelanguage.googleapis.com": "GEMINI_API_KEY", "api.openai.com": "OPENAI_API_KEY"}
VERDICT = "verdict"
HOPELESS = 16
"""So many calls dropped in a row, or twice the concurrency if that is more, and no more are made."""


@dataclass(frozen=True)
class Settings:
    """Whom to ask, and how patiently; `tries` are all tries of one call, over all starts."""

    model: str = MODEL
    base_url: str = GEMINI
    key_variable: str | None = None
    rubric: Path | None = None
    concurrency: int = 16
    tries: int = 8
    backoff: float = 1.0
    timeout: float = 120.0
    max_tokens: int | None = None
    max_calls: int | None = None


class CapError(RecastError):
    """No more calls are allowed."""


class Cap:
    """How many calls may be made in all comparisons together, those of earlier starts included."""

    def __init__(self, most: int | None) -> None:
        self.most, self.spent, self._lock = most, 0, threading.Lock()

    def take(self) -> None:
        """Count a call before it is made."""
        with self._lock:
            if self.most is not None and self.spent >= self.most:
                raise CapError(f"the cap of {self.most} calls is reached: raise --max-calls to go on from here")
            self.spent += 1

    def give_back(self) -> None:
        """Uncount a call that was certainly not billed."""
        with self._lock:
            self.spent -= 1


@dataclass(frozen=True)
class Call:
    """One question: its key in a log, the log, and what makes the messages once it is its turn."""

    key: Key
    log: Log
    messages: Callable[[], list[dict[str, Any]]]
    read: Callable[[str], Any]
    about: str


class Judge(Endpoint):
    """A multimodal model behind an OpenAI-compatible endpoint, at temperature 0."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.cap = settings, Cap(settings.max_calls)
        host = urllib.parse.urlsplit(settings.base_url).hostname or ""
        variable = settings.key_variable or _VARIABLES.get(host, "JUDGE_API_KEY")
        if settings.tries < 1:
            raise RecastError(f"tries is at least 1, not {settings.tries}")
        patience = {name: getattr(settings, name) for name in ("concurrency", "backoff", "timeout")}
        super().__init__(settings.base_url, variable, retries=settings.tries - 1, **patience)
        if host in _VARIABLES and not self.key():
            raise RecastError(f"the environment has no {variable}: set it to your key for {self.base}")
        self.answered = self.row = 0
        self.reason = ""

    def ask_all(self, calls: Sequence[Call], progress: Callable[[Any, int], Any]) -> None:
        """Ask what has no answer yet; a call that fails too often, or is refused for what it holds, is dropped.

        The cap, a key or a model that is refused, and a server that answers nothing stop new calls.
        Every answer is in its log as soon as it is there.
        """
        tries = self.settings.tries
        todo = [each for each in calls if each.key not in each.log.answers and not is_gone(each.log, each.key, tries)]
        before = self.answered
        self.each(
            self._ask,
            todo,
            lambda call: call.about,
            lambda found: progress(found, len(todo)),
            used=lambda call: call.log.failed[call.key],
            drop=self._drop,
        )
        if todo and self.answered == before and not any(each.log.answers for each in calls):
            raise RecastError(f"{self.base} has not answered any call: {self.reason}")

    def _ask(self, call: Call) -> None:
        tokens = (0, 0)
        body: dict[str, Any] = {"model": self.settings.model, "messages": call.messages(), "temperature": 0}
        body |= {"max_tokens": self.settings.max_tokens} if self.settings.max_tokens else {}
        self.cap.take()
        try:
            reply = self.post("chat/completions", body, call.about)
            tokens = _tokens(reply)
            answer = self._read(call, reply)
        except RefusedError as error:
            self.cap.give_back()
            if not error.single:
                raise
            call.log.refusal(call.key, self.excerpt(str(error)))
            self._drop(call, error)
            return
        except FailedError as error:
            if not error.billed:
                self.cap.give_back()
            call.log.failure(call.key, self.excerpt(str(error)), error.billed, tokens)
            raise
        call.log.answer(call.key, answer, tokens)
        self.answered, self.row = self.answered + 1, 0

    def _read(self, call: Call, reply: Any) -> Any:
        text, cut = self.said(reply)
        if cut:
            raise UnreadableError(f"the answer was cut at its longest: {self.excerpt(text)!r}")
        try:
            return call.read(self.redact(text))
        except Exception as error:  # whatever a model may write, the next call is asked
            raise UnreadableError(f"{error}: {self.excerpt(text)!r}") from None

    def _drop(self, call: Call, error: RecastError) -> None:
        """Leave a call without answer, unless that happens to call after call: then nobody is there to be asked."""
        call.log.gone.add(call.key)
        self.row, self.reason = self.row + 1, str(error)
        if self.row >= max(HOPELESS, 2 * self.concurrency):
            raise RecastError(
                f"{self.base} has not answered {self.row} calls in a row: {error}; started again, it goes on"
            )


def is_gone(log: Log, key: Key, tries: int) -> bool:
    """Whether a call will not be asked again."""
    return key in log.gone or log.failed[key] >= tries


def verdict_call(
    log: Log, pair: int, order: int, rubric: str, prompt: str, images: Callable[[], tuple[bytes, bytes]]
) -> Call:
    """The question about one ordering of a pair; `images` gives the two as they are shown."""
    return Call(
        (pair, order, VERDICT),
        log,
        lambda: protocol.question(rubric, prompt, *images()),
        lambda text: protocol.parse(text).fields(),
        f"the pair of the prompt {prompt!r}",
    )


def side_call(log: Log, pair: int, order: int, name: str, text: str) -> Call:
    """The question about one criterion's text."""
    return Call(
        (pair, order, name), log, lambda: protocol.tie_break(text), protocol.parse_side, f"the {name} of pair {pair}"
    )


def _tokens(reply: Any) -> tuple[int, int]:
    """Tokens sent and received, 0 where the server does not say."""
    usage = reply.get("usage") if isinstance(reply, dict) else None
    usage = usage if isinstance(usage, dict) else {}
    counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
    sent, received = (count if isinstance(count, int) and count >= 0 else 0 for count in counts)
    return sent, received
