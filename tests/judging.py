"""Two evaluated runs with pictures of known worth, and a judge whose preference, bias and faults are known."""

import hashlib
import io
import json
import threading
from base64 import b64decode
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from recast.core import artifact
from recast.evaluate.scores import FORMAT
from server import Server

BUDGET = {"ocr": 1.0, "clipscore": 2.0}


def make_run(folder: Path, method: str, worths: Sequence[int], seed: int = 0) -> Path:
    """RUN with scores and pictures; a picture's first pixel says its worth (red) and its pair (green, blue)."""
    scores = folder / "scores"
    (scores / "images").mkdir(parents=True)
    run = {"method": method, "budget": BUDGET, "seed": seed}
    fields = {
        "settings": {"policy.lora": method},
        "run": run,
        "trained": list(BUDGET),
        "held_out": [],
        "images": len(worths),
    }
    artifact.write(scores / "manifest.json", FORMAT, fields)
    rows = []
    for k, worth in enumerate(worths):
        name = f"images/{k:05d}.png"
        Image.new("RGB", (2, 2), (int(worth), k // 256, k % 256)).save(scores / name)
        values = dict.fromkeys(BUDGET, worth / 255)
        row = {"index": k, "prompt": f"prompt {k}", "seed": 42 + k, "file": name, "scores": values}
        rows.append(row | {"sha256": hashlib.sha256((scores / name).read_bytes()).hexdigest()})
    artifact.write_text(scores / "scores.jsonl", artifact.lines(rows))
    return folder


class Known:
    """Prefers the worthier picture, and the one shown first where they are worth nearly the same.

    `faulty` of its answers are wrong in one of many ways, by chance that depends on the question and how often it was
    asked. Pairs in `hopeless` never get an answer that can be read. Every 50th pair's score contradicts its
    verdict in the first order. The reasons for every 10th pair need another reader.
    """

    CLOSE = 20
    SURE = 100
    FAULTS = ("429", 500, 503, "reset", "half", "prose", "tie", "cut", "empty", "score")

    def __init__(self, server: Server, faulty: float = 0.0, hopeless: Sequence[int] = ()) -> None:
        self.faulty, self.hopeless = faulty, set(hopeless)
        self.asked: Counter[Any] = Counter()
        self.answered: Counter[Any] = Counter()
        self.kinds: Counter[str] = Counter()
        self._lock = threading.Lock()
        server.fault, server.answer = self.fault, self.answer

    @staticmethod
    def question(body: dict[str, Any]) -> tuple[Any, list[int]]:
        """Which question this is, and the worths of the pictures as shown."""
        content = body["messages"][0]["content"]
        if isinstance(content, str):
            return ("text", content.rsplit("mark ", 1)[1].strip()), []
        pixels = []
        for part in content:
            if part["type"] == "image_url":
                data = b64decode(part["image_url"]["url"].split(",", 1)[1])
                with Image.open(io.BytesIO(data)) as image:
                    pixels.append(image.convert("RGB").getpixel((0, 0)))
        (worth, high, low), (other, *_) = pixels  # type: ignore[misc]
        number = high * 256 + low
        return ("pair", number, worth, other), [int(worth), int(other)]

    def fault(self, body: dict[str, Any]) -> Any:
        key, _ = self.question(body)
        with self._lock:
            self.asked[key] += 1
            attempt = self.asked[key]
        draw = hashlib.sha256(f"{key} {attempt}".encode()).digest()
        kind: Any = None
        if key[0] == "pair" and key[1] in self.hopeless:
            kind = "prose"
        elif draw[0] < 256 * self.faulty:
            ways = self.FAULTS if key[0] == "pair" else self.FAULTS[:6]
            kind = ways[draw[1] % len(ways)]
        with self._lock:
            self.kinds[str(kind)] += 1
            if kind is None:
                self.answered[key] += 1
        said = {
            "prose": "Response A is better, I think.",
            "tie": self._text(body).replace('"better_response": "', '"better_response": "A or '),
            "cut": self._text(body)[:-60],
            "score": self._text(body).replace('"score": ', '"score": 4.5, "old": '),
        }
        if kind == "429":
            return ("after", 0.01)
        if kind == "empty":
            return ("chat", {"message": {"role": "assistant", "content": None}})
        return ("chat", {"message": {"content": said[kind]}}) if kind in said else kind

    def answer(self, body: dict[str, Any]) -> str:
        return self._text(body, dressed=True)

    def _text(self, body: dict[str, Any], dressed: bool = False) -> str:
        key, worths = self.question(body)
        if key[0] == "text":
            return {"A": "A", "B": "**B**", "N": "EQUAL"}[key[1][-1]]
        number, (first, second) = key[1], worths
        gap = first - second
        better = "A" if gap >= 0 or -gap < self.CLOSE else "B"
        score = {True: (6, 1), False: (5, 2)}[abs(gap) >= self.SURE][better == "B"]
        if number % 50 == 0 and gap >= 0:
            score = 7 - score
        faithful = {0: f"Two crates here, three there. mark {number}-{first}-{better}", 1: "Both are equal."}
        reasons = {
            "faithfulness_to_prompt": faithful.get(number % 10, f"Response {better} is better."),
            "overall_quality": f"The edge goes to {better}.",
            "text_rendering": "Not Applicable.",
            "comparison_summary": "as above",
        }
        fields = {"reasoning": reasons, "score": score, "better_response": better, "confidence": 0.4}
        text = json.dumps(fields | {"confidence_rationale": "close enough, " * 5})
        return _dress(text, better, number % 5) if dressed else text


def _dress(text: str, better: str, way: int) -> str:
    """The same verdict as models write it."""
    letter = f'"better_response": "{better}"'
    return {
        0: text,
        1: f"Here is my verdict:\n```json\n{text}\n```",
        2: text[:-1] + ",}",
        3: text.replace(letter, f'"better_response": "Response {better}"'),
        4: text.replace(letter, f'"better_response": "{better.lower()}"').replace(", ", ",\n"),
    }[way]


def worths(count: int, seed: int = 0) -> tuple[list[int], list[int]]:
    """Of both runs' pictures; the first run's are a little higher."""
    rng = np.random.default_rng(seed)
    first, second = rng.integers(30, 256, count), rng.integers(0, 226, count)
    return first.tolist(), np.where(first == second, second + 1, second).tolist()  # else both orders look the same


def expected(first: Sequence[int], second: Sequence[int], without: Sequence[int] = ()) -> dict[str, float]:
    """What the known judge's verdicts must add up to, worked out from the worths alone."""
    kept = [k for k in range(len(first)) if k not in set(without)]
    gap = np.array(first)[kept] - np.array(second)[kept]
    close, up = np.abs(gap) < Known.CLOSE, gap >= Known.CLOSE
    wins = np.where(close, 1, np.where(up, 2, 0))
    aside = np.array([k % 10 == 1 for k in kept])
    return {
        "pairs": len(kept),
        "overall": wins.sum() / (2 * len(kept)),
        "faithfulness": wins[~aside].sum() / (2 * (~aside).sum()),
        "aesthetics": wins.sum() / (2 * len(kept)),
        "consistency": (~close).mean(),
        "position_bias": (2 * close + 1 * ~close).sum() / (2 * len(kept)),
        "contradictions": sum((first[k] >= second[k]) + (second[k] >= first[k]) for k in kept if k % 50 == 0),
        "decisive": sum(first[k] - second[k] >= Known.SURE and k % 50 != 0 for k in kept),
    }


def two_runs(folder: Path, count: int) -> tuple[Path, Path, list[int], list[int]]:
    """A run of each method, and the worths of their pictures."""
    first, second = worths(count)
    return make_run(folder / "ours", "sinkhorn", first), make_run(folder / "static", "static", second), first, second
