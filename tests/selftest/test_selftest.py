"""The self-test: passes on the embedded world, and notices what is wrong."""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from forked import Command, launched
from recast import config
from recast.cli import app
from recast.errors import RecastError
from recast.flow import families
from recast.rewards import check as rewards
from recast.selftest import Check, commands, compare, stage

RECIPE = config.Recipe.model_validate({"rewards": {"composition": None, "detail": None}})
TEXTS = ["a red circle", "a blue square"]


class Group:
    """Several processes as one command."""

    def __init__(self, commands: Sequence[Command]) -> None:
        self.commands = commands

    def running(self) -> bool:
        return any(command.running() for command in self.commands)

    def kill(self) -> int:
        return max((command.kill() for command in self.commands), key=abs)

    def wait(self) -> int:
        return max((command.wait() for command in self.commands), key=abs)

    @property
    def stderr(self) -> str:
        return "".join(command.stderr for command in self.commands)


def start(arguments: Sequence[str], folder: Path, processes: int = 1) -> Group:
    return Group(launched(arguments, folder, processes) if processes > 1 else [Command(arguments, folder)])


def test_the_embedded_world_passes(tmp_path: Path) -> None:
    out, seen = tmp_path / "out", list[Check]()
    report = stage.selftest(RECIPE, out, 2, seen.append, start)
    assert report.failed == []
    assert report.checks == seen
    names = [check.name for check in seen]
    assert [name for name in names if name.startswith("stage ")] == [
        f"stage {verb}" for verb in ("propose", "estimate", "weigh", "train", "evaluate")
    ]
    by_name = {check.name: check for check in seen}
    assert by_name["killed and resumed"].off == 0
    assert by_name["2 processes"].off is not None
    assert by_name["2 processes"].off < 1e-4
    assert (out / "logs/together-train/1/err.txt").is_file()
    assert by_name["device against CPU"].outcome == "not run"
    text = (out / "selftest.md").read_text()
    assert text == report.text()
    assert str(tmp_path) not in text
    assert f"| torch | {torch.__version__} |" in text


def test_a_run_that_does_not_resume_is_noticed(tmp_path: Path) -> None:
    """Other settings after the kill stand for a trainer that cannot continue."""

    def forgetful(arguments: Sequence[str], folder: Path, processes: int = 1) -> Group:
        again = folder.name == "killed-train" and folder.exists()
        return start([*arguments, *(["train.learning_rate=0.5"] if again else [])], folder, processes)

    stage._prepare(RECIPE, out := tmp_path / "out")
    stages = stage._Stages(stage.tiny(RECIPE, out), out, forgetful)
    stage.tiny(RECIPE, out).save(out / "recipe.yaml")
    for verb in ("propose", "estimate", "weigh", "train"):
        stages.run(verb)
    with pytest.raises(RecastError, match=r"recast train ended with 2: .*learning_rate"):
        stages.killed()


def test_a_device_that_computes_something_else_is_noticed() -> None:
    good, same, bad = (families.load(config.policy(model="shapes")) for _ in range(3))
    with torch.no_grad():
        bad.network.proj_out.weight.mul_(1.01)
        bad.pipe.vae.config.scaling_factor *= 1.01  # type: ignore[attr-defined]
    assert [(check.outcome, check.off) for check in compare.against(good, same, TEXTS)] == [("passed", 0.0)] * 4
    good = families.load(config.policy(model="shapes"))
    found = {check.name: check for check in compare.against(bad, good, TEXTS)}
    assert found["velocity against CPU"].outcome == "failed"
    assert found["velocity against CPU"].off == pytest.approx(0.01, rel=0.2)
    assert found["gradient against CPU"].outcome == "failed"


def test_another_precision_is_within_its_tolerance_and_outside_float32_s() -> None:
    exact, rough = (families.load(config.policy(model="shapes", dtype=dtype)) for dtype in ("float32", "bfloat16"))
    off = compare.relative(compare._velocity(rough, TEXTS), compare._velocity(exact, TEXTS))
    assert compare.tolerance(exact) < off < compare.tolerance(rough) < 0.5


def test_a_reward_that_fails_its_trials_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = rewards.Outcome("this above that", 0.0, 1.0)
    monkeypatch.setattr(rewards, "run", lambda *_: [wrong, rewards.Outcome("fine", 1.0, 0.0)])
    assert stage._reward("ocr", {}) == Check("", "failed", "1 of 2 trials, such as this above that")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["missing.yaml"], "missing.yaml: cannot be read"),
        (["--out", "."], "is not the folder of a self-test: choose another --out"),
        (["{root}/recipes/mixture.yaml"], "a self-test needs a recipe with world.kind = images"),
        (["{root}/recipes/sd35/ocr.yaml"], "dataset/ocr/train.txt: the prompts cannot be read"),
    ],
)
def test_what_cannot_be_tested_is_one_sentence(
    words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    root = str(Path(__file__).parents[2])
    result = CliRunner().invoke(app, ["selftest", *(word.replace("{root}", root) for word in words)])
    assert result.exit_code == 2
    assert sentence in " ".join(result.stderr.split())


def test_a_failed_check_is_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = [Check("velocity", "failed", "off")]
    monkeypatch.setattr(stage, "_all", lambda *_: iter(failed))
    result = CliRunner().invoke(app, ["selftest", "--out", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert "failed: velocity: off" in result.stdout
    again: Any = CliRunner().invoke(app, ["selftest", "--out", str(tmp_path / "out")])  # its own folder is replaced
    assert again.exit_code == 1


def test_a_folder_with_a_report_alone_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "selftest.md").write_text("a guide of this name")
    with pytest.raises(RecastError, match="is not the folder of a self-test: choose another --out"):
        stage._prepare(RECIPE, tmp_path)
    assert (tmp_path / "selftest.md").read_text() == "a guide of this name"


def test_a_check_that_raises_is_a_failure_without_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Check:
        raise FileNotFoundError(str(Path.home() / "secret"))

    found = stage._measured("reward x", broken)
    assert (found.outcome, found.detail) == ("failed", "FileNotFoundError: ~/secret")


def test_commands_end_with_the_self_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = commands._Process([sys.executable, "-c", "import os; print(os.environ['RECAST_PARENT'])"], tmp_path)
    assert made.wait() == 0
    assert (tmp_path / "stdout.txt").read_text() == f"{os.getpid()}\n"
    made = commands._Process([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path)
    wait = made._process.wait
    monkeypatch.setattr(made._process, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.wait()
    assert wait(30) == -signal.SIGTERM


def interrupted() -> int:
    raise KeyboardInterrupt
