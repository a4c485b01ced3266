"""ClipScore beside the scorer of DiffusionNFT: tokens, pixels and scores.

    git clone https://github.com/NVlabs/DiffusionNFT
    pip install --no-deps --target /tmp/torchvision torchvision==0.21.0
    python benchmarks/published/clipscore.py --source DiffusionNFT --torchvision /tmp/torchvision

`flow_grpo/clip_scorer.py` is run as it is published, with the torchvision that its setup.py names. It loads a random
CLIP with the inputs of ViT-L/14 (224 pixels, patches of 14) and few channels, whose logit scale is ln 100 as in the
published checkpoint, under the published name. `clipscore` with `preprocess: nft` loads the same files. The script also
measures how far `preprocess: processor` is from `nft`: pixels, and cosines by the CLIP of the shapes world, the only
trained one here. Writes results/published/clipscore.json; less than a minute.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel

from recast.core import artifact
from recast.rewards import catalog, check
from recast.rewards.clipscore import ClipScore
from recast.shapes import models, prompts, render

RESULTS = Path(__file__).parents[1] / "results" / "published"
FILE = "flow_grpo/clip_scorer.py"
SIZES = ((512, 512), (512, 768), (517, 333), (224, 224), (100, 64), (1024, 1024))
TEXTS = ["a red circle", "", "“two” blue squares &amp; a café 日本", "a small green triangle " * 40, "two blue squares"]


def git(source: Path, *arguments: str) -> str:
    """The output of a git command in the clone."""
    return subprocess.run(["git", "-C", str(source), *arguments], capture_output=True, check=True, text=True).stdout


def published(source: Path, torchvision: Path) -> ModuleType:
    """The published module, with the torchvision of a folder."""
    sys.path.append(str(torchvision))
    module = ModuleType("clip_scorer")
    # A torchvision for another torch has no compiled operators: it needs one to exist, and the scorer uses none.
    module.library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[attr-defined]
    module.library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    exec(compile(git(source, "show", f"HEAD:{FILE}"), FILE, "exec"), module.__dict__)
    return module


def save(folder: Path) -> None:
    """A random CLIP with the inputs of ViT-L/14."""
    torch.manual_seed(0)
    words = models.tokenizer(length=77)
    narrow = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    text = {**narrow, "eos_token_id": words.eos_token_id, "vocab_size": len(words)}
    config = CLIPConfig(text_config=text, vision_config={**narrow, "patch_size": 14}, projection_dim=48)
    model = CLIPModel(config)
    model.logit_scale.data.fill_(math.log(100))
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    CLIPImageProcessorPil().save_pretrained(folder)


def images() -> Iterator[Tensor]:
    """Batches of drawn, smooth and noisy images of several sizes, with 8-bit values and without."""
    generator = torch.Generator().manual_seed(0)
    for height, width in SIZES:
        drawn = torch.stack([check.draw(name) for name in ("circle", "meadow", "text")])
        drawn = functional.interpolate(drawn, (height, width), mode="bilinear", antialias=True)
        noise = torch.rand(2, 3, height, width, generator=generator)
        batch = torch.cat([drawn, noise]).clamp(0, 1)  # resizing exceeds 1 by rounding; rewards are given [0, 1]
        yield (batch * 255).round() / 255
        yield batch


def largest(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Largest absolute difference over all pairs."""
    return max(float((ours.double() - theirs.double()).abs().max()) for ours, theirs in pairs)


def compare(scorer: Any, ours: ClipScore) -> list[dict[str, Any]]:
    """Tokens, pixels and scores of both: how many were compared, and their largest difference."""
    pixels, scores, tokens = [], [], []
    length = ours.clip.model.config.text_config.max_position_embeddings
    options = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
    for batch in images():
        pixels.append((ours.pixels(batch), scorer._process(batch)))
        scores.append((torch.from_numpy(ours(batch, TEXTS)), scorer(batch, TEXTS)))
    mine = ours.clip.tokenizer(TEXTS, max_length=length, **options)["input_ids"]
    tokens.append((mine, scorer.processor(text=TEXTS, **options)["input_ids"]))
    found = {"tokens": tokens, "pixels": pixels, "scores": scores}
    return [
        {"what": what, "count": sum(len(pair[0]) for pair in pairs), "largest": largest(pairs)}
        for what, pairs in found.items()
    ]


def between_options(folder: Path) -> dict[str, Any]:
    """How far `processor` is from `nft`: in pixels after normalization, and in cosines by the shapes world's CLIP."""
    two = [ClipScore(folder, preprocess=name) for name in ("processor", "nft")]
    pixels = [tuple(each.pixels(check.draw(name)[None]) for each in two) for name in ("circle", "meadow", "text")]
    rows = prompts.load("test")
    drawn = functional.interpolate(render.render(rows, seed=0), (512, 512), mode="bicubic").clamp(0, 1)
    drawn, texts = (drawn * 255).round() / 255, [row["prompt"] for row in rows]
    trained = str(files("recast.shapes").joinpath("data/clip"))
    cosines = [ClipScore(trained, preprocess=name)(drawn, texts) for name in ("processor", "nft")]
    gaps = abs(cosines[0] - cosines[1])
    return {
        "largest_pixel_of_drawn_images": max(float((a - b).abs().max()) for a, b in pixels),
        "images": len(rows),
        "largest_cosine": float(gaps.max()),
        "mean_cosine": float(gaps.mean()),
    }


def main() -> None:
    """Compare, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="a clone of NVlabs/DiffusionNFT")
    parser.add_argument("--torchvision", type=Path, required=True, help="the folder with torchvision 0.21.0")
    given = parser.parse_args()
    source = given.source.resolve()
    module = published(source, given.torchvision.resolve())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / catalog.CLIP_L14
        save(folder)
        os.chdir(name)  # the published scorer loads the model by its name, which is a folder here
        scorer = module.ClipScorer(device="cpu")
        ours = ClipScore(folder, preprocess="nft", device="cpu")
        compared, options = compare(scorer, ours), between_options(folder)
    versions = {name: sys.modules[name].__version__ for name in ("torch", "torchvision", "transformers")}
    content = {
        "reward": "clipscore",
        "source": f"NVlabs/DiffusionNFT, {FILE}",
        "commit": git(source, "rev-parse", "HEAD").strip(),
        "compared": compared,
        "not_compared": [
            "the published checkpoint openai/clip-vit-large-patch14 (the model is random) and its logit scale",
            "transformers 4.40.0 and torch 2.6.0, which the source names",
        ],
        "versions": versions,
        "processor_minus_nft": options,
    }
    print(content)
    artifact.write(RESULTS / "clipscore.json", "recast.benchmark.published", content)


if __name__ == "__main__":
    main()
