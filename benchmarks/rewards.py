"""Rewards at their published sizes with random parameters: memory, load times, images per second, and a shared CLIP.

    python benchmarks/rewards.py [ROUNDS]

Nothing is downloaded: checkpoints of the real sizes and layouts are written to a temporary folder (7 GB) and read back
by the code of the rewards, since the cost of a network does not depend on the values of its parameters. One CPU
thread, 512-pixel images; the rewards of the shapes world have 64-pixel images and, like OCR, their own parameters.
Every reward runs in a process of its own: `parameters` are the bytes of its tensors (of its files for OCR), `memory`
is the peak of the whole process while it loads and scores. HPSv3's parameters are counted on the meta device, without
memory; it is not run. `shared`: clipscore and aesthetic on the same batch, with one CLIP ViT-L/14 that embeds it once,
and with one model each; alternating, best of ROUNDS (3). OCR reads rendered text at three sizes. Writes
results/rewards.json next to this file and the figures of `recast rewards list`; ten to twenty minutes.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    BertTokenizer,
    BlipTextConfig,
    BlipTextModel,
    BlipVisionConfig,
    BlipVisionModel,
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    Mask2FormerImageProcessorPil,
    Qwen2VLConfig,
    Qwen2VLModel,
    SwinConfig,
)

from recast.core import artifact
from recast.rewards import aesthetic, base, catalog, check, clip, hpsv2, hpsv3, imagereward
from recast.shapes import models, prompts, render

RESULTS = Path(__file__).parent / "results"
LISTED = Path(catalog.__file__).parent / "data/measured.json"
"""The figures of `recast rewards list`."""
SIZES = catalog.configurations()
"""Configurations of the published models."""
SHAPES = ("composition", "alignment", "detail", "background", "census")
COUNT = 4
"""Images per batch: on one core, a ViT-H/14 takes a second per image."""


def random_clip(sizes: dict[str, Any]) -> CLIPModel:
    """A CLIP of published sizes."""
    config = CLIPConfig(**sizes)
    end = models.tokenizer(length=77).eos_token_id
    config.text_config.eos_token_id = end
    return CLIPModel(config)


def save_words(folder: Path) -> None:
    """A small CLIP tokenizer and the published image processor."""
    models.tokenizer(length=77).save_pretrained(folder)
    CLIPImageProcessorPil().save_pretrained(folder)


def renamed(state: dict[str, Tensor], tables: list[dict[str, str]]) -> dict[str, Tensor]:
    """Tensors under the published names, by the inverse of the tables of a reward."""
    made = {}
    for name, value in state.items():
        for old, new in ((old, new) for table in tables for old, new in table.items()):
            name = name.replace(new, old) if name.startswith(new) or new.startswith(".") else name
        made[name] = value
    return made


def save_hpsv2(folder: Path) -> None:
    """HPS_v2.1_compressed.pt in open_clip's layout."""
    state = renamed(random_clip(SIZES["CLIP ViT-H/14"]).state_dict(), [hpsv2._PARTS, hpsv2._PLACES])
    for name in [name for name in state if ".self_attn.q_proj." in name]:
        parts = [state.pop(name.replace("q_proj", f"{letter}_proj")) for letter in "qkv"]
        state[name.replace(".self_attn.q_proj.", ".attn.in_proj_")] = torch.cat(parts)
    state["visual.proj"] = state.pop("visual_projection.weight").T.contiguous()
    state["text_projection"] = state.pop("text_projection.weight").T.contiguous()
    save_words(folder)
    torch.save({"state_dict": {name: value.half() for name, value in state.items()}}, folder / hpsv2.FILE)


def save_imagereward(folder: Path) -> None:
    """ImageReward.pt in its published layout, and a small BERT tokenizer."""
    eyes = BlipVisionModel(BlipVisionConfig(**SIZES["BLIP vision"])).state_dict()
    words = BlipTextModel(BlipTextConfig(**SIZES["BLIP text"]), add_pooling_layer=False).state_dict()
    state = {f"blip.visual_encoder.{k}": v for k, v in renamed(eyes, [imagereward._PARTS, imagereward._NAMES]).items()}
    state |= {f"blip.text_encoder.{k}": v for k, v in words.items()}
    state |= {f"mlp.layers.{k}": v for k, v in aesthetic.head(768).state_dict().items()}
    folder.mkdir()
    torch.save(state, folder / imagereward.FILE)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
    BertTokenizer(vocab={word: k for k, word in enumerate(vocabulary)}).save_pretrained(folder)


def save_geneval(folder: Path) -> None:
    """Mask2Former with a Swin-S, for COCO's 80 classes."""
    swin = SwinConfig(**SIZES["Swin-S"])
    Mask2FormerForUniversalSegmentation(Mask2FormerConfig(backbone_config=swin, num_labels=80)).save_pretrained(folder)
    Mask2FormerImageProcessorPil().save_pretrained(folder)


def save_all(folder: Path) -> dict[str, dict[str, Any]]:
    """Write checkpoints of the published sizes; returns the options that name them, by reward."""
    torch.manual_seed(0)
    for name, sizes in (("l14", SIZES["CLIP ViT-L/14"]), ("h14", SIZES["CLIP ViT-H/14"])):
        random_clip(sizes).save_pretrained(folder / name)
        save_words(folder / name)
    head = {f"layers.{k}": v for k, v in aesthetic.head(768).state_dict().items()}
    torch.save(head, folder / catalog.AESTHETIC_FILE)
    save_hpsv2(folder / "hpsv2")
    save_imagereward(folder / "imagereward")
    save_geneval(folder / "mask2former")
    return {
        "clipscore": {"model": folder / "l14"},
        "aesthetic": {"model": folder / "l14", "checkpoint": folder / catalog.AESTHETIC_FILE},
        "pickscore": {"model": folder / "h14", "processor": folder / "h14"},
        "hpsv2": {"checkpoint": folder / "hpsv2", "tokenizer": folder / "hpsv2"},
        "imagereward": {"checkpoint": folder / "imagereward", "tokenizer": folder / "imagereward"},
        "geneval": {"model": folder / "mask2former", "clip": folder / "l14"},
    }


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Duration of a call in seconds, and its result."""
    begun = time.perf_counter()
    made = call()
    return time.perf_counter() - begun, made


def best(call: Callable[[], Any], rounds: int) -> float:
    """The shortest duration of several calls, in seconds."""
    return min(timed(call)[0] for _ in range(rounds))


def scored(reward: base.Reward, images: Tensor, texts: list[str]) -> Any:
    """Scores of a copy of the images, for which no model has cached embeddings."""
    rows = [{"include": [{"class": "cat", "count": 1, "color": "red"}]}] * len(texts)
    return reward(images.clone(), texts, rows)


def batch(name: str) -> tuple[Tensor, list[str]]:
    """Images and prompts for a reward."""
    if name in SHAPES:
        rows = prompts.load("test")[:COUNT]
        return render.render(rows, 0), [row["prompt"] for row in rows]
    if name == "ocr":
        return torch.stack([check.draw("text")] * COUNT), [check.CAPTIONS["text"]] * COUNT
    return torch.rand(COUNT, 3, 512, 512), [f"prompt {k}" for k in range(COUNT)]


def parameter_bytes(name: str) -> int:
    """Bytes of all parameters and buffers in this process; for OCR, of its files."""
    if name == "ocr":
        import rapidocr

        folder = Path(rapidocr.__file__).parent / "models"
        return sum((folder / f"{each}.onnx").stat().st_size for each in base.versions(name, {})["models"].split(", "))
    found = [each for each in gc.get_objects() if isinstance(each, torch.nn.Module)]
    tensors = {
        each.data_ptr(): each.nbytes
        for model in found
        for each in (*model.parameters(), *model.buffers())
        if each.nbytes
    }
    return sum(tensors.values())


def one(name: str, options: dict[str, Any], rounds: int) -> dict[str, float]:
    """Load time, speed and memory of a reward; to be run in a process of its own."""
    images, texts = batch(name)
    seconds, reward = timed(partial(base.load, name, **options))
    scored(reward, images, texts)
    each = best(partial(scored, reward, images, texts), rounds) / COUNT
    memory = peak()  # before tensors are counted
    return {"load": seconds, "images_per_second": 1 / each, "parameters": parameter_bytes(name), "memory": memory}


def peak() -> int:
    """Peak memory of this process in bytes, on Linux; `ru_maxrss` would include the process that started it."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def models_alone(options: dict[str, dict[str, Any]], rounds: int) -> dict[str, dict[str, float]]:
    """Load time in seconds, images per second, and memory in bytes of each reward."""
    rows: dict[str, dict[str, float]] = {}
    for name, given in options.items():
        words = {key: str(value) if isinstance(value, Path) else value for key, value in given.items()}
        command = [sys.executable, __file__, "--one", name, json.dumps(words), str(rounds)]
        rows[name] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        size, speed = rows[name]["memory"] / 1e9, rows[name]["images_per_second"]
        print(f"{name:12} loads in {rows[name]['load']:5.1f} s, {speed:7.2f} images/s, peak {size:.1f} GB", flush=True)
    return rows


def hpsv3_bytes() -> int:
    """Bytes of HPSv3's parameters: the model in bfloat16, its head in float32."""
    with torch.device("meta"):
        backbone = Qwen2VLModel._from_config(Qwen2VLConfig(**SIZES["Qwen2-VL-7B"]), dtype=torch.bfloat16)
        width, (first, second, last) = backbone.config.text_config.hidden_size, hpsv3._HEAD
        head = [torch.nn.Linear(*sizes) for sizes in ((width, first), (first, second), (second, last))]
    return sum(each.nbytes for model in (backbone, *head) for each in model.parameters())


def sharing(options: dict[str, dict[str, Any]], rounds: int) -> float:
    """Time of two rewards with one CLIP each relative to that with a shared one, alternating."""
    pair = ("clipscore", "aesthetic")
    texts = [f"prompt {k}" for k in range(COUNT)]
    together = {name: base.load(name, **options[name]) for name in pair}
    clip._shared.clear()
    apart = {"clipscore": together["clipscore"], "aesthetic": base.load("aesthetic", **options["aesthetic"])}
    assert together["aesthetic"].clip is together["clipscore"].clip is not apart["aesthetic"].clip  # type: ignore[attr-defined]
    seconds: dict[str, list[float]] = {"together": [], "apart": []}
    for _ in range(rounds):
        for name, rewards in (("together", together), ("apart", apart)):
            images = torch.rand(COUNT, 3, 512, 512)
            seconds[name].append(timed(partial(base.score, rewards, images, texts))[0])
    return min(seconds["apart"]) / min(seconds["together"])


def reading(rounds: int) -> dict[str, float]:
    """Images per second that OCR reads on one thread, by their size."""
    reward = base.load("ocr", threads=1)
    found = {}
    for side in (512, 128, 64):
        images = torch.stack([check.draw(name, side) for name in ("text", "typo") * 2])
        texts = [check.CAPTIONS["text"]] * len(images)
        reward(images, texts)
        found[str(side)] = len(images) / best(partial(scored, reward, images, texts), rounds)
        print(f"ocr at {side} pixels: {found[str(side)]:.1f} images/s", flush=True)
    return found


def main() -> None:
    """Measure, print and write."""
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(one(sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4]))))
        return
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    with tempfile.TemporaryDirectory() as name:
        options = save_all(Path(name))
        small: dict[str, dict[str, Any]] = {"ocr": {"threads": 1}, "jpeg": {}, **{name: {} for name in SHAPES}}
        rows = models_alone(options | small, rounds)
        ratio = sharing(options, rounds)
    print(f"clipscore and aesthetic with one CLIP each take {ratio:.2f} times as long as with a shared one")
    rows["hpsv3"] = {"parameters": hpsv3_bytes()}
    content = {"models": rows, "apart_over_shared": ratio, "ocr": reading(rounds)}
    artifact.write(RESULTS / "rewards.json", "recast.benchmark.rewards", content)
    listed = {name: {key: value for key, value in row.items() if key != "load"} for name, row in rows.items()}
    artifact.write(LISTED, "recast.rewards.measured", {"command": "python benchmarks/rewards.py", "rewards": listed})


if __name__ == "__main__":
    main()
