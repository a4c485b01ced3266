"""How long an endpoint waits, and what stops it, beyond what the tests of its users show."""

import email.utils
import time

import pytest

from recast.endpoint import Endpoint
from server import serve


@pytest.mark.parametrize(
    ("header", "least", "most"),
    [
        (email.utils.formatdate(time.time() + 1000, usegmt=True), 60, 60),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 1, 2),
        ("soon", 1, 2),
        ("1e9", 60, 60),
        ("-5", 1, 2),
        ("30", 30, 30),
    ],
)
def test_retry_after_is_seconds_or_a_date_and_has_a_limit(header: str, least: float, most: float) -> None:
    slept: list[float] = []
    with serve() as server:
        server.script = [("after", header)]
        endpoint = Endpoint(
            server.url, "NO_KEY", concurrency=1, retries=1, backoff=1.0, timeout=5.0, sleep=slept.append
        )
        replies = endpoint.each(lambda item: endpoint.post("chat/completions", {"n": item}, "it"), [7], str)
    assert replies[0]["choices"][0]["message"]["content"] == "Final Score: 3"
    assert [request["body"] for request in server.requests] == [{"n": 7}] * 2
    assert least <= slept[0] <= most
    assert len(slept) == 1


def test_jitter_differs_between_processes_that_wait_for_the_same_server() -> None:
    waits = []
    for _ in range(8):
        options = {"concurrency": 1, "retries": 1, "backoff": 1.0, "timeout": 1.0}
        waits.append(Endpoint("http://localhost/v1", "NO_KEY", **options).pause(0, 0))  # type: ignore[arg-type]
    assert len(set(waits)) == 8


def test_an_error_that_is_no_failed_answer_is_raised_as_it_is_at_once() -> None:
    endpoint = Endpoint("http://localhost/v1", "NO_KEY", concurrency=2, retries=5, backoff=1.0, timeout=1.0)
    asked: list[int] = []

    def ask(item: int) -> int:
        asked.append(item)
        raise KeyError(item)

    with pytest.raises(KeyError):
        endpoint.each(ask, range(50), str)
    assert len(asked) <= 4
