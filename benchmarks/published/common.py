"""What the comparisons with published scorers share: pictures, prompts, the other process and the file of results.

The published scorer runs in a process of its own, with the interpreter of an environment that has its packages. That
process also writes the random checkpoint, so its names and layout are those of the published code. This module is
imported on both sides and therefore needs only numpy, pillow and torch.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw

RESULTS = Path(__file__).parents[1] / "results" / "published"
FORMAT = "recast.benchmark.published"
SIZES = ((512, 512), (512, 768), (517, 333), (1024, 1024), (225, 226), (100, 64), (20, 30))
"""Heights and widths: square, wide and tall, with odd margins, and small ones that are enlarged."""
PROMPTS = [
    "a red circle",
    "",
    "  two\tblue squares\n and   spaces ",
    "“Curly” quotes’ and a café, naïve Ångström, STRASSE straße",
    "fish &amp; chips &lt;3 &amp;quot;twice&amp;quot; &#8364;5",
    "schÃ¶n: text that was decoded wrongly",
    "日本語のネオンサイン, кот на окне, قطة، แมว, 1234567890 x²",
    "emoji 🐈‍⬛🌈 and symbols ∑≠√ ©®™ …—–",
    "a sign that says \"HELLO, WORLD!!! (2049)\" it's we're I'd",
    "ﬁne ligatures, ｗｉｄｅ letters, Ǆ İ ẞ",
    "a photo of a very small green triangle, highly detailed, 8k, trending on artstation, " * 12,
    "supercalifragilisticexpialidocious_and_then_some-more.words/without\\spaces" * 3,
]
SPLITS = ("pickscore", "ocr", "drawbench")
Found = dict[str, list[NDArray[Any]]]
_kept: list[Any] = []


def pictures(height: int, width: int) -> NDArray[np.uint8]:
    """Four images (4, H, W, 3): noise, a drawing with text, a smooth one, and the drawing with noise."""
    generator = np.random.default_rng(height * 10_000 + width)
    noise = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
    canvas = Image.new("RGB", (width, height), (30, 90, 160))
    pen = ImageDraw.Draw(canvas)
    for _ in range(12):
        x, y = generator.integers(0, width), generator.integers(0, height)
        box = (x, y, x + generator.integers(4, width), y + generator.integers(4, height))
        color = tuple(int(level) for level in generator.integers(0, 256, 3))
        (pen.ellipse if generator.random() < 0.5 else pen.rectangle)(tuple(map(int, box)), fill=color)
    pen.text((width // 10, height // 3), "HELLO 2049", fill="white")
    drawn = np.asarray(canvas)
    small = Image.fromarray(generator.integers(0, 256, (5, 6, 3), dtype=np.uint8))
    smooth = np.asarray(small.resize((width, height), Image.Resampling.BICUBIC))
    mixed = (drawn // 2 + noise // 2).astype(np.uint8)
    return np.stack([noise, drawn, smooth, mixed])


def batches(folder: Path) -> Iterator[tuple[NDArray[np.uint8], list[str]]]:
    """The images (4, H, W, 3) of each size with their prompts, as `save_cases` has written them."""
    with np.load(folder / "cases.npz") as stored:
        for number, name in enumerate(stored.files):
            images = stored[name]
            yield images, [PROMPTS[(4 * number + k) % len(PROMPTS)] for k in range(len(images))]


def save_cases(folder: Path, sizes: Sequence[tuple[int, int]]) -> None:
    """Write the images: drawn once, since two versions of pillow may draw differently."""
    arrays: dict[str, Any] = {f"{height}x{width}": pictures(height, width) for height, width in sizes}
    np.savez(folder / "cases.npz", **arrays)


def as_tensor(images: NDArray[np.uint8]) -> torch.Tensor:
    """The same images (B, 3, H, W) in [0, 1]."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255


def as_floats(images: NDArray[np.uint8]) -> torch.Tensor:
    """Images (B, 3, H, W) in [0, 1] between the 8-bit levels, as a sampler returns them."""
    return as_tensor(images) * 0.97 + 0.01


def rounded(floats: torch.Tensor) -> NDArray[np.uint8]:
    """Images (B, H, W, 3) in 8 bits, as flow_grpo/rewards.py rounds those of a sampler."""
    return (floats * 255).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()


def as_pil(images: NDArray[np.uint8]) -> list[Image.Image]:
    """The same images for scorers that take PIL's."""
    return [Image.fromarray(image) for image in images]


def texts(source: Path | None) -> list[str]:
    """The prompts of this file and, from a clone of DiffusionNFT, those of its text-only test splits."""
    found = list(PROMPTS)
    for split in SPLITS if source is not None else ():
        found += (Path(source or "") / "dataset" / split / "test.txt").read_text(encoding="utf-8").splitlines()
    return found


def until_end(rows: Sequence[Sequence[int]], end: int) -> NDArray[np.int64]:
    """Token numbers (B, L) up to the first end token, and -1 behind it: what follows is not attended to."""
    made = np.full((len(rows), max(map(len, rows))), -1, dtype=np.int64)
    for row, tokens in zip(made, rows, strict=True):
        length = list(tokens).index(end) + 1
        row[:length] = tokens[:length]
    return made


def torchvision() -> None:
    """Let a torchvision without compiled operators be imported: it registers one, which no scorer calls."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)


def widen(model: torch.nn.Module, seed: int = 0) -> None:
    """Random parameters under which scores differ visibly between images: no bias 0, no norm 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in model.named_parameters():
        noise = torch.randn(value.shape, generator=generator)
        if value.ndim < 2:
            value.data = value.data + 0.1 * noise if name != "logit_scale" else torch.tensor(4.594)
        else:
            spread = 0.5 if "embed" in name else 1.0
            value.data = spread * noise / max(value[0].numel(), 1) ** 0.5


def published(name: str) -> Any:
    """A published module."""
    return import_module(name)


def merges_file() -> Path:
    """The merges of CLIP's tokenizer in the package hpsv2x."""
    return Path(published("hpsv2.src.open_clip").__file__).parent / "bpe_simple_vocab_16e6.txt.gz"


def save_tokenizer(folder: Path, merges: Path) -> None:
    """CLIP's tokenizer in transformers' files, from the merges that open_clip distributes."""
    lines = gzip.decompress(merges.read_bytes()).decode().split("\n")[1 : 49152 - 256 - 2 + 1]
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(byte) for byte in shown] + [chr(256 + k) for k in range(256 - len(shown))]
    words = [*letters, *(f"{letter}</w>" for letter in letters), *("".join(line.split()) for line in lines)]
    words += ["<|startoftext|>", "<|endoftext|>"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *lines]) + "\n", encoding="utf-8")
    settings = {"tokenizer_class": "CLIPTokenizer", "model_max_length": 77, "do_lower_case": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def save_processor(folder: Path) -> None:
    """CLIP's image processor as the hub repositories have it."""
    settings = {
        "crop_size": 224,
        "do_center_crop": True,
        "do_normalize": True,
        "do_resize": True,
        "feature_extractor_type": "CLIPFeatureExtractor",
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "resample": 3,
        "size": 224,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    if not (folder / "config.json").exists():
        (folder / "config.json").write_text(json.dumps({"model_type": "clip"}))


def save_clip(folder: Path, merges: Path, activation: str, projection: int) -> None:
    """A random CLIP with the inputs, vocabulary and head widths of the published ones, and few channels."""
    from transformers import CLIPConfig, CLIPModel

    common = {"num_hidden_layers": 3, "num_attention_heads": 2, "hidden_act": activation}
    config = CLIPConfig(
        # The published configurations have the end token 2, for which transformers takes the largest number.
        text_config={**common, "hidden_size": 128, "intermediate_size": 512, "vocab_size": 49408, "eos_token_id": 2},
        vision_config={**common, "hidden_size": 160, "intermediate_size": 640, "image_size": 224, "patch_size": 14},
        projection_dim=projection,
    )
    model = CLIPModel(config)
    widen(model)
    model.save_pretrained(folder)
    save_tokenizer(folder, merges)
    save_processor(folder)


def versions(*names: str) -> dict[str, str]:
    """Versions of installed packages."""
    return {name: metadata.version(name) for name in names}


def write_found(folder: Path, found: Found, packages: Mapping[str, str]) -> None:
    """Store what the published scorer has found."""
    arrays: dict[str, Any] = {f"{what}.{k}": part for what, parts in found.items() for k, part in enumerate(parts)}
    np.savez(folder / "theirs.npz", **arrays)
    (folder / "versions.json").write_text(json.dumps(dict(packages)))


def read_found(folder: Path) -> Found:
    """What the published scorer has found, by kind and batch."""
    found: Found = {}
    with np.load(folder / "theirs.npz") as stored:
        for name in stored.files:
            found.setdefault(name.rsplit(".", 1)[0], []).append(stored[name])
    return found


def compare(ours: Found, theirs: Found) -> list[dict[str, Any]]:
    """For each kind of value: how many rows were compared, and the largest absolute difference."""
    if ours.keys() != theirs.keys():
        raise ValueError(f"compared are {sorted(ours)} with {sorted(theirs)}")
    rows = []
    for what, parts in ours.items():
        pairs = list(zip(parts, theirs[what], strict=True))
        if any(mine.shape != other.shape for mine, other in pairs):
            raise ValueError(f"{what}: shapes {[(mine.shape, other.shape) for mine, other in pairs]}")
        largest = max(float(np.abs(mine.astype(np.float64) - other.astype(np.float64)).max()) for mine, other in pairs)
        rows.append({"what": what, "count": sum(len(mine) for mine, _ in pairs), "largest": largest})
    return rows


def spread(found: Found) -> float:
    """Standard deviation of the scores, beside which their difference is to be read."""
    return float(np.concatenate([part.ravel() for part in found["scores"]]).std())


def commit(source: Path) -> str:
    """The commit that is checked out in a clone."""
    command = ["git", "-C", str(source), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()


def call_theirs(script: Path, folder: Path, python: Path, options: Mapping[str, Any]) -> None:
    """Run the published side of a script in another interpreter, in a folder where hub names are paths."""
    # The script's own folder comes last in the search path: hpsv2.py must not hide the package hpsv2.
    code = "import runpy, sys; sys.path.append(sys.argv[1]); runpy.run_path(sys.argv[2], run_name='__main__')"
    given = json.dumps({name: value if value is None else str(value) for name, value in options.items()})
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [str(python), "-c", code, str(script.parent), str(script), "--theirs", given]
    subprocess.run(command, cwd=folder, env=environment, check=True)


def run(
    reward: str,
    script: str,
    theirs: Callable[[Path, Any], None],
    ours: Callable[[Path, Any], Found],
    about: Mapping[str, Any],
    sizes: Sequence[tuple[int, int]] = SIZES,
    options: Mapping[str, str] | None = None,
) -> None:
    """The command line of a comparison; `options` are paths it needs, with their help.

    `about` has the source and what was not compared; the commits of the clones among the options are added.
    """
    if "--theirs" in sys.argv:
        given = json.loads(sys.argv[sys.argv.index("--theirs") + 1])
        theirs(Path.cwd(), argparse.Namespace(**given))
        return
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--python", type=Path, required=True, help="interpreter of the environment with the packages")
    for name, text in (options or {}).items():
        parser.add_argument(f"--{name}", type=lambda value: Path(value).resolve(), required=True, help=text)
    given = parser.parse_args()
    python = given.python.absolute()  # not resolved: the link decides the environment
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_cases(folder, sizes)
        call_theirs(Path(script).resolve(), folder, python, vars(given))
        found, other = ours(folder, given), read_found(folder)
        packages = json.loads((folder / "versions.json").read_text())
    content = {
        "reward": reward,
        "commit": "; ".join(commit(path) for path in vars(given).values() if (path / ".git").exists()),
        **about,
        "compared": compare(found, other),
        "spread_of_scores": spread(other),
        "versions": {
            "published": packages,
            "recast": versions("torch", "transformers", "tokenizers", "pillow", "numpy"),
        },
    }
    write(reward, content)


def write(reward: str, content: Mapping[str, Any]) -> None:
    """Print the result and write results/published/REWARD.json."""
    from recast.core import artifact

    for row in content["compared"]:
        print(f"{reward:12} {row['what']:32} {row['count']:6} compared, largest difference {row['largest']:.1e}")
    artifact.write(RESULTS / f"{reward}.json", FORMAT, content)
