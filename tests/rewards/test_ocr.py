"""OCR for real, on rendered text; the formula by hand; PaddleOCR's interface with a stand-in."""

import sys
import threading
import types
from importlib import metadata
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import rapidocr
import torch
from PIL import Image, ImageDraw, ImageFont
from rapidfuzz.distance import Levenshtein
from torch.nn import functional

from recast.errors import RecastError
from recast.rewards import base, ocr
from recast.rewards.ocr import OCR


def page(lines: str, side: int, share: float = 0.17) -> torch.Tensor:
    """Black text on white, (3, side, side)."""
    image = Image.new("RGB", (side, side), "white")
    font = ImageFont.load_default(size=side * share)
    ImageDraw.Draw(image).multiline_text((side / 2, side / 2), lines, "black", font, "mm", align="center")
    return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255


@pytest.fixture(scope="module")
def reward() -> OCR:
    return OCR(threads=2)


@pytest.mark.parametrize("side", [512, 128, 64])
def test_rendered_text_is_read(reward: OCR, side: int) -> None:
    """Exact, one letter wrong, text around it, nothing: at the sizes of SD3 and of small worlds."""
    prompt = 'a sign that says "COFFEE"'
    images = torch.stack([page(text, side) for text in ("COFFEE", "COFFEL", "HOT\nCOFFEE\nNOW", "")])
    scores = reward(images, [prompt] * 4)
    np.testing.assert_allclose(scores, [1, 5 / 6, 1, 0], atol=1e-9)


def test_half_legible_text_earns_its_share(reward: OCR) -> None:
    """What the engine is unsure of counts: training must be able to tell it from nothing."""
    blurred = functional.avg_pool2d(page("Garden", 128)[None], 5, 1, 2)
    noisy = blurred + 0.15 * torch.randn(blurred.shape, generator=torch.Generator().manual_seed(1))
    score = reward(noisy.clamp(0, 1), ['"Garden"'])[0]
    assert 0.3 < score <= 1


class Rapid:
    """The interface of rapidocr, without its models; `lacks` are the values that its enumerations do not have."""

    def __init__(self, lacks: tuple[str, ...] = (), fails: bool = False) -> None:
        self.asked: list[dict[str, object]] = []
        self.calls: list[dict[str, object]] = []
        self.fails, self.lacks = fails, lacks
        self.OCRVersion = self.ModelType = self.LangDet = self.LangRec = self.known

    def known(self, value: str) -> str:
        if value in self.lacks:
            raise ValueError(f"{value!r} is not known")
        return value

    def RapidOCR(self, params: dict[str, object]) -> object:  # noqa: N802 - rapidocr's name
        self.asked.append(params)

        def read(picture: np.ndarray, **parts: object) -> object:
            if self.fails:
                raise OSError("Failed to download https://models")
            self.calls.append(parts)
            return types.SimpleNamespace(txts=("a", "B"))

        return read


def test_the_engine_is_asked_for_speed_all_text_and_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that both models are loaded at once: rapidocr 3.10 alone would load them at the first image with text."""
    module = Rapid()
    monkeypatch.setitem(sys.modules, "rapidocr", module)
    reward = OCR(threads=1)
    assert module.asked == [
        {
            "Global.use_cls": False,
            "Global.text_score": 0.0,
            "Global.log_level": "critical",
            "Det.limit_side_len": 64,
            "Det.limit_type": "min",
            "Det.ocr_version": "PP-OCRv6",
            "Det.model_type": "small",
            "Det.lang_type": "en",
            "Rec.ocr_version": "PP-OCRv6",
            "Rec.model_type": "small",
            "Rec.lang_type": "en",
            "EngineConfig.onnxruntime.intra_op_num_threads": 1,
        }
    ]
    parts = [(call["use_det"], call["use_rec"]) for call in module.calls]
    assert parts == [(True, False), (False, True)]
    assert reward.read(torch.ones(1, 3, 8, 8)) == ["aB"]
    assert module.calls[-1] == {"use_det": True, "use_cls": False, "use_rec": True}  # rapidocr keeps the last values


@pytest.mark.parametrize(
    ("version", "language", "asked", "models"),
    [
        ("PP-OCRv4", "en", ("mobile", "en", "en"), "en_PP-OCRv3_det, en_PP-OCRv4_rec"),
        ("PP-OCRv4", "ch", ("mobile", "ch", "ch"), "ch_PP-OCRv4_det, ch_PP-OCRv4_rec"),
        ("PP-OCRv5", "en", ("mobile", "ch", "en"), "ch_PP-OCRv5_det, en_PP-OCRv5_rec"),
        ("PP-OCRv6", "ch", ("small", "ch", "ch"), "PP-OCRv6_det_small, PP-OCRv6_rec_small"),
    ],
)
def test_the_models_are_those_that_are_named(
    version: ocr._Version, language: ocr._Language, asked: tuple[str, ...], models: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names and routes by default_models.yaml of rapidocr 3.10.0."""
    module = Rapid()
    monkeypatch.setitem(sys.modules, "rapidocr", module)
    OCR(version=version, language=language, threads=1)
    settings = module.asked[0]
    assert settings["Det.ocr_version"] == settings["Rec.ocr_version"] == version
    assert settings["Det.model_type"] == settings["Rec.model_type"] == asked[0]
    assert (settings["Det.lang_type"], settings["Rec.lang_type"]) == asked[1:]
    assert OCR.versions(version=version, language=language)["models"] == models


def test_the_installed_package_has_the_default_models() -> None:
    """Not downloaded: the wheel of every admitted release contains them."""
    folder = Path(rapidocr.__file__).parent / "models"
    for name in OCR.versions()["models"].split(", "):
        assert (folder / f"{name}.onnx").is_file()
    assert OCR.versions() == base.versions("ocr", {"threads": 2})
    assert OCR.versions()["engine"] == f"rapidocr {metadata.version('rapidocr')}"


@pytest.mark.parametrize("module", [Rapid(lacks=("PP-OCRv6",)), Rapid(fails=True)])
def test_models_that_are_missing_are_named_at_load_time(module: Rapid, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier rapidocr does not know PP-OCRv6, and without a network none has more than its wheel contains."""
    monkeypatch.setitem(sys.modules, "rapidocr", module)
    monkeypatch.setattr(metadata, "version", lambda package: "3.8.4")
    said = r"rapidocr 3.8.4 cannot load PP-OCRv6_det_small and PP-OCRv6_rec_small \(.*\): .* 'rapidocr>=3.9'"
    with pytest.raises(RecastError, match=said):
        OCR()


def test_several_targets_and_spaces(reward: OCR) -> None:
    images = torch.stack([page("Open 24", 128), page("open24", 128), page("Open\n24", 128)])
    scores = reward(images, ['the words "Open 24"', 'the words " o P e N 2 4 "', "no words asked for"])
    assert scores[:2].tolist() == [1, 1]
    assert np.isnan(scores[2])
    assert "Open" in reward.read(images)[2]


def test_threads_and_batches_change_nothing(reward: OCR) -> None:
    words = ["RED", "BLUE", "GREEN", "BLACK"]
    images = torch.stack([page(word, 64) for word in words])
    prompts = [f'"{word}x"' for word in words]
    whole = reward(images, prompts)
    np.testing.assert_allclose(whole, [3 / 4, 4 / 5, 5 / 6, 5 / 6])
    alone = OCR(threads=1)
    assert [alone(images[k : k + 1], prompts[k : k + 1])[0] for k in range(4)] == whole.tolist()
    pil = [Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy()) for image in images]
    assert (alone(pil, prompts) == whole).all()


def test_colors_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """rapidocr expects blue first: a page of pure red must arrive as (0, 0, 255)."""
    module, seen = Rapid(), []
    monkeypatch.setitem(sys.modules, "rapidocr", module)
    engine = types.SimpleNamespace(txts=("x",))
    module.RapidOCR = lambda params: lambda picture, **_: seen.append(picture[0, 0].tolist()) or engine  # type: ignore[method-assign]
    reward = OCR(threads=1)
    reward(torch.tensor([1.0, 0, 0]).view(1, 3, 1, 1).expand(1, 3, 8, 8), ['"x"'])
    assert seen[-1] == [0, 0, 255]


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        ('a "Big Sale" sign and "more"', "bigsale"),
        ("curly “Hot Tea” quotes", "hottea"),
        ("it's plain, 'single' quotes", None),
        ('an empty "" pair', None),
        ('white "  \t " space', None),
        ('an unterminated "Open Late', "openlate"),
        ('an unterminated "Open\nuntil late', "open"),
        ('a pair "over\ntwo lines"', "overtwolines"),
        ("an unterminated “Hot Tea", "hottea"),
        ('nothing after the "', None),
        ('first “Curly”, then "Straight"', "straight"),
        ('first “Curly”, then an open "Straight', "straight"),
        ('“Curly” and nothing after the "', "curly"),
        ('"Ünïcode 1½"', "ünïcode1½"),
    ],
)
def test_the_first_quoted_text_is_the_target(prompt: str, wanted: str | None) -> None:
    assert ocr.target(prompt) == wanted


def by_hand(read: str, wanted: str) -> float:
    """The paper's formula, with a distance table of its own."""
    table = np.zeros((len(read) + 1, len(wanted) + 1), int)
    table[:, 0], table[0] = np.arange(len(read) + 1), np.arange(len(wanted) + 1)
    for i, a in enumerate(read, 1):
        for j, b in enumerate(wanted, 1):
            table[i, j] = min(table[i - 1, j] + 1, table[i, j - 1] + 1, table[i - 1, j - 1] + (a != b))
    assert table[-1, -1] == Levenshtein.distance(read, wanted)
    distance = 0 if wanted in read else min(int(table[-1, -1]), len(wanted))
    return 1 - distance / len(wanted)


@pytest.mark.parametrize(
    ("read", "wanted", "score"),
    [
        ("hello", "hello", 1),
        ("hallo", "hello", 0.8),
        ("sayhellonow", "hello", 1),
        ("sayhallonow", "hello", 0),
        ("", "hello", 0),
        ("hell", "hello", 0.8),
        ("xyzxyzxyz", "abc", 0),
    ],
)
def test_the_formula(read: str, wanted: str, score: float) -> None:
    assert ocr.similarity(read, wanted) == pytest.approx(score) == pytest.approx(by_hand(read, wanted))


def play_paddle(kind: type, release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "paddleocr", types.SimpleNamespace(PaddleOCR=kind))
    monkeypatch.setattr(metadata, "version", lambda package: {"paddleocr": release}[package])


class Paddle:
    """PaddleOCR's models need a network: stand-ins with its interface play it here."""

    made: ClassVar[list[dict[str, object]]]
    seen: ClassVar[list[list[int]]]

    def __init__(self, **options: object) -> None:
        self.made.append(options)


class Paddle2(Paddle):
    """`PaddleOCR` of 2.9.1: its `ocr` was run with PP-OCRv4 in ONNX, and returned what this one returns."""

    def ocr(self, img: np.ndarray, det: bool = True, rec: bool = True, cls: bool = True) -> list[object]:
        assert (img.dtype, img.shape, det, rec, cls) == (np.uint8, (16, 16, 3), True, True, False)
        self.seen.append(img[0, 0].tolist())
        box = [[1.0, 2.0]] * 4
        return [None] if img[0, 0, 1] else [[[box, ("He", 0.99)], [box, ("llo", 0.6)], [box, ("x", 0.0)]]]


class Paddle3(Paddle):
    """`PaddleOCR` of 3.7.0, where `ocr` takes no `cls` and calls `predict`."""

    def predict(self, input: np.ndarray, *, return_word_box: bool | None = None) -> list[dict[str, list[str]]]:
        self.seen.append(input[0, 0].tolist())
        return [{"rec_texts": [] if input[0, 0, 1] else ["He", "llo"]}]

    def ocr(self, img: np.ndarray, **kwargs: object) -> list[dict[str, list[str]]]:
        return self.predict(img, **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "release", "red"), [(Paddle2, "2.9.1", [255, 0, 0]), (Paddle3, "3.7.0", [0, 0, 255])])
def test_paddleocr_of_both_interfaces_is_asked_as_it_wants(
    kind: type[Paddle],
    release: str,
    red: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Version 2 receives RGB as from the published scorer, version 3 OpenCV's order; both say what they are."""
    kind.made, kind.seen = [], []
    play_paddle(kind, release, monkeypatch)
    with pytest.warns(UserWarning, match=f"^ocr reads with paddleocr {release}, PP-OCRv4 en$"):
        reward = OCR(engine="paddleocr", threads=1)
    pages = torch.zeros(2, 3, 16, 16)
    pages[0, 0], pages[1] = 1, 1
    assert reward(pages, ['"hello!"'] * 2).tolist() == [1 - 1 / 6, 0]
    assert kind.seen == [red, [255] * 3]
    options = {
        "2": {"use_angle_cls": False, "use_gpu": False, "show_log": False},
        "3": {"use_doc_orientation_classify": False, "use_doc_unwarping": False, "use_textline_orientation": False},
    }
    assert kind.made == [{"lang": "en", "ocr_version": "PP-OCRv4", **options[release[0]]}]
    assert OCR.versions(engine="paddleocr") == {"engine": f"paddleocr {release}", "models": "PP-OCRv4 en"}


def test_what_is_missing_or_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecastError, match="ocr's engine must be rapidocr or paddleocr, not 'tesseract'"):
        OCR(engine="tesseract")  # type: ignore[arg-type]
    with pytest.raises(RecastError, match="ocr's threads must be at least 1, not 0"):
        OCR(threads=0)
    monkeypatch.setitem(sys.modules, "paddleocr", None)
    with pytest.raises(RecastError, match="needs paddleocr, .* not installed .*: pip install paddleocr==2.9.1"):
        OCR(engine="paddleocr")
    with pytest.raises(RecastError, match="needs paddleocr, .* not installed .*: pip install paddleocr==2.9.1"):
        OCR.versions(engine="paddleocr")
    with pytest.raises(RecastError, match="ocr's version must be one of PP-OCRv4, PP-OCRv5, PP-OCRv6, not 'PP-OCRv3'"):
        OCR(version="PP-OCRv3")  # type: ignore[arg-type]
    with pytest.raises(RecastError, match="ocr's language must be en or ch, not 'fr'"):
        OCR.versions(language="fr")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    with pytest.raises(RecastError, match=r"ocr needs rapidocr, .*: pip install 'recast-diffusion\[rewards\]'"):
        OCR()


def test_an_engine_that_fails_is_an_error_and_not_a_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rapidocr", Rapid())
    reward = OCR(threads=2)

    def broken() -> object:
        raise RuntimeError(f"no engine in {threading.current_thread().name}")

    reward._make = broken  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="no engine"):
        reward(torch.ones(2, 3, 16, 16), ['"a"', '"b"'])
