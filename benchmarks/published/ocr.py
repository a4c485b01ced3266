"""OCR beside the published scorer: its targets, what the engine is given, and scores of synthetic readings.

    git clone https://github.com/NVlabs/DiffusionNFT
    python benchmarks/published/ocr.py --source DiffusionNFT

Both run with the same stand-in for paddleocr 2.9.1, which returns prepared readings of each image in the form of the
real one (checked with its own code on PP-OCRv4 in ONNX), the published one with a Levenshtein distance written here.
Prompts are all lines of dataset/ocr/test.txt; the readings are their targets whole, misspelled, surrounded, cut, in
several lines, with other letter case and spaces, with lines of confidence 0, and none. A difference is 0 or 1 for a
target and for the engine's options, in levels of 255 for pixels. Writes results/published/ocr.json; a few seconds.
"""

from __future__ import annotations

import argparse
import ast
import random
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from recast.core import artifact
from recast.rewards.ocr import OCR, target

RESULTS = Path(__file__).parents[1] / "results" / "published"
SCORER, REWARDS, PROMPTS = "flow_grpo/ocr.py", "flow_grpo/rewards.py", "dataset/ocr/test.txt"
RELEASE = "2.9.1"
NOT_COMPARED = [
    "readings by the published models of paddleocr 2.9.1, which could not be downloaded",
    "the default engine, rapidocr with PP-OCRv6: it has other models, and keeps texts of a confidence below 0.5",
    "prompts without a quoted text, where the published scorer raises an error and ours is NaN",
]
Lines = list[tuple[str, float]]
asked: list[tuple[str, str]] = []
"""What the published scorer has measured the distance of: the text that was read, and its target."""


class Engine:
    """A stand-in for `paddleocr.PaddleOCR` of 2.9.1: the first pixel of an image numbers its reading."""

    readings: list[Lines]
    made: list[dict[str, Any]]
    pages: list[np.ndarray]

    def __init__(self, **options: Any) -> None:
        self.made.append(options)

    def ocr(self, img: np.ndarray, cls: bool = True) -> list[Any]:
        """Boxes with texts and confidences, or None where there is no text."""
        assert not cls
        self.pages.append(np.asarray(img))
        red, green, blue = (int(level) for level in img[0, 0])
        box = [[0.0, 0.0], [8.0, 0.0], [8.0, 8.0], [0.0, 8.0]]
        return [[[box, line] for line in self.readings[red + 256 * green + 65536 * blue]] or None]


def distance(first: str, second: str) -> int:
    """Insertions, deletions and replacements that turn one text into the other."""
    row = list(range(len(second) + 1))
    for i, letter in enumerate(first, 1):
        above, row[0] = row[0], i
        for j, other in enumerate(second, 1):
            above, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, above + (letter != other))
    return row[-1]


def observed(read: str, wanted: str) -> int:
    """The distance, kept in `asked`."""
    asked.append((read, wanted))
    return distance(read, wanted)


def git(source: Path, *arguments: str) -> str:
    """The output of a git command in a clone."""
    return subprocess.run(["git", "-C", str(source), *arguments], capture_output=True, check=True, text=True).stdout


def stub(name: str, **contents: Any) -> None:
    """Put a module with these contents under a name."""
    module = ModuleType(name)
    module.__dict__.update(contents)
    sys.modules[name] = module


def published(source: Path) -> Any:
    """The published function of the reward, `ocr_score` with its `OcrScorer`."""
    stub("paddleocr", PaddleOCR=Engine)
    stub("Levenshtein", distance=observed)
    scorer: dict[str, Any] = {"__name__": "flow_grpo.ocr"}
    exec(compile(git(source, "show", f"HEAD:{SCORER}"), SCORER, "exec"), scorer)
    stub("flow_grpo")
    stub("flow_grpo.ocr", OcrScorer=scorer["OcrScorer"])
    tree = ast.parse(git(source, "show", f"HEAD:{REWARDS}"))
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "ocr_score"]
    found: dict[str, Any] = {"torch": torch, "np": np}
    exec(compile(tree, REWARDS, "exec"), found)
    return found["ocr_score"]("cpu")


def readings(text: str, other: str, generator: random.Random) -> Iterator[Lines]:
    """Readings of an image that should show a text."""
    yield [(text, 0.99)]
    yield [(text.upper().replace(" ", "  "), 0.9)]
    yield [(word, 0.8) for word in text.split()]
    yield [(word, 0.8) for word in reversed(text.split())]
    yield [("THE", 0.7), (text, 0.6), (other, 0.7)]
    yield [(other, 0.95)]
    yield [(text[: len(text) // 2], 0.5), (text[len(text) // 2 :], 0.0)]
    for share in (0.1, 0.3, 0.6):
        letters = [generator.choice("aZé0 .") if generator.random() < share else letter for letter in text]
        yield [("".join(letters), generator.random())]
    yield []


def compare_targets(theirs: Any, prompts: list[str]) -> dict[str, Any]:
    """Targets of all prompts; the published one is seen when it measures a distance, for a reading without a match."""
    Engine.readings = [[("\0", 1.0)]]
    theirs(torch.zeros(len(prompts), 3, 8, 8), prompts, None)
    differ = [float(mine != wanted) for mine, (_, wanted) in zip(map(target, prompts), asked, strict=True)]
    return {"what": "targets", "count": len(differ), "largest": max(differ)}


def make_cases(prompts: list[str]) -> tuple[torch.Tensor, list[str]]:
    """Numbered images and their prompts; the engine gets their readings."""
    generator, cases = random.Random(0), list[str]()
    Engine.readings, Engine.pages = [], []
    for k, prompt in enumerate(prompts):
        text, other = (prompts[number % len(prompts)].split('"')[1] for number in (k, k + 1))
        for lines in readings(text, other, generator):
            Engine.readings.append(lines)
            cases.append(prompt)
    images = torch.rand(len(cases), 3, 8, 8, generator=torch.Generator().manual_seed(0))
    numbers = torch.arange(len(cases))
    images[:, :, 0, 0] = torch.stack([numbers % 256, numbers // 256 % 256, numbers // 65536], 1) / 255
    return images, cases


def main() -> None:
    """Compare, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="a clone of NVlabs/DiffusionNFT")
    source = parser.parse_args().source
    Engine.made, Engine.pages = [], []
    metadata.version = lambda package: RELEASE  # type: ignore[assignment]
    theirs, ours = published(source), OCR(engine="paddleocr", threads=1)
    options = Engine.made[0] | {"ocr_version": "PP-OCRv4"}  # its default in 2.9.1
    prompts = git(source, "show", f"HEAD:{PROMPTS}").splitlines()
    compared = [compare_targets(theirs, prompts)]
    compared.append({"what": "options of the engine", "count": 1, "largest": float(Engine.made[1] != options)})
    images, cases = make_cases(prompts)
    first, second = np.array(theirs(images, cases, None)[0]), ours(images, cases)
    seen = zip(Engine.pages[: len(cases)], Engine.pages[len(cases) :], strict=True)
    pixels = max(float(np.abs(their_page.astype(int) - our_page).max()) for their_page, our_page in seen)
    compared.append({"what": "pixels", "count": len(cases), "largest": pixels})
    compared.append({"what": "scores", "count": len(cases), "largest": float(np.abs(first - second).max())})
    for row in compared:
        print(f"{row['what']:24} {row['count']:6} compared, largest difference {row['largest']:.1e}")
    content = {
        "reward": "ocr",
        "source": f"NVlabs/DiffusionNFT, {SCORER}",
        "commit": git(source, "rev-parse", "HEAD").strip(),
        "compared": compared,
        "not_compared": NOT_COMPARED,
        "spread_of_scores": float(first.std()),
    }
    artifact.write(RESULTS / "ocr.json", "recast.benchmark.published", content)


if __name__ == "__main__":
    main()
