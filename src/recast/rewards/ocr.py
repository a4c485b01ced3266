"""OCR: how much of the text quoted in the prompt can be read in the image."""

from __future__ import annotations

import os
import re
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import metadata
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from recast import processes
from recast.errors import RecastError
from recast.rewards.base import Images, as_tensor

__all__ = ["OCR", "similarity", "target"]

_Engine = Literal["rapidocr", "paddleocr"]
_Version = Literal["PP-OCRv4", "PP-OCRv5", "PP-OCRv6"]
_Language = Literal["en", "ch"]
_Read = Callable[[NDArray[np.uint8]], str]
_DEFAULT: dict[_Engine, _Version] = {"rapidocr": "PP-OCRv6", "paddleocr": "PP-OCRv4"}
"""The models that every wheel of rapidocr since 3.9 contains, and those that paddleocr 2 has by default."""
_STRAIGHT, _CURLY = re.compile(r'"(?:([^"]*)"|(.*))'), re.compile(r"“(?:([^”]*)”|(.*))")
_SIDE = 64
"""The detector enlarges images whose shorter side is below this. On rendered text of 64 to 512 pixels, rapidocr's
default of 736 is not more accurate, and 15 times slower at 64 pixels."""


def target(prompt: str) -> str | None:
    """The text in the first pair of double quotes, in lower case and without white space; None without such a text.

    Straight quotes are preferred to curly ones. Without a closing quote, the text ends with the line.

    >>> target('a sign that says "Open 24 h" and "closed"')
    'open24h'
    """
    found = (pattern.search(prompt) for pattern in (_STRAIGHT, _CURLY))
    return next((text for each in found if each is not None and (text := _plain(each[1] or each[2] or ""))), None)


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

    `rapidocr` works offline with the PP-OCR models in its wheel. `paddleocr`, to be installed separately, is the engine
    of the paper; it downloads its models. Version 2 is called as in the published scorer (RGB pages, texts with a
    confidence of at least 0.5), later ones by their own interface.

    `version` names the models: by default PP-OCRv6 in rapidocr, which releases from 3.9 on contain, and PP-OCRv4 in
    paddleocr. `language="en"` chooses models for English where there are any: PP-OCRv4 then has the detector and the
    recognizer of the published scorer, `"ch"` those of rapidocr's wheels before 3.9. The models of PP-OCRv6 are the
    same for both. rapidocr downloads models that its wheel does not contain.

    Angle classification is off. `threads` engines read images in parallel, by default one per core of this process.
    """

    def __init__(
        self,
        engine: _Engine = "rapidocr",
        version: _Version | None = None,
        language: _Language = "en",
        threads: int | None = None,
    ) -> None:
        chosen = _chosen(engine, version, language)
        if threads is not None and threads < 1:
            raise RecastError(f"ocr's threads must be at least 1, not {threads}")
        make = _rapid if engine == "rapidocr" else _paddle
        self._make: Callable[[], _Read] = partial(make, chosen, language)
        self._local = threading.local()
        self._local.read = self._make()  # raises now if the package or a model is missing
        if engine == "paddleocr" and processes.RANK == 0:
            found = ", ".join(self.versions(engine, version, language).values())
            warnings.warn(f"ocr reads with {found}", stacklevel=2)
        self._threads = threads or processes.cores()
        self._pool: ThreadPoolExecutor | None = None

    @staticmethod
    def versions(
        engine: _Engine = "rapidocr",
        version: _Version | None = None,
        language: _Language = "en",
        threads: int | None = None,
    ) -> dict[str, str]:
        """The engine with the version of its package, and its models."""
        chosen = _chosen(engine, version, language)
        models = f"{chosen} {language}" if engine == "paddleocr" else ", ".join(_names(chosen, language))
        return {"engine": f"{engine} {_release(engine)}", "models": models}

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
        pages = np.ascontiguousarray(pixels.permute(0, 2, 3, 1).cpu().numpy())
        if self._threads == 1 or len(pages) == 1:
            return [self._page(page) for page in pages]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads)
        return list(self._pool.map(self._page, pages))

    def _page(self, page: NDArray[np.uint8]) -> str:
        if not hasattr(self._local, "read"):  # engines are not thread-safe: one per thread
            self._local.read = self._make()
        return str(self._local.read(page))


def _chosen(engine: _Engine, version: _Version | None, language: _Language) -> _Version:
    """The version of the models; raises if an option is unknown."""
    for key, value, known in (("engine", engine, _Engine), ("language", language, _Language)):
        if value not in get_args(known):
            raise RecastError(f"ocr's {key} must be {' or '.join(get_args(known))}, not {value!r}")
    if version is not None and version not in get_args(_Version):
        raise RecastError(f"ocr's version must be one of {', '.join(get_args(_Version))}, not {version!r}")
    return version or _DEFAULT[engine]


def _names(version: _Version, language: _Language) -> tuple[str, str]:
    """The names of rapidocr's detector and recognizer, without their endings."""
    if version == "PP-OCRv6":
        return "PP-OCRv6_det_small", "PP-OCRv6_rec_small"
    english = (version, language) == ("PP-OCRv4", "en")
    return "en_PP-OCRv3_det" if english else f"ch_{version}_det", f"{language}_{version}_rec"


def _release(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError as error:
        raise _absent(package, error) from None


def _absent(package: str, reason: object) -> RecastError:
    rapid = package == "rapidocr"
    how = "'recast-diffusion[rewards]'" if rapid else "paddleocr==2.9.1 paddlepaddle==2.6.2"
    return RecastError(f"ocr needs {package}, which is not installed ({reason}): pip install {how}")


def _rapid(version: _Version, language: _Language) -> _Read:
    try:
        import rapidocr
    except ImportError as error:
        raise _absent("rapidocr", error) from error
    try:
        engine = rapidocr.RapidOCR(params=_rapid_settings(rapidocr, version, language))
        blank = np.full((_SIDE, _SIDE, 3), 255, np.uint8)
        for part in ({"use_det": True, "use_rec": False}, {"use_det": False, "use_rec": True}):
            engine(blank, use_cls=False, **part)  # loads the model: later releases would do so at the first image
    except Exception as error:
        raise RecastError(
            f"rapidocr {_release('rapidocr')} cannot load {' and '.join(_names(version, language))} "
            f"({type(error).__name__}: {' '.join(str(error).split())}): its wheels contain PP-OCRv6 alone since 3.9 "
            "(pip install 'rapidocr>=3.9'), and before it PP-OCRv4 with language ch; others it downloads once"
        ) from error

    def read(page: NDArray[np.uint8]) -> str:
        found = engine(_bgr(page), use_det=True, use_cls=False, use_rec=True)
        return "".join(getattr(found, "txts", None) or ())

    return read


def _bgr(page: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A page in OpenCV's order of the channels."""
    return np.ascontiguousarray(page[..., ::-1])


def _rapid_settings(rapidocr: Any, version: _Version, language: _Language) -> dict[str, Any]:
    size = rapidocr.ModelType("small" if version == "PP-OCRv6" else "mobile")
    detector = "ch" if version == "PP-OCRv5" else language  # one detector for all languages
    return {
        "Global.use_cls": False,
        "Global.text_score": 0.0,  # keep half-legible text: training must distinguish it from no text
        "Global.log_level": "critical",
        "Det.limit_side_len": _SIDE,
        "Det.limit_type": "min",
        "Det.ocr_version": rapidocr.OCRVersion(version),
        "Det.model_type": size,
        "Det.lang_type": rapidocr.LangDet(detector),
        "Rec.ocr_version": rapidocr.OCRVersion(version),
        "Rec.model_type": size,
        "Rec.lang_type": rapidocr.LangRec(language),
        "EngineConfig.onnxruntime.intra_op_num_threads": 1,
    }


def _paddle(version: _Version, language: _Language) -> _Read:
    os.environ.setdefault("PADDLE_PDX_DISABLE_MODEL_SOURCE_CHECK", "True")  # else every start accesses the network
    try:
        from paddleocr import PaddleOCR
    except ImportError as error:
        raise _absent("paddleocr", error) from error
    if not hasattr(PaddleOCR, "predict"):  # version 2
        old = PaddleOCR(use_angle_cls=False, lang=language, ocr_version=version, use_gpu=False, show_log=False)
        return lambda page: "".join(text for _, (text, sure) in old.ocr(page, cls=False)[0] or () if sure > 0)
    new = PaddleOCR(
        lang=language,
        ocr_version=version,
        use_doc_orientation_classify=False,
        use_doc_unwarping=False,
        use_textline_orientation=False,
    )
    return lambda page: "".join(text for found in new.predict(_bgr(page)) for text in found["rec_texts"])
