"""A stage that continues another run: its adapters, optimizer and step count, as the paper's second stage does."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from test_trainer import make, one_thread, recipe, uneven, weights_of  # noqa: F401 - an autouse fixture

from edited import edit
from recast.errors import RecastError
from recast.train import advantage, checkpoint, groups, stage
from recast.train.checkpoint import Position, all_of, load_tensors, save_tensors
from recast.train.decay import old_decay
from recast.train.trainer import Trainer

ADAPTER = "lora/pytorch_lora_weights.safetensors"


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two epochs with two optimizer steps each."""
    out = tmp_path_factory.mktemp("parent") / "run"
    uneven().save(out / "weights.json")
    stage.train(recipe("train.epochs=2"), out)
    return out


def moments(made: Trainer) -> dict[str, torch.Tensor]:
    return checkpoint.optimizer_tensors(made.optimizer.optimizer)


def test_the_whole_state_is_taken_over(tmp_path: Path, parent: Path) -> None:
    made, fresh = make(tmp_path), make(tmp_path)
    last = all_of(parent / "checkpoints")[-1]
    made.start_from(last)
    assert made.position == Position(epoch=0, update=0, step=4)
    assert made.ema.optimization_step == 4
    state, begun = weights_of(made), weights_of(fresh)
    for name in ("default", "old", "ema"):
        fresh.adapters.load(last / name, "default")
        assert torch.equal(state[name], weights_of(fresh)["default"])
        assert not torch.equal(state[name], begun[name])
    saved = checkpoint.load_tensors(last / "optimizer.safetensors")
    found = moments(made)
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[key], saved[key]) for key in saved)
    assert not torch.equal(state["default"], state["old"])  # the old policy is not made equal


def test_a_stage_counts_on_from_its_parent_and_resumes_after_a_stop(tmp_path: Path, parent: Path) -> None:
    settings = recipe("train.epochs=2", f"train.resume_from={parent}", "train.seed=5")
    outs = [tmp_path / name for name in ("whole", "stopped")]
    for out in outs:
        uneven().save(out / "weights.json")
        stage.train(settings, out)
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == [6, 8]
        assert [row["old_decay"] for row in rows] == [old_decay(6, 1), old_decay(8, 1)] == [0.006, 0.008]
        if out.name == "stopped":
            shutil.rmtree(all_of(out / "checkpoints")[-1])
            shutil.rmtree(out / "lora")
            said: list[str] = []
            stage.train(settings, out, observer=stage.Observer(start=said.append))
            assert said[0].endswith("; resuming from epoch-00001")
    assert (outs[0] / ADAPTER).read_bytes() == (outs[1] / ADAPTER).read_bytes()
    other = recipe("train.epochs=2", f"train.resume_from={all_of(parent / 'checkpoints')[0]}", "train.seed=5")
    with pytest.raises(RecastError, match=r"was trained with another checkpoint to resume from \(train.resume_from\)"):
        stage.train(other, outs[0])


def test_with_an_adapter_only_optimizer_and_step_are_taken(tmp_path: Path, parent: Path) -> None:
    """What DiffusionNFT does: its checkpoints hold the averaged adapter, from which both policies start."""
    made = make(tmp_path, f"train.lora={parent / 'lora'}")
    made.start_from(all_of(parent / "checkpoints")[-1], adapters=False)
    state = weights_of(made)
    made.adapters.load(parent / "lora", "default")
    averaged = weights_of(made)["default"]
    assert all(torch.equal(state[name], averaged) for name in ("default", "old", "ema"))
    assert made.position.step == made.ema.optimization_step == 4
    assert moments(made)


def test_what_cannot_be_resumed_from_is_said(tmp_path: Path, parent: Path) -> None:
    uneven().save(tmp_path / "weights.json")
    with pytest.raises(RecastError, match=r"train.resume_from = .*none has no checkpoint: train that run first"):
        stage.train(recipe(f"train.resume_from={tmp_path / 'none'}"), tmp_path)
    half = tmp_path / "half"
    shutil.copytree(parent, half)
    shutil.rmtree(all_of(half / "checkpoints")[-1])
    words = r"is trained up to epoch-00001 of 2 epochs: finish that run, or name the checkpoint .*epoch-00001"
    with pytest.raises(RecastError, match=words):
        stage.train(recipe(f"train.resume_from={half}"), tmp_path)
    broken = tmp_path / "broken"
    shutil.copytree(parent, broken)
    last = all_of(broken / "checkpoints")[-1]
    (last / "optimizer.safetensors").write_bytes(b"123")
    words = r"optimizer.safetensors has changed since it was saved: .*: train.resume_from can name another checkpoint$"
    with pytest.raises(RecastError, match=words):
        stage.train(recipe(f"train.resume_from={broken}"), tmp_path)
    hashes = next(line for line in (last / "state.json").read_text().splitlines() if line.startswith('"files"'))
    edit(last / "state.json", f"{hashes}\n", "")  # as earlier releases wrote it
    moments = load_tensors(all_of(parent / "checkpoints")[-1] / "optimizer.safetensors")
    save_tensors(last / "optimizer.safetensors", moments | {"0.exp_avg": moments["0.exp_avg"] * float("nan")})
    words = r"optimizer.safetensors: 1 of \d+ tensors have values that are not finite, the first is 0.exp_avg: .*"
    with pytest.raises(RecastError, match=words):
        stage.train(recipe(f"train.resume_from={broken}"), tmp_path)
    with pytest.raises(RecastError, match=r"its rank is 4, but this policy's is 2: train.resume_from can name another"):
        stage.train(recipe(f"train.resume_from={parent}", "train.rank=2"), tmp_path)


def test_a_prompt_that_the_file_repeats_is_one_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Advantages of a repeated prompt are relative to all its images, as in DiffusionNFT's tracker."""
    made = make(tmp_path)
    made.rows = [made.rows[0]] * 4
    seen: list[list[int]] = []
    real = advantage.contributions

    def watched(rewards: torch.Tensor, members: torch.Tensor, *rest: object) -> torch.Tensor:
        seen.append(members.tolist())
        return real(rewards, members, *rest)

    monkeypatch.setattr("recast.train.trainer.advantage.contributions", watched)
    made.epoch()
    assert seen == [[0, 0, 0, 0]]
    assert groups.members(["a", "b", "a"], 2).tolist() == [0, 0, 1, 1, 0, 0]


def test_the_share_of_levels_is_rounded_down_as_in_diffusionnft(tmp_path: Path) -> None:
    """24 of 25 levels at .99; here 3 of 4."""
    assert make(tmp_path, "train.fraction=0.99").batches.pairs == 3
