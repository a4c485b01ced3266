"""UnifiedReward: a vision-language model behind an OpenAI-compatible endpoint grades each image from 1 to 5."""

from __future__ import annotations

import base64
import hashlib
import io
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from recast.endpoint import Endpoint, FailedError, UnreadableError
from recast.errors import RecastError
from recast.rewards import catalog, setup
from recast.rewards.base import Images, as_tensor

__all__ = ["Encoding", "UnifiedReward", "parse"]

Encoding = Literal["jpeg", "png"]
_Task = tuple[NDArray[np.uint8], str]
_THREE = ("alignment", "coherence", "style")
_LIMITS, _ROUNDING = (1.0, 5.0), 1e-6
"""Range of a score, and how far outside of it a score may be for rounding."""
_FEW, _SHARE = 5, 0.05
"""Unreadable answers that never stop a run, and their share that a run may have."""
_JPEG_QUALITY = 95
# "Style Score (1-5): 3.62", "**Final Score:** 4/5"; never the first part of "3,5", "1-5", "4/10" or "3.2e1". On a line
# of its own, a score is the whole line: "Final Score:\n1. The cat" begins a list.
_OF_FIVE = r"(?:\s*(?:/|out of)\s*5(?:\.0)?)?"
_SCORE = (
    r"\b{} score\b[ \t*_]*(?:\(1\s*[-–]\s*5\))?[ \t*_]*:"
    rf"(?:[ \t*_]*|[\s*_]*\n(?=[ \t*_]*[-+\d.]+{_OF_FIVE}[ \t\r*_.]*$)[ \t*_]*)"
    rf"([-+]?\d+(?:\.\d+)?){_OF_FIVE}(?!\s*(?:/|out of)|[^\S\n]*[-–]\s*\d|[\w%]|[.,]\d)"
)


class UnifiedReward:
    """The grade of an image for its prompt: the final score of the answer, or the mean of its three scores.

    The endpoint is your own server (`vllm serve CodeGoat24/UnifiedReward-2.0-qwen3vl-8b`) or another one under
    `base_url`; the environment variable `key_variable`, if set, is sent as the key. Within a call, every distinct pair
    of image and prompt is requested once.

    Images are sent as they are, as JPEGs of quality 95, which is what the published client does; `size` resizes them
    to a square first (DiffusionNFT: 512), `encoding="png"` sends them without loss. `template` is a text file that
    contains {prompt} and may ask for either form of answer. By default, it is the published one if `recast rewards
    setup unifiedreward` has stored it, otherwise the wording of this package.

    An answer that has no readable score after all retries is NaN, with one warning per call that counts them. When
    more than 5 answers and more than 5 % of all that this instance has asked for are unreadable, it raises. A server
    that fails or refuses a request is an error, after the retries.
    """

    def __init__(
        self,
        base_url: str = "http://localhost:8000/v1",
        model: str = catalog.UNIFIEDREWARD,
        template: str | Path | None = None,
        key_variable: str = "UNIFIEDREWARD_API_KEY",
        concurrency: int = 32,
        retries: int = 5,
        backoff: float = 1.0,
        timeout: float = 120.0,
        size: int | None = None,
        max_tokens: int = 4096,
        encoding: Encoding = "jpeg",
    ) -> None:
        if (size is not None and size < 1) or max_tokens < 1:
            raise RecastError(f"unifiedreward's size and max_tokens must be at least 1, not {size} and {max_tokens}")
        if encoding not in get_args(Encoding):
            raise RecastError(f"unifiedreward's encoding is jpeg or png, not {encoding!r}")
        self.model, self.size, self.max_tokens, self.encoding = model, size, max_tokens, encoding
        self.template = _template(template)
        self.endpoint = Endpoint(
            base_url, key_variable, concurrency=concurrency, retries=retries, backoff=backoff, timeout=timeout
        )
        self._asked = self._unreadable = 0

    @staticmethod
    def versions(model: str = catalog.UNIFIEDREWARD, template: str | Path | None = None, **_: Any) -> dict[str, str]:
        """What decides a score besides the options: the model, and the SHA-256 of the template."""
        return {"model": model, "template": setup.digest(_template(template))}

    def __call__(
        self, images: Images, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]] | None = None
    ) -> NDArray[np.float64]:
        """One grade per image, in [1, 5]; NaN where the answer cannot be read."""
        return self.details(images, prompts)["score"]

    def details(self, images: Images, prompts: Sequence[str]) -> dict[str, NDArray[np.float64]]:
        """`score` and its parts `alignment`, `coherence`, `style` and `final`; NaN where the answer has none."""
        pixels = (as_tensor(images, prompts).float() * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
        tasks: dict[tuple[bytes, str], _Task] = {}
        order = []
        for image, prompt in zip(pixels, prompts, strict=True):
            order.append((hashlib.sha256(image.tobytes()).digest(), prompt))
            tasks.setdefault(order[-1], (image, prompt))
        found = dict(zip(tasks, self._answers(list(tasks.values())), strict=True))
        return {
            part: np.array([found[key].get(part, math.nan) for key in order], np.float64)
            for part in ("score", *_THREE, "final")
        }

    def _answers(self, tasks: list[_Task]) -> list[dict[str, float]]:
        """The scores of every answer; none for an answer that cannot be read."""
        self._asked += len(tasks)
        reasons: list[str] = []

        def drop(task: _Task, error: FailedError) -> dict[str, float]:
            if not isinstance(error, UnreadableError):
                raise FailedError(f"{_failure(task)} after {self.endpoint.retries + 1} tries: {error}")
            reasons.append(f"{task[1]!r}: {error}")
            self._unreadable += 1
            if self._unreadable > max(_FEW, _SHARE * self._asked):
                raise RecastError(
                    f"{self._unreadable} of {self._asked} answers of {self.model} have no readable score, more than "
                    f"{_SHARE:.0%}: check its template and max_tokens; the last one, for the prompt {reasons[-1]}"
                )
            return {}

        answers = self.endpoint.each(self._ask, tasks, _failure, drop=drop)
        if reasons:
            warnings.warn(
                f"unifiedreward: {len(reasons)} of {len(tasks)} answers have no readable score and count as NaN "
                f"({self._unreadable} of {self._asked} so far); the first, for the prompt {reasons[0]}",
                stacklevel=3,
            )
        return answers

    def _ask(self, task: _Task) -> dict[str, float]:
        pixels, prompt = task
        content = [
            {"type": "image_url", "image_url": {"url": _data_url(pixels, self.size, self.encoding)}},
            {"type": "text", "text": self.template.replace("{prompt}", prompt)},
        ]
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": self.max_tokens,
        }
        reply = self.endpoint.post("chat/completions", body, f"the prompt {prompt!r}")
        text, cut = self.endpoint.text_of(reply)
        if cut:  # 3.6 may be a truncated 3.62
            raise UnreadableError(f"the answer was cut at max_tokens = {self.max_tokens}")
        try:
            return parse(text)
        except ValueError as error:
            raise UnreadableError(f"{error}: {self.endpoint.excerpt(text)!r}") from None


def parse(text: str) -> dict[str, float]:
    r"""`score` and parts of an answer, NaN for absent parts; raises ValueError without a score in [1, 5].

    >>> parse("Alignment Score (1-5): 4\nCoherence Score (1-5): 3.5\nStyle Score (1-5): 3")["score"]
    3.5
    >>> parse("cat (animal): 1\nFinal Score:\n4.5")["score"]
    4.5
    """
    parts = {}
    for part in (*_THREE, "final"):
        found = re.findall(_SCORE.format(part), text, re.IGNORECASE | re.MULTILINE)
        parts[part] = _in_range(part, found[-1]) if found else math.nan  # the answer follows its reasons
    score = parts["final"] if not math.isnan(parts["final"]) else sum(parts[part] for part in _THREE) / len(_THREE)
    if math.isnan(score):
        raise ValueError("the answer has neither a final score nor all three of alignment, coherence and style")
    return {"score": score, **parts}


def _in_range(part: str, written: str) -> float:
    """A score in [1, 5]; one that is outside by no more than rounding is clamped."""
    (low, high), value = _LIMITS, float(written)
    if not low - _ROUNDING <= value <= high + _ROUNDING:
        raise ValueError(f"the {part} score {written} is outside [1, 5]")
    return min(max(value, low), high)


def _failure(task: _Task) -> str:
    return f"no score for the prompt {task[1]!r}"


def _data_url(pixels: NDArray[np.uint8], size: int | None, encoding: Encoding) -> str:
    """An image as a data URL, resized to size × size pixels if a size is given."""
    page = Image.fromarray(pixels)
    if size is not None and page.size != (size, size):
        page = page.resize((size, size), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    if encoding == "jpeg":
        page.save(file, "JPEG", quality=_JPEG_QUALITY)
    else:
        page.save(file, "PNG", compress_level=1)  # fast
    return f"data:image/{encoding};base64,{base64.b64encode(file.getvalue()).decode()}"


def _template(path: str | Path | None) -> str:
    """The text of a template; raises if it has no placeholder for the prompt."""
    known = setup.stored("unifiedreward") or files("recast.rewards") / "data/unifiedreward.txt"
    source = known if path is None else Path(path).expanduser()
    try:
        text = source.read_text(encoding="utf-8").rstrip("\n")  # editors add it
    except (OSError, UnicodeDecodeError) as error:
        raise RecastError(f"unifiedreward's template {source} cannot be read: {error}") from error
    if "{prompt}" not in text:
        raise RecastError(f"unifiedreward's template {source} has no placeholder {{prompt}}")
    return text
