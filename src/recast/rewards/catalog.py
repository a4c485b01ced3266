"""What each reward is and what it needs, for `recast rewards list`; none of it is imported."""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

__all__ = [
    "AESTHETIC",
    "AESTHETIC_FILE",
    "BERT",
    "CLIP_H14",
    "CLIP_L14",
    "COST",
    "ENTRIES",
    "HPSV2",
    "HPSV3",
    "IMAGEREWARD",
    "MASK2FORMER",
    "MASK2FORMER_FILE",
    "PICKSCORE",
    "QWEN2_VL",
    "UNIFIEDREWARD",
    "Address",
    "Entry",
    "Files",
    "Measured",
    "configurations",
    "measured",
]

CLIP_L14, CLIP_H14 = "openai/clip-vit-large-patch14", "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
PICKSCORE, HPSV2, IMAGEREWARD, HPSV3 = "yuvalkirstain/PickScore_v1", "xswu/HPSv2", "THUDM/ImageReward", "MizzenAI/HPSv3"
BERT, QWEN2_VL = "google-bert/bert-base-uncased", "Qwen/Qwen2-VL-7B-Instruct"
MASK2FORMER_FILE = "mask2former_swin-s-p4-w7-224_lsj_8x2_50e_coco_20220504_001756-743b7d99.pth"
MASK2FORMER = (
    "https://download.openmmlab.com/mmdetection/v2.0/mask2former/mask2former_swin-s-p4-w7-224_lsj_8x2_50e_coco/"
    + MASK2FORMER_FILE
)
UNIFIEDREWARD = "CodeGoat24/UnifiedReward-2.0-qwen3vl-8b"
AESTHETIC_FILE = "sac+logos+ava1-l14-linearMSE.pth"
AESTHETIC = (
    "https://github.com/christophschuhmann/improved-aesthetic-predictor/raw/main/sac%2Blogos%2Bava1-l14-linearMSE.pth"
)
COST = (
    "GB: parameters in memory / peak of a process that scores four images; images/s: one CPU thread, images of 512 "
    "pixels (shapes world: 64). Measured at the published sizes with random parameters (ocr and the shapes world: "
    "their own) by python benchmarks/rewards.py; ?: not measured."
)
"""What the figures of `measured` are."""
_SMALL = ("*.json", "*.txt")
"""Configurations, tokenizers and processors of a repository."""


@dataclass(frozen=True)
class Files:
    """Part of a hub repository: patterns of the files to download, and one file that shows whether they are there."""

    repository: str
    patterns: tuple[str, ...]
    marker: str

    @property
    def source(self) -> str:
        """The option of a reward that means these files."""
        return self.repository

    def path(self) -> Path | None:
        """Where the cache of the hub has the marker, or None."""
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self.repository, self.marker)
        return Path(found) if isinstance(found, str) else None

    def missing(self) -> str | None:
        """The command that downloads the files, or None if the cache of the hub has them."""
        if self.path() is not None:
            return None
        return f"hf download {self.repository} " + " ".join(f"--include '{each}'" for each in self.patterns)


@dataclass(frozen=True)
class Address:
    """A file that is downloaded once from an https address."""

    url: str
    name: str

    @property
    def source(self) -> str:
        """The option of a reward that means this file."""
        return self.url

    def path(self) -> Path:
        """Where the cache of torch has the file, whether or not it exists."""
        home = Path(os.environ.get("TORCH_HOME", Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "torch"))
        return home.expanduser() / "hub" / "checkpoints" / self.name

    def missing(self) -> str | None:
        """The command that downloads the file, or None if the cache of torch has it."""
        return None if self.path().is_file() else f"curl --create-dirs -L -o '{self.path()}' '{self.url}'"


@dataclass(frozen=True)
class Entry:
    """One reward: what it is, the range of its scores, and the packages and files it needs."""

    what: str
    range: str
    packages: tuple[str, ...] = ("torch", "transformers")
    files: tuple[Files | Address, ...] = ()
    remark: str = ""

    def missing(self) -> list[str]:
        """Commands that install or download what is missing, in order."""
        absent = [name for name in self.packages if importlib.util.find_spec(name) is None]
        found = ["pip install 'recast-diffusion[rewards]'"] if absent else []
        if self.files and importlib.util.find_spec("huggingface_hub") is None:  # comes with transformers
            return found or ["pip install 'recast-diffusion[rewards]'"]
        return found + [command for each in self.files if (command := each.missing()) is not None]


@dataclass(frozen=True)
class Measured:
    """Cost of a reward: bytes of its parameters, peak memory of a process that scores, images per second.

    None where it was not measured.
    """

    parameters: int | None = None
    memory: int | None = None
    images_per_second: float | None = None


@cache
def measured() -> dict[str, Measured]:
    """The cost of every reward but `unifiedreward`, which is a server, as `python benchmarks/rewards.py` wrote it."""
    content = json.loads((files("recast.rewards") / "data/measured.json").read_text(encoding="utf-8"))
    return {name: Measured(**values) for name, values in content["rewards"].items()}


@cache
def configurations() -> dict[str, Any]:
    """The configurations of the published models, by name: settings of classes that decide their sizes."""
    content: dict[str, Any] = json.loads(
        (files("recast.rewards") / "data/configurations.json").read_text(encoding="utf-8")
    )
    return content


_L14 = Files(CLIP_L14, (*_SMALL, "model.safetensors"), "model.safetensors")
_H14 = Files(CLIP_H14, _SMALL, "preprocessor_config.json")
ENTRIES = {
    "clipscore": Entry("cosine by CLIP ViT-L/14", "cosine", files=(_L14,)),
    "hpsv2": Entry(
        "cosine by HPS v2.1, a ViT-H/14",
        "cosine",
        ("torch", "transformers", "ftfy"),
        (Files(HPSV2, ("HPS_v2.1_compressed.pt",), "HPS_v2.1_compressed.pt"), _H14),
    ),
    "pickscore": Entry(
        "(e^s / 26) cos by PickScore, a ViT-H/14",
        "0 to 3.8",
        files=(Files(PICKSCORE, ("config.json", "model.safetensors"), "model.safetensors"), _H14),
    ),
    "imagereward": Entry(
        "ImageReward-v1.0, BLIP",
        "signed; sigmoid for curves",
        files=(
            Files(IMAGEREWARD, ("ImageReward.pt",), "ImageReward.pt"),
            Files(BERT, ("config.json", "tokenizer*", "vocab.txt"), "tokenizer_config.json"),
        ),
    ),
    "aesthetic": Entry("LAION's predictor of ratings", "1 to 10", files=(_L14, Address(AESTHETIC, AESTHETIC_FILE))),
    "ocr": Entry(
        "legibility of the quoted text, by PP-OCR", "0 to 1", ("torch", "PIL", "rapidocr", "onnxruntime", "rapidfuzz")
    ),
    "geneval": Entry(
        "clauses confirmed by Mask2Former and CLIP",
        "0 to 1; nft: -14 to 1",
        ("torch", "transformers", "scipy"),
        (Address(MASK2FORMER, MASK2FORMER_FILE), _L14),
    ),
    "hpsv3": Entry(
        "HPSv3, Qwen2-VL-7B",
        "-10 to 16",
        files=(
            Files(HPSV3, ("HPSv3.safetensors",), "HPSv3.safetensors"),
            Files(QWEN2_VL, ("config.json", "tokenizer*", "vocab.json", "merges.txt"), "tokenizer_config.json"),
        ),
        remark="needs its published instruction: pip download --no-deps hpsv3==1.0.0, then recast rewards setup hpsv3 "
        "--from hpsv3-1.0.0-py3-none-any.whl",
    ),
    "unifiedreward": Entry(
        "UnifiedReward-2 behind an OpenAI-compatible endpoint",
        "1 to 5",
        ("torch", "PIL"),
        remark=f"needs a server: vllm serve {UNIFIEDREWARD}; for the published template: recast rewards setup "
        "unifiedreward --from a clone of github.com/CodeGoat24/UnifiedReward",
    ),
    "jpeg": Entry("example: negative size of a JPEG in kilobytes", "below 0", ("torch", "PIL")),
    "composition": Entry("shapes world: share of confirmed clauses", "0 to 1"),
    "alignment": Entry("shapes world: clipscore with its own CLIP", "0 to 1"),
    "detail": Entry("shapes world: quality of the drawn objects", "0 to 1"),
    "background": Entry("shapes world: cleanness of the background", "0 to 1"),
    "census": Entry("shapes world, held-out: F1 of the objects", "0 to 1"),
}
