"""Checkpoints: whole or not there, exact, and refused by the key that differs."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from recast.core import artifact
from recast.errors import RecastError
from recast.train import checkpoint
from recast.train.checkpoint import Position
from recast.train.metrics import Log


def make(folder: Path, position: Position, keep: int = 2) -> Path:
    temporary = folder / f".{checkpoint.name(position)}.tmp"
    temporary.mkdir(parents=True)
    checkpoint.write_state(temporary, position, {"train.seed": 0}, {"schedule": {"last_epoch": 1, "_last_lr": [0.1]}})
    checkpoint.publish(temporary, folder / checkpoint.name(position), keep)
    return folder / checkpoint.name(position)


def test_the_last_ones_are_kept_in_the_order_of_training(tmp_path: Path) -> None:
    for position in (Position(1, 0, 3), Position(2, 0, 6), Position(2, 1, 7), Position(10, 0, 30)):
        make(tmp_path, position)
    assert [path.name for path in checkpoint.all_of(tmp_path)] == ["epoch-00002-step-001", "epoch-00010"]
    position, _ = checkpoint.read_state(tmp_path / "epoch-00002-step-001", {"train.seed": 0})
    assert position == Position(2, 1, 7)


def test_half_a_checkpoint_is_none(tmp_path: Path) -> None:
    (tmp_path / ".epoch-00003.tmp").mkdir()
    (tmp_path / "epoch-00004").mkdir()  # no state.json: never the work of publish
    assert checkpoint.all_of(tmp_path) == []
    make(tmp_path, Position(5, 0, 15))
    assert not list(tmp_path.glob(".*.tmp"))


def test_other_settings_are_refused_by_their_key(tmp_path: Path) -> None:
    path = make(tmp_path, Position(1, 0, 3))
    with pytest.raises(RecastError, match=r"trained with train.seed = 0, not 1: choose another --out"):
        checkpoint.read_state(path, {"train.seed": 1})
    with pytest.raises(RecastError, match=r"train.beta = None, not 0.1"):
        checkpoint.read_state(path, {"train.seed": 0, "train.beta": 0.1})
    (path / "state.json").write_text("{")
    with pytest.raises(RecastError, match="not valid JSON"):
        checkpoint.read_state(path, {"train.seed": 0})


def test_random_generators_go_on_where_they_were(tmp_path: Path) -> None:
    random.gauss(0, 1), np.random.standard_normal(), torch.rand(3)  # noqa: NPY002
    checkpoint.save_tensors(tmp_path / "random.safetensors", checkpoint.random_tensors())

    def draw() -> list[float]:
        legacy = [np.random.standard_normal() for _ in range(3)]  # noqa: NPY002
        return [random.gauss(0, 1), random.gauss(0, 1), random.random(), *legacy, *torch.rand(3).tolist()]

    expected = draw()
    assert draw() != expected
    checkpoint.restore_random(checkpoint.load_tensors(tmp_path / "random.safetensors"))
    assert draw() == expected


def test_an_optimizer_goes_on_where_it_was(tmp_path: Path) -> None:
    def run(steps: int, optimizer: torch.optim.Optimizer, weight: torch.nn.Parameter) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            (weight**3).sum().backward()
            optimizer.step()

    weight = torch.nn.Parameter(torch.arange(1.0, 5.0))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    run(3, optimizer, weight)
    checkpoint.save_tensors(tmp_path / "o.safetensors", checkpoint.optimizer_tensors(optimizer))
    other = torch.nn.Parameter(weight.detach().clone())
    run(3, optimizer, weight)
    resumed = torch.optim.AdamW([other], lr=0.1)
    checkpoint.restore_optimizer(resumed, checkpoint.load_tensors(tmp_path / "o.safetensors"))
    run(3, resumed, other)
    assert torch.equal(weight, other)


def test_moments_that_are_not_finite_or_not_all_there_are_refused(tmp_path: Path) -> None:
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = torch.optim.AdamW(weights)
    path = tmp_path / "optimizer.safetensors"
    checkpoint.save_tensors(path, checkpoint.optimizer_tensors(optimizer))
    assert checkpoint.load_moments(path, 3) == {}
    sum((weight**2).sum() for weight in weights).backward()  # type: ignore[union-attr]
    optimizer.step()
    good = checkpoint.optimizer_tensors(optimizer)
    checkpoint.save_tensors(path, good)
    assert checkpoint.load_moments(path, 3).keys() == good.keys()
    checkpoint.save_tensors(path, good | {"1.exp_avg_sq": torch.tensor([1.0, float("nan")])})
    with pytest.raises(RecastError, match=r"1 of 9 tensors have values that are not finite, the first is 1.exp_avg_sq"):
        checkpoint.load_moments(path, 3)
    for damaged in (
        {key: value for key, value in good.items() if key != "1.exp_avg"},
        {key: value for key, value in good.items() if not key.startswith("2.")},
        good | {"3.exp_avg": torch.ones(2)},
    ):
        checkpoint.save_tensors(path, damaged)
        with pytest.raises(RecastError, match="does not have the state of all 3 parameters"):
            checkpoint.load_moments(path, 3)


def test_a_broken_or_missing_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "optimizer.safetensors").write_bytes(b"123")
    with pytest.raises(RecastError, match="optimizer.safetensors: not readable"):
        checkpoint.load_tensors(tmp_path / "optimizer.safetensors")
    with pytest.raises(RecastError, match=r"state.json: the checkpoint is not complete: No such file"):
        checkpoint.digest(tmp_path)


def test_no_epoch_stands_twice_in_the_log(tmp_path: Path) -> None:
    log = Log(tmp_path / "metrics.jsonl", 0)
    for epoch in (1, 2, 3):
        log.write({"epoch": epoch, "loss": float("inf"), "share": [0.5, float("nan")]})
    with log.path.open("a") as file:
        file.write('{"epoch": 4, "lo')  # cut by a kill
    Log(log.path, 2).write({"epoch": 3, "loss": 1.0})
    rows = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert rows[0].pop("checksum") == artifact.checksum(rows[0])
    assert rows[0] == {"epoch": 1, "loss": None, "share": [0.5, None]}
    assert rows[2]["loss"] == 1.0


def test_a_parameter_that_never_had_a_gradient_has_zero_moments(tmp_path: Path) -> None:
    """AdamW has no state for it, and a run with such a parameter must resume."""
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    parameters[0].grad = torch.ones(2)
    optimizer.step()
    checkpoint.save_tensors(tmp_path / "o.safetensors", checkpoint.optimizer_tensors(optimizer))
    found = checkpoint.load_moments(tmp_path / "o.safetensors", 2)
    assert found["1.exp_avg"].tolist() == [0, 0]
    assert found["1.step"].item() == 0
    resumed = torch.optim.AdamW(parameters, lr=0.1)
    checkpoint.restore_optimizer(resumed, found)
    fresh = torch.optim.AdamW([torch.nn.Parameter(parameters[1].detach().clone())], lr=0.1)
    for each, other in ((parameters[1], resumed), (fresh.param_groups[0]["params"][0], fresh)):
        each.grad = torch.full((2,), 0.3)
        parameters[0].grad = None
        other.step()
    assert torch.equal(parameters[1], fresh.param_groups[0]["params"][0])


def test_a_checkpoint_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    folder = tmp_path / ".epoch-00001.tmp"

    def write() -> None:
        with checkpoint.draft(folder, True):
            folder.mkdir()
            (folder / "weights.json").write_text("{}")
            checkpoint.save_tensors(folder / "optimizer.safetensors", {"a": torch.zeros(2, 3)})

    with pytest.raises(RecastError, match=r"optimizer.safetensors: cannot be written: No space .* \(24 bytes are"):
        write()
    assert list(tmp_path.iterdir()) == []
