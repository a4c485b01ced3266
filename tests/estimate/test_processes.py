"""Several processes in one run folder, and processes that are killed for real."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from forked import Command, launched
from recast import config
from recast import lock as module
from recast.cli import app
from recast.errors import RecastError
from recast.estimate import stage
from recast.estimate.shards import Shards
from recast.progress import no_progress

ROOT = Path(__file__).parents[2]
SMALL = ["world.dimension=4", "world.prompts=6", "estimate.steps=12", "estimate.samples=4", "estimate.noisings=64"]
MIXTURE = ["estimate", str(ROOT / "recipes/mixture.yaml"), *SMALL]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def recast(*arguments: str, out: Path, launcher: tuple[str, ...] = ()) -> list[str]:
    return [sys.executable, "-m", *launcher, "recast", *arguments, "--out", str(out)]


def forked(out: Path, name: str = "said") -> Command:
    return Command([*MIXTURE, "--out", str(out)], out / name)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """`gains.json` of one process that nothing disturbs: this one."""
    out = tmp_path_factory.mktemp("whole")
    stage.estimate(config.load(ROOT / "recipes/mixture.yaml", SMALL), out, no_progress)
    return (out / "gains.json").read_bytes()


def test_killed_with_signal_9_at_several_points(undisturbed: bytes, tmp_path: Path) -> None:
    for wanted in (1, 4):
        process = forked(tmp_path)
        while len(list(tmp_path.glob("shards/*.safetensors"))) < wanted and process.running():
            time.sleep(0.002)
        assert process.kill() == -signal.SIGKILL
    begun = time.monotonic()
    assert forked(tmp_path).wait() == 0
    assert time.monotonic() - begun < 60  # a dead owner's claim is not waited for
    assert (tmp_path / "gains.json").read_bytes() == undisturbed
    assert not list(tmp_path.glob("shards/*.lock"))


def test_two_processes_under_torchrun_give_the_same_bytes(undisturbed: bytes, tmp_path: Path) -> None:
    launcher = ("torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m")
    result = subprocess.run(
        recast(*MIXTURE, out=tmp_path, launcher=launcher), capture_output=True, text=True, env=ENVIRONMENT, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("wrote gains.json") == 1
    assert (tmp_path / "gains.json").read_bytes() == undisturbed


def test_run_in_two_processes_goes_through_all_stages_together(tmp_path: Path) -> None:
    small = ("prompts.count=2", "estimate.samples=2", "estimate.noisings=1", "estimate.steps=4", "estimate.spacing=2")
    small += (
        "train.epochs=1",
        "train.prompts_per_epoch=4",
        "train.batch=16",
        "train.trackers=[]",
        "train.preview_every=0",
        "evaluate.count=16",
        "evaluate.repeats=1",
        "evaluate.steps=2",
    )
    shapes = ("run", str(ROOT / "recipes/shapes.yaml"), *small)
    alone = CliRunner().invoke(app, [*shapes, "run.methods=[]", "--out", str(tmp_path / "one")])
    assert alone.exit_code == 0, alone.output
    both = launched([*shapes, "run.methods=[static]", "--out", str(tmp_path / "two")], tmp_path / "said")
    assert [each.wait() for each in both] == [0, 0], both[0].stderr
    for name in ("gains.json", "weights.json", "proposals/manifest.jsonl"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert [each.stdout.count("the page is") for each in both] == [1, 0]
    for name in ("static-s0", "base"):
        assert (tmp_path / "two" / name / "scores/scores.jsonl").read_text().count("\n") == 16


def test_accelerate_launch_gives_the_same_bytes(undisturbed: bytes, tmp_path: Path) -> None:
    # On a CPU it starts a single process, whatever number is asked for; the launcher's way in is what is tried here.
    launcher = ("accelerate.commands.launch", "--cpu", "--num_processes", "1", "--num_machines", "1")
    launcher += ("--mixed_precision", "no", "--dynamo_backend", "no", "-m")
    result = subprocess.run(
        recast(*MIXTURE, out=tmp_path, launcher=launcher), capture_output=True, text=True, env=ENVIRONMENT, check=False
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "gains.json").read_bytes() == undisturbed


def test_two_machines_join_by_the_folder_alone(undisturbed: bytes, tmp_path: Path) -> None:
    processes = [forked(tmp_path, name) for name in ("one", "two")]
    assert [process.wait() for process in processes] == [0, 0]
    assert (tmp_path / "gains.json").read_bytes() == undisturbed


def test_a_claim_is_one_processs_own(tmp_path: Path) -> None:
    first, second = Shards(tmp_path, {}), Shards(tmp_path, {})
    mine = first.claim("a")
    assert mine is not None
    assert second.claim("a") is None
    other = second.claim("b")
    assert other is not None
    mine.release()
    again = second.claim("a")
    assert again is not None
    for claim in (other, again):
        claim.release()
    assert not list(tmp_path.glob("*.lock"))


def test_a_claim_without_a_sign_of_life_expires(tmp_path: Path) -> None:
    shards = Shards(tmp_path, {})
    lock = shards.path("a").with_suffix(".lock")
    lock.write_text("another-machine 1")
    assert shards.claim("a") is None
    old = time.time() - module.STALE - 5
    os.utime(lock, (old, old))
    mine = shards.claim("a")
    assert mine is not None
    assert lock.stat().st_mtime > old + module.STALE
    mine.release()


def test_a_dead_process_of_this_machine_holds_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    shards = Shards(tmp_path, {})
    lock = shards.path("a").with_suffix(".lock")
    lock.write_text(f"{socket.gethostname()} {process.pid}")
    mine = shards.claim("a")
    assert mine is not None
    mine.release()
    lock.write_text(f"{socket.gethostname()} {os.getpid()}")
    assert shards.claim("a") is None


def test_a_claim_is_kept_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STALE", 0.5)
    mine = Shards(tmp_path, {}).claim("a")
    assert mine is not None
    time.sleep(1.2)
    assert Shards(tmp_path, {}).claim("a") is None
    mine.release()


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = Shards(tmp_path, {})

    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(RecastError, match="cannot be claimed: Permission denied"):
        shards.claim("a")


@pytest.mark.parametrize("ahead", [3600.0, 366 * 86400.0])
def test_a_lock_from_the_future_holds_nothing(tmp_path: Path, ahead: float) -> None:
    shards = Shards(tmp_path, {})
    lock = shards.path("a").with_suffix(".lock")
    lock.write_text("another-machine 1")
    os.utime(lock, (time.time() + ahead,) * 2)
    mine = shards.claim("a")
    assert mine is not None
    mine.release()


@pytest.mark.parametrize("content", [b"", b" \n", b"\xff\xfe", b"host 99999999999999999999"])
def test_an_empty_or_damaged_lock_holds_nothing_for_long(tmp_path: Path, content: bytes) -> None:
    shards = Shards(tmp_path, {})
    lock = shards.path("a").with_suffix(".lock")
    lock.write_bytes(content)
    assert shards.claim("a") is None  # its owner may be about to write its name
    age = 10 if not content.strip() else module.STALE + 5
    os.utime(lock, (time.time() - age,) * 2)
    mine = shards.claim("a")
    assert mine is not None
    mine.release()
