"""OCR: how much of the text that a prompt quotes can be read in the image."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from recast import processes
from recast.errors import RecastError
from recast.rewards.base import Images, as_tensor

Engine = Literal["rapidocr", "paddleocr"]
_QUOTED = re.compile(r'"([^"]*)"|“([^”]*)”')
SIDE = 64
"""The detector enlarges images whose shorter side is below this. rapidocr's own 736 is no more accurate on rendered
text of 64 to 512 pixels and 15 times slower at 64."""


def target(prompt: str) -> str | None:
    """The text between the first pair of double quotes, without white space and in lower case; None if there is none.

    >>> target('a sign that says "Open 24 h" and "closed"')
    'open24h'
    """
    found = _QUOTED.search(prompt)
    return None if found is None else _plain(found[1] or found[2] or "") or None


def _plain(text: str) -> str:
    return "".join(text.split()).lower()


def similarity(read: str, wanted: str) -> float:
    """1 − min(Levenshtein, |wanted|) / |wanted|, and 1 wherever `wanted` occurs in what was read."""
    from rapidfuzz.distance import Levenshtein

    if wanted in read:
        return 1.0
    return 1 - min(Levenshtein.distance(read, wanted), len(wanted)) / len(wanted)


class OCR:
    """The paper's OCR reward; NaN for a prompt that quotes nothing.

    `rapidocr` brings PP-OCR's weights with it and reads offline; `paddleocr` (3 or later, installed by the user, who
    lets it download its models) is the engine of the paper. Both read with angle classification off. Images are read
    side by side by `threads` engines, this process's share of the cores unless told.
    """

    def __init__(self, engine: Engine = "rapidocr", threads: int | None = None) -> None:
        if engine not in get_args(Engine):
            raise RecastError(f"ocr's engine is rapidocr or paddleocr, not {engine!r}")
        if threads is not None and threads < 1:
            raise RecastError(f"ocr's threads must be at least 1, not {threads}")
        self._make: Callable[[], Callable[[NDArray[np.uint8]], str]] = _rapid if engine == "rapidocr" else _paddle
        self._local = threading.local()
        self._local.read = self._make()  # a missing package is known at once
        self._threads = threads or processes.cores()
        self._pool: ThreadPoolExecutor | None = None

    def __call__(
        self, images: Images, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]] | None = None
    ) -> NDArray[np.float64]:
        """How much of each prompt's quoted text is in its image."""
        images = as_tensor(images, prompts)
        wanted = [target(prompt) for prompt in prompts]
        asked = [k for k, text in enumerate(wanted) if text is not None]
        texts = self.read(images[asked]) if asked else []
        scores = np.full(len(prompts), np.nan)
        scores[asked] = [similarity(_plain(text), wanted[k] or "") for k, text in zip(asked, texts, strict=True)]
        return scores

    def read(self, images: Images) -> list[str]:
        """All text in each image, as it stands there."""
        pixels = (as_tensor(images, [""] * len(images)) * 255).round().clamp(0, 255).byte()
        # OpenCV's order of colours, which both engines expect of arrays.
        pages = np.ascontiguousarray(pixels.permute(0, 2, 3, 1).cpu().numpy()[..., ::-1])
        if self._threads == 1 or len(pages) == 1:
            return [self._page(page) for page in pages]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads)
        return list(self._pool.map(self._page, pages))

    def _page(self, page: NDArray[np.uint8]) -> str:
        if not hasattr(self._local, "read"):  # engines keep state while they read: one for each thread
            self._local.read = self._make()
        return str(self._local.read(page))


def _rapid() -> Callable[[NDArray[np.uint8]], str]:
    try:
        from rapidocr import RapidOCR
    except ImportError as error:
        raise RecastError(f"ocr needs rapidocr ({error}): pip install 'recast-diffusion[rewards]'") from error
    engine = RapidOCR(
        params={
            "Global.use_cls": False,
            "Global.text_score": 0.0,  # half-legible text is what training must tell from none
            "Global.log_level": "critical",
            "Det.limit_side_len": SIDE,
            "Det.limit_type": "min",
            "EngineConfig.onnxruntime.intra_op_num_threads": 1,
        }
    )
    return lambda page: "".join(getattr(engine(page), "txts", None) or ())


def _paddle() -> Callable[[NDArray[np.uint8]], str]:
    os.environ.setdefault("PADDLE_PDX_DISABLE_MODEL_SOURCE_CHECK", "True")  # else it looks for a network at every start
    try:
        from paddleocr import PaddleOCR
    except ImportError as error:
        raise RecastError(
            f"ocr's engine paddleocr is not installed ({error}): pip install paddleocr paddlepaddle"
        ) from error
    engine = PaddleOCR(
        lang="en",
        use_doc_orientation_classify=False,
        use_doc_unwarping=False,
        use_textline_orientation=False,
    )
    return lambda page: "".join(text for result in engine.predict(page) for text in result["rec_texts"])
