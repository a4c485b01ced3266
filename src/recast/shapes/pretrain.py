"""`recast shapes pretrain`: the base pipeline by flow matching, and CLIP by contrast, from nothing.

Both are functions of the seed alone. Every step draws its data from (seed, step), and the state is
written every few steps, so a killed run goes on where it was and ends with the same weights.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterable, Sequence
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
from recast.flow import sd3
from recast.flow.generate import generate
from recast.quiet import quiet
from recast.rewards import base
from recast.shapes import models, prompts, render

Progress = Callable[[Iterable[int], str, int], Iterable[int]]
EVERY = 50
"""Steps between two entries of the log and two saved states."""


SEED = 42
"""Image k of a split is sampled from seed 42 + k, as the paper's evaluation images are."""


@dataclass(frozen=True)
class Plan:
    """What decides a model's weights, beside its architecture."""

    seed: int
    steps: int
    batch: int
    learning_rate: float
    weight_decay: float = 1e-4
    ema: float = 0.999


FLOW = Plan(seed=0, steps=1200, batch=64, learning_rate=2e-3)
CLIP = Plan(seed=1, steps=800, batch=128, learning_rate=2e-3)


def fit(
    parameters: Sequence[Parameter],
    loss: Callable[[int], Tensor],
    plan: Plan,
    state: Path,
    progress: Progress,
    title: str,
) -> list[dict[str, float]]:
    """Train `parameters` in place by AdamW, cosine decay and EMA; returns the log. Resumes from `state`."""
    optimizer = torch.optim.AdamW(parameters, lr=plan.learning_rate, weight_decay=plan.weight_decay)
    average = EMAModel(parameters, decay=plan.ema)
    start, log = _restore(state, plan, parameters, optimizer, average)
    running = 0.0
    for step in progress(range(start, plan.steps), title, plan.steps - start):
        warm = min(1.0, (step + 1) / 50)
        for group in optimizer.param_groups:
            group["lr"] = plan.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * step / plan.steps))
        value = loss(step)
        optimizer.zero_grad(set_to_none=True)
        value.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        average.step(parameters)
        running += float(value.detach())
        if (step + 1) % EVERY == 0 or step + 1 == plan.steps:
            log.append({"step": step + 1, "loss": round(running / (step % EVERY + 1), 6)})
            running = 0.0
            _store(state, plan, step + 1, log, parameters, optimizer, average)
    average.copy_to(parameters)
    return log


def _store(
    path: Path,
    plan: Plan,
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
    header = {"plan": json.dumps(asdict(plan)), "world": _world(), "step": str(step), "log": json.dumps(log)}
    try:
        save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, temporary, header)
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        raise RecastError(f"{path}: the state cannot be written: {error}") from error


def _restore(
    path: Path, plan: Plan, parameters: Sequence[Parameter], optimizer: torch.optim.AdamW, average: EMAModel
) -> tuple[int, list[dict[str, float]]]:
    if not check_state(path, plan):
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
        raise RecastError(f"{path} is of another model ({error}): remove it, or choose another --out") from error
    average.optimization_step = step
    return step, json.loads(header["log"])


def check_state(path: Path, plan: Plan) -> bool:
    """Whether there is a state to go on from; one that this plan and this world did not make is an error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            return False
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise RecastError(f"{path} cannot be used ({error}): remove it, or choose another --out") from error
    if header.get("plan") != json.dumps(asdict(plan)):
        raise RecastError(f"{path} was made by another plan ({header.get('plan')}): remove it, or choose another --out")
    if header.get("world") != _world():
        raise RecastError(f"{path} was made in another version of the world: remove it, or choose another --out")
    return True


@cache
def _world() -> str:
    """Hash of what the models learn from, beside the plan: some prompts, and how they are drawn."""
    rows = prompts.load("train")
    drawn = render.render(rows[:64], 0).numpy().tobytes()
    return hashlib.sha256(drawn + json.dumps(rows).encode()).hexdigest()


def flow_loss(pipe: Any, plan: Plan) -> Callable[[int], Tensor]:
    """Flow matching on renders of training prompts: σ logit-normal, one in five uniform; a tenth unprompted."""
    rows = prompts.load("train")
    scale, shift = pipe.vae.config.scaling_factor, pipe.vae.config.shift_factor

    def loss(step: int) -> Tensor:
        rng = np.random.default_rng([plan.seed, step])
        chosen = [rows[k] for k in rng.integers(0, len(rows), plan.batch)]
        images = render.render(chosen, int(rng.integers(2**31)))
        clean = (pipe.vae.encode(2 * images - 1).latent_dist.mode() - shift) * scale
        normal = rng.standard_normal(plan.batch)
        sigma = np.where(rng.random(plan.batch) < 0.2, rng.random(plan.batch), 1 / (1 + np.exp(-normal)))
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


def clip_loss(model: Any, processor: Any, plan: Plan) -> Callable[[int], Tensor]:
    """Contrast of renders and their prompts in both directions, on images with some noise added.

    To a prompt, not only other prompts' images are wrong: so is half a batch of its own with an object less, or one
    more. Without those CLIP does not learn to count, and an empty paper scores well for a single object.
    """
    rows = prompts.load("train")
    mean = torch.tensor(processor.image_processor.image_mean).view(3, 1, 1)
    std = torch.tensor(processor.image_processor.image_std).view(3, 1, 1)

    def loss(step: int) -> Tensor:
        rng = np.random.default_rng([plan.seed, step])
        chosen = [rows[k] for k in rng.permutation(len(rows))[: plan.batch]]
        held = np.stack([render.scene(row["include"], rng) for row in chosen])
        held = np.concatenate([held, _miscounted(held[: plan.batch // 2], rng)])
        images = render.draw(held, render.paper(len(held), rng))
        images = images + torch.tensor(rng.standard_normal(images.shape) * rng.uniform(0, 0.1)).float()
        texts = processor.tokenizer(
            [row["prompt"] for row in chosen], padding="max_length", truncation=True, return_tensors="pt"
        )
        logits = model(pixel_values=(images - mean) / std, **texts).logits_per_text
        right = torch.arange(plan.batch)
        forward = functional.cross_entropy(logits, right)
        return 0.5 * (forward + functional.cross_entropy(logits[:, : plan.batch].T, right))

    return loss


def _miscounted(held: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The scenes with one object taken away, or one of theirs drawn once more."""
    changed = held.copy()
    for scene in changed:
        full, empty = np.flatnonzero(scene != render.EMPTY), np.flatnonzero(scene == render.EMPTY)
        one = rng.choice(full)
        if rng.random() < 0.5:
            scene[one] = render.EMPTY
        else:
            scene[rng.choice(empty)] = scene[one]
    return changed


def pretrain(out: Path, progress: Progress, flow: Plan, clip: Plan) -> dict[str, Any]:
    """`out/pipeline` and `out/clip` from nothing; returns the plans, the losses and the scores on validation prompts.

    On two threads whatever the machine has: another number adds in another order and gives other weights.
    """
    for name, plan in (("flow", flow), ("clip", clip)):
        check_state(out / f"{name}.state.safetensors", plan)
    for name in ("pipeline", "clip"):
        _ours(out / name)
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
        _forget(pipe.tokenizer, pipe.tokenizer_2)
        save_folder(pipe, out / "pipeline")
        model, processor = models.clip(clip.seed)
        parameters = [p for p in model.parameters() if p.requires_grad]
        loss = clip_loss(model, processor, clip)
        clip_log = fit(parameters, loss, clip, out / "clip.state.safetensors", progress, "contrast")
        _forget(processor.tokenizer)
        save_folder(model, out / "clip", processor)
        scores = measure(out / "pipeline", out / "clip")
    finally:
        torch.set_num_threads(threads)
    return {"flow": asdict(flow) | {"log": flow_log}, "clip": asdict(clip) | {"log": clip_log}, "scores": scores}


def _ours(folder: Path) -> None:
    """Refuse to write over a folder that no earlier run left there."""
    known = ("model_index.json", "config.json")
    if folder.is_symlink() or (folder.exists() and not any((folder / name).is_file() for name in known)):
        raise RecastError(f"{folder} is there already and is no model of this world: choose another --out")


def _forget(*tokenizers: Any) -> None:
    """Undo what use leaves in a tokenizer and its file would keep: whether and how far it last padded."""
    for tokenizer in tokenizers:
        tokenizer.backend_tokenizer.no_padding()
        tokenizer.backend_tokenizer.no_truncation()


def save_folder(model: Any, folder: Path, *more: Any) -> None:
    """Save models by `save_pretrained`; the folder is always the old one or the new one, whole."""
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
    """Mean rewards of a base over a split with the sampler of training, and the renderer's beside them."""
    rows = prompts.load(split)
    texts = [row["prompt"] for row in rows]
    found = {
        "base": generate(sd3.load(config.policy(model=str(model))), texts, range(SEED, SEED + len(rows)), steps=steps),
        "renderer": render.render(rows, SEED),
    }
    names = ("composition", "alignment", "detail", "background", "census")
    judges = {name: base.load(name, **({"model": str(clip)} if name == "alignment" else {})) for name in names}
    return {
        f"{who} {name}": float(values.mean())
        for who, images in found.items()
        for name, values in zip(names, base.score(judges, images, texts), strict=True)
    }
