"""GenEval beside the benchmark's own script, the reward server of the RL codebases, and mmdet: rules, detector, colors.

    git clone https://github.com/djghosh13/geneval
    git clone https://github.com/yifan123/reward-server
    git clone -b v1.7.2 https://github.com/open-mmlab/mmcv
    git clone -b v2.28.2 https://github.com/open-mmlab/mmdetection
    python benchmarks/published/geneval.py --python ENVIRONMENT/bin/python --source geneval --server reward-server \
        --mmcv mmcv --mmdet mmdetection --rows test_metadata.jsonl

with

    ENVIRONMENT/bin/pip install torch==2.13.0 transformers pillow==13.0.0 pandas opencv-python-headless addict yapf \
        terminaltables pycocotools matplotlib scikit-learn ftfy regex timm
    ENVIRONMENT/bin/pip install --no-deps torchvision==0.21.0 open_clip_torch==3.3.0 clip-benchmark==1.6.2

`evaluate_images.py` and `gen_eval.py` run as they are published, on each row of the metadata (of DiffusionNFT's
dataset/geneval) with random detections. mmdet builds its Mask2Former with few channels and random tensors and detects
by `inference_detector`; the compiled operators of mmcv are not needed, since its deformable attention has a form in
plain torch. pillow has the same version on both sides: 10.4 resizes one of the 30 crops differently, by up to 6 levels.
Writes results/published/geneval.json; three minutes on one core.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from PIL import Image

CONFIG = "configs/mask2former/mask2former_swin-s-p4-w7-224_lsj_8x2_50e_coco.py"
CLIP = "openai/clip-vit-large-patch14"
SIZES = ((512, 512), (300, 700), (517, 333), (1024, 1024), (100, 64))
SCENES = 4
SERVER = ", as the reward server passes images"
COLORS = ["red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white"]
ABOUT: dict[str, Any] = {
    "source": "djghosh13/geneval, evaluation/evaluate_images.py; yifan123/reward-server, reward_server/gen_eval.py, "
    "with the functions of NVlabs/DiffusionNFT, flow_grpo/gen_eval.py; open-mmlab/mmdetection 2.28.2 on mmcv 1.7.2",
    "not_compared": [
        "the published checkpoints (the detector and CLIP are random, with few channels; the names and shapes of the "
        "detector's 649 tensors are compared)",
        "half precision: the published scripts run CLIP under autocast",
        "JPEG: Flow-GRPO's client compresses the images that it sends to the reward server, DiffusionNFT does not",
        "the order of objects with equal scores",
    ],
}


def scenes(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Random objects for each row: of its classes, as many as asked for or not, in its color or another one."""
    generator = np.random.default_rng(0)
    made = []
    for row in [row for row in rows for _ in range(SCENES)]:
        low, objects = 0.75 if row["tag"] == "counting" else 0.2, []
        for wanted in row["include"]:
            extra = int(generator.choice([-1, 0, 1, 4, 17], p=[0.1, 0.7, 0.1, 0.07, 0.03]))
            for _ in range(max(wanted["count"] + extra, 0)):
                corner, size = generator.integers(0, 400, 2), generator.integers(10, 110, 2)
                color = wanted.get("color") if generator.random() < 0.7 else None
                objects.append(
                    {
                        "name": wanted["class"],
                        "score": float(generator.uniform(low, 1)),
                        "box": [*corner.tolist(), *(corner + size).tolist()],
                        "color": COLORS.index(color) if color else int(generator.integers(10)),
                    }
                )
        made.append(objects)
    return made


@contextmanager
def claimed_gpu() -> Iterator[None]:
    """The benchmark's script asserts at its import that there is one."""
    known = torch.cuda.is_available
    torch.cuda.is_available = lambda: True
    try:
        yield
    finally:
        torch.cuda.is_available = known


def imported(path: Path) -> Any:
    """The module of a file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with claimed_gpu():
        spec.loader.exec_module(module)
    module.DEVICE = "cpu"  # type: ignore[attr-defined]
    return module


class Operators(types.ModuleType):
    """In place of mmcv's compiled operators: any name, none of which is called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def prepare(given: Any) -> None:
    """Make mmcv and mmdet importable."""
    common.torchvision()
    sys.modules["mmcv._ext"] = Operators("mmcv._ext")
    sys.path[:0] = [given.mmcv, given.mmdet]


def fake_detections(objects: list[dict[str, Any]], names: list[str]) -> list[np.ndarray]:
    """Boxes with scores (n, 5) per class, as `inference_detector` returns them for a detector without masks."""
    return [
        np.array([[*each["box"], each["score"]] for each in objects if each["name"] == name]).reshape(-1, 5)
        for name in names
    ]


def fake_classifier(objects: list[dict[str, Any]]) -> Any:
    """In place of CLIP: the color of an object by its box and score."""
    known = {(*each["box"], each["score"]): each["color"] for each in objects}

    def run(model: Any, classifier: Any, loader: Any, device: str) -> tuple[torch.Tensor, None]:
        return torch.eye(10)[[known[tuple(box.tolist())] for box, _ in loader.dataset._objects]], None

    return types.SimpleNamespace(zero_shot_classifier=lambda *_: None, run_classification=run)


def rules(folder: Path, given: Any, found: common.Found) -> None:
    """Verdicts and scores of the published functions for each scene."""
    rows = [json.loads(line) for line in Path(given.rows).read_text(encoding="utf-8").splitlines()]
    made = scenes(rows)
    (folder / "scenes.json").write_text(json.dumps({"rows": rows, "scenes": made}))
    official = imported(Path(given.source) / "evaluation/evaluate_images.py")
    names = (Path(given.source) / "evaluation/object_names.txt").read_text().split("\n")[:80]
    official.args, official.classnames = argparse.Namespace(options={}), names
    official.object_detector = official.clip_model = official.tokenizer = None
    official.THRESHOLD, official.COUNTING_THRESHOLD, official.MAX_OBJECTS = 0.3, 0.9, 16
    official.NMS_THRESHOLD, official.POSITION_THRESHOLD = 1.0, 0.1
    server = imported(Path(given.server) / "reward_server/gen_eval.py")
    server.init_detector = lambda *_, **__: None
    server.open_clip = types.SimpleNamespace(
        create_model_and_transforms=lambda *_, **__: (None, None, None), get_tokenizer=lambda *_: None
    )
    os.chdir(given.server)
    compute = server.load_geneval()
    os.chdir(folder)
    image = Image.new("RGB", (512, 512))
    image.save(folder / "blank.png")
    results = []
    for objects, row in zip(made, (row for row in rows for _ in range(SCENES)), strict=True):
        official.zsc = server.zsc = fake_classifier(objects)
        detected = fake_detections(objects, names)
        official.inference_detector = lambda *_, detected=detected: detected
        server.inference_detector = lambda *_, detected=detected: [detected]
        verdict = official.evaluate_image(str(folder / "blank.png"), row)["correct"]
        scores, rewards, strict, *_ = compute([image], [row])
        results.append((scores[0], float(verdict), rewards[0], strict[0]))
    table = np.array(results)
    found["scores"], found["correct"], found["correct, by the reward server"] = (
        [table[:, 0]],
        [table[:, 1]],
        [table[:, 2]],
    )
    found["strict"] = [table[:, 3]]


def small(config: Any) -> Any:
    """The published configuration with few channels and layers."""
    head = config.model.panoptic_head
    config.model.backbone.update(embed_dims=24, depths=[2, 2, 2, 2], num_heads=[1, 2, 2, 4], init_cfg=None)
    head.update(in_channels=[24, 48, 96, 192], feat_channels=64, out_channels=64, num_queries=40)
    encoder, decoder = head.pixel_decoder.encoder, head.transformer_decoder
    encoder.num_layers, decoder.num_layers = 2, 4
    for layers, hidden in ((encoder.transformerlayers, 96), (decoder.transformerlayers, 128)):
        layers.attn_cfgs.update(embed_dims=64, num_heads=4)
        layers.ffn_cfgs.update(embed_dims=64, feedforward_channels=hidden)
    decoder.transformerlayers.feedforward_channels = 128
    head.positional_encoding.num_feats = head.pixel_decoder.positional_encoding.num_feats = 32
    return config


def detector(folder: Path, given: Any, found: common.Found) -> None:
    """Write a random checkpoint; its outputs and detections by mmdet."""
    mmcv, apis = import_module("mmcv"), import_module("mmdet.apis")
    build = import_module("mmdet.models").build_detector
    full = mmcv.Config.fromfile(str(Path(given.mmdet) / CONFIG))
    full.model.backbone.init_cfg = None
    layout = {name: tuple(value.shape) for name, value in build(full.model).state_dict().items()}
    (folder / "layout.json").write_text(json.dumps(layout))
    config = small(full)
    torch.manual_seed(0)
    model = build(config.model)
    common.widen(model)
    model.panoptic_head.cls_embed.weight.data *= 3
    state = {"meta": {"CLASSES": tuple(map(str, range(80)))}, "state_dict": model.state_dict()}
    torch.save(state, folder / "detector.pth", _use_new_zipfile_serialization=False)
    model = apis.init_detector(config, str(folder / "detector.pth"), device="cpu")
    seen: list[Any] = []
    model.backbone.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    forward = model.panoptic_head.forward

    def watched(*given: Any) -> Any:
        seen.append(forward(*given))
        return seen[-1]

    model.panoptic_head.forward = watched
    for number, (images, _) in enumerate(common.batches(folder)):
        for k, image in enumerate(images[1:3]):
            path = folder / f"{number}-{k}.png"
            Image.fromarray(image).save(path)
            model.cfg = copy.deepcopy(config)  # a call with an array changes it for the following calls with a path
            store(found, "", apis.inference_detector(model, str(path)))
            pixels, (classes, masks) = seen[-2:]
            found.setdefault("pixels of the detector", []).append(pixels.numpy())
            found.setdefault("logits of classes", []).append(classes[-1].detach().numpy())
            found.setdefault("logits of masks", []).append(masks[-1].detach().numpy())
            store(found, SERVER, apis.inference_detector(model, [image])[0])


def store(found: common.Found, what: str, result: Any) -> None:
    """Sort the detections by score and keep those with a mask."""
    boxes, masks = result
    rows = [(*box, label, place) for label, group in enumerate(boxes) for place, box in enumerate(group)]
    rows = sorted((row for row in rows if row[4] > 0), key=lambda row: -row[4])
    found.setdefault("scores of objects" + what, []).append(np.array([row[4] for row in rows]))
    found.setdefault("boxes and classes of objects" + what, []).append(np.array([(*row[:4], row[5]) for row in rows]))
    areas = np.sort([masks[row[5]][row[6]].sum() for row in rows])  # sorted: two objects may have nearly equal scores
    found.setdefault("areas of masks in pixels" + what, []).append(areas)


def colors(folder: Path, given: Any, found: common.Found) -> None:
    """Crops and colors of random objects by the published functions, with a random CLIP in place of open_clip's."""
    open_clip, transform = import_module("open_clip"), import_module("open_clip.transform").image_transform(224, False)
    merges = Path(str(open_clip.__file__)).parent / "bpe_simple_vocab_16e6.txt.gz"
    common.save_clip(folder / CLIP, merges, "quick_gelu", 768)
    from transformers import CLIPModel

    model = CLIPModel.from_pretrained(folder / CLIP)
    official = imported(Path(given.source) / "evaluation/evaluate_images.py")
    official.args, official.transform = argparse.Namespace(options={}), transform
    official.tokenizer = open_clip.get_tokenizer("ViT-L-14")
    official.clip_model = types.SimpleNamespace(
        encode_image=lambda pixels: model.get_image_features(pixel_values=pixels).pooler_output,
        encode_text=lambda tokens: model.get_text_features(input_ids=tokens).pooler_output,
    )
    real = torch.autocast
    torch.autocast = lambda device, enabled: real(device, enabled=False)  # type: ignore[assignment,misc]
    official.torch.utils.data.DataLoader = lambda data, batch_size, num_workers: [
        (torch.stack([data[k][0] for k in range(len(data))]), torch.zeros(len(data)))
    ]
    for images, _ in common.batches(folder):
        objects = blobs(*images.shape[1:3])
        for image in common.as_pil(images[1:3]):
            parts = official.ImageCrops(image, objects)
            found.setdefault("pixels of crops", []).append(np.stack([parts[k][0].numpy() for k in range(len(objects))]))
            named = official.color_classification(image, objects, "stop sign")
            found.setdefault("colors of crops", []).append(np.array([COLORS.index(name) for name in named]))


def blobs(height: int, width: int) -> list[tuple[tuple[float, ...], np.ndarray]]:
    """Boxes, with a score, and masks of random ellipses."""
    generator = np.random.default_rng(height * 10_000 + width + 1)
    ys, xs = np.mgrid[:height, :width]
    found: list[tuple[tuple[float, ...], np.ndarray]] = []
    for _ in range(6):
        middle, radius = generator.uniform(0.2, 0.8, 2), generator.uniform(0.05, 0.5, 2)
        mask = ((ys / height - middle[0]) / radius[0]) ** 2 + ((xs / width - middle[1]) / radius[1]) ** 2 < 1
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        # A tuple, not an array as of mmdet: newer versions of pillow do not crop to an array.
        found.append(((float(columns[0]), float(rows[0]), columns[-1] + 1.0, rows[-1] + 1.0, 0.9), mask))
    return found


def theirs(folder: Path, given: Any) -> None:
    """Everything by the published code."""
    prepare(given)
    found: common.Found = {}
    rules(folder, given, found)
    detector(folder, given, found)
    colors(folder, given, found)
    names = ("torch", "torchvision", "open_clip_torch", "clip-benchmark", "opencv-python-headless", "pillow", "numpy")
    common.write_found(folder, found, common.versions(*names))


def our_rules(folder: Path, found: common.Found) -> None:
    """The same by this package; also how often the share of clauses equals the published scores."""
    from recast.rewards.geneval_clauses import MAX_OBJECTS, assess, parse

    content = json.loads((folder / "scenes.json").read_text())
    rows = [row for row in content["rows"] for _ in range(SCENES)]
    table = []
    for objects, row in zip(content["scenes"], rows, strict=True):
        limit = 0.9 if row["tag"] == "counting" else 0.3
        best = sorted((each for each in objects if each["score"] > limit), key=lambda each: -each["score"])
        groups = {each["name"]: [one for one in best if one["name"] == each["name"]][:MAX_OBJECTS] for each in best}
        request = parse(row, row["prompt"])
        assert request is not None
        seen = assess(
            request,
            {name: [(each["score"], tuple(each["box"])) for each in group] for name, group in groups.items()},
            {name: [COLORS[each["color"]] for each in group] for name, group in groups.items()},
        )
        table.append([seen.score("nft"), seen.score("correct"), seen.score("strict"), seen.score("clauses")])
    nft, correct, strict, clauses = np.array(table).T
    found["scores"], found["correct"], found["correct, by the reward server"] = [nft], [correct], [correct]
    found["strict"] = [strict]
    ABOUT["clauses"] = {
        "equal_to_nft": float((np.abs(clauses - nft) < 1e-12).mean()),
        "equal_to_correct": float((clauses == correct).mean()),
        "mean": {"clauses": clauses.mean(), "nft": nft.mean(), "correct": correct.mean(), "strict": strict.mean()},
        "smallest_nft": float(nft.min()),
    }


def our_detector(folder: Path, found: common.Found) -> None:
    """The same by this package, from the checkpoint that mmdet's model wrote."""
    from recast.rewards import geneval_detector

    sys.path.append(str(Path(__file__).parents[2] / "tests/rewards"))
    layout = json.loads((folder / "layout.json").read_text())
    ABOUT["layout_of_tests"] = import_module("mmdet_layout").shapes() == {k: tuple(v) for k, v in layout.items()}
    made = geneval_detector.load(folder / "detector.pth", torch.device("cpu"))
    for images, _ in common.batches(folder):
        for image in images[1:3]:
            levels = torch.from_numpy(image).permute(2, 0, 1).unsqueeze(0)
            pixels, _ = geneval_detector.inputs(levels, *made.edges)
            with torch.no_grad():
                output = made.model(pixel_values=pixels)
            found.setdefault("pixels of the detector", []).append(pixels.numpy())
            for what, logits in (("classes", output.class_queries_logits), ("masks", output.masks_queries_logits)):
                found.setdefault(f"logits of {what}", []).append(logits.numpy())
                largest = ABOUT.setdefault("largest_logits", {})
                largest[what] = max(largest.get(what, 0.0), float(logits.abs().max()))
            for what, seen in (("", levels), (SERVER, levels.flip(1))):
                each = next(made.detect(seen, [0.0], 1))
                found.setdefault("scores of objects" + what, []).append(each.scores.numpy())
                rows = torch.cat([each.boxes(), each.labels.unsqueeze(1)], 1).numpy()
                found.setdefault("boxes and classes of objects" + what, []).append(rows)
                found.setdefault("areas of masks in pixels" + what, []).append(np.sort(each.masks.sum((1, 2)).numpy()))
    pairs = zip(found["scores of objects"], found["scores of objects" + SERVER], strict=True)
    ABOUT["scores_change_with_the_order_of_channels_by"] = max(float(abs(one[0] - other[0])) for one, other in pairs)


def our_colors(folder: Path, found: common.Found) -> None:
    """The same by this package."""
    from recast.rewards import geneval

    reward = geneval.GenEval(folder / "detector.pth", folder / CLIP, device="cpu")
    for images, _ in common.batches(folder):
        objects = blobs(*images.shape[1:3])
        for image in images[1:3]:
            levels = torch.from_numpy(image).permute(2, 0, 1)
            parts = [
                reward.pixels(geneval._cut(levels, torch.from_numpy(mask), torch.tensor(box[:4]).int()))
                for box, mask in objects
            ]
            found.setdefault("pixels of crops", []).append(torch.cat(parts).numpy())
            named = reward._colors([geneval._Crop(0, "stop sign", part) for part in parts])[0]["stop sign"]
            found.setdefault("colors of crops", []).append(np.array([COLORS.index(name) for name in named]))


def ours(folder: Path, given: Any) -> common.Found:
    """Everything by this package."""
    found: common.Found = {}
    our_rules(folder, found)
    our_detector(folder, found)
    our_colors(folder, found)
    return found


if __name__ == "__main__":
    common.run(
        "geneval",
        __file__,
        theirs,
        ours,
        ABOUT,
        SIZES,
        {
            "source": "clone of djghosh13/geneval",
            "server": "clone of yifan123/reward-server",
            "mmcv": "clone of open-mmlab/mmcv at v1.7.2",
            "mmdet": "clone of open-mmlab/mmdetection at v2.28.2",
            "rows": "GenEval's test_metadata.jsonl",
        },
    )
