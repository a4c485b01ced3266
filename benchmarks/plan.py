"""Memory that `recast plan` computes beside memory that a CPU process really takes, the paper's hours, and all models.

    python benchmarks/plan.py [memory] [hours] [models]

Three things run for real, in the code of the trainer and of the policy, with one thread: a micro-batch of training in
the shapes world; one on SD3.5-Medium with two of its 24 blocks at their published widths, for images of 256 pixels and
with zeros for parameters, with and without checkpointing, in float32 and in bfloat16; and decoding by its VAE. Memory
is what PyTorch's allocator holds at most (its profiler records every allocation) and, for the large ones, the peak of
the resident memory of a process of its own in a second call; both without what was there before the call. The plan
computes the same on the meta device. The paper's GPU-hours (App. E.2) are compared with the FLOPs of the recipes on an
H200. Last, the costs of every supported model at 512 pixels in bfloat16, the table of docs/guides/models.md. Writes
results/plan.json next to this file; about ten minutes, all parts by default.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from recast import config
from recast.config import PolicyConfig, Recipe
from recast.core import artifact
from recast.flow import configurations, families
from recast.flow.pipeline import stacked
from recast.flow.policy import Condition
from recast.flow.sd3 import SD3Policy
from recast.plan import CARDS, Machine, plan
from recast.plan.network import Network
from recast.train import pairs, passes, stage
from recast.train.rollout import Rollout
from recast.weigh import static

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
MEDIUM = "stabilityai/stable-diffusion-3.5-medium"
MODELS = (
    MEDIUM,
    "stabilityai/stable-diffusion-3.5-large",
    "black-forest-labs/FLUX.1-dev",
    "black-forest-labs/FLUX.2-klein-base-4B",
    "black-forest-labs/FLUX.2-klein-base-9B",
    "Qwen/Qwen-Image",
    "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers",
    "Tongyi-MAI/Z-Image",
)
HOURS = {
    "warmup": ("sd35/warmup.yaml", "train", 68),
    "OCR training": ("sd35/ocr.yaml", "train", 37),
    "GenEval training": ("sd35/geneval.yaml", "train", 59),
    "T = 25 curve": ("sd35/ocr.yaml", "estimate", 90),
    "T = 10 curve": ("sd35/t10.yaml", "estimate", 15),
}
"""The paper's GPU-hours on H200s, and the recipe and stage that they are of."""
CASES = {
    "shapes, 64 pairs": ("shapes", "float32", False, 64),
    "shapes, 64 pairs, checkpointing": ("shapes", "float32", True, 64),
    "SD3.5-M, 2 blocks, 2 pairs": ("blocks", "float32", False, 2),
    "SD3.5-M, 2 blocks, 2 pairs, checkpointing": ("blocks", "float32", True, 2),
    "SD3.5-M, 2 blocks, 2 pairs, bfloat16": ("blocks", "bfloat16", False, 2),
    "SD3.5-M VAE, 2 images decoded": ("decode", "float32", False, 2),
}
"""Model, precision, checkpointing, and rows of every measured call."""


def folder(path: Path, layers: int = 2) -> Path:
    """The configuration of SD3.5-Medium with fewer blocks and without text encoders, as a user's folder has it."""
    found = configurations.read(MEDIUM)
    index: dict[str, Any] = {"_class_name": found.pipeline}
    for name in ("transformer", "vae", "scheduler"):
        part = found.parts[name]
        settings = dict(part.settings)
        if name == "transformer":
            settings |= {"num_layers": layers, "dual_attention_layers": [0]}
        index[name] = [part.library, part.kind]
        (path / name).mkdir(parents=True)
        file = "scheduler_config.json" if name == "scheduler" else "config.json"
        (path / name / file).write_text(json.dumps(settings))
    for name in ("tokenizer", "tokenizer_2", "tokenizer_3"):
        index[name] = ["transformers", "CLIPTokenizer"]
        (path / name).mkdir()
        (path / name / "tokenizer_config.json").write_text(json.dumps({"model_max_length": found.tokens[name]}))
    (path / "model_index.json").write_text(json.dumps(index))
    return path


def policy_of(settings: PolicyConfig) -> Any:
    """The policy with parameters: the embedded one, or that of a configuration, filled with zeros."""
    if settings.model == "shapes":
        return families.load(settings)
    pipe = configurations.pipeline(configurations.read(settings.model), getattr(torch, settings.dtype))
    for name in ("transformer", "vae"):
        made = getattr(pipe, name).to_empty(device="cpu")
        for each in (*made.parameters(), *made.buffers()):
            each.data.zero_()  # what memory happens to hold may be denormal, and a hundred times slower
        setattr(pipe, name, made)
    return SD3Policy(pipe, resolution=settings.resolution, max_sequence_length=settings.max_sequence_length)


def recipe_of(model: str, dtype: str, checkpointing: bool, rows: int, place: Path) -> Recipe:
    """The recipe of a case."""
    common = [f"train.checkpointing={str(checkpointing).lower()}", "weigh.method=static", "train.trackers=[]"]
    if model == "shapes":
        return config.load(ROOT / "recipes/shapes.yaml", [*common, f"train.micro_batch={rows}"])
    source = place if (place / "model_index.json").is_file() else folder(place)
    own = [f"policy.model={source}", f"policy.dtype={dtype}", f"train.micro_batch={rows}", "rewards={jpeg: }"]
    own.append("policy.resolution=256")  # processors without instructions for bfloat16 take minutes for 512
    own += ["train.precision=float32", "train.prompts=shapes:train", "train.resume_from=null", "weigh.budget={jpeg: 1}"]
    return config.load(ROOT / "recipes/sd35/warmup.yaml", [*common, *own])


def micro_batch(recipe: Recipe, rows: int) -> Callable[[], None]:
    """One micro-batch of the real trainer, whose gradients exist already."""
    policy = policy_of(recipe.policy)
    sigmas = policy.sigmas(recipe.train.steps or recipe.estimate.steps)
    texts: list[dict[str, Any]] = [{"prompt": f"a red circle {k}"} for k in range(rows)]
    with tempfile.TemporaryDirectory() as out:
        accelerator = stage.accelerator_of(recipe, Path(out))
    trainer = stage.build(recipe, static(recipe.budget, sigmas), texts, accelerator, policy)
    for each in trainer.adapters.parameters:
        each.grad = torch.zeros_like(each)
    if isinstance(policy, SD3Policy) and recipe.policy.model != "shapes":
        blank = {name: torch.zeros(each.shape, dtype=each.dtype) for name, each in policy.blank_prompt().items()}
        condition = Condition(stacked([blank] * rows))
    else:
        condition = policy.condition([row["prompt"] for row in texts])
    latents = torch.zeros(rows, *policy.latent_shape)
    data = Rollout(latents, condition, torch.arange(rows), torch.zeros(rows, 1).double().numpy(), {})
    number = torch.arange(rows)
    level = torch.tensor(sigmas)[1 + number % (len(sigmas) - 1)]
    chosen = pairs.Pairs(number, number, level, torch.full((rows,), 0.5), number, number >= 0)

    def call() -> None:
        trainer._backward(trainer._terms(data, chosen, passes.Needed()).total.mean())

    return call


def decoding(recipe: Recipe, rows: int) -> Callable[[], object]:
    """Decoding of so many images at a time."""
    policy = policy_of(recipe.policy)
    policy.vae_batch = rows
    latents = torch.zeros(rows, *policy.latent_shape)
    return lambda: policy.decode(latents)


def allocated(call: Callable[[], object]) -> int:
    """The most bytes that PyTorch's allocator held for a call."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        call()
    results = found.profiler.kineto_results
    events = sorted((each for each in results.events() if each.name() == "[memory]"), key=lambda each: each.start_ns())
    live = peak = 0
    for each in events:
        live += each.nbytes()
        peak = max(peak, live)
    return peak


def resident() -> int:
    """Peak of this process's resident memory in bytes, since it was last reset, on Linux."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def call_of(name: str, place: Path) -> Callable[[], object]:
    """The call of a case, with real parameters."""
    model, dtype, checkpointing, rows = CASES[name]
    recipe = recipe_of(model, dtype, checkpointing, rows, place)
    return decoding(recipe, rows) if model == "decode" else micro_batch(recipe, rows)


def one(name: str, place: Path) -> dict[str, int]:
    """The resident memory of a call, for a process of its own."""
    call = call_of(name, place)
    call()  # libraries keep buffers of their own from the first call on
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    call()
    return {"resident": resident() - before}


def computed(name: str, place: Path) -> int:
    """What the plan has for the same call, on the meta device."""
    model, dtype, checkpointing, rows = CASES[name]
    recipe = recipe_of(model, dtype, checkpointing, rows, place)
    network = Network(recipe.policy)
    if model == "decode":
        return network.decoding.memory.at(rows)
    pair, _ = network.training(recipe.train)
    return pair.memory["checkpointed" if checkpointing else "plain"].at(rows)


def memory() -> dict[str, dict[str, float]]:
    """Computed and measured bytes of every case."""
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as place:
        for name in CASES:
            row: dict[str, float] = {"computed": computed(name, Path(place)), "allocated": 0}
            row["allocated"] = allocated(call_of(name, Path(place)))
            if CASES[name][0] != "shapes":  # a few megabytes drown in the process's own
                command = [sys.executable, __file__, "--one", name, place]
                # Memory that is freed goes back to the system at once, and does not count as resident.
                environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
                done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
                row |= json.loads(done.stdout.splitlines()[-1])
            found[name] = row
            cells = ", ".join(f"{key} {value / 2**20:,.0f} MiB" for key, value in row.items())
            print(f"{name}: {cells}, computed / allocated = {row['computed'] / row['allocated']:.3f}", flush=True)
    return found


def hours() -> dict[str, dict[str, float]]:
    """The paper's GPU-hours, the hours at the full peak of an H200, and the utilization that follows."""
    found = {}
    for name, (file, what, paper) in HOURS.items():
        recipe = config.load(ROOT / "recipes" / file)
        machine = Machine(CARDS["h200"], gpus=8, utilization=1.0)
        made = plan(recipe, machine).stage(what)
        least = made.gpu_hours(machine)
        sampled = sum(made.flops[part].get("bfloat16", 0.0) for part in ("sampling", "pairs") if part in made.flops)
        found[name] = {
            "paper": paper,
            "exaflop": made.total_flops / 1e18,
            "share_of_network": sampled / made.total_flops,
            "at_peak": least,
            "utilization": least / paper,
        }
        print(f"{name}: {paper} GPU-hours, {least:.2f} at the peak: utilization {least / paper:.3f}", flush=True)
    return found


def models() -> dict[str, dict[str, float]]:
    """Bytes and FLOPs of every model at 512 pixels in bfloat16, with adapters of rank 32."""
    found = {}
    settings = config.load(ROOT / "recipes/sd35/warmup.yaml").train
    for name in MODELS:
        policy = config.policy(model=name, dtype="bfloat16", resolution=512)
        network = Network(policy)
        pair, adapter = Network(policy).training(settings)
        smaller = {
            f"transformer, {kind}": Network(policy.model_copy(update={"quantize": kind})).parameters["transformer"]
            for kind in ("int8", "nf4")
        }
        found[name] = {
            "adapter parameters": adapter // 4,
            **network.parameters,
            **smaller,
            "FLOPs of an evaluation": network.velocity.total,
            "decoding": network.decoding.memory.at(1),
            "pair": pair.memory["plain"].each,
            "pair, checkpointing": pair.memory["checkpointed"].each,
        }
        facts = [f"{value / 2**30:.2f}" if value > 1e9 else f"{value:,.0f}" for value in found[name].values()]
        print(name, *facts, f"{network.velocity.total / 1e12:.2f} TFLOP", flush=True)
    return found


def main() -> None:
    """Measure, print and write; the results of parts that are not asked for remain."""
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(one(sys.argv[2], Path(sys.argv[3]))))
        return
    parts: dict[str, Callable[[], Any]] = {"memory": memory, "hours": hours, "models": models}
    path = RESULTS / "plan.json"
    known = artifact.read(path, "recast.benchmark.plan") if path.exists() else {}
    content = {key: value for key, value in known.items() if key not in ("format", "version")}
    for name in sys.argv[1:] or parts:
        content[name] = parts[name]()
    artifact.write(path, "recast.benchmark.plan", content)


if __name__ == "__main__":
    main()
