"""The files that stages pass to each other, and for each what reads it, in tiny worlds that are made in seconds."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from typer.testing import CliRunner

from judging import Known, two_runs
from recast import GainCurves, WeightMatrix, config, evaluate, identity, judge, prompts, weigh
from recast.cli import app
from recast.core.effects import Effects
from recast.errors import RecastError
from recast.estimate import stage as estimation
from recast.evaluate import stage as evaluation
from recast.judge import stage as judging_stage
from recast.judge.ask import Settings
from recast.progress import no_progress
from recast.propose import Store, api
from recast.propose import stage as proposing
from recast.report import figures
from recast.sweep import jobs, workers
from recast.train import checkpoint, gradients, metrics, sketch
from recast.train import stage as training
from server import serve

__all__ = ["Target", "targets"]

ROOT = Path(__file__).parents[2]
SIGMAS = [0.0, 0.25, 0.5, 0.75, 1.0]


@dataclass(frozen=True)
class Target:
    """A file of a folder and a function that reads it.

    `own` marks what a user writes, where another value is valid, `made` what the function makes anew or needs no more.
    """

    name: str
    folder: Path
    file: str
    read: Callable[[], Any]
    own: bool = False
    made: bool = False


@contextmanager
def targets(folder: Path, only: str = "") -> Iterator[list[Target]]:
    """Every target whose name contains `only`, in a folder of its own."""
    makers = (_curves, _recipes, _scores, _parts, _proposals, _shards, _checkpoint, _doctor, _run)
    found: list[Target] = []
    for maker in makers:
        found += maker(folder / maker.__name__.strip("_"))
    with serve() as server:
        Known(server)
        os.environ.setdefault("JUDGE_API_KEY", "loopback")
        found += _judged(folder / "judged", server.url)
        yield [each for each in found if only in each.name]


def _verb(*words: Any) -> str:
    """What a verb prints; a RecastError if it refuses with one line on the error stream."""
    found = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    errors = [line for line in found.stderr.splitlines() if line.startswith("error: ")]
    if found.exit_code == 2 and len(errors) == 1 and found.stderr.endswith(f"{errors[0]}\n"):  # after bars of progress
        raise RecastError(errors[0].removeprefix("error: "))
    if found.exit_code:
        raise AssertionError(f"exit code {found.exit_code}: {found.stderr}")
    return found.stdout


def _curves(folder: Path) -> list[Target]:
    folder.mkdir(parents=True)
    D = np.array([[1.0, 0.8, 0.5, 0.2, 0.1], [0.9, 0.85, 0.6, 0.5, 0.1]])
    by_prompt = np.stack([D, 1.1 * D])
    curves = GainCurves(("ocr", "clip"), SIGMAS, by_prompt.mean(0), D_prompts=by_prompt)
    curves.save(folder / "gains.json")
    curves.save(folder / "other.json")
    table = np.array([[0.2, 0.1, 0.05, 0.15], [0.05, 0.15, 0.2, 0.1]])
    WeightMatrix(("ocr", "clip"), SIGMAS, table, table.sum(1)).save(folder / "weights.json")
    g = np.random.default_rng(0).normal(1.0, 1.0, (4, 8, 20))
    products = np.einsum("qap,rbp->qrab", g, g)
    Effects.measured(("ocr", "clip"), SIGMAS, products, 4, batch=8, levels=4).save(folder / "effects.json")
    where = {name: folder / f"{name}.json" for name in ("gains", "other", "weights", "effects")}

    def weigh() -> Any:
        _verb("weigh", where["gains"], "--budget", "ocr=1,clip=2", "--out", folder / "made.json")
        return (folder / "made.json").read_bytes()

    def effects() -> Any:
        _verb("weigh", where["gains"], "--columns", where["effects"], "--out", folder / "made.json")
        return (folder / "made.json").read_bytes(), vars(Effects.load(where["effects"]))

    def weights() -> Any:
        found = WeightMatrix.load(where["weights"])
        return vars(found), identity.weights_hash(found)

    return [
        Target("gains.json (weigh)", folder, "gains.json", weigh),
        Target("gains.json (compare)", folder, "gains.json", lambda: _verb("compare", where["gains"], where["other"])),
        Target("weights.json", folder, "weights.json", weights),
        Target("effects.json (weigh)", folder, "effects.json", effects),
    ]


def _recipes(folder: Path) -> list[Target]:
    folder.mkdir(parents=True)
    recipe, texts, rows = folder / "recipe.yaml", folder / "prompts.txt", folder / "prompts.jsonl"
    recipe.write_text((ROOT / "recipes/shapes.yaml").read_text())
    texts.write_text("a cat\na dog on a mat\nzwölf Äpfel\n")
    found = [
        {"prompt": f"a photo of {n} cats", "tag": "counting", "include": [{"class": "cat", "count": n}]} for n in (2, 3)
    ]
    rows.write_text("".join(json.dumps(row) + "\n" for row in found))
    return [
        Target("recipe.yaml", folder, "recipe.yaml", lambda: config.load(recipe).model_dump(), own=True),
        Target("prompts.txt", folder, "prompts.txt", lambda: prompts.load(str(texts)), own=True),
        Target("prompts.jsonl", folder, "prompts.jsonl", lambda: prompts.load_distinct(str(rows)), own=True),
    ]


def _table(found: evaluate.Scores) -> Any:
    return [found.method, found.budget, found.seed, found.rewards, found.means(), found.values, found.prompts_and_seeds]


def _scores(folder: Path) -> list[Target]:
    two_runs(folder, 4)

    def tables() -> Any:
        policies = evaluate.find([folder])
        return [[_table(each), [str(each.image(k)) for k in range(4)], each.images_hash()] for each in policies]

    return [
        Target(f"scores/{name}", folder, f"ours/scores/{name}", tables) for name in ("manifest.json", "scores.jsonl")
    ]


def _parts(folder: Path) -> list[Target]:
    recipe = config.load(
        ROOT / "recipes/shapes.yaml",
        ["evaluate.count=3", "evaluate.steps=1", "evaluate.guidance=1", "policy.model=shapes"],
    )
    evaluation.evaluate(recipe, folder, None, no_progress)

    def again() -> Any:
        made = evaluation.evaluate(recipe, folder, None, no_progress)
        return made.read_bytes() if made else None

    def read() -> Any:
        found = evaluate.Scores.load(folder)
        return _table(found), [found.image(k).read_bytes() for k in range(3)]

    part = sorted((folder / "scores/parts").iterdir())[0].name
    return [
        Target("scores/parts (evaluate)", folder, f"scores/parts/{part}", again),
        Target("scores/manifest.json (evaluate)", folder, "scores/manifest.json", again),
        Target("scores.jsonl of evaluate", folder, "scores/scores.jsonl", read),
    ]


def _proposals(folder: Path) -> list[Target]:
    base = ["prompts.count=2", "estimate.samples=2", "estimate.steps=4", "policy.model=shapes"]
    recipe = config.load(ROOT / "recipes/shapes.yaml", base)
    proposing.propose(recipe, folder / "source", no_progress)
    copied = config.load(
        ROOT / "recipes/shapes.yaml", [*base, "propose.source=folder", f"propose.folder={folder / 'source/proposals'}"]
    )

    def copy() -> Any:
        made = proposing.propose(copied, folder / "copy", no_progress)
        return made.read_bytes(), [path.read_bytes() for path in sorted(made.parent.glob("images/*"))]

    def again() -> Any:
        return proposing.propose(recipe, folder / "source", no_progress).read_bytes()

    def ledger() -> Any:
        kept = Store(folder / "source/proposals", identity.proposals(recipe))
        return api._Ledger(kept, 100)._spent

    api._Ledger(Store(folder / "source/proposals", identity.proposals(recipe)), 100).take()
    image = sorted((folder / "source/proposals/images").iterdir())[0].name
    return [
        Target("proposals/manifest.jsonl (propose)", folder, "source/proposals/manifest.jsonl", copy),
        Target("proposals/settings.json (propose)", folder, "source/proposals/settings.json", again),
        Target("proposals/images (propose)", folder, f"source/proposals/images/{image}", again),
        Target("proposals/ledger.json (propose)", folder, "source/proposals/ledger.json", ledger),
    ]


def _shards(folder: Path) -> list[Target]:
    small = ["world.dimension=2", "world.prompts=2", "estimate.steps=3", "estimate.samples=2", "estimate.noisings=2"]
    recipe = config.load(ROOT / "recipes/mixture.yaml", small)
    estimation.estimate(recipe, folder, no_progress)

    def reuse() -> Any:
        made = estimation.estimate(recipe, folder, no_progress, reuse=True)
        return made and (folder / "gains.json").read_bytes()

    shard = sorted((folder / "shards").glob("*.safetensors"))[0].name
    return [
        Target("shards/*.safetensors (estimate)", folder, f"shards/{shard}", reuse),
        Target("shards/manifest.json (estimate)", folder, "shards/manifest.json", reuse),
    ]


def _checkpoint(folder: Path) -> list[Target]:
    small = [
        *("train.epochs=2", "train.prompts_per_epoch=2", "train.images_per_prompt=2", "train.batch=2", "train.rank=1"),
        *("train.steps=2", "train.micro_batch=4", "train.preview_every=0", "train.trackers=[]", "train.save_every=1"),
        *("train.fraction=1", "weigh.method=static", "train.keep=1", "policy.guidance=1", "policy.model=shapes"),
    ]
    recipe = config.load(ROOT / "recipes/shapes.yaml", small)
    recipe = recipe.model_copy(
        update={"rewards": {"detail": {}}, "weigh": recipe.weigh.model_copy(update={"budget": {}})}
    )
    training.train(recipe, folder)
    path = checkpoint.all_of(folder / "checkpoints")[-1]
    settings = checkpoint.read_state(path)[1]["settings"]
    matrix, rows = WeightMatrix.load(folder / "weights.json"), prompts.load(recipe.train.prompts)
    trainer = training.build(recipe, matrix, rows, training.accelerator_of(recipe, folder))

    def load() -> Any:
        with training._reading(path, "remove it"):
            trainer.load(path, settings)
        tensors = [*trainer.adapters.parameters, *trainer.ema.shadow_params]
        tensors += checkpoint.optimizer_tensors(trainer.optimizer.optimizer).values()
        tensors += checkpoint.random_tensors().values()
        content = [hashlib.sha256(each.detach().numpy().tobytes()).hexdigest() for each in tensors]
        rates = [group["lr"] for group in trainer.optimizer.param_groups]
        return content, rates, vars(trainer.position), trainer.schedule.state_dict(), vars(trainer.weights)

    def log() -> Any:
        metrics.Log(folder / "metrics.jsonl", 2)
        rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        return [{key: value for key, value in row.items() if key != "checksum"} for row in rows]

    def done() -> Any:
        return training.train(recipe, folder)

    inside = path.relative_to(folder)
    files = ("state.json", "optimizer.safetensors", "random-0.safetensors", "weights.json")
    adapter = "default/pytorch_lora_weights.safetensors"
    return [
        *(Target(f"checkpoint/{name} (train)", folder, str(inside / name), load) for name in files),
        Target("checkpoint/default (train)", folder, str(inside / adapter), load),
        Target("checkpoint/state.json (finished)", folder, str(inside / "state.json"), done),
        Target("metrics.jsonl (train)", folder, "metrics.jsonl", log),
    ]


def _doctor(folder: Path) -> list[Target]:
    small = ["policy.model=shapes", "train.rank=1", "train.steps=2", "train.micro_batch=64", "rewards={detail: {}}"]
    recipe = config.load(ROOT / "recipes/shapes.yaml", small)

    def measure() -> Any:
        return vars(gradients.effects(recipe, folder, 4, 2))

    def products() -> Any:
        return hashlib.sha256(sketch.products(folder / "splits", 4).tobytes()).hexdigest()

    measure()
    (folder / "splits").mkdir()
    for split in range(4):  # as they are until all have been measured
        sketch.save(folder / "splits", split, torch.full((1, 2, 8), 0.5 + split))
    return [
        Target("effects.json (doctor)", folder, "effects.json", measure),
        Target("effects/split-00.safetensors (doctor)", folder, "splits/split-00.safetensors", products),
    ]


RUN = """
world: {kind: images}
policy: {model: shapes}
rewards: {detail: {}, background: {}}
estimate: {steps: 3, samples: 2, noisings: 1}
prompts: {source: shapes:train, count: 2}
train: {epochs: 1, prompts_per_epoch: 2, images_per_prompt: 2, batch: 4, rank: 1, trackers: [], preview_every: 0,
        save_every: 1}
evaluate: {count: 3, steps: 2, guidance: 1}
run: {methods: [sinkhorn]}
sweep: {methods: [sinkhorn], seeds: [0], budgets: [{detail: 1, background: 1}]}
"""


def _run(folder: Path) -> list[Target]:
    """A finished RUN, which `recast run` and `recast sweep` read again; jobs run in this process, without figures."""
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(RUN)
    before = workers.run_jobs, figures.gain_figure, figures.differences_figure, figures.save

    def verb(name: str) -> Any:
        workers.run_jobs = lambda order, *_: [jobs.run_here(job) for job in order]  # type: ignore
        figures.gain_figure, figures.save = lambda *_: None, lambda *_: None  # type: ignore
        try:
            _verb(name, folder / "recipe.yaml", "--out", folder / "run")
        finally:
            workers.run_jobs, figures.gain_figure, _, figures.save = before
        return [path.read_bytes() for path in sorted((folder / "run/report").rglob("*")) if path.is_file()]

    verb("run")
    job = folder / "run/sinkhorn-s0"
    shard = sorted((folder / "run/shards").glob("*.safetensors"))[0]
    part = sorted((job / "scores/parts").iterdir())[0]
    files = [
        *(folder / "run" / name for name in ("gains.json", "proposals/settings.json", "proposals/manifest.jsonl")),
        *(job / name for name in ("weights.json", "metrics.jsonl", "scores/manifest.json", "scores/scores.jsonl")),
        *(job / "lora/pytorch_lora_weights.safetensors", job / "checkpoints/epoch-00001/state.json", part, shard),
    ]
    found = []
    for path in files:
        name, made = str(path.relative_to(folder)), path in (job / "weights.json", shard)
        what = {part: "scores/parts", shard: "shards/*.safetensors"}.get(path, path.name)
        what = f"proposals/{what}" if "proposals" in name else f"scores/{what}" if what == "manifest.json" else what
        found.append(Target(f"{what} (run)", folder, name, lambda: verb("run"), made=made))
        if path in files[:2] or made:
            found.append(Target(f"{what} (sweep)", folder, name, lambda: verb("sweep"), made=made))
    return found


def _reported(ours: Path) -> None:
    """What else a report reads: curves, W, and metrics."""
    D = np.array([[1.0, 0.8, 0.5, 0.2, 0.1], [0.9, 0.85, 0.6, 0.5, 0.1]])
    curves = GainCurves(("ocr", "clipscore"), SIGMAS, D)
    curves.save(ours.parent / "gains.json")
    weigh(curves, {"ocr": 1.0, "clipscore": 2.0}).save(ours / "weights.json")
    log = metrics.Log(ours / "metrics.jsonl", 0)
    for epoch in (1, 2, 3):
        log.write({"epoch": epoch, "step": epoch, "reward/ocr": 0.1 * epoch, "share_by_step/ocr": [0.5, None]})
    (ours / "checkpoints/epoch-00003").mkdir(parents=True)


def _judged(folder: Path, url: str) -> list[Target]:
    ours, static, _, _ = two_runs(folder, 4)
    settings = Settings("known", url, concurrency=2, tries=2, backoff=0.001, timeout=5.0)

    def compare() -> Any:
        found = judging_stage.judge([judging_stage.two(ours, static, None)], settings, no_progress)
        return [_rates(each) for each in found.verdicts]

    def read() -> Any:
        return _rates(judge.load(place))

    def image() -> Any:
        made = judging_stage.two(ours, static, None)
        return [made.shown(k, 0) for k in range(4)]

    def page() -> Any:
        _verb("report", folder, "--out", folder / "report")
        return [path.read_bytes() for path in sorted((folder / "report").rglob("*")) if path.is_file()]

    place = ours / "verdicts/static"
    compare()
    _reported(ours)
    shown = ["gains.json", "ours/weights.json", "ours/metrics.jsonl", "ours/scores/scores.jsonl"]
    shown += ["ours/verdicts/static/verdicts.jsonl", "ours/verdicts/static/summary.json"]
    inside = place.relative_to(folder)
    return [
        Target("verdicts/calls.jsonl (judge)", folder, str(inside / "calls.jsonl"), compare),
        Target("verdicts/manifest.json (judge)", folder, str(inside / "manifest.json"), compare),
        Target("verdicts/manifest.json (report)", folder, str(inside / "manifest.json"), read),
        Target("verdicts/verdicts.jsonl (report)", folder, str(inside / "verdicts.jsonl"), read),
        Target("scores/images (judge)", folder, "ours/scores/images/00001.png", image),
        *(Target(f"{Path(name).name} (report's page)", folder, name, page) for name in shown),
    ]


def _rates(found: judge.Verdicts) -> Any:
    return [*vars(replace(found, folder=None)).values()]
