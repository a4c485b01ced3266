"""ImageReward beside the published package: tokens, pixels and scores.

    git clone https://github.com/NVlabs/DiffusionNFT
    python benchmarks/published/imagereward.py --python nft/bin/python --source DiffusionNFT --vocabulary vocab.txt

`nft` is the environment of README.md in this folder; it has image-reward 1.5. `vocab.txt` is the file of this name in
the hub repository bert-base-uncased. `flow_grpo/imagereward_scorer.py`, as flow_grpo/rewards.py calls it, and the
package run as they are published, with random parameters: the vision tower is as large as the published one, the text
tower has two of its twelve layers. Writes results/published/imagereward.json; a few minutes, 2 GB of temporary files
and 7 GB of memory.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch

FILE, WORDS = "ImageReward.pt", "bert-base-uncased"
SHA256 = "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"
"""Of the published vocabulary."""
SIZES = ((512, 512), (512, 768), (517, 333), (225, 226), (20, 30))
"""Fewer than elsewhere: the published scorer scores every prompt of a batch with every image."""
TEXT = {
    "architectures": ["BertModel"],
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "num_attention_heads": 12,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "add_type_embeddings": False,
    "type_vocab_size": 2,
    "vocab_size": 30524,
    "encoder_width": 768,
    "add_cross_attention": True,
}
ABOUT = {
    "source": "image-reward 1.5; NVlabs/DiffusionNFT, flow_grpo/imagereward_scorer.py",
    "not_compared": [
        "the published checkpoint (parameters are random; the text tower has 2 of 12 layers)",
        "half precision",
    ],
}


def theirs(folder: Path, given: Any) -> None:
    """Write the checkpoint and what the published scorer makes of it."""
    if hashlib.sha256(Path(given.vocabulary).read_bytes()).hexdigest() != SHA256:
        sys.exit(f"{given.vocabulary} is not the vocabulary of {WORDS}: its SHA-256 is not {SHA256[:12]}…")
    common.torchvision()
    sys.path.append(given.source)
    (folder / WORDS).mkdir()
    shutil.copy(given.vocabulary, folder / WORDS / "vocab.txt")
    (folder / WORDS / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True}))
    (folder / WORDS / "config.json").write_text(json.dumps({"model_type": "bert"}))
    (folder / "med_config.json").write_text(json.dumps(TEXT))
    published = common.published("ImageReward")
    made = published.ImageReward(med_config=str(folder / "med_config.json"))
    common.widen(made)
    torch.save(made.state_dict(), folder / FILE)
    del made
    load = published.load
    published.load = lambda name, device, download_root: load(
        str(folder / FILE), device=device, med_config=str(folder / "med_config.json")
    )
    # The scorer is made once more by `imagereward_score`, which keeps its own to itself.
    score = common.published("flow_grpo.rewards").imagereward_score("cpu")
    scorer = common.published("flow_grpo.imagereward_scorer").ImageRewardScorer(device="cpu")
    options = {"padding": "max_length", "truncation": True, "max_length": 35}
    ids = scorer.model.blip.tokenizer(common.texts(Path(given.source)), **options)["input_ids"]
    found: common.Found = {"tokens": [np.array(ids)], "pixels": [], "scores": []}
    for images, prompts in common.batches(folder):
        floats = common.as_floats(images)
        pil = common.as_pil(common.rounded(floats))
        found["pixels"].append(np.stack([scorer.model.preprocess(image) for image in pil]))
        found["scores"].append(score(floats, prompts, None)[0].numpy())
    names = ("torch", "torchvision", "transformers", "image-reward", "timm", "pillow", "numpy")
    common.write_found(folder, found, common.versions(*names))


def ours(folder: Path, given: Any) -> common.Found:
    """The same by this package."""
    from recast.rewards.imagereward import ImageReward

    reward = ImageReward(folder / FILE, folder / WORDS, device="cpu")
    options = {"padding": "max_length", "truncation": True, "max_length": 35}
    ids = reward.tokenizer(common.texts(given.source), **options)["input_ids"]
    found: common.Found = {"tokens": [np.array(ids)], "pixels": [], "scores": []}
    for images, prompts in common.batches(folder):
        tensor = common.as_floats(images)
        found["pixels"].append(reward.pixels(tensor).numpy())
        found["scores"].append(reward(tensor, prompts))
    return found


if __name__ == "__main__":
    paths = {"source": "a clone of NVlabs/DiffusionNFT", "vocabulary": "vocab.txt of bert-base-uncased"}
    common.run("imagereward", __file__, theirs, ours, ABOUT, SIZES, paths)
