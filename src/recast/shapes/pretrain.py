"""`recast shapes pretrain`: train the base pipeline by flow matching, and CLIP by a contrastive loss, from scratch.

Both depend on the seed alone: every step draws its data from (seed, step), and the state is saved every few steps, so
an interrupted run resumes where it stopped and ends with the same parameters.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.training_utils import EMAModel
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Parameter, functional

from recast import config
from recast.errors import RecastError
from recast.flow import families
from recast.flow.generate import generate
from recast.progress import Progress
from recast.quiet import quiet
from recast.rewards import base
from recast.shapes import models, prompts, render

__all__ = [
    "CLIP",
    "EVERY",
    "FLOW",
    "SEED",
    "Hyperparameters",
    "clip_loss",
    "fit",
    "flow_loss",
    "measure",
    "pretrain",
]

EVERY = 50
"""Steps between two entries of the log, and between two saved states."""
SEED = 42
"""Image k of a split is sampled with the seed 42 + k, as in the evaluation of the paper."""


@dataclass(frozen=True)
class Hyperparameters:
    """The settings that decide the parameters of a model, besides its architecture."""

    seed: int
    steps: int
    batch: int
    learning_rate: float
    weight_decay: float = 1e-4
    ema: float = 0.999


FLOW = Hyperparameters(seed=0, steps=1200, batch=64, learning_rate=2e-3)
CLIP = Hyperparameters(seed=1, steps=800, batch=128, learning_rate=2e-3)


def fit(
    parameters: Sequence[Parameter],
    loss: Callable[[int], Tensor],
    settings: Hyperparameters,
    state: Path,
    progress: Progress,
    title: str,
) -> list[dict[str, float]]:
    """Train `parameters` in place by AdamW with cosine decay and EMA, resuming from `state`; returns the log."""
    optimizer = torch.optim.AdamW(parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay)
    average = EMAModel(parameters, decay=settings.ema)
    start, log = _restore(state, settings, parameters, optimizer, average)
    running = 0.0
    for step in progress(range(start, settings.steps), title, settings.steps - start):
        warm = min(1.0, (step + 1) / 50)
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * step / settings.steps))
        value = loss(step)
        optimizer.zero_grad(set_to_none=True)
        value.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        average.step(parameters)
        running += float(value.detach())
        if (step + 1) % EVERY == 0 or step + 1 == settings.steps:
            log.append({"step": step + 1, "loss": round(running / (step % EVERY + 1), 6)})
            running = 0.0
            _store(state, settings, step + 1, log, parameters, optimizer, average)
    average.copy_to(parameters)
    return log


def _store(
    path: Path,
    settings: Hyperparameters,
    step: int,
    log: list[dict[str, float]],
    parameters: Sequence[Parameter],
    optimizer: torch.optim.AdamW,
    average: EMAModel,
) -> None:
    tensors: dict[str, Tensor] = {}
    for k, parameter in enumerate(parameters):
        moments = optimizer.state[parameter]
        tensors |= {f"weight.{k}": parameter.data, f"average.{k}": average.shadow_params[k]}
        tensors |= {f"first.{k}": moments["exp_avg"], f"second.{k}": moments["exp_avg_sq"]}
    temporary = path.with_name(f".{path.name}.tmp")
    header = {"plan": json.dumps(asdict(settings)), "world": _data_hash(), "step": str(step), "log": json.dumps(log)}
    try:
        save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, temporary, header)
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        raise RecastError(f"{path}: the state cannot be written: {error}") from error


def _restore(
    path: Path,
    settings: Hyperparameters,
    parameters: Sequence[Parameter],
    optimizer: torch.optim.AdamW,
    average: EMAModel,
) -> tuple[int, list[dict[str, float]]]:
    if not _check_state(path, settings):
        return 0, []
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata()
            step = int(header["step"])
            for k, parameter in enumerate(parameters):
                parameter.data.copy_(file.get_tensor(f"weight.{k}"))
                average.shadow_params[k].copy_(file.get_tensor(f"average.{k}"))
                optimizer.state[parameter] = {
                    "step": torch.tensor(float(step)),
                    "exp_avg": file.get_tensor(f"first.{k}"),
                    "exp_avg_sq": file.get_tensor(f"second.{k}"),
                }
    except (SafetensorError, RuntimeError, KeyError) as error:
        raise RecastError(f"{path} belongs to another model ({error}): remove it, or choose another --out") from error
    average.optimization_step = step
    return step, json.loads(header["log"])


def _check_state(path: Path, settings: Hyperparameters) -> bool:
    """Whether there is a state to resume from; raises if it was made with other settings or other data."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            return False
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise RecastError(f"{path} cannot be used ({error}): remove it, or choose another --out") from error
    if header.get("plan") != json.dumps(asdict(settings)):
        raise RecastError(
            f"{path} was made with other settings ({header.get('plan')}): remove it, or choose another --out"
        )
    if header.get("world") != _data_hash():
        raise RecastError(f"{path} was made with other prompts or another renderer: remove it, or choose another --out")
    return True


@cache
def _data_hash() -> str:
    """Hash of the training data: the prompts, and rendered images of some of them."""
    rows = prompts.load("train")
    drawn = render.render(rows[:64], 0).numpy().tobytes()
    return hashlib.sha256(drawn + json.dumps(rows).encode()).hexdigest()


def flow_loss(pipe: Any, settings: Hyperparameters) -> Callable[[int], Tensor]:
    """Flow matching on rendered training prompts: σ is logit-normal, for one in five uniform; a tenth has no prompt."""
    rows = prompts.load("train")
    scale, shift = pipe.vae.config.scaling_factor, pipe.vae.config.shift_factor

    def loss(step: int) -> Tensor:
        rng = np.random.default_rng([settings.seed, step])
        chosen = [rows[k] for k in rng.integers(0, len(rows), settings.batch)]
        images = render.render(chosen, int(rng.integers(2**31)))
        clean = (pipe.vae.encode(2 * images - 1).latent_dist.mode() - shift) * scale
        normal = rng.standard_normal(settings.batch)
        sigma = np.where(rng.random(settings.batch) < 0.2, rng.random(settings.batch), 1 / (1 + np.exp(-normal)))
        texts = ["" if rng.random() < 0.1 else row["prompt"] for row in chosen]
        embeds, _, pooled, _ = pipe.encode_prompt(
            texts, None, None, do_classifier_free_guidance=False, max_sequence_length=1
        )
        noise = torch.tensor(rng.standard_normal(clean.shape)).float()
        level = torch.tensor(sigma).float()
        wide = level.view(-1, 1, 1, 1)
        predicted = pipe.transformer(
            (1 - wide) * clean + wide * noise,
            timestep=1000 * level,
            encoder_hidden_states=embeds,
            pooled_projections=pooled,
            return_dict=False,
        )[0]
        return functional.mse_loss(predicted, noise - clean)

    return loss


def clip_loss(model: Any, processor: Any, settings: Hyperparameters) -> Callable[[int], Tensor]:
    """The contrastive loss of rendered images and their prompts in both directions, on slightly noisy images.

    The negatives of a prompt are the images of the others and half a batch of scenes with one object more or less.
    Without the latter, CLIP does not learn to count, and an empty paper scores well for a single object.
    """
    rows = prompts.load("train")
    mean = torch.tensor(processor.image_processor.image_mean).view(3, 1, 1)
    std = torch.tensor(processor.image_processor.image_std).view(3, 1, 1)

    def loss(step: int) -> Tensor:
        rng = np.random.default_rng([settings.seed, step])
        chosen = [rows[k] for k in rng.permutation(len(rows))[: settings.batch]]
        held = np.stack([render.scene(row["include"], rng) for row in chosen])
        held = np.concatenate([held, _miscounted(held[: settings.batch // 2], rng)])
        images = render.draw(held, render.paper(len(held), rng))
        images = images + torch.tensor(rng.standard_normal(images.shape) * rng.uniform(0, 0.1)).float()
        texts = processor.tokenizer(
            [row["prompt"] for row in chosen], padding="max_length", truncation=True, return_tensors="pt"
        )
        logits = model(pixel_values=(images - mean) / std, **texts).logits_per_text
        right = torch.arange(settings.batch)
        forward = functional.cross_entropy(logits, right)
        return 0.5 * (forward + functional.cross_entropy(logits[:, : settings.batch].T, right))

    return loss


def _miscounted(held: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The scenes with one object removed or drawn a second time."""
    changed = held.copy()
    for scene in changed:
        full, empty = np.flatnonzero(scene != render.EMPTY), np.flatnonzero(scene == render.EMPTY)
        one = rng.choice(full)
        if rng.random() < 0.5:
            scene[one] = render.EMPTY
        else:
            scene[rng.choice(empty)] = scene[one]
    return changed


def pretrain(out: Path, progress: Progress, flow: Hyperparameters, clip: Hyperparameters) -> dict[str, Any]:
    """Write `out/pipeline` and `out/clip`; returns the settings, the losses and the scores on validation prompts.

    Always runs on two threads: another number changes the order of additions, and so the parameters.
    """
    for name, settings in (("flow", flow), ("clip", clip)):
        _check_state(out / f"{name}.state.safetensors", settings)
    for name in ("pipeline", "clip"):
        _check_folder(out / name)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        pipe = models.pipeline(flow.seed)
        trained = (pipe.transformer, pipe.text_encoder, pipe.text_encoder_2)
        flow_log = fit(
            [p for model in trained for p in model.parameters() if p.requires_grad],
            flow_loss(pipe, flow),
            flow,
            out / "flow.state.safetensors",
            progress,
            "flow matching",
        )
        _reset(pipe.tokenizer, pipe.tokenizer_2)
        _save_folder(pipe, out / "pipeline")
        model, processor = models.clip(clip.seed)
        parameters = [p for p in model.parameters() if p.requires_grad]
        loss = clip_loss(model, processor, clip)
        clip_log = fit(parameters, loss, clip, out / "clip.state.safetensors", progress, "contrast")
        _reset(processor.tokenizer)
        _save_folder(model, out / "clip", processor)
        scores = measure(out / "pipeline", out / "clip")
    finally:
        torch.set_num_threads(threads)
    return {"flow": asdict(flow) | {"log": flow_log}, "clip": asdict(clip) | {"log": clip_log}, "scores": scores}


def _check_folder(folder: Path) -> None:
    """Raise if the folder exists and was not written by an earlier run."""
    known = ("model_index.json", "config.json")
    if folder.is_symlink() or (folder.exists() and not any((folder / name).is_file() for name in known)):
        raise RecastError(f"{folder} exists and is not a model of the shapes world: choose another --out")


def _reset(*tokenizers: Any) -> None:
    """Reset the padding and truncation of the last call, which a saved tokenizer would contain."""
    for tokenizer in tokenizers:
        tokenizer.backend_tokenizer.no_padding()
        tokenizer.backend_tokenizer.no_truncation()


def _save_folder(model: Any, folder: Path, *more: Any) -> None:
    """Save models by `save_pretrained`; the folder is replaced as a whole."""
    new, old = folder.with_name(f".{folder.name}.new"), folder.with_name(f".{folder.name}.old")
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    with quiet():
        for each in (model, *more):
            each.save_pretrained(new)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def measure(
    model: Path | str, clip: Path | str, split: prompts.Split = "validation", steps: int = 10
) -> dict[str, float]:
    """Mean rewards of a base policy and of the renderer over a split, with the sampler of training."""
    rows = prompts.load(split)
    texts = [row["prompt"] for row in rows]
    policy = families.load(config.policy(model=str(model)))
    found = {
        "base": generate(policy, texts, range(SEED, SEED + len(rows)), steps=steps),
        "renderer": render.render(rows, SEED),
    }
    names = ("composition", "alignment", "detail", "background", "census")
    rewards = {name: base.load(name, **({"model": str(clip)} if name == "alignment" else {})) for name in names}
    return {
        f"{who} {name}": float(values.mean())
        for who, images in found.items()
        for name, values in zip(names, base.score(rewards, images, texts), strict=True)
    }
