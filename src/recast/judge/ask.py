"""Calls to the judge: two images with a rubric, or the text of one criterion that the patterns cannot read."""

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
from recast.judge.protocol import GEMINI, MODEL

__all__ = [
    "VERDICT",
    "Call",
    "CapError",
    "Judge",
    "Settings",
    "is_gone",
    "side_call",
    "verdict_call",
]

VERDICT = "verdict"
_VARIABLES = {"generativelanguage.googleapis.com": "GEMINI_API_KEY", "api.openai.com": "OPENAI_API_KEY"}
_HOPELESS = 16
"""Judging stops when this many calls in a row were dropped, or twice the concurrency if that is more."""


@dataclass(frozen=True)
class Settings:
    """The judge and how it is called.

    Parameters
    ----------
    model : str
        The name of the model at the endpoint.
    base_url : str
        An OpenAI-compatible endpoint.
    key_variable : str, optional
        The environment variable with the key; by default the one that is usual for the host, or JUDGE_API_KEY.
    rubric : Path, optional
        A file with the instructions; by default the rubric of the package.
    concurrency : int, default 16
        Calls that are made at the same time.
    tries : int, default 9
        Attempts per call, the first one included and counted over all starts, before its pair is dropped; 9 are the
        paper's 8 retries.
    backoff, timeout : float
        Seconds before the second attempt, and seconds to wait for an answer.
    max_tokens : int, optional
        The longest answer; by default the server's limit.
    max_calls : int, optional
        Limit of the number of calls, those of earlier starts included.
    """

    model: str = MODEL
    base_url: str = GEMINI
    key_variable: str | None = None
    rubric: Path | None = None
    concurrency: int = 16
    tries: int = 9
    backoff: float = 1.0
    timeout: float = 120.0
    max_tokens: int | None = None
    max_calls: int | None = None


class CapError(RecastError):
    """The limit of the number of calls is reached."""


class _Cap:
    """The limit of calls in all comparisons together, those of earlier starts included."""

    def __init__(self, most: int | None) -> None:
        self.most, self.spent, self._lock = most, 0, threading.Lock()

    def take(self) -> None:
        """Count a call before it is made; CapError at the limit."""
        with self._lock:
            if self.most is not None and self.spent >= self.most:
                raise CapError(f"the limit of {self.most} calls is reached: raise --max-calls to continue")
            self.spent += 1

    def give_back(self) -> None:
        """Do not count a call that was certainly not billed."""
        with self._lock:
            self.spent -= 1


@dataclass(frozen=True)
class Call:
    """One question: its key in a log, the log, and functions that make the messages and read the answer."""

    key: Key
    log: Log
    messages: Callable[[], list[dict[str, Any]]]
    read: Callable[[str], Any]
    about: str


class Judge(Endpoint):
    """A multimodal model behind an OpenAI-compatible endpoint, at temperature 0."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.cap = settings, _Cap(settings.max_calls)
        host = urllib.parse.urlsplit(settings.base_url).hostname or ""
        variable = settings.key_variable or _VARIABLES.get(host, "JUDGE_API_KEY")
        if settings.tries < 1:
            raise RecastError(f"tries must be at least 1, not {settings.tries}")
        patience = {name: getattr(settings, name) for name in ("concurrency", "backoff", "timeout")}
        super().__init__(settings.base_url, variable, retries=settings.tries - 1, **patience)
        if host in _VARIABLES and not self.key():
            raise RecastError(f"the environment variable {variable} is not set: set it to your key for {self.base}")
        self.answered = self.row = self.useless = 0
        self.reason = ""

    def ask_all(self, calls: Sequence[Call], progress: Callable[[Any, int], Any]) -> None:
        """Make the calls without an answer; one that fails too often or whose content is refused is dropped.

        The limit of calls, a refused key or model, and a server that does not answer stop all calls. Every answer is
        written to its log at once.
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
        call.log.sent(call.key)
        try:
            reply = self.post("chat/completions", body, call.about)
            tokens = _tokens(reply)
            answer = self._read(call, reply)
        except RefusedError as error:
            self.cap.give_back()
            if not error.single:
                call.log.failure(call.key, self.excerpt(str(error)), False, tokens)
                raise
            call.log.refusal(call.key, self.excerpt(str(error)))
            self._drop(call, error)
            return
        except FailedError as error:
            if not error.billed:
                self.cap.give_back()
            call.log.failure(call.key, self.excerpt(str(error)), error.billed, tokens)
            self._require_use(error)
            raise
        call.log.answer(call.key, answer, tokens)
        self.answered, self.row, self.useless = self.answered + 1, 0, 0

    def _require_use(self, error: FailedError) -> None:
        """Stop after two replies without an answer between them that are no chat completions: more only cost more."""
        self.useless += bool(error.useless)
        if error.useless and self.useless > 1:
            raise RecastError(
                f"{self.base} gave two replies that are no chat completions, which may have been billed: {error}; "
                "check --base-url and --model"
            )

    def _read(self, call: Call, reply: Any) -> Any:
        text, cut = self.text_of(reply)
        if cut:
            raise UnreadableError(f"the answer was cut at the token limit: {self.excerpt(text)!r}")
        try:
            return self.redacted(call.read(text))
        except Exception as error:  # no answer of a model may stop the other calls
            raise UnreadableError(f"{self.excerpt(str(error))}: {self.excerpt(text)!r}") from None

    def _drop(self, call: Call, error: RecastError) -> None:
        """Leave a call without an answer; after many in a row the server is considered down."""
        call.log.gone.add(call.key)
        self.row, self.reason = self.row + 1, str(error)
        if self.row >= max(_HOPELESS, 2 * self.concurrency):
            raise RecastError(
                f"{self.base} has not answered {self.row} calls in a row: {error}; the same command resumes"
            )


def is_gone(log: Log, key: Key, tries: int) -> bool:
    """Whether a call will not be made again."""
    return key in log.gone or log.failed[key] >= tries


def verdict_call(
    log: Log, pair: int, order: int, rubric: str, prompt: str, images: Callable[[], tuple[bytes, bytes]]
) -> Call:
    """The question about one ordering of a pair; `images` returns the image shown as A and the one shown as B."""
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
    """Tokens sent and received; 0 if the server does not report them."""
    usage = reply.get("usage") if isinstance(reply, dict) else None
    usage = usage if isinstance(usage, dict) else {}
    counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
    sent, received = (count if type(count) is int and 0 <= count <= 2**53 else 0 for count in counts)
    return sent, received
