"""UnifiedReward against a real HTTP server on loopback that answers in both forms and fails in all the ways."""

import base64
import io
import math
import re
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from recast.errors import RecastError
from recast.rewards import base, setup
from recast.rewards.unifiedreward import UnifiedReward, parse
from server import Server, serve

SECRET = "ur-very/secret"
THREE = "Alignment Score (1-5): {}\nCoherence Score (1-5): {}\nStyle Score (1-5): {}"


@pytest.fixture(autouse=True)
def data_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No template of whoever runs the tests."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("UNIFIEDREWARD_API_KEY", SECRET)
    with serve() as running:
        yield running


def reward(server: Server, **more: Any) -> UnifiedReward:
    defaults = {"base_url": server.url, "concurrency": 1, "retries": 3, "timeout": 5.0, "backoff": 1e-4}
    return base.load("unifiedreward", **(defaults | more))  # type: ignore[return-value]


def pictures(count: int, side: int = 8) -> torch.Tensor:
    """Different images of 8-bit values."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, 3, side, side), generator=generator) / 255


def sent(request: dict[str, Any], encoding: str = "png") -> tuple[np.ndarray, str]:
    """The pixels and the text of a request."""
    image, text = request["body"]["messages"][0]["content"]
    kind, _, data = image["image_url"]["url"].partition(",")
    assert kind == f"data:image/{encoding};base64"
    page = Image.open(io.BytesIO(base64.b64decode(data)))
    assert page.format == encoding.upper()
    return np.asarray(page), text["text"]


def eight_bit(images: torch.Tensor) -> np.ndarray:
    return (images * 255).round().byte().permute(0, 2, 3, 1).numpy()


def test_a_request_has_the_image_first_then_the_text_and_no_chance_in_it(server: Server, tmp_path: Path) -> None:
    template = tmp_path / "template.txt"
    template.write_text('Say {"a": 1} of {prompt}, twice {prompt}.\n')
    images = pictures(1)
    reward(server, template=str(template), model="grader", max_tokens=77, encoding="png")(images, ["a {prompt} “é”"])
    request = server.requests[0]
    pixels, text = sent(request)
    assert text == 'Say {"a": 1} of a {prompt} “é”, twice a {prompt} “é”.'
    np.testing.assert_array_equal(pixels, eight_bit(images)[0])
    assert request["path"] == "/v1/chat/completions"
    assert request["headers"]["Authorization"] == f"Bearer {SECRET}"
    body = request["body"]
    assert [part["type"] for part in body["messages"][0]["content"]] == ["image_url", "text"]
    assert len(body["messages"]) == 1
    assert {key: body[key] for key in body if key != "messages"} == {
        "model": "grader",
        "temperature": 0,
        "max_tokens": 77,
    }


def test_the_default_template_is_ours_and_asks_for_the_three_lines(server: Server) -> None:
    reward(server)(pictures(1), ["a cat"])
    _, text = sent(server.requests[0], "jpeg")
    assert "\na cat\n" in text
    assert text.endswith(THREE.format("x", "x", "x"))


def test_a_template_that_was_set_up_is_the_default_and_has_its_own_version(server: Server, tmp_path: Path) -> None:
    own = UnifiedReward.versions()
    assert own == {
        "model": "CodeGoat24/UnifiedReward-2.0-qwen3vl-8b",
        "template": setup.digest(UnifiedReward().template),
    }
    setup.place("unifiedreward").parent.mkdir(parents=True)
    setup.place("unifiedreward").write_text("Grade [{prompt}]\n")
    reward(server)(pictures(1), ["a cat"])
    assert sent(server.requests[0], "jpeg")[1] == "Grade [a cat]"
    assert UnifiedReward.versions()["template"] == setup.digest("Grade [{prompt}]") != own["template"]
    other = tmp_path / "mine.txt"
    other.write_text("Mine: {prompt}")
    reward(server, template=other)(pictures(1), ["a cat"])
    assert sent(server.requests[1], "jpeg")[1] == "Mine: a cat"
    assert UnifiedReward.versions(template=other, model="m", retries=3, base_url="http://x") == {
        "model": "m",
        "template": setup.digest("Mine: {prompt}"),
    }


@pytest.mark.parametrize("shape", [(512, 512), (40, 24)])
def test_images_are_sent_unresized_as_jpegs_of_quality_95(server: Server, shape: tuple[int, int]) -> None:
    images = torch.rand(1, 3, *shape, generator=torch.Generator().manual_seed(0))
    reward(server)(images, ["a cat"])
    file = io.BytesIO()
    Image.fromarray(eight_bit(images)[0]).save(file, format="JPEG", quality=95)
    url = server.requests[0]["body"]["messages"][0]["content"][0]["image_url"]["url"]
    assert url == f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
    assert server.requests[0]["body"]["max_tokens"] == 4096
    reward(server, encoding="png")(images, ["a cat"])
    np.testing.assert_array_equal(sent(server.requests[1])[0], eight_bit(images)[0])


def test_with_a_size_images_are_resized_as_pillow_does(server: Server) -> None:
    images = pictures(1, side=13)
    reward(server, size=32, encoding="png")([Image.fromarray(eight_bit(images)[0])], ["a cat"])
    expected = Image.fromarray(eight_bit(images)[0]).resize((32, 32), Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(sent(server.requests[0])[0], np.asarray(expected))


def test_both_forms_of_answer_and_their_parts(server: Server) -> None:
    answers = {"three": THREE.format(2.694700002670288, 2, 4.5), "final": "cat (animal): 1\nFinal Score: 4.25"}
    server.answer = lambda body: answers[body["messages"][0]["content"][1]["text"].split("\n\n")[1]]
    parts = reward(server).details(pictures(2), ["three", "final"])
    assert list(parts) == ["score", "alignment", "coherence", "style", "final"]
    np.testing.assert_allclose(parts["score"], [(2.694700002670288 + 2 + 4.5) / 3, 4.25], rtol=1e-15)
    np.testing.assert_array_equal(parts["alignment"], [2.694700002670288, math.nan])
    np.testing.assert_array_equal(parts["style"], [4.5, math.nan])
    np.testing.assert_array_equal(parts["final"], [math.nan, 4.25])


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("**Final Score:** 4", 4.0),
        ("final score (1-5): 3.5/5.", 3.5),
        ("Final Score: 4 out of 5", 4.0),
        ("Final Score: 1\nOn reflection:\nFinal Score: 5", 5.0),
        ('Word-wise Scores: [["cat", 0.1]]\n\n' + THREE.format(1, 5, 3), 3.0),
        (THREE.format(1, 1, 1) + "\nFinal Score: 2", 2.0),
        ("Final Score:\n4.25", 4.25),
        ("**Final Score:**\r\n\r\n**3**\r\n", 3.0),
        ("Final Score:\n\n4/5\nThank you.", 4.0),
        ("Final Score: 2\n- 3 cats are missing", 2.0),
        ("Final Score: 5.000000001", 5.0),
        ("Final Score: 0.9999999", 1.0),
        (THREE.format("5.0000001", 5, 5), 5.0),
    ],
)
def test_answers_that_can_be_read(text: str, score: float) -> None:
    assert parse(text)["score"] == score


WRONG = ["x", "0.9", "5.01", "0.99999", "5.00001", "-3", "45", "1-5", "4/10", "3,5", "3.2e1", "80%", "nan"]


@pytest.mark.parametrize(
    "text",
    [
        *(f"Final Score: {value}" for value in WRONG),
        *(THREE.format(1, value, 5) for value in WRONG),
        THREE.format(0, 2, 5) + "\nFinal Score: 3",
        "Final Score: 4 out of 10",
        "Final Score:\n1. The cat",
        "Final Score:\n4 cats",
        "Final Score:\n4/10",
        "Final Score:\n1-5",
        "Final Score:\nnone\n4",
        "Semifinal Score: 3",
        "I would say 4",
        "",
    ],
)
def test_answers_without_a_score_between_1_and_5_are_never_guessed(text: str) -> None:
    with pytest.raises(ValueError, match="outside \\[1, 5\\]|neither a final score nor all three"):
        parse(text)


def number(body: dict[str, Any]) -> int:
    """The prompt of a request, which is a number."""
    return int(body["messages"][0]["content"][1]["text"].split("\n\n")[1])


def test_order_is_kept_and_many_requests_are_on_their_way_at_once(server: Server) -> None:
    def answer(body: dict[str, Any]) -> str:
        time.sleep(0.1 if number(body) % 3 else 0.15)  # some are overtaken
        return f"Final Score: {1 + number(body) / 1000}"

    server.answer = answer
    count = 64
    start = time.perf_counter()
    scores = reward(server, concurrency=16)(pictures(count), [str(k) for k in range(count)])
    seconds = time.perf_counter() - start
    np.testing.assert_allclose(scores, 1 + np.arange(count) / 1000, rtol=0, atol=1e-12)
    assert 12 <= server.busiest <= 16
    assert seconds < 3  # one after another: 7.5 s


def test_the_same_image_and_prompt_are_asked_for_once_a_call(server: Server) -> None:
    images = pictures(2)[[0, 1, 0, 0, 1]]
    server.answer = lambda body: f"Final Score: {1 + number(body) / 1000}"
    score = reward(server, concurrency=4)
    np.testing.assert_allclose(score(images, ["1", "1", "1", "2", "1"]), [1.001, 1.001, 1.001, 1.002, 1.001])
    assert len(server.requests) == 3
    score(images, ["1", "1", "1", "2", "1"])
    assert len(server.requests) == 6  # nothing is remembered


def test_no_images_are_no_requests(server: Server) -> None:
    assert reward(server)([], []).shape == (0,)
    assert server.requests == []


NO_SCORE = "neither a final score nor all three"
FAULTS = [
    (500, "status 500"),
    (503, "status 503"),
    (429, "status 429"),
    (("after", 0), "status 429"),
    ("reset", "RemoteDisconnected"),
    ("half", "IncompleteRead"),
    ("cut", "status 500"),
    ("garbled", "the reply is not JSON"),
]
UNREADABLE = [
    ("text", f"{NO_SCORE}.*'sorry, no image'"),
    (("chat", {"message": {"content": "Final Score: 7"}}), "the final score 7 is outside"),
    (("chat", {"message": {"content": None}}), "the reply has no text"),
    (("chat", {"text": "Final Score: 3"}), "the reply has no text"),
    (("chat", 3), "the reply has no text"),
    (("chat", {"message": {"content": "Final Score: 3"}, "finish_reason": "length"}), "cut at max_tokens = 4096"),
]


@pytest.mark.parametrize(("fault", "reason"), FAULTS, ids=str)
def test_a_fault_is_tried_again_as_often_as_stated_then_names_the_prompt(
    server: Server, fault: Any, reason: str
) -> None:
    server.script = [fault] * 3
    assert reward(server)(pictures(1), ["a cat"])[0] == 3.0
    assert len(server.requests) == 4
    server.script = [fault] * 10
    with pytest.raises(RecastError, match=f"^no score for the prompt 'a dog' after 3 tries: .*{reason}"):
        reward(server, retries=2)(pictures(1), ["a dog"])
    assert len(server.requests) == 4 + 3


@pytest.mark.parametrize(("fault", "reason"), UNREADABLE, ids=str)
def test_an_answer_that_cannot_be_read_costs_its_image_only(server: Server, fault: Any, reason: str) -> None:
    server.script = [fault] * 3
    assert reward(server)(pictures(1), ["a cat"])[0] == 3.0
    assert len(server.requests) == 4
    server.fault = lambda body: fault if "a dog" in body["messages"][0]["content"][1]["text"] else None
    words = re.escape("unifiedreward: 1 of 3 answers have no readable score and count as NaN (1 of 3 so far); ")
    with pytest.warns(UserWarning, match=f"^{words}the first, for the prompt 'a dog': .*{reason}") as warned:
        parts = reward(server, retries=2).details(pictures(3), ["a cat", "a dog", "a cow"])
    assert len(warned) == 1
    assert len(server.requests) == 4 + 2 + 3
    np.testing.assert_array_equal(parts["score"], [3.0, math.nan, 3.0])
    np.testing.assert_array_equal(parts["final"], [3.0, math.nan, 3.0])


def test_more_than_5_and_more_than_5_percent_unreadable_answers_stop(server: Server) -> None:
    server.fault = lambda body: "text" if number(body) < 0 else None
    score = reward(server, retries=0, concurrency=4)

    def call(unreadable: int, readable: int) -> int:
        texts = [str(k) for k in (*range(-unreadable, 0), *range(readable))]
        return int(np.isnan(score(pictures(len(texts)), texts)).sum())

    with pytest.warns(UserWarning, match="5 of 9 answers .* \\(5 of 9 so far"):
        assert call(5, 4) == 5
    with warnings.catch_warnings():  # a call without unreadable answers says nothing
        warnings.simplefilter("error")
        assert call(0, 110) == 0
    with pytest.warns(UserWarning, match="1 of 1 answers .* \\(6 of 120 so far"):
        assert call(1, 0) == 1
    with pytest.raises(RecastError, match="^7 of 122 answers of CodeGoat24/.* no readable score, more than 5%: .*'-1'"):
        call(1, 1)
    asked = len(server.requests)
    assert asked == 9 + 110 + 1 + 2


def test_a_model_that_answers_nothing_readable_stops_early(server: Server) -> None:
    server.fault = lambda body: "text"
    with pytest.raises(RecastError, match="^6 of 60 answers of .* have no readable score, more than 5%"):
        reward(server, retries=1)(pictures(60), [str(k) for k in range(60)])
    assert len(server.requests) == 12


def test_a_server_that_hangs_times_out_and_is_asked_again(server: Server) -> None:
    server.script = ["hang"]
    assert reward(server, timeout=0.1)(pictures(1), ["a cat"])[0] == 3.0
    server.script = ["hang", "hang"]
    with pytest.raises(RecastError, match="'a cat' after 2 tries: TimeoutError"):
        reward(server, timeout=0.1, retries=1)(pictures(1), ["a cat"])
    assert len(server.requests) == 4


def test_a_server_that_is_killed_is_an_error_after_the_stated_tries(server: Server) -> None:
    server.script = ["image", "image", "die"]
    with pytest.raises(RecastError, match="^no score for the prompt '[cde]' after 4 tries: .*Connection refused"):
        reward(server)(pictures(5), list("abcde"))
    assert len(server.requests) == 3


def test_retry_after_is_obeyed(server: Server) -> None:
    server.script = [("after", 0.4)]
    start = time.perf_counter()
    reward(server)(pictures(1), ["a cat"])
    assert 0.4 <= time.perf_counter() - start < 2


@pytest.mark.parametrize("status", [400, 401, 404, 302])
def test_a_refusal_is_not_tried_again_and_says_what_the_server_said_without_the_key(
    server: Server, status: int
) -> None:
    server.script = ["image", status]
    server.repeat = f" {SECRET} " + SECRET.replace("/", "\\/") + "z" * 5000
    with pytest.raises(
        RecastError, match=f"refused the prompt 'b' with status {status}: .*scripted {status} \\[key\\]"
    ) as caught:
        reward(server)(pictures(4), list("abcd"))
    assert len(server.requests) == 2
    assert len(str(caught.value)) < 700
    assert "secret" not in "".join(traceback.format_exception(caught.value))


def test_the_key_is_in_no_error(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.repeat = "z" * 170 + SECRET  # an excerpt would end within it
    server.answer = lambda body: f"no score for {SECRET}"
    said = []
    for fault, _ in FAULTS:
        server.script = [fault] * 2
        with pytest.raises(RecastError, match="after 2 tries") as caught:
            base.score({"unifiedreward": reward(server, retries=1)}, pictures(1), ["a cat"])
        said.append("".join(traceback.format_exception(caught.value)))
    for fault, _ in [*UNREADABLE, ("image", "")]:
        server.script = [fault] * 2
        with pytest.warns(UserWarning, match="no readable score") as warned:
            base.score({"unifiedreward": reward(server, retries=1)}, pictures(1), ["a cat"])
        said.append(str(warned[0].message))
    with pytest.raises(RecastError, match="6 of 6 answers") as caught:
        reward(server, retries=0)(pictures(6), list("abcdef"))
    for text in [*said, str(caught.value)]:
        assert "ur-v" not in text
        assert "secret" not in text
    monkeypatch.setenv("UNIFIEDREWARD_API_KEY", f"{SECRET}\nmore")
    with pytest.raises(
        RecastError, match="the key in UNIFIEDREWARD_API_KEY contains characters that are not allowed"
    ) as caught:
        reward(server)
    assert "secret" not in str(caught.value)


def test_without_a_key_no_authorization_is_sent(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNIFIEDREWARD_API_KEY")
    reward(server)(pictures(1), ["a cat"])
    monkeypatch.setenv("OTHER", "other")
    reward(server, key_variable="OTHER")(pictures(1), ["a cat"])
    assert "Authorization" not in server.requests[0]["headers"]
    assert server.requests[1]["headers"]["Authorization"] == "Bearer other"


def test_the_first_failure_stops_new_requests_and_ends_waiting(server: Server) -> None:
    server.delay = 0.05
    server.script = [("after", 50), 400]
    start = time.perf_counter()
    with pytest.raises(RecastError, match="status 400"):
        reward(server, concurrency=2)(pictures(40), [str(k) for k in range(40)])
    assert time.perf_counter() - start < 2
    assert len(server.requests) <= 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"template": "no/such/file"}, "template no/such/file cannot be read"),
        (
            {"base_url": "localhost:8000/v1"},
            "base_url must be http:// or https://.* environment variable UNIFIEDREWARD_API_KEY",
        ),
        ({"base_url": "http://me:secret@localhost/v1"}, "without user or query"),
        ({"base_url": "http://localhost/v1?key=secret"}, "without user or query"),
        ({"base_url": "file:///etc"}, "base_url must be http"),
        ({"concurrency": 0}, "concurrency must lie between 1 and 1024, but it is 0"),
        ({"retries": -1}, "retries must lie between 0 and 1000, but it is -1"),
        ({"timeout": 0}, "timeout must lie between 0.001 and 86400, but it is 0"),
        ({"size": 0}, "size and max_tokens must be at least 1, not 0 and 4096"),
        ({"encoding": "webp"}, "encoding is jpeg or png, not 'webp'"),
    ],
)
def test_options_that_cannot_be_meant_are_sentences(options: dict[str, Any], words: str) -> None:
    with pytest.raises(RecastError, match=words) as caught:
        UnifiedReward(**options)
    assert "secret" not in str(caught.value)


def test_a_template_without_a_place_for_the_prompt_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "template.txt"
    path.write_text("Grade this: {caption}")
    with pytest.raises(RecastError, match="template .*template.txt has no placeholder {prompt}"):
        UnifiedReward(template=path)
