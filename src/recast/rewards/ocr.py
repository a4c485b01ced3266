"""OCR: how much of the text quoted in the prompt can be read in the image."""

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

__all__ = ["OCR", "similarity", "target"]

_Engine = Literal["rapidocr", "paddleocr"]
_QUOTED = re.compile(r'"([^"]*)"|“([^”]*)”')
_SIDE = 64
"""The detector enlarges images whose shorter side is below this. On rendered text of 64 to 512 pixels, rapidocr's
default of 736 is not more accurate, and 15 times slower at 64 pixels."""


def target(prompt: str) -> str | None:
    """The text in the first pair of double quotes, in lower case and without white space; None without such a text.

    >>> target('a sign that says "Open 24 h" and "closed"')
    'open24h'
    """
    found = _QUOTED.search(prompt)
    return None if found is None else _plain(found[1] or found[2] or "") or None


def _plain(text: str) -> str:
    return "".join(text.split()).lower()


def similarity(read: str, wanted: str) -> float:
    """1 − min(Levenshtein, |wanted|) / |wanted|, and 1 if `wanted` occurs in `read`."""
    from rapidfuzz.distance import Levenshtein

    if wanted in read:
        return 1.0
    return 1 - min(Levenshtein.distance(read, wanted), len(wanted)) / len(wanted)


class OCR:
    """The OCR reward of the paper; NaN for a prompt without quoted text.

    `rapidocr` includes the PP-OCR models and works offline; `paddleocr` (3 or later, to be installed separately; it
    downloads its models) is the engine of the paper. Angle classification is off in both. `threads` engines read images
    in parallel, by default as many as this process has cores.
    """

    def __init__(self, engine: _Engine = "rapidocr", threads: int | None = None) -> None:
        if engine not in get_args(_Engine):
            raise RecastError(f"ocr's engine must be rapidocr or paddleocr, not {engine!r}")
        if threads is not None and threads < 1:
            raise RecastError(f"ocr's threads must be at least 1, not {threads}")
        self._make: Callable[[], Callable[[NDArray[np.uint8]], str]] = _rapid if engine == "rapidocr" else _paddle
        self._local = threading.local()
        self._local.read = self._make()  # raises now if the package is missing
        self._threads = threads or processes.cores()
        self._pool: ThreadPoolExecutor | None = None

    def __call__(
        self, images: Images, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]] | None = None
    ) -> NDArray[np.float64]:
        """Similarity of the text in each image to the quoted text of its prompt."""
        images = as_tensor(images, prompts)
        wanted = [target(prompt) for prompt in prompts]
        asked = [k for k, text in enumerate(wanted) if text is not None]
        texts = self.read(images[asked]) if asked else []
        scores = np.full(len(prompts), np.nan)
        scores[asked] = [similarity(_plain(text), wanted[k] or "") for k, text in zip(asked, texts, strict=True)]
        return scores

    def read(self, images: Images) -> list[str]:
        """The text in each image."""
        pixels = (as_tensor(images, [""] * len(images)) * 255).round().clamp(0, 255).byte()
        # OpenCV's order of the color channels, which both engines expect.
        pages = np.ascontiguousarray(pixels.permute(0, 2, 3, 1).cpu().numpy()[..., ::-1])
        if self._threads == 1 or len(pages) == 1:
            return [self._page(page) for page in pages]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads)
        return list(self._pool.map(self._page, pages))

    def _page(self, page: NDArray[np.uint8]) -> str:
        if not hasattr(self._local, "read"):  # engines are not thread-safe: one per thread
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
            "Global.text_score": 0.0,  # keep half-legible text: training must distinguish it from no text
            "Global.log_level": "critical",
            "Det.limit_side_len": _SIDE,
            "Det.limit_type": "min",
            "EngineConfig.onnxruntime.intra_op_num_threads": 1,
        }
    )
    return lambda page: "".join(getattr(engine(page), "txts", None) or ())


def _paddle() -> Callable[[NDArray[np.uint8]], str]:
    os.environ.setdefault("PADDLE_PDX_DISABLE_MODEL_SOURCE_CHECK", "True")  # else every start accesses the network
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
