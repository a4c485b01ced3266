"""The passes of a training step: none that is known already, and none that changes what is trained."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_trainer import LARGER, make, one_thread, same  # noqa: F401

from recast.errors import RecastError
from recast.train import advantage, passes, rollout
from recast.train.trainer import Trainer


def asked(made: Trainer, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, bool]]:
    """The adapter, the rows and the gradient mode of every velocity call from now on."""
    calls: list[tuple[str, int, bool]] = []
    velocity = made.policy.velocity

    def watched(x: torch.Tensor, *rest: Any) -> Any:
        calls.append((made.adapters.active, len(x), torch.is_grad_enabled()))
        return velocity(x, *rest)

    monkeypatch.setattr(made.policy, "velocity", watched)
    return calls


def of_training(calls: list[tuple[str, int, bool]], made: Trainer) -> list[tuple[str, int]]:
    """The calls of training; those of sampling come first, and use the old policy."""
    sampling = -(-made.batches.total // made.settings.sample_batch) * (len(made.sigmas) - 1)
    return [(who, rows) for who, rows, _ in calls[sampling:]]


def test_a_pass_that_equals_the_trained_one_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(tmp_path, *LARGER, "train.decay=0", "train.micro_batch=8")
    calls = asked(made, monkeypatch)
    made.epoch()
    full = [("old", 8), ("base", 8), ("default", 8)]
    assert of_training(calls, made) == [("default", 8), *full]  # adapters start at zero: all three policies are equal
    calls.clear()
    made.epoch()
    assert of_training(calls, made) == [("base", 8), ("default", 8), *full]  # old was set to the trained adapter
    made.adapters.update_old(0.5)  # nothing to change: they are equal
    assert passes.differing(made.adapters).tolist() == [0, 1]
    with torch.no_grad():
        made.adapters.old_parameters[-1].view(-1)[-1].add_(1e-6)
    assert passes.differing(made.adapters).tolist() == [1, 1]


def test_passes_that_are_left_out_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = (*LARGER, "train.decay=0", "train.kl_weight=0.5", "train.learning_rate=0.01")
    short, whole = make(tmp_path, *options), make(tmp_path, *options)
    monkeypatch.setattr(whole, "_needed", lambda _: passes.Needed())
    for _ in range(2):
        assert short.epoch()["loss"] == whole.epoch()["loss"]
    assert same(short, whole)


def test_the_base_is_asked_for_every_third_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(tmp_path, *LARGER, "train.kl_weight=0.5", "train.kl_every=3", "train.micro_batch=8")
    full = make(tmp_path, *LARGER, "train.kl_weight=0.5", "train.micro_batch=8")
    for each in (made, full):
        with torch.no_grad():
            for parameter in each.adapters.parameters:
                parameter.add_(0.05)
    data, _ = made._rollout(0, lambda *_: None)
    full._rollout(0, lambda *_: None)
    quality = torch.full((8, 4), 0.5)
    pairs, every = made._pairs(quality, 0), full._pairs(quality, 0)
    assert pairs.anchored.tolist() == [k % 3 == 0 for k in range(8)]
    calls = asked(made, monkeypatch)
    found, exact = (each._terms(data, some, passes.Needed()) for each, some in ((made, pairs), (full, every)))
    assert [(who, rows) for who, rows, _ in calls] == [("old", 8), ("base", 3), ("default", 8)]
    assert exact.kl.min() > 0
    expected = torch.where(pairs.anchored, 8 / 3 * exact.kl, torch.zeros(()))  # three of eight pairs
    torch.testing.assert_close(found.kl, expected, rtol=1e-4, atol=1e-9)
    # No gradient reaches a pair that is not anchored: its base is its own velocity.
    parameter = made.adapters.parameters[1]
    others = torch.autograd.grad(found.kl[~pairs.anchored].sum(), parameter, retain_graph=True)[0]
    assert others.abs().max() == 0 < torch.autograd.grad(found.kl.sum(), parameter)[0].abs().max()


def test_which_pairs_are_anchored_does_not_depend_on_the_processes(tmp_path: Path) -> None:
    made = make(tmp_path, *LARGER, "train.kl_every=3", "train.micro_batch=4")
    made._rollout(0, lambda *_: None)
    quality = torch.full((8, 4), 0.5)
    whole = made._pairs(quality, 0)
    parts = []
    for rank in range(2):
        other = make(tmp_path, *LARGER, "train.kl_every=3", "train.micro_batch=4")
        other._rollout(0, lambda *_: None)
        images = other._mine[0]
        other._mine[0] = images[rank * 2 : rank * 2 + 2]
        other.batches = type(other.batches)(2, 2, 4, 4, 2, 4)
        other.accelerator = type("Process", (), {"process_index": rank})()
        parts.append(other._pairs(quality, 0))
    assert torch.equal(torch.cat([part.seed for part in parts]), whole.seed)
    assert torch.equal(torch.cat([part.anchored for part in parts]), whole.anchored)


def test_too_few_pairs_for_kl_every_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecastError, match="train.kl_every = 5 is above the 4 pairs of a micro-batch: use at most 4"):
        make(tmp_path, *LARGER, "train.kl_every=5")
    make(tmp_path, *LARGER, "train.kl_every=5", "train.kl_weight=0")


@pytest.mark.parametrize("mode", ["all", "positive_only", "negative_only", "one_only", "binary"])
def test_optimality_in_each_mode_is_diffusion_nft_s(mode: Any) -> None:
    values = np.array([-9.0, -5.0, -1.0, 0.0, 0.5, 2.5, 80.0])
    clipped = np.clip(values, -5, 5)
    kept = {
        "all": clipped,
        "positive_only": np.maximum(clipped, 0),
        "negative_only": np.minimum(clipped, 0),
        "one_only": (clipped > 0) * 1.0,
        "binary": np.sign(clipped),
    }[mode]
    found = advantage.optimality(torch.from_numpy(values), 5.0, mode)
    np.testing.assert_allclose(found.numpy(), np.clip(kept / 5 / 2 + 0.5, 0, 1), rtol=0, atol=1e-15)


def test_an_unknown_mode_of_advantages_is_refused() -> None:
    with pytest.raises(RecastError, match="unknown train.adv_mode 'some': choose one of all, positive_only"):
        advantage.optimality(torch.zeros(1), 5.0, "some")  # type: ignore[arg-type]


def test_a_mode_of_advantages_reaches_the_loss(tmp_path: Path) -> None:
    plain, binary = (make(tmp_path, *LARGER, f"train.adv_mode={mode}") for mode in ("all", "binary"))
    for each in (plain, binary):
        each.epoch()
    assert not same(plain, binary)


def test_integer_timesteps_are_what_the_network_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(tmp_path)
    told: list[float] = []
    velocity = made.policy.velocity

    def watched(x: torch.Tensor, sigma: float, condition: Any) -> Any:
        told.append(sigma)
        return velocity(x, sigma, condition)

    monkeypatch.setattr(made.policy, "velocity", watched)
    grid = [0.0, 0.0089286, 0.4651163, 0.96, 1.0]
    row = made.rows[:1]
    ends = [
        rollout.rollout(made.policy, {}, row, [0], grid, 1, integer_timesteps=integers).latents
        for integers in (False, True)
    ]
    assert told[:4] == grid[:0:-1]
    # 1000 · 0.96 is 960 in float32, and 0.0089286 has eight whole thousandths.
    assert told[4:] == [1.0, 0.96, 0.465, 0.008]
    assert 0 < (ends[0] - ends[1]).abs().max() < 0.1
