"""What the scripts share that run a peer's own training loop on a CPU: a tiny SD3, two rewards, a silent wandb."""

import importlib
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import CLIPTextModelWithProjection

sys.path.insert(0, str(Path(__file__).parents[1]))
import tiny
from recast.shapes import models

PROMPTS = ("a red circle", "a blue square", "a red circle and a blue square", "a circle")
STEPS = 5
NAMES = ("bright", "contrast")


def folder(path: Path) -> Path:
    """A Stable Diffusion 3 with random weights, whose CLIP encoders take the 77 tokens that the peers ask for."""
    torch.manual_seed(1)
    tokens = models.tokenizer(length=77)
    config: Any = models.text_config(tokens)
    config.max_position_embeddings, config.hidden_size, config.num_attention_heads = 77, 16, 2
    config.intermediate_size, config.projection_dim = 32, 16
    parts = {"text_encoder": CLIPTextModelWithProjection(config), "tokenizer": tokens}
    second = {"text_encoder_2": CLIPTextModelWithProjection(config), "tokenizer_2": models.tokenizer(length=77)}
    return tiny.folder(path, **parts, **second)


def scores(images: Any, prompts: Any) -> dict[str, list[float]]:
    """Two rewards; the second does not apply to prompts without a square."""
    plain = images.float().flatten(1) if isinstance(images, torch.Tensor) else torch.zeros(len(prompts), 1)
    applies = [float("nan") if "square" not in prompt else 1.0 for prompt in prompts]
    contrast = (10 * plain.std(1) * torch.tensor(applies)).tolist()
    return {"bright": plain.mean(1).tolist(), "contrast": contrast}


def multi_score(_device: Any, _weights: Any) -> Any:
    """In place of the peers' function of the same name."""

    def score(images: Any, prompts: Any, metadata: Any, only_strict: bool = True) -> Any:
        found = scores(images, prompts)
        total = np.nansum([found[name] for name in NAMES], 0).tolist()
        return {**found, "avg": total}, {}

    return score


def silence() -> list[dict[str, Any]]:
    """A wandb that keeps what is logged."""
    logged: list[dict[str, Any]] = []
    stub = types.ModuleType("wandb")
    stub.__spec__ = importlib.util.spec_from_loader("wandb", None)
    quiet: Any = {
        "init": lambda *_, **__: None,
        "log": lambda values, **_: logged.append(values),
        "Image": lambda *_, **__: None,
        "finish": lambda *_, **__: None,
    }
    vars(stub).update(quiet)
    sys.modules["wandb"] = stub
    return logged


def script(path: Path, **replaced: str) -> types.ModuleType:
    """A training script as a module; texts in it may be replaced, such as the name of a GPU."""
    text = path.read_text(encoding="utf-8")
    for old, new in replaced.items():
        text = text.replace(old, new)
    module = types.ModuleType("peer_script")
    module.__file__ = str(path)
    sys.modules["peer_script"] = module
    exec(compile(text, str(path), "exec"), vars(module))
    return module


def dataset(path: Path) -> Path:
    """Prompts for training and evaluation in the peers' format."""
    path.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        (path / f"{split}.txt").write_text("\n".join(PROMPTS) + "\n", encoding="utf-8")
    return path


def kept(values: Any) -> Any:
    """A copy that later steps do not change."""
    if isinstance(values, torch.Tensor):
        return values.detach().clone()
    return {key: kept(value) for key, value in values.items()} if isinstance(values, dict) else values


def adapters(model: Any, name: str) -> dict[str, torch.Tensor]:
    """The parameters of one adapter by the names that they have without peft's wrapper."""
    found = {key.removeprefix("base_model.model."): value for key, value in model.named_parameters()}
    return {key.replace(f".{name}.", "."): kept(value) for key, value in found.items() if f".{name}." in key}
