"""OCR for real, on rendered text; the formula by hand; PaddleOCR's interface with a stand-in."""

import sys
import threading
import types

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont
from rapidfuzz.distance import Levenshtein
from torch.nn import functional

from recast.errors import RecastError
from recast.rewards import ocr
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


def test_the_engine_is_asked_for_speed_and_all_text(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = []
    engine = types.SimpleNamespace(RapidOCR=lambda params: asked.append(params))
    monkeypatch.setitem(sys.modules, "rapidocr", engine)
    OCR()
    assert asked == [
        {
            "Global.use_cls": False,
            "Global.text_score": 0.0,
            "Global.log_level": "critical",
            "Det.limit_side_len": 64,
            "Det.limit_type": "min",
            "EngineConfig.onnxruntime.intra_op_num_threads": 1,
        }
    ]


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


def test_colours_keep_their_order() -> None:
    """The engines expect blue first: a page of pure red must arrive as (0, 0, 255)."""
    reward, seen = OCR(threads=1), []
    reward._local.read = lambda picture: seen.append(picture[0, 0].tolist()) or "x"
    reward(torch.tensor([1.0, 0, 0]).view(1, 3, 1, 1).expand(1, 3, 8, 8), ['"x"'])
    assert seen == [[0, 0, 255]]


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        ('a "Big Sale" sign and "more"', "bigsale"),
        ("curly “Hot Tea” quotes", "hottea"),
        ("it's plain, 'single' quotes", None),
        ('an empty "" pair', None),
        ('white "  \t " space', None),
        ('one " only', None),
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


def test_paddleocr_is_asked_as_version_3_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its models need a network: a stand-in with its interface plays it here."""
    made: list[dict[str, object]] = []

    class PaddleOCR:
        def __init__(self, **options: object) -> None:
            made.append(options)

        def predict(self, picture: np.ndarray) -> list[dict[str, list[str]]]:
            assert picture.dtype == np.uint8
            assert picture.shape == (16, 16, 3)
            return [{"rec_texts": ["He", "llo"]}]

    monkeypatch.setitem(sys.modules, "paddleocr", types.SimpleNamespace(PaddleOCR=PaddleOCR))
    assert OCR(engine="paddleocr", threads=1)(torch.ones(1, 3, 16, 16), ['"hello!"']).tolist() == [1 - 1 / 6]
    assert made == [
        {
            "lang": "en",
            "use_doc_orientation_classify": False,
            "use_doc_unwarping": False,
            "use_textline_orientation": False,
        }
    ]


def test_what_is_missing_or_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecastError, match="ocr's engine must be rapidocr or paddleocr, not 'tesseract'"):
        OCR(engine="tesseract")  # type: ignore[arg-type]
    with pytest.raises(RecastError, match="ocr's threads must be at least 1, not 0"):
        OCR(threads=0)
    monkeypatch.setitem(sys.modules, "paddleocr", None)
    with pytest.raises(RecastError, match="paddleocr is not installed .*: pip install paddleocr paddlepaddle"):
        OCR(engine="paddleocr")
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    with pytest.raises(RecastError, match=r"ocr needs rapidocr .*: pip install 'recast-diffusion\[rewards\]'"):
        OCR()


def test_an_engine_that_fails_is_an_error_and_not_a_zero() -> None:
    reward = OCR(threads=2)

    def broken() -> object:
        raise RuntimeError(f"no engine in {threading.current_thread().name}")

    reward._make = broken  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="no engine"):
        reward(torch.ones(2, 3, 16, 16), ['"a"', '"b"'])
