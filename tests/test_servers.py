"""Every fault of a server there is a name for, once for the judge and once for the image server.

Whatever happens, the stage ends with all its answers or one sentence, the key reaches the configured host only and is
written nowhere, and nothing that was answered is asked for again.
"""

import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from judging import Known, two_runs
from recast.config import ProposeConfig
from recast.errors import RecastError
from recast.judge import stage
from recast.judge.ask import Settings
from recast.progress import no_progress
from recast.propose import api, store
from server import Server, serve

KEY = "sk-loopback-0123456789"
HTML = b"<!doctype html><title>502</title><h1>Bad gateway</h1>" + KEY.encode()


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, Server]]:
    """The configured server and another host."""
    monkeypatch.setenv("JUDGE_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with serve() as one, serve() as other:
        one.repeat = f" {KEY}"
        yield one, other


def judge(server: Server, folder: Path, timeout: float) -> int:
    """Judge two pairs in both orders; the number of answers that were kept."""
    ours, static, *_ = two_runs(folder, 2)
    Known(server)
    settings = Settings("known", server.url, concurrency=1, tries=3, backoff=0.001, timeout=timeout)
    found = stage.judge([stage.two(ours, static, None)], settings, no_progress)
    return 2 * len(found.verdicts[0].indices)


def propose(server: Server, folder: Path, timeout: float) -> int:
    """Request four images; the number that were kept."""
    config = ProposeConfig(
        source="openai", base_url=server.url, concurrency=1, retries=3, timeout=timeout, backoff=0.0, model="m"
    )
    kept = store.Store(folder / "proposals", {"source": "openai"})
    api.fetch(api.Client(config), kept, [(text, k) for text in ("a cat", "a dog") for k in (0, 1)], no_progress)
    return len(store.stored(folder / "proposals"))


def soon() -> str:
    return formatdate(time.time() + 1, usegmt=True)


PASSING: dict[str, Any] = {
    "429, seconds": ("after", 0),
    "429, a date": lambda _: ("raw", 429, b"{}", {"Retry-After": soon()}),
    "429, nonsense": ("raw", 429, b"{}", {"Retry-After": "soon"}),
    **{str(status): status for status in (408, 500, 502, 503, 504, 529)},
    "an error in HTML": ("raw", 502, HTML, {"Content-Type": "text/html"}),
    "slow drip": ("drip", 0.1),
    "half a body": "half",
    "half an error": "cut",
    "reset": "reset",
    "no answer": "hang",
    "HTML instead of JSON": ("raw", 200, HTML, {"Content-Type": "text/html"}),
    "an empty body": ("raw", 200, b""),
    "half a JSON": "garbled",
    "a list": ("raw", 200, b"[]"),
    "null": ("raw", 200, b"null"),
    "deep nesting": ("raw", 200, b"[" * 100_000),
    "no text": ("raw", 200, b"\xff\xfe\x00"),
    "10 MB": ("padded", 10_000_000),
}
"""Faults after which the same request is answered well; what a key is repeated in, is marked by the server."""
FINAL: dict[str, Any] = {
    "401": 401,
    "403": 403,
    "404": 404,
    "redirect to another host": lambda other: ("raw", 302, b"", {"Location": other.url}),
    "redirect to a file": ("raw", 307, b"", {"Location": "file:///etc/passwd"}),
    "redirect in a circle": lambda _: ("raw", 308, b"", {"Location": "/v1/chat/completions"}),
}


@pytest.mark.parametrize("client", [judge, propose])
@pytest.mark.parametrize("fault", [*PASSING, *FINAL])
def test_a_fault_is_survived_or_one_sentence(
    servers: tuple[Server, Server], tmp_path: Path, client: Any, fault: str, capfd: pytest.CaptureFixture[str]
) -> None:
    server, other = servers
    entry = (PASSING | FINAL)[fault]
    server.script = ["image", entry(other) if callable(entry) else entry]
    # Short only where it must run out: on a busy machine, a good answer may take seconds.
    timeout, server.hang, said = 2.0 if fault in ("slow drip", "no answer") else 30.0, 4.0, ""
    if fault in PASSING:
        assert client(server, tmp_path, timeout) == 4
        reasons = 2 if client is judge else 0  # texts of the first pair, which another question is asked about
        assert len(server.requests) <= 5 + reasons  # nothing but the faulty one is asked for again
    else:
        with pytest.raises(RecastError) as caught:
            client(server, tmp_path, timeout)
        said = str(caught.value)
        assert "\n" not in said
        assert len(server.requests) == 2
    assert other.requests == []
    assert {request["headers"].get("Authorization") for request in server.requests} == {f"Bearer {KEY}"}
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    out = capfd.readouterr()
    assert not [text for text in (*written, said.encode(), out.out.encode(), out.err.encode()) if KEY.encode() in text]
