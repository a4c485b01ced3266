"""The stages that are killed: for each its command, what it needs, and which of its files two runs must share."""

import base64
import hashlib
import json
import mmap
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from judging import Known, two_runs
from server import Server, png, serve

__all__ = ["CONCURRENCY", "STAGES", "Paid", "Stage", "same_files", "serving"]

RECIPE = """
world: {kind: images}
policy: {model: shapes}
rewards: {detail: {}, background: {}}
estimate: {steps: 4, samples: 2, noisings: 2}
prompts: {source: shapes:train, count: 6}
train: {epochs: 4, prompts_per_epoch: 2, images_per_prompt: 2, batch: 2, rank: 2, alpha: 4, trackers: [], steps: 4,
        micro_batch: 4, save_every: 1, preview_every: 2, keep: 2}
evaluate: {count: 70, steps: 2, guidance: 1, held_out: {census: {}}}
"""
_CLOCKS = ("seconds/", "images_per_second", "pairs_per_second", "checksum")
PAIRS, IMAGES, CONCURRENCY = 12, 12, 3


class Paid:
    """Requests that a server in another process has received; the memory is shared with the processes forked later."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8)

    @property
    def count(self) -> int:
        """Requests so far."""
        return int.from_bytes(self._memory[:8], "little")

    def add(self) -> None:
        """Count a request; the server calls this one at a time."""
        self._memory[:8] = (self.count + 1).to_bytes(8, "little")

    def reset(self) -> None:
        """Start again from 0."""
        self._memory[:8] = bytes(8)


@dataclass(frozen=True)
class Stage:
    """A command, run in a folder that `prepare` fills, by so many processes of a launcher.

    `server` sets up a server, whose requests are counted; `cost` returns the calls that the stage itself has counted,
    and those of an undisturbed run.
    """

    name: str
    command: tuple[str, ...]
    prepare: Callable[[Path], None] = lambda _: None
    ranks: int = 1
    server: Callable[[Server, Paid], None] | None = None
    cost: Callable[[Path], tuple[int, int]] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


def _recipe(folder: Path) -> None:
    (folder / "recipe.yaml").write_text(RECIPE)


def _proposed(folder: Path) -> None:
    from recast import config
    from recast.progress import no_progress
    from recast.propose import stage

    _recipe(folder)
    stage.propose(config.load(folder / "recipe.yaml"), folder / "run", no_progress)


def _weights(folder: Path) -> None:
    from recast import config
    from recast.flow import families
    from recast.weigh import static

    _recipe(folder)
    grid = families.load(config.policy(model="shapes")).sigmas(4)
    static({"detail": 1.0, "background": 1.0}, grid).save(folder / "run/weights.json")


def _evaluated(folder: Path) -> None:
    two_runs(folder, PAIRS)


def _image_server(server: Server, paid: Paid) -> None:
    def image(body: dict[str, Any]) -> Any:
        paid.add()
        time.sleep(0.05)
        content = png(hashlib.sha256(body["prompt"].encode()).digest()[0])
        return ("json", {"created": 1, "data": [{"b64_json": base64.b64encode(content).decode()}]})

    server.fault = image


def _judge_server(server: Server, paid: Paid) -> None:
    known = Known(server)

    def count(body: dict[str, Any]) -> Any:
        paid.add()
        return known.fault(body)

    server.fault, server.delay = count, 0.05


def _proposals_paid(folder: Path) -> tuple[int, int]:
    return json.loads((folder / "run/proposals/ledger.json").read_text())["images"], IMAGES


def _verdicts_paid(folder: Path) -> tuple[int, int]:
    made = json.loads((folder / "ours/verdicts/static/summary.json").read_text())
    return made["calls"], 2 * PAIRS + 2 * sum(k % 10 == 0 for k in range(PAIRS))


STAGES = (
    Stage(
        "propose",
        (
            *("propose", "recipe.yaml", "propose.source=openai", "propose.base_url={url}"),
            f"propose.concurrency={CONCURRENCY}",
        ),
        _recipe,
        server=_image_server,
        cost=_proposals_paid,
        environment={"OPENAI_API_KEY": "loopback"},
    ),
    Stage("estimate", ("estimate", "recipe.yaml"), _proposed),
    Stage("train", ("train", "recipe.yaml", "weigh.method=static"), _weights),
    Stage("train, 2 processes", ("train", "recipe.yaml", "weigh.method=static"), _weights, ranks=2),
    Stage("doctor", ("doctor", "recipe.yaml", "--gradients", "--prompts", "4", "--images-per-prompt", "2"), _recipe),
    Stage("evaluate", ("evaluate", "recipe.yaml", "--base"), _recipe),
    Stage(
        "judge",
        ("judge", "ours", "static", "--base-url", "{url}", "--concurrency", str(CONCURRENCY)),
        _evaluated,
        server=_judge_server,
        cost=_verdicts_paid,
        environment={"JUDGE_API_KEY": "loopback"},
    ),
    Stage(
        "run",
        (
            *("run", "recipe.yaml", "run.methods=[sinkhorn]", "train.epochs=2", "evaluate.count=4"),
            "prompts.count=8",  # enough for two processes to share the estimate
        ),
        _recipe,
    ),
    Stage(
        "sweep",
        (
            *("sweep", "recipe.yaml", "sweep.methods=[static, sinkhorn]", "sweep.seeds=[0]", "train.epochs=2"),
            *("sweep.budgets=[{{detail: 1, background: 2}}]", "evaluate.count=4"),
        ),
        _recipe,
    ),
)


def same_files(one: Path, other: Path) -> list[str]:
    """The files in which two folders differ, clock times and the number of calls aside; temporary files differ."""
    found = [_contents(folder) for folder in (one, other)]
    return sorted(name for name in {*found[0], *found[1]} if found[0].get(name) != found[1].get(name))


def _contents(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder))
        if path.name == "metrics.jsonl":
            rows = map(json.loads, path.read_text().splitlines())
            found[name] = [{k: v for k, v in row.items() if not k.startswith(_CLOCKS)} for row in rows]
        elif path.name == "summary.json":
            spent = ("calls", "tokens", "checksum")
            found[name] = {k: v for k, v in json.loads(path.read_text()).items() if k not in spent}
        elif path.name not in ("ledger.json", "calls.jsonl"):
            found[name] = path.read_bytes()
    return found


def serving(stage: Stage, paid: Paid) -> tuple[int, str]:
    """The process of a stage's server, which ends with this one, and its address."""
    read, write = os.pipe()
    owner = os.getpid()
    child = os.fork()
    if child:
        os.close(write)
        with os.fdopen(read) as pipe:
            return child, pipe.readline().strip()
    assert stage.server is not None
    with serve() as server:
        stage.server(server, paid)
        os.write(write, f"{server.url}\n".encode())
        while os.getppid() == owner:
            time.sleep(0.1)
    os._exit(0)
