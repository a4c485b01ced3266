"""How long an endpoint waits, and what stops it, beyond what the tests of its users show."""

import time
from contextlib import nullcontext

import pytest

from recast import transport
from recast.endpoint import Endpoint, FailedError, UnreadableError
from server import serve


@pytest.mark.parametrize(
    ("header", "least", "most"),
    [
        ("Fri, 01 Jan 2100 00:00:00 GMT", 3600, 3600),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 1, 2),
        ("soon", 1, 2),
        ("1e9", 3600, 3600),
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
        said = pytest.warns(UserWarning, match=r"asks to wait \d+ s .*Retry-After") if least > 2 else nullcontext()
        with said:
            replies = endpoint.each(lambda item: endpoint.post("chat/completions", {"n": item}, "it"), [7], str)
    assert replies[0]["choices"][0]["message"]["content"] == "Final Score: 3"
    assert [request["body"] for request in server.requests] == [{"n": 7}] * 2
    assert least <= slept[0] <= most
    assert len(slept) == 1


def test_the_time_limit_is_for_the_whole_reply_and_not_for_each_read() -> None:
    with serve() as server:
        endpoint = Endpoint(server.url, "NO_KEY", concurrency=1, retries=0, backoff=0.0, timeout=0.5)
        server.script = [("drip", 0.05)]  # 4 seconds, headers included, with a byte well within the limit
        begun = time.monotonic()
        with pytest.raises(FailedError, match="TimeoutError") as caught:
            endpoint.post("chat/completions", {}, "it")
        assert time.monotonic() - begun < 2
        assert caught.value.billed


def test_a_reply_has_a_size_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "LARGEST", 1000)
    with serve() as server:
        endpoint = Endpoint(server.url, "NO_KEY", concurrency=1, retries=0, backoff=0.0, timeout=5.0)
        server.script = [("json", "x" * 998), ("json", "x" * 999)]
        assert len(endpoint.post("chat/completions", {}, "it")) == 998
        with pytest.raises(FailedError, match="the reply has more than .* MiB") as caught:
            endpoint.post("chat/completions", {}, "it")
        assert caught.value.useless


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


def test_a_call_that_waits_gives_its_place_to_others_and_comes_first_when_it_is_due() -> None:
    endpoint = Endpoint("http://localhost/v1", "NO_KEY", concurrency=1, retries=1, backoff=0.05, timeout=1.0)
    asked: list[int] = []

    def ask(item: int) -> int:
        asked.append(item)
        if asked == [0]:
            raise FailedError("busy")
        time.sleep(0.04)
        return item

    assert endpoint.each(ask, range(8), str) == list(range(8))
    assert asked[1] == 1  # not 0 again
    assert 1 < asked.index(0, 1) < 8  # 0.05 to 0.1 s later, while others were still waiting for their first try


def test_an_unreadable_answer_is_asked_for_again_without_a_wait() -> None:
    slept: list[float] = []
    endpoint = Endpoint(
        "http://localhost/v1", "NO_KEY", concurrency=1, retries=3, backoff=9.0, timeout=1.0, sleep=slept.append
    )
    errors = [UnreadableError("prose"), FailedError("busy"), UnreadableError("prose")]

    def ask(item: int) -> int:
        if errors:
            raise errors.pop(0)
        return item

    assert endpoint.each(ask, [5], str) == [5]
    assert slept[0] == slept[2] == 0.0
    assert slept[1] >= 9.0


def test_tries_of_before_count_and_what_fails_too_often_may_be_dropped() -> None:
    endpoint = Endpoint("http://localhost/v1", "NO_KEY", concurrency=2, retries=2, backoff=0.0, timeout=1.0)
    asked: list[int] = []

    def ask(item: int) -> str:
        asked.append(item)
        if item < 2:
            raise FailedError(f"no {item}")
        return "yes"

    found = endpoint.each(ask, range(4), str, used=lambda item: 2 * (item == 1), drop=lambda item, error: str(error))
    assert found == ["no 0", "no 1", "yes", "yes"]
    assert (asked.count(0), asked.count(1)) == (3, 1)
    with pytest.raises(FailedError, match="number 0 after 3 tries: no 0"):
        endpoint.each(ask, range(4), lambda item: f"number {item}")


def test_a_busy_server_counts_as_a_try_only_while_nobody_gets_an_answer() -> None:
    endpoint = Endpoint("http://localhost/v1", "NO_KEY", concurrency=1, retries=1, backoff=0.0, timeout=1.0)
    turn = 0

    def ask(item: int) -> int:
        nonlocal turn
        turn += item == 0
        if item == 0 and turn <= 3:
            raise FailedError("status 429", busy=True)
        return item

    with pytest.raises(FailedError, match="^0 after 2 tries: status 429"):
        endpoint.each(ask, [0, 1], str)
    assert turn == 2
    turn = 0
    with pytest.raises(FailedError, match="^0 after 2 tries: status 429"):
        endpoint.each(ask, [1, 0], str)  # item 1 is answered before the first of its failures
    assert turn == 3


def test_all_wait_while_the_server_is_busy_and_as_long_as_it_says() -> None:
    endpoint = Endpoint("http://localhost/v1", "NO_KEY", concurrency=2, retries=1, backoff=0.5, timeout=1.0)
    asked: list[tuple[int, float]] = []

    def ask(item: int, wait: float) -> int:
        asked.append((item, time.monotonic()))
        if len(asked) == 1:
            raise FailedError("status 429", busy=True, wait=wait)
        time.sleep(0.01)
        return item

    for wait, least, most in ((0.6, 0.6, 9.0), (0.02, 0.02, 0.5)):
        asked.clear()
        assert endpoint.each(lambda item, wait=wait: ask(item, wait), range(6), str) == list(range(6))  # type: ignore[misc]
        new = next(when for item, when in asked[2:] if item > 1)  # two were on their way
        assert least <= new - asked[0][1] < most
        again = [when for item, when in asked if item == 0][1]
        assert again - asked[0][1] >= max(wait, 0.5)  # its own backoff is not cut short
