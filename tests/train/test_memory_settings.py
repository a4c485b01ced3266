"""Settings that save memory: 8-bit moments, up to bitsandbytes itself, and rewards that leave the device."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_trainer import make, recipe, same

from recast import config, objects
from recast.errors import RecastError
from recast.train import stage


class Eight(torch.optim.Optimizer):
    """Momentum whose state looks like that of bitsandbytes: a plain step count, and a table of shared tensors."""

    LEVELS = torch.linspace(-1, 1, 256)

    def __init__(self, parameters: Any, lr: float, betas: Any, eps: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                if not state:
                    state["step"], state["state1"], state["qmap1"] = 0, torch.zeros_like(parameter), self.LEVELS
                assert type(state["step"]) is int
                state["step"] += 1
                state["state1"].mul_(0.9).add_(parameter.grad)
                parameter.sub_(self.param_groups[0]["lr"] * state["state1"])

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        hidden = ("state1", "qmap1")
        found["state"] = {
            number: {"step": each["step"], "table": {key: each[key] for key in hidden}}
            for number, each in found["state"].items()
        }
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        flat = {number: {"step": each["step"]} | each["table"] for number, each in state_dict["state"].items()}
        super().load_state_dict(state_dict | {"state": flat})


def test_the_optimizer_is_a_setting_and_its_state_survives_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = SimpleNamespace(optim=SimpleNamespace(AdamW8bit=Eight))
    monkeypatch.setattr(objects, "library", lambda *_: library)
    whole = make(tmp_path, "train.optimizer=adamw8bit")
    assert isinstance(whole.optimizer.optimizer, Eight)
    whole.epoch()
    path = whole.save(tmp_path / "checkpoints", {}, keep=3)
    resumed = make(tmp_path, "train.optimizer=adamw8bit")
    resumed.load(path, {})
    assert same(whole, resumed)
    for made in (whole, resumed):
        made.epoch()
    assert same(whole, resumed)


def test_without_bitsandbytes_it_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(RecastError, match=r"train.optimizer = adamw8bit needs bitsandbytes: .* or choose adamw"):
        make(tmp_path, "train.optimizer=adamw8bit")


def test_only_another_optimizer_makes_a_checkpoint_stale() -> None:
    assert "optimizer" not in recipe().train.used()  # as it was recorded before it was a setting
    assert recipe("train.optimizer=adamw8bit").train.used()["optimizer"] == "adamw8bit"
    assert recipe("train.offload_rewards=true").train.used() == recipe().train.used()


def test_rewards_are_offloaded_where_they_can_be() -> None:
    given: dict[str, Any] = {"pickscore": None, "hpsv2": {"offload": False}, "detail": None}
    made = config.Recipe(rewards=given, train={"offload_rewards": True})
    options = {name: stage._options(made, name) for name in given}
    assert options == {"pickscore": {"offload": True}, "hpsv2": {"offload": False}, "detail": {}}
    assert stage._options(config.Recipe(rewards=given), "pickscore") == {}
