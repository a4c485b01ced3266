"""UnifiedReward: a vision-language model behind an OpenAI-compatible endpoint grades each image from 1 to 5."""

from __future__ import annotations

import base64
import hashlib
import io
import math
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from recast.endpoint import Endpoint, UnreadableError
from recast.errors import RecastError
from recast.rewards import catalog
from recast.rewards.base import Images, as_tensor

__all__ = ["UnifiedReward", "parse"]

_Task = tuple[NDArray[np.uint8], str]
_THREE = ("alignment", "coherence", "style")
# "Style Score (1-5): 3.62", "**Final Score:** 4/5"; never the first part of "3,5", "1-5", "4/10" or "3.2e1".
_SCORE = (
    r"\b{} score\b[ \t*_]*(?:\(1\s*[-–]\s*5\))?[ \t*_]*:[ \t*_]*([-+]?\d+(?:\.\d+)?)"
    r"(?:\s*(?:/|out of)\s*5(?:\.0)?)?(?!\s*(?:/|out of)|\s*[-–]\s*\d|[\w%]|[.,]\d)"
)


class UnifiedReward:
    """The grade of an image for its prompt: the final score of the answer, or the mean of its three scores.

    The endpoint is your own server (`vllm serve CodeGoat24/UnifiedReward-2.0-qwen3vl-8b`) or another one under
    `base_url`; the environment variable `key_variable`, if set, is sent as the key. Images are sent as PNGs of
    `size` × `size` pixels, the size the model is published with. `template` is a text file that contains {prompt} and
    may ask for either form of answer; the default wording is that of this package. Within a call, every distinct pair
    of image and prompt is requested once.
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
        size: int = 512,
        max_tokens: int = 1024,
    ) -> None:
        if size < 1 or max_tokens < 1:
            raise RecastError(f"unifiedreward's size and max_tokens must be at least 1, not {size} and {max_tokens}")
        self.model, self.size, self.max_tokens, self.template = model, size, max_tokens, _template(template)
        self.endpoint = Endpoint(
            base_url, key_variable, concurrency=concurrency, retries=retries, backoff=backoff, timeout=timeout
        )

    def __call__(
        self, images: Images, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]] | None = None
    ) -> NDArray[np.float64]:
        """One grade per image, in [1, 5]."""
        return self.details(images, prompts)["score"]

    def details(self, images: Images, prompts: Sequence[str]) -> dict[str, NDArray[np.float64]]:
        """`score` and its parts `alignment`, `coherence`, `style` and `final`; NaN where the answer has none."""
        pixels = (as_tensor(images, prompts).float() * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
        tasks: dict[tuple[bytes, str], _Task] = {}
        order = []
        for image, prompt in zip(pixels, prompts, strict=True):
            order.append((hashlib.sha256(image.tobytes()).digest(), prompt))
            tasks.setdefault(order[-1], (image, prompt))
        answers = self.endpoint.each(
            self._ask, list(tasks.values()), lambda task: f"no score for the prompt {task[1]!r}"
        )
        found = dict(zip(tasks, answers, strict=True))
        return {part: np.array([found[key][part] for key in order], np.float64) for part in ("score", *_THREE, "final")}

    def _ask(self, task: _Task) -> dict[str, float]:
        pixels, prompt = task
        data = base64.b64encode(_png(pixels, self.size)).decode()
        content = [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
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
    >>> parse("cat (animal): 1\nFinal Score: 4.5")["score"]
    4.5
    """
    parts = {}
    for part in (*_THREE, "final"):
        found = re.findall(_SCORE.format(part), text, re.IGNORECASE)
        parts[part] = float(found[-1]) if found else math.nan  # the answer follows its reasons
        if found and not 1 <= parts[part] <= 5:
            raise ValueError(f"the {part} score {found[-1]} is outside [1, 5]")
    score = parts["final"] if not math.isnan(parts["final"]) else sum(parts[part] for part in _THREE) / len(_THREE)
    if math.isnan(score):
        raise ValueError("the answer has neither a final score nor all three of alignment, coherence and style")
    return {"score": score, **parts}


def _png(pixels: NDArray[np.uint8], size: int) -> bytes:
    """A PNG of size × size pixels, with fast compression."""
    page = Image.fromarray(pixels)
    if page.size != (size, size):
        page = page.resize((size, size), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    page.save(file, "PNG", compress_level=1)
    return file.getvalue()


def _template(path: str | Path | None) -> str:
    """The text of a template; raises if it has no placeholder for the prompt."""
    source = files("recast.rewards") / "data/unifiedreward.txt" if path is None else Path(path).expanduser()
    try:
        text = source.read_text(encoding="utf-8").rstrip("\n")  # editors add it
    except (OSError, UnicodeDecodeError) as error:
        raise RecastError(f"unifiedreward's template {source} cannot be read: {error}") from error
    if "{prompt}" not in text:
        raise RecastError(f"unifiedreward's template {source} has no placeholder {{prompt}}")
    return text
