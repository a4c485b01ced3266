"""One CLIP behind several rewards: PickScore and the aesthetic predictor beside ClipScore."""

import json
from pathlib import Path

import numpy as np
import pytest
import tiny_clip
import torch
from tiny_clip import PROMPTS, TERMS, pictures

from recast.errors import RecastError
from recast.rewards import aesthetic, base, catalog
from recast.rewards.aesthetic import Aesthetic
from recast.rewards.clipscore import ClipScore
from recast.rewards.pickscore import PickScore
from tolerance import tolerance


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_clip.save(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def predictor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The published predictor's layout, over embeddings of 24 numbers instead of 768."""
    generator = torch.Generator().manual_seed(1)
    sizes = {0: (24, 1024), 2: (1024, 128), 4: (128, 64), 6: (64, 16), 7: (16, 1)}
    state = {}
    for number, (before, after) in sizes.items():
        state[f"layers.{number}.weight"] = torch.randn(after, before, generator=generator) / before**0.5
        state[f"layers.{number}.bias"] = torch.randn(after, generator=generator)
    path = tmp_path_factory.mktemp("aesthetic") / catalog.AESTHETIC_FILE
    torch.save(state, path)
    return path


def count_calls(reward: ClipScore | Aesthetic) -> list[int]:
    """A list that gets the batch size of every call of the vision tower."""
    seen: list[int] = []
    reward.clip.model.vision_model.register_forward_hook(lambda _, __, output: seen.append(len(output[0])))
    return seen


def test_pickscore_is_the_cosine_by_its_own_scale_over_26(folder: Path) -> None:
    images, pil = pictures()
    image, text = tiny_clip.embeddings(folder, pil, PROMPTS)
    reward = PickScore(folder, processor=folder)
    scale = np.exp(reward.clip.model.logit_scale.item()) / 26
    expected = scale * (image * text).sum(-1)
    np.testing.assert_allclose(reward(images, PROMPTS), expected, atol=tolerance(TERMS, scale), rtol=0)
    assert scale == pytest.approx(np.exp(2.6592) / 26, rel=tolerance(1, 2.6592))  # the scale that CLIPModel starts with


def test_pickscore_sees_by_its_processors_settings_and_keeps_its_scale_whole(folder: Path, tmp_path: Path) -> None:
    images, _ = pictures()
    tiny_clip.save(tmp_path, side=32)
    settings = json.loads((tmp_path / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings | {"image_mean": [0.1, 0.2, 0.3]}))
    own, other = PickScore(folder, processor=folder), PickScore(folder, processor=tmp_path)
    assert other.pixels.mean == (0.1, 0.2, 0.3)
    assert (own(images, PROMPTS) != other(images, PROMPTS)).all()
    assert PickScore(folder, processor=folder, dtype="bfloat16").scale == own.scale


def test_a_model_whose_output_is_not_finite_is_an_error(folder: Path, predictor: Path) -> None:
    """NaN would be read as "does not apply", and the reward would drop out of training in silence."""
    images, _ = pictures()
    reward = ClipScore(folder, offload=True)  # not shared with the other tests
    for weight in (reward.clip.model.visual_projection.weight, reward.clip.model.text_projection.weight):
        kept = weight.clone()
        with torch.no_grad():
            weight[0] = torch.nan
        with pytest.raises(RecastError, match="the output of CLIP is not finite"):
            reward(images.clone(), [f"{prompt} again" for prompt in PROMPTS])
        with torch.no_grad():
            weight.copy_(kept)
    rating = Aesthetic(folder, predictor)
    rating.head[0].weight[0] = torch.inf
    with pytest.raises(RecastError, match="the output of the aesthetic predictor is not finite"):
        rating(images, PROMPTS)


def test_an_empty_batch_has_no_scores(folder: Path, predictor: Path) -> None:
    for reward in (ClipScore(folder), Aesthetic(folder, predictor), PickScore(folder, processor=folder)):
        assert reward(torch.empty(0, 3, 8, 8), []).shape == (0,)
        assert reward([], []).shape == (0,)


def test_a_file_in_half_precision_is_read_as_float32(folder: Path, predictor: Path, tmp_path: Path) -> None:
    state = {name: value.half() for name, value in torch.load(predictor, weights_only=True).items()}
    torch.save(state, tmp_path / "half.pth")
    assert {each.dtype for each in Aesthetic(folder, tmp_path / "half.pth").head.parameters()} == {torch.float32}


def test_aesthetic_is_a_chain_of_five_matrices(folder: Path, predictor: Path) -> None:
    images, pil = pictures()
    found, _ = tiny_clip.embeddings(folder, pil, PROMPTS)
    state = torch.load(predictor, weights_only=True)
    for number in (0, 2, 4, 6, 7):
        found = found @ state[f"layers.{number}.weight"].T + state[f"layers.{number}.bias"]
    reward = Aesthetic(folder, predictor)
    close = tolerance(TERMS + 24 + 1024 + 128 + 64 + 16)
    np.testing.assert_allclose(reward(images, PROMPTS), found[:, 0], atol=close, rtol=0)
    assert (reward(images, [""] * 3) == reward(images, PROMPTS)).all()
    assert Aesthetic(folder, predictor.parent)(images, PROMPTS).shape == (3,)


def test_the_published_width_is_768() -> None:
    assert [tuple(each.shape) for each in aesthetic.head(768).parameters()][::2] == [
        (1024, 768),
        (128, 1024),
        (64, 128),
        (16, 64),
        (1, 16),
    ]


def test_rewards_of_one_model_share_it_and_embed_a_batch_once(folder: Path, predictor: Path) -> None:
    images, _ = pictures()
    rewards = {"clipscore": ClipScore(folder), "aesthetic": Aesthetic(folder, predictor)}
    assert rewards["clipscore"].clip is rewards["aesthetic"].clip
    alone = [reward(images.clone(), PROMPTS) for reward in rewards.values()]
    calls = count_calls(rewards["clipscore"])
    np.testing.assert_array_equal(base.score(rewards, images, PROMPTS), alone)
    assert calls == [3]
    images.mul_(0.5)  # the same tensor, other pictures
    other = base.score(rewards, images, PROMPTS)
    assert calls == [3, 3]
    assert (other != alone).all()
    with torch.inference_mode():
        rewards["clipscore"](images.clone(), PROMPTS)
    assert calls == [3, 3, 3]


def test_other_preprocessing_or_settings_are_not_mixed_up(folder: Path) -> None:
    images, _ = pictures()
    plain, nft = ClipScore(folder), ClipScore(folder, preprocess="nft")
    assert plain.clip is nft.clip
    first = plain(images, PROMPTS)
    assert (nft(images, PROMPTS) != first).all()
    np.testing.assert_array_equal(plain(images, PROMPTS), first)
    assert ClipScore(folder, dtype="bfloat16").clip is not plain.clip
    again = plain.clip
    assert ClipScore(folder).clip is again


def test_batches_follow_the_setting_and_change_nothing(folder: Path) -> None:
    images, _ = pictures(count=5)
    prompts = [*PROMPTS, "a cat", "a dog"]
    whole, parts = ClipScore(folder), ClipScore(folder, batch_size=2)
    calls = count_calls(whole)
    np.testing.assert_allclose(whole(images, prompts), parts(images.clone(), prompts), atol=tolerance(TERMS), rtol=0)
    assert calls == [5, 2, 2, 1]
    with pytest.raises(RecastError, match="aesthetic's batch_size must be at least 1, not 0"):
        Aesthetic(batch_size=0)


def test_an_offloaded_model_leaves_the_device_between_scorings(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, _ = pictures()
    reward = ClipScore(folder, offload=True)
    moves: list[str] = []
    move = reward.clip.model.to
    monkeypatch.setattr(reward.clip.model, "to", lambda *where: moves.append(str(where[0])) or move(*where))
    reward.clip.device = torch.device("cpu", 0)  # stands for a GPU
    assert (reward(images, PROMPTS) == ClipScore(folder)(images, PROMPTS)).all()
    assert moves == ["cpu:0", "cpu"] * 2  # once for the images, once for the prompts
    moves.clear()
    reward(images, PROMPTS)
    assert not moves  # nothing new to embed


def test_files_that_do_not_fit_are_named(folder: Path, predictor: Path, tmp_path: Path) -> None:
    state = torch.load(predictor, weights_only=True)
    cases = {
        "it has no tensor 7.bias": {name: value for name, value in state.items() if name != "layers.7.bias"},
        "it has a tensor 9.bias, which this model does not have": state | {"layers.9.bias": torch.zeros(1)},
        r"its tensor 0.weight has the shape \(1024, 25\), not \(1024, 24\)": state
        | {"layers.0.weight": torch.zeros(1024, 25)},
    }
    for number, (words, content) in enumerate(cases.items()):
        path = tmp_path / f"{number}.pth"
        torch.save(content, path)
        with pytest.raises(RecastError, match=f"no aesthetic predictor in '.*{number}.pth': .*{words}"):
            Aesthetic(folder, path)
    with pytest.raises(RecastError, match="the file .*nowhere.pth does not exist"):
        Aesthetic(folder, tmp_path / "nowhere.pth")
    for number, content in enumerate((predictor.read_bytes()[:1000], b"", b"<html>not found</html>", b"version https")):
        (tmp_path / f"bad{number}.pth").write_bytes(content)
        with pytest.raises(
            RecastError, match=r"bad\d.pth'.*it is not a file of plain tensors written by torch, or it is truncated"
        ):
            Aesthetic(folder, tmp_path / f"bad{number}.pth")


class Evil:
    """Runs code when it is unpickled the careless way."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (print, ("ran",))


def test_a_pickle_that_would_run_code_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"layers.0.weight": Evil()}, tmp_path / "evil.pth")
    with pytest.raises(RecastError, match="no aesthetic predictor in"):
        Aesthetic(folder, tmp_path / "evil.pth")
    assert "ran" not in capsys.readouterr().out
