"""Training in processes of its own: killed with signal 9 and started again, and shared by two."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from forked import Command, launched
from recast import WeightMatrix, config
from recast.flow import families

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
STEPS = 4
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m")
ADAPTERS = ("default", "old", "ema")


def command(out: Path, *more: str, launcher: tuple[str, ...] = ()) -> list[str]:
    out.mkdir(parents=True, exist_ok=True)
    recipe = [
        *(
            str(ROOT / "recipes/shapes.yaml"),
            "train.epochs=4",
            "train.prompts_per_epoch=2",
            "train.images_per_prompt=4",
        ),
        *("train.batch=4", "train.fraction=0.5", "train.rank=4", "train.alpha=8", "train.sample_batch=4"),
        *("train.micro_batch=4", "train.save_every=1", "train.preview_every=2", "train.keep=2", "train.trackers=[]"),
        *("train.learning_rate=3e-4", f"rewards={{detail: null, 'rewards:Deadly': {{calls: {out / 'calls'}}}}}"),
    ]
    weights = ["--weights", str(out.parent / "weights.json")]
    start = [sys.executable, "-m", *launcher, "recast"] if launcher else []
    return [*start, "train", *recipe, *more, "--out", str(out), *weights]


def forked(out: Path, *more: str, **environment: str) -> Command:
    return Command(command(out, *more), out / "said", PYTHONPATH=ENVIRONMENT["PYTHONPATH"], **environment)


def run(line: list[str], code: int = 0, **environment: str) -> str:
    variables = ENVIRONMENT | environment
    result = subprocess.run(line, capture_output=True, text=True, env=variables, check=False, timeout=240)
    assert result.returncode == code, result.stderr
    return result.stdout


def both(out: Path) -> str:
    """What two processes of one group print."""
    made = launched(command(out), out / "said", PYTHONPATH=ENVIRONMENT["PYTHONPATH"])
    assert [each.wait() for each in made] == [0, 0], made[0].stderr
    assert made[1].stdout == ""
    return made[0].stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("train")
    sigmas = families.load(config.policy(model="shapes")).sigmas(STEPS)
    late = np.linspace(0.9, 0.1, STEPS) / STEPS
    table = np.stack([late, 1 / STEPS - late])
    WeightMatrix(("detail", "rewards:Deadly"), sigmas, table, table.sum(1)).save(made / "weights.json")
    return made


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    out = folder / "whole"
    made = forked(out)
    assert made.wait() == 0, made.stderr
    said = made.stdout
    (out / "sizes").write_text(said.splitlines()[0])
    assert f"trained 4 epochs; wrote {out / 'lora'}" in said
    return out


def adapters(out: Path) -> dict[str, bytes]:
    last = sorted((out / "checkpoints").glob("epoch-*"))[-1]
    assert last.name == "epoch-00004"
    found = {who: (last / who / "pytorch_lora_weights.safetensors").read_bytes() for who in ADAPTERS}
    return found | {"optimizer": (last / "optimizer.safetensors").read_bytes()}


def lines(out: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: row[key] for key in row if "second" not in key and key != "checksum"} for row in rows]


def scored(out: Path) -> list[str]:
    """The prompt of every image that was scored, in alphabetical order: who scored it when does not matter."""
    return sorted(prompt for line in (out / "calls").read_text().splitlines() for prompt in json.loads(line))


def test_killed_at_several_points_and_started_again(folder: Path) -> None:
    out, whole = folder / "killed", folder / "noisy"
    assert forked(whole, NOISE="1").wait() == 0
    assert forked(out, FATAL="4", NOISE="1").wait() == -signal.SIGKILL  # while the second epoch is scored
    waited = forked(out, NOISE="1")
    while not list((out / "checkpoints").glob(".epoch-00003.tmp")) and waited.running():
        time.sleep(0.0005)
    assert waited.kill() == -signal.SIGKILL  # while the third checkpoint is written
    assert forked(out, NOISE="1").wait() == 0
    assert adapters(out) == adapters(whole)
    assert lines(out) == lines(whole)
    assert [row["epoch"] for row in lines(out)] == [1, 2, 3, 4]
    names = [path.name for path in sorted((out / "checkpoints").iterdir())]
    assert names == ["epoch-00003", "epoch-00004"]
    assert (out / "samples/epoch-00004.png").is_file()


def test_two_processes_give_the_same_batches_and_losses_and_survive_a_kill(folder: Path, whole: Path) -> None:
    out = folder / "two"
    sizes = both(out).splitlines()[0]
    epoch, step = "2 optimizer steps per epoch, of 4 images at 2 noise levels each", "per process and optimizer step"
    same = f"2 prompts with 4 images each per epoch on {{}}; {epoch}; {{}} of 4 pairs {step}"
    assert (whole / "sizes").read_text() == same.format("1 process", "2 micro-batches")
    assert sizes == same.format("2 processes", "1 micro-batch")
    assert scored(out) == scored(whole)
    assert len(scored(whole)) == 4 * 2 * 4  # epochs, groups and images of a group
    for mine, one in zip(lines(out), lines(whole), strict=True):
        assert mine.keys() == one.keys()
        for key in ("loss", "reward/detail", "group_std/detail", "share/detail", "old_decay", "step"):
            assert mine[key] == pytest.approx(one[key], rel=2e-3), key
    killed = folder / "two-killed"
    run(command(killed, launcher=TORCHRUN), 1, FATAL="6")
    both(killed)
    assert adapters(killed) == adapters(out)
    assert lines(killed) == lines(out)
    one, two = (load_file(each / "lora/pytorch_lora_weights.safetensors") for each in (whole, out))
    assert max(np.abs(one[key] - two[key]).max() for key in one) < 2e-3  # Adam turns rounding into up to a step of 3e-4


def test_bad_input_is_one_sentence(folder: Path, whole: Path) -> None:
    result = forked(whole, "train.beta=0.5")
    assert result.wait() == 2
    assert result.stderr.count("\n") == 1, result.stderr
    assert "was trained with train.beta = 0.1, not 0.5" in result.stderr


def test_sharded_parameters_train_save_and_resume(tmp_path: Path) -> None:
    script = str(Path(__file__).parent / "sharded_run.py")
    said = run([sys.executable, "-m", *TORCHRUN[:-1], script, str(tmp_path)])
    assert "sharded and replicated agree" in said
