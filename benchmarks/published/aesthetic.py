"""The aesthetic predictor beside the scorer of DiffusionNFT, with the published head: pixels and scores.

    git clone https://github.com/NVlabs/DiffusionNFT
    git clone https://github.com/christophschuhmann/improved-aesthetic-predictor predictor
    python benchmarks/published/aesthetic.py --python nft/bin/python --source DiffusionNFT --authors predictor

`nft` is the environment of README.md in this folder. `flow_grpo/aesthetic_scorer.py` runs as it is published and as
flow_grpo/rewards.py calls it, on a random CLIP with the inputs and layout of ViT-L/14 and few channels, but with the
published checkpoint of the head, which its authors' repository contains. Writes results/published/aesthetic.json;
about a minute.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import common
import torch

MODEL, FILE = "openai/clip-vit-large-patch14", "sac+logos+ava1-l14-linearMSE.pth"
ABOUT = {
    "source": "NVlabs/DiffusionNFT, flow_grpo/aesthetic_scorer.py; christophschuhmann/improved-aesthetic-predictor, "
    "its checkpoint",
    "not_compared": [
        "the published CLIP (the one used is random, with few channels; the head is the published one)",
        "the authors' script with openai/CLIP, which rounds odd margins of non-square images differently",
        "half precision",
    ],
}


def theirs(folder: Path, given: Any) -> None:
    """Write the checkpoint and what the published scorer makes of it."""
    common.torchvision()
    common.save_clip(folder / MODEL, common.merges_file(), "quick_gelu", 768)
    shutil.copy(Path(given.authors) / FILE, folder)
    sys.path.append(given.source)
    common.published("flow_grpo.reward_ckpt_path").CKPT_PATH = str(folder)
    scorer = common.published("flow_grpo.aesthetic_scorer").AestheticScorer(dtype=torch.float32, device="cpu")
    score = common.published("flow_grpo.rewards").aesthetic_score("cpu")
    found: common.Found = {"pixels": [], "scores": []}
    for images, _ in common.batches(folder):
        floats = common.as_floats(images)
        levels = torch.from_numpy(common.rounded(floats)).permute(0, 3, 1, 2)
        found["pixels"].append(scorer.processor(images=levels, return_tensors="np")["pixel_values"])
        found["scores"].append(score(floats, None, None)[0].numpy())
    common.write_found(folder, found, common.versions("torch", "transformers", "pillow", "numpy"))


def ours(folder: Path, given: Any) -> common.Found:
    """The same by this package."""
    from recast.rewards.aesthetic import Aesthetic

    reward = Aesthetic(folder / MODEL, folder / FILE, device="cpu")
    found: common.Found = {"pixels": [], "scores": []}
    for images, prompts in common.batches(folder):
        tensor = common.as_floats(images)
        found["pixels"].append(reward.pixels(tensor).numpy())
        found["scores"].append(reward(tensor, prompts))
    return found


if __name__ == "__main__":
    paths = {
        "source": "a clone of NVlabs/DiffusionNFT",
        "authors": "a clone of christophschuhmann/improved-aesthetic-predictor",
    }
    common.run("aesthetic", __file__, theirs, ours, ABOUT, options=paths)
