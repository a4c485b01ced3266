"""HPSv2 beside the scorer of DiffusionNFT and the published package: tokens, pixels and scores.

    git clone https://github.com/NVlabs/DiffusionNFT
    python benchmarks/published/hpsv2.py --python nft/bin/python --source DiffusionNFT

`nft` is the environment of README.md in this folder; it has hpsv2x 1.2.0, which DiffusionNFT names (the open_clip of
tgxs002/HPSv2 with its vocabulary, which the wheel of hpsv2 1.2.0 lacks). `flow_grpo/hpsv2_scorer.py`, as
flow_grpo/rewards.py calls it, and `hpsv2.img_score.score` run as they are published. Their model is open_clip's, in a
configuration with few channels under the published name, and its random parameters are saved in half precision as the
published file is. Writes results/published/hpsv2.json; about a minute.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch

FILE, BASE = "HPS_v2.1_compressed.pt", "open_clip_pytorch_model.bin"
END = 49407
CONFIG = {
    "embed_dim": 64,
    "vision_cfg": {"image_size": 224, "layers": 3, "width": 160, "head_width": 80, "patch_size": 14},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 128, "heads": 2, "layers": 3},
}
KINDS = ("pixels", "scores", "pixels of hpsv2.score", "scores of hpsv2.score")
ABOUT = {
    "source": "NVlabs/DiffusionNFT, flow_grpo/hpsv2_scorer.py; hpsv2x 1.2.0, hpsv2.score",
    "not_compared": [
        "the published checkpoint and its size (the model is random, with few channels)",
        "torchvision before 0.17, which resizes tensors without a filter",
        "images whose longest side is 224 and which are not square: the published scorers fail on them",
        "prompts with CLIP's own end token or a few rare characters (U+0345, unassigned ones), which the tokenizers of "
        "open_clip and transformers split differently",
        "half precision",
    ],
}


def save(folder: Path) -> Any:
    """Write the checkpoint by the published code; returns open_clip as the package has it."""
    open_clip = common.published("hpsv2.src.open_clip")
    (folder / "ViT-H-14.json").write_text(json.dumps(CONFIG))
    open_clip.add_model_config(folder / "ViT-H-14.json")
    model = open_clip.create_model("ViT-H-14")
    common.widen(model)
    state = {name: value.half() for name, value in model.state_dict().items()}
    torch.save({"epoch": 1, "state_dict": state}, folder / FILE)
    torch.save(state, folder / BASE)
    common.save_tokenizer(folder, common.merges_file())
    return open_clip


def package(folder: Path, open_clip: Any) -> Any:
    """`hpsv2.img_score` with its model in place: it would download one only to overwrite it."""
    module = common.published("hpsv2.img_score")
    model, _, module.model_dict["preprocess_val"] = open_clip.create_model_and_transforms(
        "ViT-H-14", str(folder / BASE), precision="amp", device="cpu", light_augmentation=True, output_dict=True
    )
    module.model_dict["model"] = model
    return module


def theirs(folder: Path, given: Any) -> None:
    """Write the checkpoint and what the published scorers make of it."""
    common.torchvision()
    sys.path.append(given.source)
    open_clip = save(folder)
    common.published("flow_grpo.reward_ckpt_path").CKPT_PATH = str(folder)
    scorer = common.published("flow_grpo.hpsv2_scorer").HPSv2Scorer(dtype=torch.float32, device="cpu")
    score = common.published("flow_grpo.rewards").hpsv2_score("cpu")
    alone = package(folder, open_clip)
    ids = scorer.processor(common.texts(Path(given.source))).tolist()
    found: common.Found = {"tokens": [common.until_end(ids, END)], **{what: [] for what in KINDS}}
    for images, prompts in common.batches(folder):
        floats, pil = common.as_floats(images), common.as_pil(images)
        found["pixels"].append(scorer.preprocess_val(floats).numpy())
        found["scores"].append(score(floats, prompts, None)[0].numpy())
        found["pixels of hpsv2.score"].append(np.stack([alone.model_dict["preprocess_val"](each) for each in pil]))
        pairs = zip(pil, prompts, strict=True)
        scores = [alone.score(image, prompt, cp=str(folder / FILE))[0] for image, prompt in pairs]
        found["scores of hpsv2.score"].append(np.array(scores))
    names = ("torch", "torchvision", "hpsv2x", "ftfy", "pillow", "numpy")
    common.write_found(folder, found, common.versions(*names))


def ours(folder: Path, given: Any) -> common.Found:
    """The same by this package."""
    from recast.rewards import hpsv2

    reward = hpsv2.HPSv2(folder / FILE, folder, device="cpu")
    options = {"padding": "max_length", "truncation": True, "max_length": 77}
    clean = [hpsv2.cleaned(text) for text in common.texts(given.source)]
    ids = reward.clip.tokenizer(clean, **options)["input_ids"]
    found: common.Found = {"tokens": [common.until_end(ids, END)], **{what: [] for what in KINDS}}
    for images, prompts in common.batches(folder):
        for which, tensor in (("", common.as_floats(images)), (" of hpsv2.score", common.as_tensor(images))):
            found[f"pixels{which}"].append(hpsv2.pixels(tensor).numpy())
            found[f"scores{which}"].append(reward(tensor, prompts))
    return found


if __name__ == "__main__":
    common.run("hpsv2", __file__, theirs, ours, ABOUT, options={"source": "a clone of NVlabs/DiffusionNFT"})
