"""`recast integrate` on scripts that do what DiffusionNFT's and flow_grpo's do; tests/peers has the real ones."""

import os
import stat
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from recast import RecastError, WeightMatrix
from recast.cli import app
from recast.core.advantage import advantages
from recast.integrations import diffusion_nft, flow_grpo, scripts, tracker

W = WeightMatrix(("clip", "ocr"), [0, 0.3, 0.6, 1], [[0.2, 0.1, 0.1], [0.1, 0.2, 0.3]], [0.4, 0.6])
NFT = '''"""A trainer that shuffles timesteps."""
from stand_in_tracker import PerPromptStatTracker


def main(names, table, order, rows):
    track = PerPromptStatTracker(global_std=True)
    seen = {}
    seen.update(table)
    if names:
        scaled = track.update(names, table["avg"])
    times = torch.as_tensor(1000 * W.sigmas[:0:-1].copy()).expand(12, 3)
    kept = {"timesteps": times, "advantages": torch.as_tensor(scaled)}
    for round in range(2):
        mixed = {key: value[rows] for key, value in kept.items()}
        for key in ["timesteps", "other"]:
            mixed[key] = mixed.get(key, mixed["timesteps"])[torch.arange(12)[:, None], order]
        yield mixed
'''
GRPO = '''"""A trainer that does not."""
from stand_in_tracker import PerPromptStatTracker


def main(names, table, order, rows):
\ttrack = PerPromptStatTracker(global_std=False)
\tadv = track.update(names, table['avg'])
\tsamples = {"timesteps": torch.as_tensor(1000 * W.sigmas[:0:-1].copy()).expand(12, 3)}
\tsamples["advantages"] = (
\t\ttorch.as_tensor(adv)
\t)
\tyield {key: value[rows] for key, value in samples.items()}
'''
CASES = {"diffusion_nft": (diffusion_nft.PEER, NFT, "batch"), "flow_grpo": (flow_grpo.PEER, GRPO, "group")}


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[scripts.Peer, Path, str]:
    peer, text, spread = CASES[request.param]
    path = tmp_path / peer.script
    path.parent.mkdir()
    path.write_text(text, encoding="utf-8")
    return peer, path, spread


def test_an_edited_script_has_w_at_each_slot(
    case: tuple[scripts.Peer, Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots are shuffled, rows too; each is traced back by the permutations and not by σ."""
    peer, path, spread = case
    stand_in = types.ModuleType("stand_in_tracker")
    kind = type(
        "PerPromptStatTracker", (), {"__init__": lambda self, global_std: setattr(self, "global_std", global_std)}
    )
    kind.update = lambda self, prompts, rewards: np.full((len(prompts), 3), 99.0)  # type: ignore[attr-defined]
    stand_in.PerPromptStatTracker = kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "stand_in_tracker", stand_in)
    monkeypatch.setenv("RECAST_WEIGHTS", str(W.save(tmp_path / "weights.json")))
    tracker._mixer.cache_clear()
    rng = np.random.default_rng(1)
    scores, prompts = rng.normal(size=(12, 2)), [f"prompt {k // 4}" for k in range(12)]
    scores[:4, 1] = -10  # "does not apply" in these trainers
    order = torch.as_tensor(np.stack([rng.permutation(3) for _ in range(12)]))
    rows = torch.as_tensor(rng.permutation(12))

    scripts.apply(peer, path)
    names: dict[str, Any] = {"torch": torch, "W": W}
    exec(compile(path.read_bytes(), str(path), "exec"), names)
    table = {"clip": scores[:, 0], "ocr": scores[:, 1], "avg": scores.sum(1)}
    expected = advantages(np.where(scores == -10, np.nan, scores), np.arange(12) // 4, W, "step", spread)
    ours = torch.as_tensor(expected)[rows]
    slots = torch.arange(3).flip(0).expand(12, 3)  # noisiest first
    if peer.name == "diffusion_nft":
        slots = slots.gather(1, order)
    found = list(names["main"](prompts, table, order, rows))
    assert len(found) == (2 if peer.name == "diffusion_nft" else 1), "every inner epoch"
    for each in found:
        assert torch.equal(each["advantages"], ours.gather(1, slots))
    tracker._mixer.cache_clear()


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_revert_restores_the_bytes(case: tuple[scripts.Peer, Path, str], newline: str) -> None:
    peer, path, _ = case
    before = path.read_text(encoding="utf-8").replace("\n", newline).encode() + b"# no newline at the end"
    path.write_bytes(before)
    os.chmod(path, 0o755)
    assert scripts.state(peer, path) == "plain"
    scripts.apply(peer, path)
    assert scripts.state(peer, path) == "edited"
    added = [line for line in path.read_bytes().splitlines() if scripts.MARK.encode() in line]
    assert len(added) == 3
    assert path.read_bytes().count(newline.encode()) == before.count(newline.encode()) + 3
    with pytest.raises(RecastError, match="is edited already: --revert"):
        scripts.apply(peer, path)
    scripts.revert(peer, path)
    assert path.read_bytes() == before
    assert stat.S_IMODE(path.stat().st_mode) == 0o755
    with pytest.raises(RecastError, match="is not edited"):
        scripts.revert(peer, path)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("track.update(", "track.moved(", "has moved on: no statement assigns what a tracker's update"),
        ("import PerPromptStatTracker", "import Tracker as PerPromptStatTracker", "no statement imports PerPrompt"),
        ("yield", "yield (", "is not Python"),
    ],
)
def test_a_script_that_moved_on_is_named_and_left(case: Any, old: str, new: str, words: str) -> None:
    peer, path, _ = case
    path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    before = path.read_bytes()
    for call in (scripts.state, scripts.apply):
        with pytest.raises(RecastError, match=words):
            call(peer, path)
    assert path.read_bytes() == before


def test_a_place_that_is_there_twice_is_not_guessed(case: Any) -> None:
    peer, path, _ = case
    path.write_text(path.read_text(encoding="utf-8") * 2, encoding="utf-8")
    with pytest.raises(RecastError, match=r"2 statements \(lines \d+, \d+\)"):
        scripts.apply(peer, path)


def test_half_an_edit_is_noticed_and_can_be_taken_out(case: Any) -> None:
    peer, path, _ = case
    before = path.read_bytes()
    scripts.apply(peer, path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(line for line in lines if b"recast_peer.table" not in line))
    with pytest.raises(RecastError, match="other marked lines than this version inserts: --revert"):
        scripts.state(peer, path)
    scripts.revert(peer, path)
    assert path.read_bytes() == before


def test_slots_without_a_table_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """flow_grpo without per_prompt_stat_tracking makes advantages of its own, which are not per step."""
    monkeypatch.setattr(tracker, "_made", [])
    with pytest.raises(RecastError, match="set per_prompt_stat_tracking = True"):
        tracker.slots(np.zeros((2, 3)), np.array([1000.0]))


def test_the_command(case: Any, tmp_path: Path) -> None:
    peer, path, _ = case

    def call(*options: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["integrate", peer.name, "--path", str(tmp_path), *options])
        return result.exit_code, " ".join(result.output.split())

    before = path.read_bytes()
    assert call() == call("--check") == (0, f"{path} can be edited: --apply (tried at {peer.tried[:7]})")
    assert call("--apply")[0] == 0
    assert "is edited: --revert takes the lines out" in call("--check")[1]
    code, text = call("--apply")
    assert code == 2
    assert text.startswith("error: ")
    assert call("--revert")[0] == 0
    assert path.read_bytes() == before
    assert call("--check", "--apply") == (2, "error: choose one of --check, --apply and --revert")
    assert call("--script", "scripts/other.py")[1].endswith("--path is the repository")
    other = CliRunner().invoke(app, ["integrate", "trl", "--path", "."])
    assert other.exit_code == 2
    assert "choose diffusion_nft or flow_grpo" in other.output
