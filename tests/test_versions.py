"""Scores of a reward by two versions are refused wherever they would be mixed, and only there."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recast import config, versions
from recast.core.curves import GainCurves
from recast.errors import RecastError
from recast.estimate import at_orders
from recast.estimate import stage as estimation
from recast.evaluate import Scores, find
from recast.evaluate import stage as evaluation
from recast.flow import families
from recast.progress import no_progress
from recast.propose import stage as proposing
from recast.rewards import base
from recast.shapes.rewards import Detail
from recast.train import stage as training
from recast.weigh import static

SHAPES = Path(__file__).parents[1] / "recipes/shapes.yaml"
ESTIMATE = ["estimate.samples=1", "estimate.noisings=1", "estimate.steps=2", "estimate.spacing=1"]
TRAIN = [
    *("train.steps=2", "train.prompts_per_epoch=1", "train.images_per_prompt=2", "train.batch=1", "train.rank=2"),
    *("train.micro_batch=2", "train.preview_every=0", "train.save_every=1", "train.trackers=[]"),
]
Become = Callable[[str | None], None]


@pytest.fixture
def become(monkeypatch: pytest.MonkeyPatch) -> Become:
    """Gives the reward `detail` another version, or none at all, as rewards had before."""

    def change(version: str | None) -> None:
        name = staticmethod(lambda **_: {"engine": version} if version else {})
        monkeypatch.setattr(Detail, "versions", name, raising=False)

    return change


def recipe(*more: str) -> config.Recipe:
    return config.load(SHAPES, ["rewards={detail: {}}", "weigh.budget={detail: 1}", *more])


def evaluate(out: Path) -> Path | None:
    settings = recipe("evaluate.count=6", "evaluate.steps=1", "evaluate.guidance=1", "evaluate.held_out={}")
    return evaluation.evaluate(settings, out, None, no_progress)


def refused(was: str, now: str, remedy: str) -> Any:
    install = "" if "not recorded" in (was, now) else "install the former version, or "
    sentence = (
        f"with detail.engine = {was}, but here it is {now}: scores of two versions are not mixed: {install}{remedy}"
    )
    return pytest.raises(RecastError, match=sentence)


@pytest.mark.parametrize("was", ["A 1", None])
def test_evaluation_goes_on_by_the_version_it_began_with(
    was: str | None, tmp_path: Path, become: Become, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "PART", 2)
    become(was)
    evaluate(tmp_path)
    folder = tmp_path / "scores"
    known = {"detail": {"engine": was}} if was else {}
    assert Scores.load(tmp_path).versions == known
    parts = sorted((folder / "parts").iterdir())
    become("A 2")
    assert evaluate(tmp_path)  # all scores are there: nothing is mixed, and their version stays
    assert Scores.load(tmp_path).versions == known
    first = json.loads(parts[0].read_text())
    assert first.get("versions", {}) == known.get("detail", {})
    parts[1].unlink()
    pattern = str(folder / "parts/").replace(".", r"\.") + r"/\*-[0-9a-f]{8}\.json to score these images again"
    with refused(was or "not recorded", "A 2", f"remove {pattern}"):
        evaluate(tmp_path)
    assert not parts[1].exists()
    for part in (folder / "parts").iterdir():
        part.unlink()
    evaluate(tmp_path)
    assert Scores.load(tmp_path).versions == {"detail": {"engine": "A 2"}}
    assert all(json.loads(part.read_text())["versions"] == {"engine": "A 2"} for part in parts)


def test_policies_by_two_versions_are_not_compared(
    tmp_path: Path, become: Become, recwarn: pytest.WarningsRecorder
) -> None:
    become("A 1")
    evaluate(tmp_path / "a")
    for name, kept in (("b", "A 1"), ("c", "A 2"), ("d", None)):
        shutil.copytree(tmp_path / "a", tmp_path / name)
        path = tmp_path / name / "scores/manifest.json"
        content = json.loads(path.read_text())
        content["run"]["method"] = name
        del content["checksum"]
        content["versions"] = {"detail": {"engine": kept}} if kept else {}
        path.write_text(json.dumps(content))
    both = find([tmp_path / "a", tmp_path / "b"])
    assert [policy.versions["detail"] for policy in both] == [{"engine": "A 1"}] * 2
    where = f"in {tmp_path / 'a/scores'} it is A 1"
    with pytest.raises(RecastError, match=f"c/scores has scores with detail.engine = A 2, but {where}"):
        find([tmp_path / "a", tmp_path / "c"])
    assert not recwarn.list
    with pytest.warns(UserWarning, match="d/scores has not recorded the version of detail, .*a/scores has"):
        assert len(find([tmp_path / "a", tmp_path / "d"])) == 2


def test_rollouts_go_on_by_the_version_they_began_with(
    tmp_path: Path, become: Become, monkeypatch: pytest.MonkeyPatch
) -> None:
    become("A 1")
    one, two = (recipe(*ESTIMATE, f"prompts.count={count}") for count in (1, 2))
    proposing.propose(two, tmp_path, no_progress)
    estimation.estimate(one, tmp_path, no_progress)
    made = GainCurves.load(tmp_path / "gains.json")
    assert made.provenance["versions"] == {"detail": {"engine": "A 1"}}
    written = (tmp_path / "gains.json").read_bytes()
    become("A 2")
    assert estimation.up_to_date(one, tmp_path) is not None
    assert at_orders(tmp_path, [2.0])[2.0].provenance == made.provenance
    for reuse in (True, False):  # all shards are there: nothing is mixed
        estimation.estimate(one, tmp_path, no_progress, reuse=reuse)
        assert (tmp_path / "gains.json").read_bytes() == written
    with monkeypatch.context() as patch, refused("A 1", "A 2", "choose another --out"):
        patch.setattr(families, "load", None)  # refused before a model is loaded
        estimation.estimate(two, tmp_path, no_progress)
    become("A 1")
    estimation.estimate(two, tmp_path, no_progress)
    become(None)
    with refused("A 1", "not recorded", "choose another --out"):
        estimation.estimate(recipe(*ESTIMATE, "prompts.count=3"), tmp_path, no_progress)


def test_training_goes_on_by_the_version_it_began_with(tmp_path: Path, become: Become) -> None:
    become("A 1")
    settings = recipe(*TRAIN, "train.epochs=1")
    static({"detail": 1.0}, families.load(settings.policy).sigmas(2)).save(tmp_path / "weights.json")
    weights = tmp_path / "weights.json"
    training.train(settings, tmp_path, weights)
    state = json.loads((tmp_path / "checkpoints/epoch-00001/state.json").read_text())
    assert state["settings"]["versions.detail.engine"] == "A 1"
    become("A 2")
    assert training.train(settings, tmp_path, weights) == 1  # finished: nothing is mixed
    further = recipe(*TRAIN, "train.epochs=2")
    with refused("A 1", "A 2", "choose another --out"):
        training.train(further, tmp_path, weights)
    become("A 1")
    assert training.train(further, tmp_path, weights) == 2


class Custom:
    """A reward of a user, with an option."""

    def __init__(self, size: int = 1) -> None:
        raise AssertionError("versions are told without an instance")

    @classmethod
    def versions(cls, size: int = 1) -> dict[str, Any]:
        """As the protocol asks for."""
        return {"size": 10 // size}


class Bound(Custom):
    """Its versions need an instance."""

    def versions(self) -> dict[str, Any]:  # type: ignore[override]
        """Not as the protocol asks for."""
        return {}


def plain(images: Any, prompts: Any, metadata: Any = None, size: int = 1) -> np.ndarray:
    raise NotImplementedError


def test_a_custom_reward_names_its_versions() -> None:
    assert base.versions("test_versions:Custom", {"size": "5"}) == {"size": "2"}
    assert base.versions("test_versions:plain", {"size": 2}) == {}
    for name, options, said in (
        ("Custom", {"size": "many"}, "size = 'many': input should be a valid integer"),
        ("Custom", {"color": 1}, "does not take these options"),
        ("Custom", {"size": 0}, "the versions of the reward 'test_versions:Custom' cannot be told: ZeroDivisionError"),
        ("Bound", {}, "has a method versions that needs an instance: make it a static method"),
    ):
        with pytest.raises(RecastError, match=said):
            base.versions(f"test_versions:{name}", options)


def test_versions_are_no_settings() -> None:
    known = versions.flat({"a": {"x": "1", "y": "2"}, "b": {"x": "3"}})
    assert known == {"versions.a.x": "1", "versions.a.y": "2", "versions.b.x": "3"}
    assert versions.without(known | {"train.rank": 4}) == {"train.rank": 4}
    assert versions.of({"detail": None, "jpeg": {"quality": 5}}) == {}
    versions.require_same(known | {"train.rank": 4}, known, "", "")
    with pytest.raises(RecastError, match="made with b.x = 3, but there it is 4: .*, or wait"):
        versions.require_same(known, {**known, "versions.b.x": "4"}, "made", "wait", "there")


def test_an_unrecorded_version_cannot_be_installed() -> None:
    known, wanted = {}, {"versions.ocr.engine": "rapidocr 3.10.0"}
    with pytest.raises(RecastError, match="not mixed: choose another --out$"):
        versions.require_same(known, wanted, "runs/a has scores", "choose another --out")
    with pytest.raises(RecastError, match="not mixed: install the former version, or choose another --out$"):
        versions.require_same({"versions.ocr.engine": "b"}, wanted, "runs/a has scores", "choose another --out")


def test_geneval_records_its_detector() -> None:
    assert base.versions("geneval", {})["detector"].startswith("mask2former_swin-s")
    assert base.versions("geneval", {"model": "facebook/mask2former", "mode": "nft"})["detector"] == "mask2former"
