"""The whole stage against a judge on loopback whose preference, bias and faults are known."""

import base64
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from edited import edit
from forked import Command
from judging import Known, expected, make_run, two_runs, worths
from recast.cli import app
from recast.errors import RecastError
from recast.judge import stage
from recast.judge.ask import Settings
from recast.judge.verdicts import load
from recast.progress import no_progress
from server import Server, serve

KEY = 'sk-"loop"back/7'


@pytest.fixture
def server() -> Iterator[Server]:
    with serve() as running:
        yield running


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", KEY)


def settings(server: Server, **changes: object) -> Settings:
    made = Settings("known", server.url, concurrency=16, backoff=0.001, timeout=20.0)
    return replace(made, **changes)  # type: ignore[arg-type]


def check(found: Path, wanted: dict[str, float]) -> None:
    verdicts = load(found)
    assert len(verdicts.indices) == wanted["pairs"]
    for aspect in ("overall", "faithfulness", "aesthetics"):
        assert verdicts.rate(aspect) == pytest.approx(wanted[aspect], abs=1e-12)
    assert verdicts.consistency == pytest.approx(wanted["consistency"], abs=1e-12)
    assert verdicts.position_bias == pytest.approx(wanted["position_bias"], abs=1e-12)
    assert verdicts.contradictions == wanted["contradictions"]
    assert len(verdicts.decisive()) == wanted["decisive"]


def test_three_hundred_pairs_with_every_fault_and_a_kill_give_the_exact_rates(server: Server, tmp_path: Path) -> None:
    ours, static, first, second = two_runs(tmp_path, 300)
    hopeless = (7, 150)
    known = Known(server, faulty=0.3, hopeless=hopeless)
    calm = stage.two(ours, static, tmp_path / "calm")
    stage.judge([calm], settings(server, concurrency=32), no_progress)
    check(tmp_path / "calm", expected(first, second, hopeless))
    assert load(tmp_path / "calm").dropped == 2
    never = 2 * 2 * 9  # attempts at both orders of the two pairs that never succeed
    faulty = sum(count for kind, count in known.kinds.items() if kind != "None") - never
    assert 0.25 < faulty / (sum(known.kinds.values()) - never) < 0.35
    assert set(known.kinds) == {"None", *map(str, Known.FAULTS)}
    assert set(known.answered.values()) == {1}  # nothing was asked again once it was answered
    assert max(known.asked.values()) == 9  # the first attempt and the paper's 8 retries

    again = Known(server, faulty=0.3, hopeless=hopeless)
    command = [sys.executable, "-m", "recast", "judge", str(ours), str(static), "--out", str(tmp_path / "killed")]
    command += ["--base-url", server.url, "--model", "known", "--concurrency", "32", "--backoff", "0.001"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while sum(again.answered.values()) < 300:
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    log = tmp_path / "killed" / "calls.jsonl"
    kept = sum('"answer"' in line for line in log.read_text().splitlines())
    assert kept >= 300 - 32
    with log.open("ab") as file:
        file.write(b'{"pair": 3, "ord')  # as a power cut would leave it
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "wrote" in done.stdout
    assert all(json.loads(line) for line in log.read_text().split("\n")[:-1])  # the torn line is gone
    assert sum(count - 1 for count in again.answered.values()) <= 32  # those in flight at the kill
    for name in ("verdicts.jsonl", "manifest.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "calm" / name).read_bytes()
    _no_key(tmp_path, done.stdout + done.stderr)


def _no_key(folder: Path, *texts: str) -> None:
    escaped = json.dumps(KEY)[1:-1]
    written = [path.read_bytes().decode("utf-8", "replace") for path in folder.rglob("*") if path.is_file()]
    assert len(written) > 3
    assert not [text for text in (*written, *texts) if KEY in text or escaped in text]


def test_a_key_that_the_server_repeats_is_nowhere_to_be_found(server: Server, tmp_path: Path) -> None:
    ours, static, *_ = two_runs(tmp_path, 4)
    known = Known(server)
    plain = known.answer
    server.answer = lambda body: plain(body).replace("as above", json.dumps(KEY)[1:-1])
    server.repeat = f" for {KEY}"
    server.script = [500, "garbled", ("chat", {"message": {"content": f"I saw {KEY}"}})]
    stage.judge([stage.two(ours, static, None)], settings(server), no_progress)
    assert server.requests[0]["headers"]["Authorization"] == f"Bearer {KEY}"
    log = (ours / "verdicts" / "static" / "calls.jsonl").read_text()
    assert "I saw [key]" in log
    assert '"comparison_summary": "[key]"' in log
    server.script = [401]
    with pytest.raises(RecastError, match="refused the pair of the prompt .* with status 401") as refusal:
        stage.judge([stage.two(ours, static, tmp_path / "b")], settings(server, concurrency=1), no_progress)
    _no_key(tmp_path, str(refusal.value))


@pytest.mark.parametrize("form", ["\\u escapes", "upper case", "base64", "base64 within", "hex", "percent", "twice"])
def test_a_key_in_another_form_is_nowhere_to_be_found(server: Server, tmp_path: Path, form: str) -> None:
    ours, static, *_ = two_runs(tmp_path, 2)
    plain = Known(server).answer
    shown = {
        "\\u escapes": "".join(f"\\u{ord(letter):04x}" for letter in KEY),
        "upper case": json.dumps(KEY.upper())[1:-1],
        "base64": base64.b64encode(KEY.encode()).decode(),
        "base64 within": base64.b64encode(f"key={KEY};".encode()).decode(),
        "hex": KEY.encode().hex(),
        "percent": urllib.parse.quote(KEY, safe=""),
        "twice": "".join(f"\\\\u{ord(letter):04x}" for letter in KEY),
    }[form]
    server.answer = lambda body: plain(body).replace("as above", shown)
    server.script = [("chat", {"message": {"content": f'{{"better_response": "{shown}"}}'}})]
    stage.judge([stage.two(ours, static, None)], settings(server), no_progress)
    log = (ours / "verdicts" / "static" / "calls.jsonl").read_text()
    assert log.count("[key]") >= 5  # four answers and the one that could not be read
    written = [path.read_bytes().decode("utf-8", "replace").lower() for path in ours.rglob("*.json*")]
    assert not [text for text in written if shown.lower() in text or KEY.lower() in text]
    if form == "base64 within":
        assert shown[6:-4].lower() not in log.lower()


def test_a_question_is_one_turn_with_the_rubric_the_prompt_and_both_pictures(server: Server, tmp_path: Path) -> None:
    ours, static, first, second = two_runs(tmp_path, 1)
    Known(server)
    (tmp_path / "rubric.txt").write_text("Which one?\n")
    changed = settings(server, rubric=tmp_path / "rubric.txt", concurrency=1)
    stage.judge([stage.two(ours, static, None)], changed, no_progress)
    bodies = [request["body"] for request in server.requests]
    assert [body["temperature"] for body in bodies] == [0] * len(bodies)
    assert [body["model"] for body in bodies] == ["known"] * len(bodies)
    assert [Known.question(body)[1] for body in bodies[:2]] == [[first[0], second[0]], [second[0], first[0]]]
    for body in bodies[:2]:
        assert [message["role"] for message in body["messages"]] == ["user"]
        kinds = [part["type"] for part in body["messages"][0]["content"]]
        assert kinds == ["text", "image_url", "text", "image_url"]
        texts = [part["text"] for part in body["messages"][0]["content"] if part["type"] == "text"]
        assert texts == ["Which one?\n\n[ORIGINAL PROMPT TO MODEL:]\nprompt 0\n\n[RESPONSE A:]", "[RESPONSE B:]"]
    assert len(bodies) == 4  # pair 0's reasons on faithfulness are not plain, in both orders
    assert all(isinstance(body["messages"][0]["content"], str) for body in bodies[2:])


def test_as_many_calls_are_on_their_way_as_allowed_and_no_more(server: Server, tmp_path: Path) -> None:
    ours, static, *_ = two_runs(tmp_path, 24)
    Known(server, faulty=0.3)
    server.delay = 0.1
    stage.judge([stage.two(ours, static, None)], settings(server, concurrency=12), no_progress)
    assert server.busiest == 12


def test_a_second_start_asks_for_nothing_and_another_judge_is_refused(server: Server, tmp_path: Path) -> None:
    ours, static, *_ = two_runs(tmp_path, 12)
    Known(server)
    comparison = stage.two(ours, static, None)
    stage.judge([comparison], settings(server), no_progress)
    before = {path: path.read_bytes() for path in comparison.folder.iterdir()}
    asked = len(server.requests)
    stage.judge([comparison], settings(server), no_progress)
    assert len(server.requests) == asked
    assert {path: path.read_bytes() for path in comparison.folder.iterdir()} == before
    with pytest.raises(RecastError, match="verdicts made with model = 'known', not 'other'"):
        stage.judge([comparison], settings(server, model="other"), no_progress)
    (tmp_path / "rubric.txt").write_text("Which one?")
    with pytest.raises(RecastError, match="verdicts made with another rubric"):
        stage.judge([comparison], settings(server, rubric=tmp_path / "rubric.txt"), no_progress)
    manifest = static / "scores" / "manifest.json"
    edit(manifest, '"policy.lora": "static"', '"policy.lora": "another"')
    with pytest.raises(RecastError, match="verdicts made with another run than .*static"):
        stage.judge([stage.two(ours, static, None)], settings(server), no_progress)
    (comparison.folder / "manifest.json").unlink()
    with pytest.raises(RecastError, match=r"contains calls\.jsonl without its manifest\.json"):
        stage.judge([comparison], settings(server), no_progress)
    assert len(server.requests) == asked


def test_the_cap_stops_new_calls_and_a_higher_one_goes_on(server: Server, tmp_path: Path) -> None:
    ours, static, first, second = two_runs(tmp_path, 30)
    known = Known(server, faulty=0.2)
    command = ["judge", str(ours), str(static), "--base-url", server.url, "--model", "known", "--backoff", "0.001"]
    result = CliRunner().invoke(app, [*command, "--max-calls", "25", "--price", "2,10"])
    assert result.exit_code == 2
    assert "the limit of 25 calls is reached: raise --max-calls to continue" in result.output
    assert "25 calls in total" in result.stdout
    assert re.search(r"\$0\.0\d", result.stdout)
    part = load(ours / "verdicts" / "static")
    assert 0 < len(part.indices) < 13
    assert (part.dropped, part.pending) == (0, 30 - len(part.indices))
    plan = CliRunner().invoke(app, [*command, "--dry-run"])
    left = 60 - sum(key[0] == "pair" for key in known.answered)
    assert f"30 pairs in 1 comparison(s): {left} calls to make with {2 * left} images" in plan.stdout
    asked = len(server.requests)
    assert CliRunner().invoke(app, [*command, "--max-calls", "25"]).exit_code == 2  # of all starts together
    assert len(server.requests) == asked
    assert CliRunner().invoke(app, command).exit_code == 0
    assert set(known.answered.values()) == {1}
    check(ours / "verdicts" / "static", expected(first, second))


def test_the_cap_survives_kills(server: Server, tmp_path: Path) -> None:
    ours, static, first, second = two_runs(tmp_path, 30)
    Known(server)
    server.delay = 0.3
    command = ["judge", str(ours), str(static), "--base-url", server.url, "--model", "known", "--max-calls", "20"]
    for kill in range(3):
        process = Command([*command, "--concurrency", "8"], tmp_path / "printed")
        asked = len(server.requests)
        while process.running() and len(server.requests) < asked + 3:
            time.sleep(0.01)
        if kill < 2:
            process.kill()
    assert process.wait() == 2
    assert 6 <= len(server.requests) <= 20  # three starts together; a kill may come between a record and its call
    assert "20 calls in total" in process.stdout
    server.delay = 0.0
    assert CliRunner().invoke(app, command[:-2]).exit_code == 0
    check(ours / "verdicts" / "static", expected(first, second))
    assert load(ours / "verdicts" / "static").dropped == 0


def test_dropped_pairs_stay_dropped_until_told_otherwise(server: Server, tmp_path: Path) -> None:
    ours, static, first, second = two_runs(tmp_path, 6)
    Known(server, hopeless=(2,))
    command = ["judge", str(ours), str(static), "--base-url", server.url, "--model", "known", "--backoff", "0.001"]
    result = CliRunner().invoke(app, command)
    assert "1 pairs were dropped" in result.stdout
    asked = len(server.requests)
    Known(server)  # the judge has come to its senses
    assert "1 pairs were dropped" in CliRunner().invoke(app, command).stdout
    assert len(server.requests) == asked
    assert "were dropped" not in CliRunner().invoke(app, [*command, "--retry"]).stdout
    check(ours / "verdicts" / "static", expected(first, second))


def test_a_server_that_nobody_answers_for_is_given_up_and_asked_again_later(server: Server, tmp_path: Path) -> None:
    ours, static, first, second = two_runs(tmp_path, 10)
    server.fault = lambda body: 503
    with pytest.raises(RecastError, match="has not answered any call: status 503"):
        stage.judge([stage.two(ours, static, None)], settings(server), no_progress)
    Known(server)
    stage.judge([stage.two(ours, static, None)], settings(server), no_progress)
    check(ours / "verdicts" / "static", expected(first, second))


@pytest.mark.parametrize("reply", [("json", {"output": "A"}), "garbled"])
def test_two_replies_of_another_interface_stop_the_stage(server: Server, tmp_path: Path, reply: object) -> None:
    ours, static, first, second = two_runs(tmp_path, 40)
    known = Known(server)
    server.fault = lambda body: reply
    with pytest.raises(RecastError, match="gave two replies that are no chat completions"):
        stage.judge([stage.two(ours, static, None)], settings(server, concurrency=4), no_progress)
    assert len(server.requests) <= 2 * 4
    server.fault = known.fault
    stage.judge([stage.two(ours, static, None)], settings(server), no_progress)
    check(ours / "verdicts" / "static", expected(first, second))


def test_a_filter_that_refuses_one_prompt_drops_its_pair_and_nothing_else(server: Server, tmp_path: Path) -> None:
    ours, static, first, second = two_runs(tmp_path, 10)
    known = Known(server)
    server.fault = lambda body: 400 if "prompt 3\n" in str(body["messages"]).encode().decode("unicode_escape") else None
    comparison = stage.two(ours, static, None)
    stage.judge([comparison], settings(server), no_progress)
    check(comparison.folder, expected(first, second, [3]))
    assert load(comparison.folder).dropped == 1
    asked = len(server.requests)
    stage.judge([comparison], settings(server), no_progress)
    assert len(server.requests) == asked
    server.fault = known.fault
    stage.judge([comparison], settings(server), no_progress, forget=True)
    check(comparison.folder, expected(first, second))
    server.fault = lambda body: 400
    other = stage.two(ours, static, tmp_path / "b")
    with pytest.raises(RecastError, match="has not answered any call: .* refused the pair of .* status 400"):
        stage.judge([other], settings(server), no_progress)
    server.fault = known.fault  # it was the settings, not the pairs
    stage.judge([other], settings(server), no_progress)
    check(other.folder, expected(first, second))


def test_an_outage_stops_the_run_and_costs_no_pair_its_tries(server: Server, tmp_path: Path) -> None:
    ours, static, first, second = two_runs(tmp_path, 60)
    known = Known(server)
    server.fault = lambda body: 500 if len(server.requests) > 40 else known.fault(body)
    comparison = stage.two(ours, static, None)
    with pytest.raises(RecastError, match="has not answered 16 calls in a row: status 500"):
        stage.judge([comparison], settings(server, concurrency=4), no_progress)
    assert 10 < len(load(comparison.folder).indices) <= 20
    server.fault = known.fault
    stage.judge([comparison], settings(server), no_progress)
    check(comparison.folder, expected(first, second))
    assert set(known.answered.values()) == {1}


def test_a_judge_with_a_narrow_rate_limit_gets_through_without_dropping_a_pair(server: Server, tmp_path: Path) -> None:
    ours, static, first, second = two_runs(tmp_path, 40)
    known = Known(server)
    window: list[float] = []

    def limit(body: dict[str, object]) -> object:
        window[:] = [moment for moment in window if moment > time.monotonic() - 0.2]
        if len(window) >= 8:
            return ("after", 0.2)
        window.append(time.monotonic())
        return known.fault(body)

    server.fault = limit
    outcome = stage.judge([stage.two(ours, static, None)], settings(server, tries=3), no_progress)
    check(outcome.verdicts[0].folder, expected(first, second))  # type: ignore[arg-type]
    refused = len(server.requests) - sum(known.answered.values())
    assert 0 < refused < 3 * len(known.answered)  # all wait while one is told to


def test_reasons_that_nobody_can_read_leave_the_denominator(server: Server, tmp_path: Path) -> None:
    ours, static, first, second = two_runs(tmp_path, 30)
    known = Known(server)
    server.fault = lambda body: (
        ("chat", {"message": {"content": "Hm."}})
        if isinstance(body["messages"][0]["content"], str)
        else known.fault(body)
    )
    outcome = stage.judge([stage.two(ours, static, None)], settings(server, max_tokens=99), no_progress)
    plain = [k for k in range(30) if k % 10 > 1]
    wanted = expected([first[k] for k in plain], [second[k] for k in plain])["overall"]
    assert outcome.verdicts[0].rate("faithfulness") == pytest.approx(wanted, abs=1e-12)
    assert server.requests[0]["body"]["max_tokens"] == 99
    assert outcome.calls == len(server.requests) == 60 + 6 * 9
    assert outcome.tokens[0] == 60 * 1000  # the known judge counts its own answers only


def test_a_log_that_is_none_is_one_sentence(server: Server, tmp_path: Path) -> None:
    ours, static, *_ = two_runs(tmp_path, 2)
    Known(server)
    comparison = stage.two(ours, static, None)
    stage.judge([comparison], settings(server), no_progress)
    log = comparison.folder / "calls.jsonl"
    whole = log.read_text()
    for line in (
        "[]",
        '{"pair": 1}',
        next(line for line in whole.split("\n") if "answer" in line).replace('"A"', '"C"').replace('"B"', '"C"'),
        '{"pair": "x"}',
    ):
        log.write_text(f"{line}\n")
        with pytest.raises(RecastError, match=r"calls\.jsonl, line 1: .*: not a call; remove that line"):
            stage.judge([comparison], settings(server), no_progress)
    log.unlink()
    log.mkdir()
    with pytest.raises(RecastError, match=r"calls\.jsonl: cannot be written: Is a directory"):
        stage.judge([comparison], settings(server), no_progress)


def test_a_call_that_hangs_is_asked_again(server: Server, tmp_path: Path) -> None:
    ours, static, first, second = two_runs(tmp_path, 3)
    Known(server)
    server.script = ["hang"]
    stage.judge([stage.two(ours, static, None)], settings(server, timeout=0.5), no_progress)
    check(ours / "verdicts" / "static", expected(first, second))
    log = (ours / "verdicts" / "static" / "calls.jsonl").read_text()
    assert log.count("TimeoutError") == 1


def test_two_processes_never_pay_for_the_same_pairs(server: Server, tmp_path: Path) -> None:
    ours, static, *_ = two_runs(tmp_path, 40)
    Known(server)
    server.delay = 0.2
    command = [sys.executable, "-m", "recast", "judge", str(ours), str(static), "--base-url", server.url]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | {"COLUMNS": "200"}) as process:
        while not server.requests:
            assert process.poll() is None
            time.sleep(0.01)
        result = CliRunner().invoke(app, command[3:])
        process.kill()
    assert result.exit_code == 2
    assert f"is judging in {ours / 'verdicts' / 'static'}: wait for it to finish" in result.output


@pytest.mark.parametrize("way", ["parent", "absolute", "link", "text", "number"])
def test_only_images_inside_the_run_are_uploaded(server: Server, tmp_path: Path, way: str) -> None:
    ours, static, *_ = two_runs(tmp_path, 2)
    secret = tmp_path / "private.txt"
    secret.write_text("the secret diary")
    rows, image = static / "scores" / "scores.jsonl", static / "scores" / "images" / "00001.png"
    named = {"parent": "../../private.txt", "absolute": str(secret), "number": 7}.get(way, "images/00001.png")
    edit(rows, '"images/00001.png"', json.dumps(named))
    if way in ("link", "text"):
        image.unlink()
        image.symlink_to(secret) if way == "link" else image.write_bytes(secret.read_bytes())
    sentences = {"text": "cannot be decoded as an image", "number": "line 2: the field file is 7: input should be"}
    sentence = sentences.get(way, "must lie in .*scores; folders of others")
    Known(server)
    with pytest.raises(RecastError, match=sentence):
        stage.judge([stage.two(ours, static, None)], settings(server), no_progress)
    sent = json.dumps([request["body"] for request in server.requests])
    assert base64.b64encode(b"the secret diary").decode()[:12] not in sent


def test_a_folder_of_runs_is_judged_pair_by_matched_pair(server: Server, tmp_path: Path) -> None:
    first, second = worths(8)
    for seed in (0, 1):
        make_run(tmp_path / "sweep" / f"sinkhorn-s{seed}", "sinkhorn", first, seed)
        make_run(tmp_path / "sweep" / f"static-s{seed}", "static", second, seed)
    make_run(tmp_path / "sweep" / "row-s0", "row", second)
    Known(server)
    command = ["judge", str(tmp_path / "sweep"), "--base-url", server.url, "--count", "5"]
    assert CliRunner().invoke(app, command).exit_code == 0
    for seed in (0, 1):
        assert len(load(tmp_path / "sweep" / f"sinkhorn-s{seed}" / "verdicts" / f"static-s{seed}").indices) == 5
    capped = CliRunner().invoke(app, [*command[:-2], "--max-calls", "26", "--concurrency", "1"])
    assert capped.exit_code == 2
    folders = [tmp_path / "sweep" / f"sinkhorn-s{seed}" / "verdicts" / f"static-s{seed}" for seed in (0, 1)]
    assert abs(len(load(folders[0]).indices) - len(load(folders[1]).indices)) <= 1  # in turns
    missing = CliRunner().invoke(app, [*command, "--methods", "hard,static"])
    assert missing.exit_code == 2
    assert "no matched pair of hard and static, only row, sinkhorn, static" in missing.output


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (["--count", "9"], "--count must be between 1 and the number of pairs, 4, not 9"),
        (["--price", "cheap"], "--price takes two numbers, such as 0.5,3"),
        (["--tries", "0"], "tries must be at least 1, not 0"),
        (["--concurrency", "0"], "concurrency must lie between 1 and 1024"),
        (["--rubric", "nowhere.txt"], "the rubric nowhere.txt cannot be read"),
        (["--base-url", "ftp://host/v1"], "base_url must be http:// or https://"),
        (["--base-url", "https://api.openai.com/v1"], "the environment variable OPENAI_API_KEY is not set"),
    ],
)
def test_bad_options_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: list[str], sentence: str
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    ours, static, *_ = two_runs(tmp_path, 4)
    result = CliRunner().invoke(app, ["judge", str(ours), str(static), "--base-url", "http://127.0.0.1:9/v1", *change])
    assert result.exit_code == 2
    assert sentence in result.output
    assert not (ours / "verdicts").exists()


def test_runs_that_do_not_match_are_one_sentence(server: Server, tmp_path: Path) -> None:
    ours, static, *_ = two_runs(tmp_path, 4)
    other = make_run(tmp_path / "other", "static", worths(5)[0])

    def said(*arguments: object) -> str:
        result = CliRunner().invoke(app, ["judge", *map(str, arguments), "--base-url", server.url])
        assert result.exit_code == 2
        return result.output

    assert "were evaluated on different prompts or seeds" in said(ours, other)
    assert "nowhere is not a folder: name two runs" in said(ours, tmp_path / "nowhere")
    assert "are the same run: name two different ones" in said(ours, ours / "scores")
    assert "name two runs, or one folder of runs" in said(ours, static, other)
    assert "--methods takes two different methods" in said(tmp_path, "--methods", "static")
    (static / "scores" / "images" / "00002.png").unlink()
    assert "00002.png is missing (1 images in all): run recast evaluate again" in said(ours, static)
    assert not server.requests


@pytest.mark.parametrize(
    "counts", [{"prompt_tokens": True, "completion_tokens": 2**60}, {"prompt_tokens": -1}, [], "7"]
)
def test_odd_counts_of_tokens_lose_no_answer(server: Server, tmp_path: Path, counts: object) -> None:
    ours, static, *_ = two_runs(tmp_path, 2)
    known = Known(server)
    server.fault = lambda body: (
        "json",
        {"choices": [{"message": {"content": known.answer(body)}, "finish_reason": "stop"}], "usage": counts},
    )
    found = stage.judge([stage.two(ours, static, None)], settings(server), no_progress)
    assert len(found.verdicts[0].indices) == 2
    assert found.tokens == (0, 0)
