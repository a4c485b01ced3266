"""Pretraining: the same bytes from the same plan, killed or not, and models that learn."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recast.errors import RecastError
from recast.shapes import models, pretrain

FLOW = replace(pretrain.FLOW, steps=5, batch=4)
CLIP = replace(pretrain.CLIP, steps=4, batch=8)


def silent(items: Iterable[int], title: str, total: int) -> Iterable[int]:
    return items


class KilledError(Exception):
    """Stands for kill -9: nothing after it runs."""


def killed_after(count: int) -> object:
    def items(steps: Iterable[int], title: str, total: int) -> Iterable[int]:
        for done, step in enumerate(steps):
            if done == count:
                raise KilledError
            yield step

    return items


def content(folder: Path) -> dict[str, bytes]:
    parts = ("pipeline", "clip")
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for part in parts
        for path in (folder / part).rglob("*")
        if path.is_file()
    }


def test_killed_and_resumed_it_ends_with_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrain, "EVERY", 2)
    log = pretrain.pretrain(tmp_path / "whole", silent, FLOW, CLIP)
    for stop in (1, 3, 1):  # before the first state is written, after it, and in the second model
        with pytest.raises(KilledError):
            pretrain.pretrain(tmp_path / "parts", killed_after(stop), FLOW, CLIP)  # type: ignore[arg-type]
    assert pretrain.pretrain(tmp_path / "parts", silent, FLOW, CLIP) == log
    whole, parts = content(tmp_path / "whole"), content(tmp_path / "parts")
    assert len(whole) > 15
    assert whole == parts
    assert [entry["step"] for entry in log["flow"]["log"]] == [2, 4, 5]


def test_another_plan_does_not_go_on_from_a_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrain, "EVERY", 2)
    with pytest.raises(KilledError):
        pretrain.pretrain(tmp_path, killed_after(3), FLOW, CLIP)  # type: ignore[arg-type]
    with pytest.raises(RecastError, match="made by another plan"):
        pretrain.pretrain(tmp_path, silent, replace(FLOW, seed=9), CLIP)


def test_threads_are_left_as_they_were(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    with pytest.raises(KilledError):
        pretrain.pretrain(tmp_path, killed_after(0), FLOW, CLIP)  # type: ignore[arg-type]
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("which", ["flow", "clip"])
def test_both_losses_fall(which: str, tmp_path: Path) -> None:
    plan = replace(pretrain.FLOW if which == "flow" else pretrain.CLIP, steps=60, batch=32)
    if which == "flow":
        pipe = models.pipeline(0)
        parts = (pipe.transformer, pipe.text_encoder, pipe.text_encoder_2)
        loss = pretrain.flow_loss(pipe, plan)
    else:
        model, processor = models.clip(0)
        parts, loss = (model,), pretrain.clip_loss(model, processor, plan)
    parameters = [p for part in parts for p in part.parameters() if p.requires_grad]
    with torch.no_grad():
        before = float(loss(1000))
    pretrain.fit(parameters, loss, plan, tmp_path / "state.safetensors", silent, "")
    with torch.no_grad():
        assert float(loss(1000)) < 0.8 * before


def test_the_kept_log_is_of_the_shipped_plan() -> None:
    log = json.loads((Path(__file__).parents[2] / "docs/shapes-pretrain.json").read_text())
    assert {key: log["flow"][key] for key in ("seed", "steps", "batch")} == {
        key: getattr(pretrain.FLOW, key) for key in ("seed", "steps", "batch")
    }
    assert {key: log["clip"][key] for key in ("seed", "steps", "batch")} == {
        key: getattr(pretrain.CLIP, key) for key in ("seed", "steps", "batch")
    }
    found = pretrain.measure("shapes", models_folder() / "clip")
    for name, value in log["scores"].items():
        assert found[name] == pytest.approx(value, abs=0.02), name  # other machines round otherwise


def models_folder() -> Path:
    return Path(models.__file__).parent / "data"


def test_the_tokenizer_makes_a_token_of_every_word_and_loses_nothing() -> None:
    tokens = models.tokenizer()
    for word in models.words():
        assert len(tokens(word)["input_ids"]) == 3
    text = "two zebras, l'été"
    decoded = tokens.decode(tokens(text)["input_ids"], skip_special_tokens=True)
    assert decoded.replace(" ", "") == text.replace(" ", "")
