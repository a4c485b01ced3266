"""`recast rewards list` and `check`: what is missing, and rewards that work, are broken, or constant."""

import hashlib
import json
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from recast._version import __version__
from recast.cli import app
from recast.errors import RecastError
from recast.rewards import NAMES, base, catalog, check, checkpoints, inventory
from recast.rewards.ocr import OCR

ROOT = Path(__file__).parents[2]


def call(*words: object) -> Any:
    return CliRunner().invoke(app, ["rewards", *map(str, words)], env={"COLUMNS": "200", "HF_HUB_OFFLINE": "1"})


class Matcher:
    """Knows the pictures' captions; `sign` turns its order around, `spread` flattens it."""

    def __init__(self, sign: float = 1.0, spread: float = 1.0) -> None:
        self.scale = sign * spread
        self.pictures = {name: check.draw(name) for name in check.CAPTIONS}

    def __call__(self, images: torch.Tensor, prompts: list[str], metadata: object = None) -> np.ndarray:
        """1 where the picture is the caption's."""
        right = [
            any(
                check.CAPTIONS[name] == prompt and torch.equal(picture, image)
                for name, picture in self.pictures.items()
            )
            for image, prompt in zip(images, prompts, strict=True)
        ]
        return self.scale * np.array(right, float)


def nowhere(images: torch.Tensor, prompts: list[str], metadata: object = None) -> np.ndarray:
    return np.full(len(images), np.nan)


def constant(images: torch.Tensor, prompts: list[str], metadata: object = None) -> np.ndarray:
    return np.full(len(images), 0.5)


def random(images: torch.Tensor, prompts: list[str], metadata: object = None) -> np.ndarray:
    return np.random.default_rng().random(len(images))


def ranked(images: torch.Tensor, prompts: list[str], metadata: object = None) -> np.ndarray:
    return images.mean((1, 2, 3)).argsort().numpy().astype(float)


def spoiling(images: torch.Tensor, prompts: list[str], metadata: object = None) -> np.ndarray:
    scores = images.mean((1, 2, 3)).numpy().copy()
    images.mul_(0.99).clamp_(0, 1)
    return scores


def huge(images: torch.Tensor, prompts: list[str], metadata: object = None) -> np.ndarray:
    return images.mean((1, 2, 3)).double().numpy() * 1e9


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("random", "gives other scores to the same images in a second call"),
        ("ranked", "gives an image another score alone than in a batch"),
        ("spoiling", "changes the images it is given"),
        ("huge", "returns numbers up to .*e\\+08"),
    ],
)
def test_habits_of_a_reward_are_said(name: str, said: str, recwarn: pytest.WarningsRecorder) -> None:
    with pytest.warns(UserWarning, match=said) as found:
        check.run(f"test_check:{name}", {})
    assert len(found) == 1
    check.run("test_check:Bright", {})
    assert not recwarn.list


class Bright:
    """A reward without such habits."""

    def __call__(self, images: torch.Tensor, prompts: list[str], metadata: object = None) -> np.ndarray:
        return images.double().mean((1, 2, 3)).numpy()


def test_every_name_is_listed_with_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(catalog.ENTRIES) == list(NAMES)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    result = call("list")
    assert result.exit_code == 0
    for name in NAMES:
        assert name in result.output
    lines = result.output.splitlines()
    assert "hf download xswu/HPSv2 --include 'HPS_v2.1_compressed.pt'" in lines
    shared = lines[lines.index("# for clipscore, aesthetic, geneval") + 1]
    assert shared.startswith("hf download openai/clip-vit-large-patch14 --include")
    assert any(line.startswith("curl ") and catalog.AESTHETIC_FILE in line for line in lines)


def test_the_published_names_are_spelled_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """REWARDS' names by hand: a slip would show on a user's machine only."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    small = "--include '*.json' --include '*.txt'"
    clip = f"hf download openai/clip-vit-large-patch14 {small} --include 'model.safetensors'"
    processor = f"hf download laion/CLIP-ViT-H-14-laion2B-s32B-b79K {small}"
    detector = "mask2former_swin-s-p4-w7-224_lsj_8x2_50e_coco_20220504_001756"
    expected = {
        "clipscore": [clip],
        "hpsv2": ["hf download xswu/HPSv2 --include 'HPS_v2.1_compressed.pt'", processor],
        "pickscore": [
            "hf download yuvalkirstain/PickScore_v1 --include 'config.json' --include 'model.safetensors'",
            processor,
        ],
        "imagereward": [
            "hf download THUDM/ImageReward --include 'ImageReward.pt'",
            "hf download google-bert/bert-base-uncased --include 'config.json' --include 'tokenizer*' "
            "--include 'vocab.txt'",
        ],
        "geneval": [
            f"curl --create-dirs -L -o '{tmp_path}/hub/checkpoints/{detector}-743b7d99.pth' 'https://download.openmmlab.com/"
            "mmdetection/v2.0/mask2former/mask2former_swin-s-p4-w7-224_lsj_8x2_50e_coco/"
            f"{detector}-743b7d99.pth'",
            clip,
        ],
        "hpsv3": [
            "hf download MizzenAI/HPSv3 --include 'HPSv3.safetensors'",
            "hf download Qwen/Qwen2-VL-7B-Instruct --include 'config.json' --include 'tokenizer*' "
            "--include 'vocab.json' --include 'merges.txt'",
        ],
        "ocr": [],
        "unifiedreward": [],
    }
    assert {name: catalog.ENTRIES[name].missing() for name in expected} == expected
    assert "CodeGoat24/UnifiedReward-2.0-qwen3vl-8b" in catalog.ENTRIES["unifiedreward"].remark
    packages = {name: entry.packages for name, entry in catalog.ENTRIES.items()}
    assert "ftfy" in packages["hpsv2"]
    assert "rapidocr" in packages["ocr"]


def test_what_is_there_is_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    address = catalog.Address(catalog.AESTHETIC, catalog.AESTHETIC_FILE)
    assert address.missing()
    path = tmp_path / "hub/checkpoints" / catalog.AESTHETIC_FILE
    path.parent.mkdir(parents=True)
    path.touch()
    assert address.missing() is None

    assert checkpoints.cached(catalog.AESTHETIC) == path
    assert checkpoints.find(catalog.AESTHETIC, "") == path

    files = catalog.Files("owner/name", ("*.bin",), "model.bin")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: str(path))
    assert files.missing() is None
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    assert files.missing() == "hf download owner/name --include '*.bin'"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert catalog.ENTRIES["ocr"].missing() == ["pip install 'recast-diffusion[rewards]'"]


@pytest.mark.parametrize("name", ["ocr", "alignment", "census", "jpeg"])
def test_rewards_that_are_whole_pass(name: str) -> None:
    result = call("check", name)
    assert result.exit_code == 0, result.output
    assert f"{name} passed" in result.output


@pytest.mark.parametrize("name", ["composition", "detail", "background"])
def test_the_rest_of_the_shapes_world_passes(name: str) -> None:
    assert all(outcome.passed for outcome in check.run(name, {}))


def test_costs_are_those_that_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """`recast rewards list` shows the benchmark's last result, and of every reward but the server."""
    results = json.loads((ROOT / "benchmarks/results/rewards.json").read_text())["models"]
    known = catalog.measured()
    assert {*known, "unifiedreward"} == {*NAMES}
    keys = ("parameters", "memory", "images_per_second")
    assert {name: tuple(row.get(key) for key in keys) for name, row in results.items()} == {
        name: (each.parameters, each.memory, each.images_per_second) for name, each in known.items()
    }
    assert 15e9 < (known["hpsv3"].parameters or 0) < 17e9  # 7.75 billion in bfloat16
    assert 1.6e9 < (known["clipscore"].parameters or 0) < 1.8e9  # 428 million in float32
    costs = {"ocr": catalog.Measured(31_000_000, 760_000_000, 3.14159), "hpsv3": catalog.Measured(15_500_000_000)}
    monkeypatch.setattr(catalog, "measured", lambda: costs)
    output = call("list").output
    rows = {line.split()[1]: line.split("│") for line in output.splitlines() if line.startswith("│")}
    assert [cell.strip() for cell in rows["ocr"][4:6]] == ["0.0 / 0.8", "3.1"]
    assert [cell.strip() for cell in rows["hpsv3"][4:6]] == ["15.5 / ?", "?"]
    assert [cell.strip() for cell in rows["unifiedreward"][4:6]] == ["a server", "-"]
    assert "with random parameters" in output
    assert "python benchmarks/rewards.py" in output


class Files:
    """A reward of files: one that an option names, and a folder."""

    def __init__(self, checkpoint: str | Path = "owner/name", tokens: str | Path = "", mode: str = "auto") -> None:
        self.value = float(Path(checkpoint).read_text())

    @staticmethod
    def versions(checkpoint: str | Path = "", tokens: str | Path = "", mode: str = "auto") -> dict[str, str]:
        """One more thing that decides the scores."""
        return {"table": f"{mode} 7"}

    def __call__(self, images: torch.Tensor, prompts: list[str], metadata: object = None) -> np.ndarray:
        return self.value * images.double().mean((1, 2, 3)).numpy()


def test_a_check_names_what_decides_the_scores(tmp_path: Path) -> None:
    file, folder = tmp_path / "model.pt", tmp_path / "tokens"
    file.write_text("2.0")
    folder.mkdir()
    (folder / "vocab.txt").write_text("a\nb\n")
    (folder / "notes.md").write_text("no part of it")
    result = call("check", "test_check:Files", f"checkpoint={file}", f"tokens={folder}", "mode=fast")
    assert result.exit_code == 0, result.output
    rows = dict(line.strip("│ ").split("│") for line in result.output.splitlines() if line.count("│") == 3)
    facts = {key.strip(): value.strip() for key, value in rows.items()}
    assert facts["recast"] == __version__
    assert facts["torch"] == metadata.version("torch")
    assert facts["table"] == "fast 7"
    digest = hashlib.sha256(b"2.0").hexdigest()[:12]
    assert facts["checkpoint"] == f"model.pt, 0.0 MB, SHA-256 {digest}"
    assert facts["tokens"].startswith("vocab.txt, 0.0 MB, SHA-256 ")
    assert "mode" not in facts


def test_packages_are_those_that_a_reward_computes_with() -> None:
    assert {"rapidocr", "onnxruntime", "opencv-python-headless", "numpy"} <= {*inventory.packages("ocr", {})}
    assert "rapidocr" not in inventory.packages("ocr", {"engine": "paddleocr"})
    assert {"torch", "transformers", "tokenizers", "ftfy", "pillow"} <= {*inventory.packages("hpsv2", {})}
    assert inventory.packages("jpeg", {})["pillow"] == metadata.version("pillow")


def test_cached_files_are_found_and_their_names_are_their_hashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the cache of the hub, where a file is a link to a blob that is called by its SHA-256."""
    blob = tmp_path / ("5" * 64)
    blob.write_text("never read")
    link = tmp_path / "model.safetensors"
    link.symlink_to(blob)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: str(link))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    assert list(inventory.files("aesthetic", {})) == [("model", link)]
    assert inventory.digest(link) == "5" * 12
    head = tmp_path / "hub/checkpoints" / catalog.AESTHETIC_FILE
    head.parent.mkdir(parents=True)
    head.write_bytes(b"head")
    assert list(inventory.files("aesthetic", {"model": "/nowhere"})) == [("checkpoint", head)]
    assert list(inventory.files("aesthetic", {"model": "long " * 99, "checkpoint": str(head)})) == [
        ("checkpoint", head)
    ]
    monkeypatch.setattr(inventory, "_LARGE", 3)
    assert inventory.digest(head) == "not computed"


def test_a_matched_caption_must_win(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(**options: float) -> Any:
        monkeypatch.setitem(NAMES, "clipscore", "test_check:Matcher")
        return call("check", "clipscore", *(f"{key}={value}" for key, value in options.items()))

    assert answer().exit_code == 0
    assert "passed 6 of 6" in answer().output
    assert "failed 6 of 6 trials: wrong checkpoint, or a broken installation" in answer(sign=-1).output
    assert answer(sign=-1).exit_code == 2
    assert "it gives every image the same score" in answer(spread=0).output
    assert answer(spread=0).exit_code == 2


def test_a_misreading_ocr_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OCR, "read", lambda self, images: ["HELLO"] * len(images))
    result = call("check", "ocr")
    assert result.exit_code == 2
    assert "failed 2 of 2 trials" in result.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["test_check:constant"], "failed 1 of 1 trials: it gives every image the same score"),
        (["test_check:nowhere"], "applies to none of the test pictures"),
        (["clipscor"], "unknown reward 'clipscor'"),
        (["jpeg", "quality"], "key=value"),
        (["jpeg", "quality=abc"], "the reward 'jpeg' has quality = 'abc': input should be a valid integer"),
        (["test_check_broken:f"], "the reward 'test_check_broken:f' cannot be imported (SyntaxError"),
        (["test_check_nowhere:f"], "is its folder in PYTHONPATH?"),
        (["jpeg", "quality=400"], "jpeg's quality must lie between 1 and 95, not 400"),
        (["aesthetic", "model=/nowhere"], "no CLIP model in '/nowhere'"),
        (["hpsv2", "weights=model.pt"], "the reward 'hpsv2': the option weights is called checkpoint now"),
    ],
)
def test_what_fails_says_so_in_a_sentence(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_check_broken.py").write_text("def f(:\n")
    monkeypatch.chdir(tmp_path)  # a module in the working folder is found
    result = call("check", *words)
    assert result.exit_code == 2
    assert said in result.output
    assert "Traceback" not in result.output


def test_a_missing_checkpoint_comes_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object) -> str:
        raise OSError("not in the cache")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", absent)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    result = call("check", "hpsv2")
    assert result.exit_code == 2
    assert "no HPS v2.1 checkpoint in 'xswu/HPSv2'" in result.output
    assert "get the missing parts with: hf download xswu/HPSv2" in result.output


def test_pictures_are_what_their_captions_say() -> None:
    circle, meadow = check.draw("circle"), check.draw("meadow")
    assert circle[:, 256, 256].tolist() == pytest.approx([220 / 255, 30 / 255, 30 / 255])
    assert circle[:, 5, 5].tolist() == [1, 1, 1]
    assert meadow[2, 5, 5] > meadow[1, 5, 5]
    assert meadow[1, 500, 5] > meadow[2, 500, 5]
    assert OCR(threads=1).read(torch.stack([check.draw("sign"), check.draw("text")])) == ["STOP", "HELLO"]
    for name, better, worse in (("geneval", "sign", "meadow"), ("aesthetic", "meadow", "noise")):
        (trial,) = check.trials(name)
        assert (trial.better.picture, trial.worse.picture) == (better, worse)
    assert check.trials("geneval")[0].better.metadata["include"] == [{"class": "stop sign", "count": 1}]
    for name in ("clipscore", "hpsv2", "pickscore", "imagereward", "hpsv3", "unifiedreward"):
        assert len(check.trials(name)) == 6
    assert check.trials("my.own:Reward") == []


def test_curves_get_scores_that_are_not_negative() -> None:
    scores = np.array([-1.0, 0.0, 0.5, np.nan])
    values, counts = base.positive("a", constant, scores)
    np.testing.assert_array_equal(values, [0, 0, 0.5, np.nan])
    assert counts.tolist() == [1, 3]
    jpeg = base.load("jpeg")
    values, counts = base.positive("jpeg", jpeg, np.array([-9.0, -1.0]))
    np.testing.assert_allclose(values, [0.1, 0.5])
    assert counts.tolist() == [0, 2]


class Broken:
    """Its map to positive scores fails, or returns another shape."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def __call__(self, images: torch.Tensor, prompts: list[str], metadata: object = None) -> np.ndarray:
        return np.zeros(len(images))

    def positive(self, scores: np.ndarray) -> np.ndarray:
        """Nothing good."""
        return scores / 0 if not self.fails else scores[1 / 0]  # type: ignore[index]


def test_a_map_to_positive_scores_that_fails_is_named() -> None:
    with pytest.raises(RecastError, match="'x' failed to make its scores positive: ZeroDivisionError"):
        base.positive("x", Broken(True), np.zeros(3))
    shorter = Broken(False)
    shorter.positive = lambda scores: scores[1:]  # type: ignore[method-assign]
    with pytest.raises(RecastError, match=r"'x' mapped scores of the shape \(3,\) to the shape \(2,\)"):
        base.positive("x", shorter, np.zeros(3))
