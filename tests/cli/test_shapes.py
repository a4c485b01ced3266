"""`recast shapes`: the sheet, the models made again, and bad input in one sentence."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from recast.cli import app
from recast.core import artifact
from recast.shapes import pretrain, prompts, vae


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["shapes", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_show_draws_a_sheet_that_is_the_same_each_time(tmp_path: Path) -> None:
    code, output = invoke("show", "--count", "3", "--steps", "4", "--out", str(tmp_path / "sheet.png"))
    assert code == 0, output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sheet.pdf", "sheet.png"]
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.width > sheet.height > 300
    first = (tmp_path / "sheet.png").read_bytes()
    invoke("show", "--count", "3", "--steps", "4", "--out", str(tmp_path / "sheet"))
    assert (tmp_path / "sheet.png").read_bytes() == first


def test_pretrain_leaves_models_that_show_and_the_rewards_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrain, "FLOW", replace(pretrain.FLOW, steps=2, batch=4))
    monkeypatch.setattr(pretrain, "CLIP", replace(pretrain.CLIP, steps=2, batch=4))
    fit, load = vae.fit, prompts.load
    monkeypatch.setattr(prompts, "load", lambda split: load(split)[:16])  # what the scores are the means of
    monkeypatch.setattr(vae, "fit", lambda channels: fit(channels, images=64))
    code, output = invoke("pretrain", "--out", str(tmp_path))
    assert code == 0, output
    log = artifact.read(tmp_path / "log.json", "recast.shapes.log")
    assert log["flow"]["steps"] == log["clip"]["steps"] == 2
    assert 0 <= log["scores"]["base composition"] < 0.5  # two steps teach nothing
    assert log["scores"]["renderer composition"] == 1
    assert "base composition" in output
    code, output = invoke("show", "--model", str(tmp_path / "pipeline"), "--count", "1", "--out", str(tmp_path / "x"))
    assert code == 0, output
    assert (tmp_path / "x.png").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--split", "dev"], "unknown split 'dev': choose one of train, validation, test"),
        (["--model", "no/such-folder"], "no diffusers pipeline in 'no/such-folder'"),
        (["--guidance", "0.5"], "policy: guidance = 0.5: input should be greater than or equal to 1"),
        (["--out", "/proc/nowhere/sheet"], "the figure cannot be written"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # what is not there could be a hub name
    code, output = invoke("show", "--count", "1", "--steps", "1", *arguments)
    assert code == 2
    assert words in output


def test_the_libraries_say_nothing_beside_the_sentence() -> None:
    """In a process of its own, where they are imported anew."""
    command = [sys.executable, "-m", "recast", "shapes", "show", "--model", "no/such-folder"]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=offline)
    assert result.returncode == 2
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr


@pytest.mark.parametrize("out", ["/proc/nowhere", "file"])
def test_pretrain_into_a_folder_that_cannot_be_is_one_sentence(out: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, output = invoke("pretrain", "--out", str(tmp_path / out))
    assert code == 2
    assert "choose another --out" in output
