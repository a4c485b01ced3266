"""PickScore beside the scorer of DiffusionNFT and the inference code of its authors: tokens, pixels and scores.

    git clone https://github.com/NVlabs/DiffusionNFT
    git clone https://github.com/yuvalkirstain/PickScore
    python benchmarks/published/pickscore.py --python nft/bin/python --source DiffusionNFT --authors PickScore

`nft` is the environment of README.md in this folder. `flow_grpo/pickscore_scorer.py` runs as it is published and as
flow_grpo/rewards.py calls it, on a random CLIP with the vocabulary, inputs and layout of the published one and few
channels. `infer_example` of the authors gives the probabilities of the images of a batch under one prompt, which are
compared with softmax(26·score). Writes results/published/pickscore.json; about a minute.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch

MODEL, PROCESSOR = "yuvalkirstain/PickScore_v1", "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
END = 49407
ABOUT = {
    "source": "NVlabs/DiffusionNFT, flow_grpo/pickscore_scorer.py; yuvalkirstain/PickScore, infer_example",
    "not_compared": [
        "the published checkpoint and its size (the model is random, with few channels)",
        "half precision",
    ],
}


def theirs(folder: Path, given: Any) -> None:
    """Write the checkpoint and what the published scorers make of it."""
    common.torchvision()
    common.save_clip(folder / MODEL, common.merges_file(), "gelu", 64)
    common.save_tokenizer(folder / PROCESSOR, common.merges_file())
    common.save_processor(folder / PROCESSOR)
    sys.path += [given.source, given.authors]
    scorer = common.published("flow_grpo.pickscore_scorer").PickScoreScorer(device="cpu")
    score = common.published("flow_grpo.rewards").pickscore_score("cpu")
    infer = common.published("trainer.scripts.eval_preference_predictor").infer_example
    options = {"padding": True, "truncation": True, "max_length": 77}
    ids = scorer.processor(text=common.texts(Path(given.source)), **options)["input_ids"]
    found: common.Found = {"tokens": [common.until_end(ids, END)], "pixels": [], "scores": [], "probabilities": []}
    for images, prompts in common.batches(folder):
        floats = common.as_floats(images)
        pil = common.as_pil(common.rounded(floats))
        found["pixels"].append(scorer.processor(images=pil, return_tensors="np")["pixel_values"])
        found["scores"].append(score(floats, prompts, None)[0].numpy())
        chances = infer(pil, prompts[0], scorer.model, scorer.processor, "cpu")
        found["probabilities"].append(np.array(chances))
    common.write_found(folder, found, common.versions("torch", "transformers", "tokenizers", "pillow", "numpy"))


def ours(folder: Path, given: Any) -> common.Found:
    """The same by this package."""
    from recast.rewards.pickscore import PickScore

    reward = PickScore(folder / MODEL, folder / PROCESSOR, device="cpu")
    options = {"padding": "max_length", "truncation": True, "max_length": 77}
    ids = reward.clip.tokenizer(common.texts(given.source), **options)["input_ids"]
    found: common.Found = {"tokens": [common.until_end(ids, END)], "pixels": [], "scores": [], "probabilities": []}
    for images, prompts in common.batches(folder):
        tensor = common.as_floats(images)
        found["pixels"].append(reward.pixels(tensor).numpy())
        found["scores"].append(reward(tensor, prompts))
        logits = torch.from_numpy(26 * reward(tensor, [prompts[0]] * len(images)))
        found["probabilities"].append(logits.softmax(-1).numpy())
    return found


if __name__ == "__main__":
    paths = {"source": "a clone of NVlabs/DiffusionNFT", "authors": "a clone of yuvalkirstain/PickScore"}
    common.run("pickscore", __file__, theirs, ours, ABOUT, options=paths)
