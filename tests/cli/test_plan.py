"""`recast plan`: its tables, its JSON, and its sentences."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from recast.cli import app
from recast.plan import result

ROOT = Path(__file__).parents[2]
SHAPES = str(ROOT / "recipes/shapes.yaml")
STAGE = {
    *("velocity_evaluations", "rows_with_padding", "pairs", "encoded", "decoded", "reward_calls", "api_calls"),
    *("flops", "gpu_hours", "hours", "dollars", "memory", "disk"),
}


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "160"})


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    done = run(SHAPES, "--gpus", "2", "--card", "rtx4090", "--json", "--price", "gpu=1", "--price", "judge=0.01")
    assert done.exit_code == 0, done.output
    content: dict[str, Any] = json.loads(done.stdout)
    return content


def test_the_json_has_the_same_keys_in_every_release(found: dict[str, Any]) -> None:
    assert (found["format"], found["version"]) == ("recast.plan", 1)
    assert set(found) == {
        *("format", "version", "recast", "machine", "configuration", "flops", "batches", "micro_batches"),
        *("paper_evaluations", "stages", "totals", "notes"),
    }
    assert list(found["stages"]) == ["propose", "estimate", "train", "evaluate"]
    assert all(set(stage) == STAGE for stage in found["stages"].values())
    assert set(found["stages"]["train"]["memory"]) == {"peak", "fits", "parts", "phases", "largest"}
    assert list(found["totals"]) == ["once", "run", "sweep"]


def test_numbers_follow_from_each_other(found: dict[str, Any]) -> None:
    train = found["stages"]["train"]
    pair = sum(value for name, value in found["flops"].items() if name.startswith("pair"))
    assert sum(train["flops"]["pairs"].values()) == pytest.approx(train["pairs"] * pair)
    assert train["memory"]["peak"] == sum(train["memory"]["parts"].values()) == max(train["memory"]["phases"].values())
    assert train["hours"] == pytest.approx(train["gpu_hours"] / 2) == pytest.approx(train["dollars"] / 2)
    once, several = found["totals"]["once"], found["totals"]["sweep"]
    assert once["velocity_evaluations"] == sum(each["velocity_evaluations"] for each in found["stages"].values())
    assert several["trainings"] == 8 * 3 * 5
    assert several["pairs"] == 120 * train["pairs"]
    assert several["api_calls"] == {"judge": 2 * 7 * 15 * 128 * 4}
    rows = found["micro_batches"]["plain"]
    assert rows["64"] > found["micro_batches"]["checkpointed"]["64"]
    used = str(found["batches"]["micro_batch"])
    assert rows[used] == train["memory"]["phases"]["pairs"]
    limit = train["memory"]["largest"]["train.micro_batch"]
    assert limit == 64 // 2 * 5  # all pairs of a process fit


def test_the_tables_say_what_is_computed(tmp_path: Path, found: dict[str, Any]) -> None:
    text = Path(SHAPES).read_text().replace("shapes:test", "nowhere.txt")
    text = text[: text.index("train: ")] + text[text.index("run: ") :]  # training is in the test below
    (tmp_path / "mine.yaml").write_text(text)
    done = run(str(tmp_path / "mine.yaml"), "--gpus", "2", "--gpu", "24")
    assert done.exit_code == 0, done.output
    assert "computed, not measured" in done.output
    assert f"{found['stages']['estimate']['velocity_evaluations']:,}" in done.output
    assert "hours on 2 x RTX 4090" in done.output
    assert "evaluate is not planned: nowhere.txt does not exist here: set evaluate.count" in done.output
    assert "Hours are FLOPs at 20% of the RTX 4090's peak" in done.output
    assert "112,640 evaluations" in done.output  # Alg. 1: 16 prompts, N = 8, K = 16, 55 steps


def test_the_exact_world_has_counts_only() -> None:
    done = run(str(ROOT / "recipes/mixture.yaml"))
    assert done.exit_code == 0, done.output
    assert "the exact world needs no GPU" in done.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--gpu", "25"], "--gpu 25 stands for no known card: choose one of 24, 40, 48, 80, 141, 180"),
        (["--card", "tpu"], "unknown card 'tpu': choose one of rtx4090, a100-40"),
        (["--gpus", "0"], "--gpus must be at least 1, not 0"),
        (["--utilization", "1.5"], "--utilization is a share of the peak in (0, 1], not 1.5"),
        (["--price", "gpu"], "--price gpu must be NAME=DOLLARS, such as gpu=2.5"),
        (["--price", "moon=3"], "--price moon=3: the name must be one of gpu, propose, judge, unifiedreward"),
        (["--gpus", "7"], "train.batch = 64 cannot be divided among 7 processes"),
        (["policy.model=nobody/knows"], "the configuration of the model 'nobody/knows' is not known"),
        (["prompts.source=none.txt", "prompts.count=null"], "none.txt does not exist here: set prompts.count"),
    ],
)
def test_wrong_input_is_one_sentence(arguments: list[str], sentence: str) -> None:
    done = run(SHAPES, *arguments)
    assert done.exit_code == 2
    assert sentence in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_warmup_needs_no_curves_and_its_plan_is_the_same_twice(tmp_path: Path) -> None:
    recipe = tmp_path / "warmup.yaml"
    recipe.write_text("rewards: {detail: }\nweigh: {method: static}\ntrain: {epochs: 2, batch: 48, steps: 3}\n")
    done = run(str(recipe), "--json")
    assert run(str(recipe), "--json").stdout == done.stdout  # the same bytes
    assert list(json.loads(done.stdout)["stages"]) == ["train"]
    recipe.write_text("rewards: {detail: }\n")
    assert "none of the sections estimate, train and evaluate" in run(str(recipe)).stderr


def test_the_default_utilization_is_that_of_the_stage() -> None:
    assert result.UTILIZATION == 0.2
