"""The time of an epoch here and in DiffusionNFT's own script, which runs in the same process.

    RECAST_PEERS=FOLDER python benchmarks/peers.py

FOLDER/DiffusionNFT is a checkout of NVlabs/DiffusionNFT; tests/peers/README.md says what it needs. Its `main` trains a
Stable Diffusion 3 with random parameters on one thread. After each of its epochs one epoch is trained by each of our
settings, on as many images, steps, levels and micro-batches, so that all are measured under the same conditions. Text
is encoded in every epoch there, and cached here after the first. Writes results/peers.json in this folder; takes
about ten minutes.
"""

from __future__ import annotations

import importlib
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from diffusers import SD3Transformer2DModel
from numpy.typing import NDArray

from recast import config, prompts
from recast.core import artifact
from recast.train import stage
from recast.train.trainer import Trainer
from recast.weigh import static

HERE = Path(__file__).parent
RESULTS = HERE / "results"
sys.path[:0] = [str(HERE), str(HERE.parent / "tests/peers")]
EPOCHS, STEPS, GROUPS, IMAGES, MICRO = 13, 5, 16, 3, 12
SETTINGS = {
    "as DiffusionNFT": [],
    "kl_every=4": ["train.kl_every=4"],
    "kl_weight=0": ["train.kl_weight=0"],
    "kl_weight=0, decay=0": ["train.kl_weight=0", "train.decay=0"],
}
"""The last one leaves out both passes, the base's and, with one optimizer step per epoch, the old policy's."""


def _shared(name: str) -> Any:
    """A module of tests/peers, which knows how to run the peers."""
    return importlib.import_module(name)


def bright(images: Any, texts: Any, metadata: Any = None) -> NDArray[np.float64]:
    """The first reward of the peers' tests."""
    return np.array(_shared("loops").scores(images, texts)["bright"])


def contrast(images: Any, texts: Any, metadata: Any = None) -> NDArray[np.float64]:
    """The second, which does not apply to all prompts."""
    return np.array(_shared("loops").scores(images, texts)["contrast"])


def model(path: Path) -> Path:
    """A Stable Diffusion 3 whose time is spent in its transformer."""
    folder: Path = _shared("loops").folder(path)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_layers": 4, "attention_head_dim": 32, "num_attention_heads": 4}
    settings: dict[str, Any] = (
        dict(_shared("tiny").pipeline().transformer.config) | sizes | {"caption_projection_dim": 128}
    )
    SD3Transformer2DModel.from_config(settings).save_pretrained(folder / "transformer")
    return folder


def trainer(folder: Path, data: Path, out: Path, changes: list[str]) -> Trainer:
    """Our trainer with the settings of their script."""
    names = ("peers:bright", "peers:contrast")
    given = {
        "policy": {"model": str(folder), "resolution": 64, "max_sequence_length": 128, "device": "cpu"},
        "rewards": dict.fromkeys(names),
        "train": {"prompts": str(data / "train.txt"), "prompts_per_epoch": GROUPS, "images_per_prompt": IMAGES}
        | {"batch": GROUPS * IMAGES, "fraction": 0.99, "sample_batch": MICRO, "micro_batch": MICRO, "trackers": []},
    }
    path = out / "recipe.yaml"
    config.Recipe.model_validate(given).save(path)
    recipe = config.load(path, changes)
    policy = stage._load_policy(recipe)
    weights = static(recipe.budget, policy.sigmas(STEPS))
    return stage.build(recipe, weights, prompts.load(recipe.train.prompts), stage.accelerator_of(recipe, out), policy)


def theirs(repository: Path, folder: Path, data: Path, out: Path) -> Any:
    """DiffusionNFT's script, ready to run."""
    sys.path.insert(0, str(repository))
    loops, peer = _shared("loops"), _shared("run_diffusion_nft")
    loops.silence()
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    module: Any = loops.script(repository / "scripts/train_nft_sd3.py", **{'f"cuda:{local_rank}"': '"cpu"'})
    module.flow_grpo.rewards.multi_score = loops.multi_score
    module.setup_distributed = lambda *_: None
    module.gather_tensor_to_all = lambda tensor, _: tensor.cpu()
    module.DDP = peer.Alone
    nothing: Any = lambda *_, **__: None  # noqa: E731
    module.dist = SimpleNamespace(
        all_reduce=nothing, barrier=nothing, destroy_process_group=nothing, ReduceOp=SimpleNamespace(AVG=None)
    )
    settings = peer.settings(data, folder, out)
    settings.num_epochs = EPOCHS
    batches = GROUPS * IMAGES // MICRO
    settings.sample.update(
        num_steps=STEPS, train_batch_size=MICRO, num_image_per_prompt=IMAGES, num_batches_per_epoch=batches
    )
    settings.train.update(batch_size=MICRO, gradient_accumulation_steps=batches)
    module.FLAGS = SimpleNamespace(config=settings)
    return module


def main() -> None:
    """Measure, print, and write."""
    torch.set_num_threads(1)
    repository = Path(os.environ["RECAST_PEERS"]) / "DiffusionNFT"
    times: dict[str, list[float]] = {"theirs": [], **{name: [] for name in SETTINGS}}
    with tempfile.TemporaryDirectory() as name:
        out = Path(name)
        folder, data = model(out / "model"), _shared("loops").dataset(out / "data")
        ours = {key: trainer(folder, data, out, changes) for key, changes in SETTINGS.items()}
        module = theirs(repository, folder, data, out)
        decay, begun = module.return_decay, [time.perf_counter()]

        def end_of_epoch(*args: Any) -> Any:
            times["theirs"].append(time.perf_counter() - begun[0])
            for key in ours if len(times["theirs"]) % 2 else reversed(ours):
                start = time.perf_counter()
                with torch.enable_grad():  # they update the old policy, where this is called, without
                    ours[key].epoch()
                times[key].append(time.perf_counter() - start)
            print({key: round(values[-1], 2) for key, values in times.items()}, flush=True)
            begun[0] = time.perf_counter()
            return decay(*args)

        module.return_decay = end_of_epoch
        module.main(None)
    pairs = {key: np.array(times[key][1:]) / np.array(times["theirs"][1:]) for key in SETTINGS}
    ratios = {
        key: {"median": statistics.median(each), "low": float(each.min()), "high": float(each.max())}
        for key, each in pairs.items()
    }
    for key, facts in ratios.items():
        print(f"{key}: {facts['median']:.2f} of their epoch ({facts['low']:.2f} to {facts['high']:.2f})")
    fields = {"ratios": ratios, "epochs": EPOCHS - 1, "seconds": times["theirs"]}
    artifact.write(RESULTS / "peers.json", "recast.benchmark.peers", fields)


if __name__ == "__main__":
    main()
