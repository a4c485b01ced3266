"""Image APIs against a real HTTP server on loopback that fails in all the ways servers do."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recast.config import ProposeConfig
from recast.errors import RecastError
from recast.progress import no_progress
from recast.propose import api, store
from server import Server, serve

TASKS = [("a cat", 0), ("a cat", 1), ("a dog", 0), ("a dog", 1)]
SECRET = "sk-very-secret"


@pytest.fixture
def server() -> Iterator[Server]:
    with serve() as running:
        yield running


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    monkeypatch.setenv("GEMINI_API_KEY", SECRET)


def settings(server: Server, **more: Any) -> ProposeConfig:
    defaults = {
        "source": "openai",
        "base_url": server.url,
        "concurrency": 1,
        "retries": 3,
        "timeout": 5.0,
        "backoff": 0.0,
    }
    return ProposeConfig(**(defaults | more))


def fetch(server: Server, folder: Path, tasks: list[tuple[str, int]] = TASKS, **more: Any) -> store.Store:
    config = settings(server, **more)
    kept = store.Store(folder, {"source": config.source})
    api.fetch(api.Client(config), kept, [task for task in tasks if store.key(*task) not in kept._files], no_progress)
    return kept


def test_openai_images(server: Server, tmp_path: Path) -> None:
    kept = fetch(server, tmp_path, size="512x512", quality="low", model="gpt-image-9")
    assert len(list((tmp_path / "images").iterdir())) == 4
    first = server.requests[0]
    assert first["path"] == "/v1/images/generations"
    assert first["body"] == {"model": "gpt-image-9", "prompt": "a cat", "n": 1, "size": "512x512", "quality": "low"}
    assert first["headers"]["Authorization"] == f"Bearer {SECRET}"
    assert kept.missing(["a cat", "a dog"], 2) == []


def test_gemini_images(server: Server, tmp_path: Path) -> None:
    fetch(server, tmp_path, source="gemini")
    assert len(list((tmp_path / "images").iterdir())) == 4
    first = server.requests[0]
    assert first["path"] == "/v1/models/gemini-3-pro-image-preview:generateContent"
    assert first["body"]["contents"] == [{"parts": [{"text": "a cat"}]}]
    assert first["body"]["generationConfig"]["responseModalities"] == ["IMAGE"]
    assert {name.lower(): value for name, value in first["headers"].items()}["x-goog-api-key"] == SECRET


@pytest.mark.parametrize("source", ["openai", "gemini"])
@pytest.mark.parametrize("failure", [429, 500, 503, 529, ("after", 0), "reset", "half", "cut", ("text", "noise")])
def test_what_passes_is_tried_again(server: Server, tmp_path: Path, failure: Any, source: str) -> None:
    server.script = list(failure) if failure == ("text", "noise") else [failure, failure]
    fetch(server, tmp_path, source=source)
    assert len(list((tmp_path / "images").iterdir())) == 4
    assert len(server.requests) == 6


USELESS = {
    "url": ("json", {"data": [{"url": "https://elsewhere.example/1.png"}]}),
    "text": "text",
    "noise": "noise",
    "garbled": "garbled",
    "list": ("json", [1, 2]),
}


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ("url", r"the reply has no data\[0\].b64_json, and no url on the same host: .*https://elsewhere.example"),
        ("text", r"the reply has no data\[0\].b64_json, .*sorry, no image"),
        ("noise", "cannot be decoded as an image"),
        ("garbled", "the reply is not JSON"),
        ("list", r"the reply has no data\[0\].b64_json, .*: \[1, 2\]"),
    ],
)
def test_two_useless_answers_of_one_kind_stop_the_stage(
    server: Server, tmp_path: Path, answer: str, sentence: str
) -> None:
    server.fault = lambda body: USELESS[answer]
    tasks = [(f"prompt {k}", 0) for k in range(120)]
    with pytest.raises(RecastError, match=sentence) as caught:
        fetch(server, tmp_path, tasks, retries=5)
    assert "two answers that cannot be used" in str(caught.value)
    assert len(server.requests) == 2
    server.requests.clear()
    with pytest.raises(RecastError, match=sentence):
        fetch(server, tmp_path / "b", tasks, retries=5, concurrency=8)
    assert len(server.requests) <= 2 * 8


def test_useless_answers_with_images_in_between_are_bought_once_more_but_not_for_one_prompt(
    server: Server, tmp_path: Path
) -> None:
    server.script = ["noise", "image", "noise", "image"]
    fetch(server, tmp_path, TASKS[:2])
    assert len(server.requests) == 4
    server.script = ["noise", 503, "noise"]
    with pytest.raises(RecastError, match="two answers that cannot be used, .*the last for the prompt 'a dog'"):
        fetch(server, tmp_path, TASKS[:3])


def test_a_url_on_the_same_host_is_fetched_without_the_key(server: Server, tmp_path: Path) -> None:
    link = ("json", {"data": [{"url": f"{server.url}/made/1.png"}]})
    server.script = [link, 503, 503, "image"]
    fetch(server, tmp_path, TASKS[:1])
    posts = [request for request in server.requests if request["body"]]
    assert len(posts) == 1  # only the download is tried again
    assert [request["path"] for request in server.requests[1:]] == ["/v1/made/1.png"] * 3
    assert not any("Authorization" in request["headers"] for request in server.requests[1:])
    assert len(list((tmp_path / "images").iterdir())) == 1


def test_a_server_that_hangs_times_out_and_is_asked_again(server: Server, tmp_path: Path) -> None:
    server.script = ["hang"]
    fetch(server, tmp_path, TASKS[:1], timeout=0.2)
    assert len(server.requests) == 2


def test_backoff_grows_and_obeys_the_server(server: Server, tmp_path: Path) -> None:
    slept: list[float] = []
    server.script = [500, 500, ("after", 30), 500]
    client = api.Client(settings(server, backoff=1.0, retries=5), sleep=slept.append)
    with pytest.warns(UserWarning, match="asks to wait 30 s"):
        api.fetch(client, store.Store(tmp_path, {}), TASKS[:1], no_progress)
    assert 1 <= slept[0] <= 2 <= slept[1] <= 4
    assert slept[2] == 30
    assert 8 <= slept[3] <= 16
    assert client.pause(20, 0) == 60


def test_an_end_to_patience_names_the_prompt_and_the_reason(server: Server, tmp_path: Path) -> None:
    server.script = [503] * 10
    with pytest.raises(RecastError, match="no image for the prompt 'a cat' after 4 tries: status 503"):
        fetch(server, tmp_path, TASKS[:1])
    assert len(server.requests) == 4


def test_a_refusal_is_not_tried_again_and_what_is_there_stays(server: Server, tmp_path: Path) -> None:
    server.script = ["image", 400]
    with pytest.raises(RecastError, match="refused the prompt 'a cat' with status 400: .*scripted 400") as caught:
        fetch(server, tmp_path)
    assert SECRET not in str(caught.value)
    assert len(server.requests) == 2
    fetch(server, tmp_path)
    assert len(server.requests) == 2 + 3  # the first image was paid for once


def test_an_image_that_was_paid_for_is_never_asked_for_twice(server: Server, tmp_path: Path) -> None:
    fetch(server, tmp_path, TASKS[:3])
    fetch(server, tmp_path)
    fetch(server, tmp_path)
    assert server.made == 4


def test_the_cap_holds_over_runs_and_loses_nothing(server: Server, tmp_path: Path) -> None:
    with pytest.raises(RecastError, match="cap of 3 images is reached: raise propose.cap"):
        fetch(server, tmp_path, cap=3)
    assert server.made == 3
    with pytest.raises(RecastError, match="cap of 3 images"):
        fetch(server, tmp_path, cap=3)
    assert server.made == 3
    fetch(server, tmp_path, cap=4)
    assert server.made == 4


def test_what_may_have_been_billed_counts_and_what_was_not_does_not(server: Server, tmp_path: Path) -> None:
    server.script = [429, 529, 503]
    fetch(server, tmp_path / "a", TASKS[:1], cap=1, retries=5)
    server.script = ["noise"]  # an image came, and was none
    with pytest.raises(RecastError, match="cap of 1 images"):
        fetch(server, tmp_path / "b", TASKS[:1], cap=1)
    for failure in ("hang", "reset", "half", 500, 504):
        server.script = [failure]
        with pytest.raises(RecastError, match="cap of 1 images"):
            fetch(server, tmp_path / str(failure), TASKS[:1], cap=1, timeout=0.2)


def test_requests_run_at_once_as_many_as_asked(server: Server, tmp_path: Path) -> None:
    server.delay = 0.1
    fetch(server, tmp_path, [("a cat", k) for k in range(9)], concurrency=3)
    assert server.busiest == 3
    assert server.made == 9


def test_images_on_their_way_are_kept_when_another_is_refused(server: Server, tmp_path: Path) -> None:
    server.delay = 0.2
    server.script = [400, "image", "image"]
    with pytest.raises(RecastError, match="status 400"):
        fetch(server, tmp_path, [("a cat", k) for k in range(9)], concurrency=3)
    assert len(list((tmp_path / "images").glob("*.png"))) == server.made
    assert server.made <= 5


def test_a_missing_key_is_named_and_a_key_is_written_nowhere(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch(server, tmp_path)
    assert not any(SECRET.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(RecastError, match="the environment variable OPENAI_API_KEY is not set"):
        api.Client(settings(server))


def test_an_unreachable_server_is_one_sentence(server: Server, tmp_path: Path) -> None:
    with pytest.raises(RecastError, match="no image for the prompt 'a cat' after 1 tries"):
        fetch(server, tmp_path, base_url="http://127.0.0.1:9", retries=0)


def test_an_image_that_is_too_small_stops_at_once_and_is_kept(server: Server, tmp_path: Path) -> None:
    server.script = ["tiny"]
    with pytest.raises(RecastError, match="is 8×8 pixels, below the minimum .*it is kept as"):
        fetch(server, tmp_path)
    assert len(server.requests) == 1
    assert len(list((tmp_path / "rejected").iterdir())) == 1


def test_a_folder_that_cannot_be_written_costs_one_image(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_bytes

    def full(self: Path, data: bytes) -> int:
        if self.suffix == ".tmp" and "images" in self.parts:
            raise OSError(28, "No space left on device")
        return write(self, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(RecastError, match="cannot be written: No space left"):
        fetch(server, tmp_path)
    assert len(server.requests) == 1


def test_a_key_with_a_line_end_works_and_a_broken_one_is_not_shown(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", f"{SECRET}\r\n")
    fetch(server, tmp_path, TASKS[:1])
    assert server.requests[0]["headers"]["Authorization"] == f"Bearer {SECRET}"
    monkeypatch.setenv("OPENAI_API_KEY", f"{SECRET}\rmore")
    with pytest.raises(RecastError, match="contains characters that are not allowed in a key") as caught:
        api.Client(settings(server))
    assert SECRET not in str(caught.value)


def test_a_redirect_is_refused(server: Server, tmp_path: Path) -> None:
    server.script = [302]
    with pytest.raises(RecastError, match="refused the prompt 'a cat' with status 302"):
        fetch(server, tmp_path)
    assert len(server.requests) == 1
