"""Comparisons of methods, budgets and seeds: planned and matched, skipped, set aside, and run as commands."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

import recast
from recast import GainCurves, WeightMatrix, config, evaluate, lock
from recast.cli import app
from recast.core import schedule
from recast.core.effects import Effects
from recast.errors import RecastError
from recast.report import figures
from recast.sweep import jobs as planning
from recast.sweep import stage, workers
from recast.train import stage as training

RECIPE = """
world: {kind: images}
policy: {model: shapes}
rewards: {detail: {}, background: {}}
estimate: {steps: 4, samples: 2, noisings: 1}
prompts: {source: shapes:train, count: 2}
train: {epochs: 1, prompts_per_epoch: 4, images_per_prompt: 2, batch: 8, rank: 4, alpha: 8, trackers: [],
        preview_every: 0}
evaluate: {count: 4, steps: 2, guidance: 1, held_out: {census: {}}}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def curves() -> GainCurves:
    D = np.array([[0.9, 0.3, 0.2, 0.1, 0.0], [0.9, 0.8, 0.7, 0.1, 0.0]])
    return GainCurves(("detail", "background"), schedule.from_shift(4), D)


def grid_of_the_policy() -> GainCurves:
    from recast.flow import families

    found = curves()
    return GainCurves(found.rewards, families.load(config.policy(model="shapes")).sigmas(4), found.D)


def test_the_papers_five_budgets() -> None:
    settings = config.Recipe.model_validate({"rewards": {name: {} for name in ("clip", "hps", "pick", "ocr")}})
    found = [tuple(int(value) for value in budget.values()) for budget in planning.budgets_of(settings, [])]
    assert found == [(1, 1, 1, 1), (1, 1, 1, 2), (1, 1, 2, 1), (1, 2, 1, 1), (2, 1, 1, 1)]
    assert planning.budgets_of(settings, [{"clip": 3.0}]) == [{"clip": 3.0}]
    with pytest.raises(
        RecastError, match="sweep.budgets contains 'clop', but the rewards of the recipe are clip, hps, pick, ocr"
    ):
        planning.budgets_of(settings, [{"clop": 3.0}])
    with pytest.raises(RecastError, match="a sweep needs world.kind = images, not mixture"):
        planning.budgets_of(config.Recipe.model_validate({"world": {"kind": "mixture"}}), [])
    for wrong in ({"seeds": []}, {"seeds": [-1]}, {"methods": []}):
        with pytest.raises(ValueError, match="sweep"):
            config.Recipe.model_validate({"sweep": wrong})


def test_the_papers_thirty_runs_are_matched(recipe: Path, tmp_path: Path) -> None:
    settings = config.load(recipe)
    budgets = [{"detail": 1.0, "background": float(k)} for k in range(1, 6)]
    jobs = planning.jobs_of(settings, tmp_path, ["static", "sinkhorn"], [0, 1, 2], budgets)
    assert len(jobs) == 31
    assert planning.facts(jobs) == {"methods": 2, "budgets": 5, "seeds": 3, "runs": 30}
    assert len({job.folder for job in jobs}) == 31
    for first, second in zip(jobs[1::2], jobs[2::2], strict=True):
        a, b = (config.load(recipe, job.overrides) for job in (first, second))
        assert (a.weigh.method, b.weigh.method) == ("static", "sinkhorn")
        assert a.model_copy(update={"weigh": b.weigh}) == b
        assert a.weigh.budget == b.weigh.budget == dict(first.budget)
    assert str(jobs[-1].folder).endswith("b1-5/sinkhorn-s2")


def test_a_job_is_made_once_and_anew_when_its_settings_change(recipe: Path, tmp_path: Path) -> None:
    found, out = grid_of_the_policy(), tmp_path / "out"

    def go(*changes: str) -> list[str | None]:
        settings = config.load(recipe, changes)
        settings.save(out / "recipe.yaml")
        jobs = planning.jobs_of(settings, out, ["sinkhorn"], [0], [{"detail": 1.0, "background": 1.0}])
        said = [planning.prepare(settings, found, job) for job in jobs]
        for job in jobs:
            if not planning.finished(job):
                planning.run_here(job)
                made.append(job.folder.name)
            assert planning.finished(job)
        return said

    made: list[str] = []
    assert go() == [None, None]
    assert made == ["base", "sinkhorn-s0"]
    W = WeightMatrix.load(out / "sinkhorn-s0/weights.json")
    assert W.method == "sinkhorn"
    lora = (out / "sinkhorn-s0/lora/pytorch_lora_weights.safetensors").read_bytes()
    made.clear()
    assert go() == [None, None]
    assert made == []
    said = go("evaluate.steps=3")  # images, not adapters
    assert [str(each).startswith(f"{out}") for each in said] == [True] * 2
    words = "contains images made with evaluate.steps = 2, not 3; it was renamed to scores.stale-1 and is made again"
    assert words in str(said[1])
    assert (out / "sinkhorn-s0/lora/pytorch_lora_weights.safetensors").read_bytes() == lora
    said = go("evaluate.steps=3", "train.beta=0.2")
    assert said[0] is None
    assert "was trained with train.beta = 0.1, not 0.2; it was renamed to sinkhorn-s0.stale-1" in str(said[1])
    assert (out / "sinkhorn-s0/lora/pytorch_lora_weights.safetensors").read_bytes() != lora
    assert (out / "sinkhorn-s0.stale-1/lora/pytorch_lora_weights.safetensors").read_bytes() == lora
    made.clear()
    said = go("evaluate.steps=3", "train.beta=0.2", "train.epochs=2")  # resumes
    assert "scores contains images of an earlier epoch; it was renamed to scores.stale-1" in str(said[1])
    assert made == ["sinkhorn-s0"]
    assert planning.Job(out / "sinkhorn-s0", "sinkhorn", (), 0, (), recipe).epochs_done() == 2
    assert len(evaluate.find([out])) == 2  # what was set aside is left out


def test_commands_for_a_queue(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is printed is what a job runs, and W is there for it."""
    monkeypatch.setattr("recast.sweep.stage.curves_of", lambda *_: (curves(), None))
    words = ["sweep", str(recipe), "sweep.seeds=[7]", "--out", str(tmp_path / "s w"), "--print"]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert len(lines) == 7  # the base, then two methods at three budgets
    assert lines[0].startswith("recast evaluate ")
    assert lines[0].endswith("--base")
    assert "b1-2/sinkhorn-s7' && recast evaluate '" in lines[4]
    assert "'weigh.budget={detail: 1, background: 2}' train.seed=7" in lines[4]
    W = WeightMatrix.load(tmp_path / "s w/b1-2/sinkhorn-s7/weights.json")
    np.testing.assert_allclose(W.budget, [1 / 3, 2 / 3])


def effects(sigmas: Any, scale: float = 3.0) -> Effects:
    """Effects of random gradients that grow with the level by a factor of `scale`."""
    size = np.tile(np.linspace(1, scale, 4), 2)
    g = np.random.default_rng(0).normal(1.0, 0.5, (6, 8, 20)) * size[:, None]
    products = np.einsum("qap,rbp->qrab", g, g)
    return Effects.measured(("detail", "background"), sigmas, products, 4, batch=8, levels=4)


def test_jobs_take_the_masses_of_their_steps_from_the_recipe(recipe: Path, tmp_path: Path) -> None:
    found = curves()

    def prepared(*changes: str, measured: Effects | None = None) -> dict[str, WeightMatrix]:
        settings = config.load(recipe, changes)
        settings.save(tmp_path / "recipe.yaml")
        methods: list[Any] = ["static", "sinkhorn", "row", "matched", "matched-reversed", "hard-shuffled"]
        jobs = planning.jobs_of(settings, tmp_path, methods, [0], [{"detail": 1.0, "background": 2.0}])
        stage.prepare(settings, tmp_path, found, jobs, {}, measured)
        made = {job.method: WeightMatrix.load(job.folder / "weights.json") for job in jobs if job.method}
        for job in jobs[1:]:
            training.check_weights(job.load(), made[job.method], job.folder / "weights.json")  # type: ignore[index]
        return made  # type: ignore[return-value]

    assert all(W.uniform for W in prepared().values())
    for method, W in prepared("weigh.columns=[1, 2, 3, 4]", "weigh.tau=0.5").items():
        np.testing.assert_allclose(W.nu, [0.1, 0.2, 0.3, 0.4])
        tau = 0.5 if method == "sinkhorn" else 1.0
        expected = recast.weigh(found, {"detail": 1, "background": 2}, method, tau=tau, columns=[1, 2, 3, 4])
        np.testing.assert_array_equal(W.matrix, expected.matrix)
    for scale in (3.0, 9.0):
        measured = effects(found.sigmas, scale)
        for W in prepared("weigh.columns=effect", measured=measured).values():
            np.testing.assert_allclose(W.nu, measured.effect)
    with pytest.raises(RecastError, match="weigh.columns = effect needs the effects"):
        prepared("weigh.columns=effect")


class Command(planning.Job):
    """A job that runs other commands."""

    def commands(self) -> list[list[str]]:
        return json.loads(self.overrides[0])


def command(*words: list[str], after: Path | None = None) -> Command:
    return Command(Path(json.dumps(words)), "static", (), 0, (json.dumps(words),), Path(), after=after)


def test_a_job_that_fails_stops_the_rest_in_one_sentence(tmp_path: Path) -> None:
    bad = command(["weigh", str(tmp_path / "nowhere.json")])
    with pytest.raises(RecastError, match="`recast weigh .*nowhere.json` failed: .*nowhere.json: cannot be read"):
        workers.run_jobs([bad, command(["--version"])], 1, lambda _: None)


def test_a_job_waits_for_the_one_it_resumes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    def call(words: list[str], *_: object) -> None:
        time.sleep(0.4 if words[0] == "first" else 0.0)
        ended.append(words[0])

    monkeypatch.setattr(workers, "_call", call)
    first = command(["first"])
    workers.run_jobs([first, command(["second"], after=first.folder), command(["third"])], 3, lambda _: None)
    assert ended == ["third", "first", "second"]
    monkeypatch.setattr(workers, "_call", lambda *_: (_ for _ in ()).throw(RecastError("no")))
    with pytest.raises(RecastError, match="no"):
        workers.run_jobs([first, command(["second"], after=first.folder)], 2, lambda _: None)


WARMUP = """
world: {kind: images}
policy: {model: shapes}
rewards: {detail: {}}
weigh: {method: static}
train: {epochs: 2, steps: 4, prompts_per_epoch: 4, images_per_prompt: 2, batch: 8, rank: 4, alpha: 8, trackers: [],
        preview_every: 0}
"""


def test_every_seed_has_its_own_warmup(recipe: Path, tmp_path: Path) -> None:
    """As in the paper, which repeats warmup and second stage for every seed."""
    first, second = tmp_path / "one.yaml", tmp_path / "two.yaml"
    first.write_text(WARMUP)
    second.write_text(WARMUP.replace("epochs: 2", "epochs: 3"))
    out = tmp_path / "out"

    def plan(*warmups: Path) -> list[planning.Job]:
        settings = config.load(recipe, [f"sweep.warmup=[{', '.join(map(str, warmups))}]"])
        found = planning.warmups_of(settings, out)
        return planning.jobs_of(settings, out, ["static", "sinkhorn"], [0, 1], [settings.budget], found)

    jobs = plan(first)
    assert [job.folder.name for job in jobs] == [
        *("base", "warmup-s0", "warmup-s1", "static-s0", "sinkhorn-s0", "static-s1", "sinkhorn-s1")
    ]
    for job in jobs[3:]:
        assert job.after == out / f"warmup-s{job.seed}"
        assert f"train.resume_from={job.after}" in job.overrides
    assert [job.epochs for job in jobs] == [0, 2, 2, 1, 1, 1, 1]
    assert planning.facts(jobs) == {"methods": 2, "budgets": 1, "seeds": 2, "runs": 4}
    lines = planning.command_lines(jobs)
    assert lines[0] == f"recast train {out}/warmup.yaml train.seed=0 --out {out}/warmup-s0"
    assert [line.split()[1] for line in lines[:4]] == ["train", "train", "evaluate", "when"]
    chain = plan(first, second)
    assert [job.folder.name for job in chain if job.is_warmup] == [
        *("warmup-1-s0", "warmup-1-s1", "warmup-2-s0", "warmup-2-s1")
    ]
    assert {job.after for job in chain if job.method} == {out / "warmup-2-s0", out / "warmup-2-s1"}
    assert sum(line.startswith("#") for line in planning.command_lines(chain)) == 2
    with pytest.raises(RecastError, match="train.lora = a would replace the adapters of the warmup .*one.yaml"):
        planning.warmups_of(config.load(recipe, [f"sweep.warmup={first}", "train.lora=a"]), out)
    second.write_text(WARMUP.replace("method: static", "method: sinkhorn"))
    with pytest.raises(
        RecastError, match=r"two.yaml: a warmup needs .* weigh.method = static, not images and sinkhorn"
    ):
        plan(second)


def test_a_warmup_is_trained_once_and_its_policies_count_on_from_it(recipe: Path, tmp_path: Path) -> None:
    warmup, found, out = tmp_path / "warmup.yaml", grid_of_the_policy(), tmp_path / "out"
    warmup.write_text(WARMUP)

    def go(*changes: str) -> tuple[list[str], list[str]]:
        settings = config.load(recipe, [f"sweep.warmup={warmup}", *changes])
        warmups = planning.warmups_of(settings, out)
        jobs = planning.jobs_of(settings, out, ["sinkhorn"], [0], [settings.budget], warmups)
        said = stage.prepare(settings, out, found, jobs, warmups)
        order = sorted((job for job in jobs if not planning.finished(job)), key=lambda job: not job.is_warmup)
        for job in order:
            planning.run_here(job)
        assert all(planning.finished(job) for job in jobs)
        return said, [job.folder.name for job in order]

    assert go() == ([], ["warmup-s0", "base", "sinkhorn-s0"])
    rows = [json.loads(line) for line in (out / "sinkhorn-s0/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [3]
    assert not (out / "warmup-s0/scores").exists()
    assert go() == ([], [])
    warmup.write_text(WARMUP.replace("epochs: 2", "epochs: 3"))  # it is trained on; what resumed from it is not its own
    said, made = go()
    assert made == ["warmup-s0", "sinkhorn-s0"]
    assert "sinkhorn-s0 resumed from" in said[0]
    assert "it was renamed to sinkhorn-s0.stale-1" in said[0]
    assert json.loads((out / "sinkhorn-s0/metrics.jsonl").read_text())["step"] == 4
    warmup.write_text(WARMUP.replace("rewards: {detail: {}}", "rewards: {background: {}}"))
    said, made = go()
    assert made == ["warmup-s0", "sinkhorn-s0"]
    assert "but the recipe has {'background': 1.0}; it was renamed to warmup-s0.stale-1" in said[0]
    assert "it was renamed to sinkhorn-s0.stale-2" in said[1]


@pytest.mark.parametrize("variable", ["RECAST_PARENT", "TORCHELASTIC_RUN_ID"])
def test_jobs_end_with_the_process_that_started_them(tmp_path: Path, variable: str) -> None:
    """kill −9 of `recast run` or of torchrun must not leave a training that a second start would collide with."""
    script = (
        "import os, sys, time, threading\n"
        "from recast.sweep import workers\n"
        "if len(sys.argv) == 1:\n"
        "    import subprocess\n"
        f"    os.environ[{variable!r}] = str(os.getpid())\n"
        "    child = subprocess.Popen([sys.executable, __file__, 'job'])\n"
        "    print(child.pid, flush=True)\n"
        "else:\n"
        "    workers.end_with_parent()\n"
        "time.sleep(60)\n"
    )
    path = tmp_path / "parent.py"
    path.write_text(script)
    parent = subprocess.Popen([sys.executable, path], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    time.sleep(1.5)
    os.kill(child, 0)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    for _ in range(100):
        try:
            state = Path(f"/proc/{child}/stat").read_text().split()[2]
        except FileNotFoundError:
            break
        if state == "Z":
            break
        time.sleep(0.1)
    else:
        pytest.fail("the job outlived its parent")


def test_each_job_gets_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(workers.processes, "cores", lambda: 8)
    assert workers.environment(1, 2)["OMP_NUM_THREADS"] == "4"
    assert workers.workers_here() == 8
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert workers.environment(1, 4)["CUDA_VISIBLE_DEVICES"] == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    assert workers.environment(1, 2)["CUDA_VISIBLE_DEVICES"] == "7"
    assert workers.workers_here() == 4


def test_run_goes_from_the_recipe_to_the_page(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All stages in this process; a second run makes nothing, and another π⁺ seed sets proposals aside."""

    def here(jobs: Any, workers: int, watch: Any) -> None:
        for job in jobs:
            ran.append(job.folder.name)
            planning.run_here(job)

    ran: list[str] = []
    monkeypatch.setattr(workers, "run_jobs", here)
    out = tmp_path / "out"

    def call(*changes: str) -> str:
        words = ["run", recipe, "run.methods=[static, sinkhorn]", *changes, "--out", out]
        result = CliRunner().invoke(app, list(map(str, words)), env={"COLUMNS": "150"})
        assert result.exit_code == 0, result.output
        return result.output

    first = call()
    assert ran == ["static-s0", "sinkhorn-s0", "base"]
    assert f"the page is {out / 'report/index.html'}" in first
    assert "matched pairs won" in first
    page = (out / "report/index.html").read_bytes()
    for name in ("gain_figure", "differences_figure"):  # drawn once: the slowest part of a run that makes nothing
        monkeypatch.setattr(figures, name, lambda *_: Figure(figsize=(1, 1)))
    ran.clear()
    call()
    assert ran == []
    assert (out / "report/index.html").read_bytes() == page
    changed = call("propose.seed=5")
    assert "note: " in changed
    assert (out / "proposals.stale-1").is_dir()
    assert (out / "shards.stale-1").is_dir()
    assert "sinkhorn-s0" in ran  # another W
    assert "static-s0" not in ran  # the same W


def test_run_measures_effects_once_and_trains_by_them(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def here(jobs: Any, workers: int, watch: Any) -> None:
        for job in jobs:
            ran.append(job.folder.name)
            planning.run_here(job)

    def measure(settings: config.Recipe, out: Path, on_progress: Any) -> Effects:
        asked.append(out)
        return effects(found.sigmas, scale[0])

    ran: list[str] = []
    asked: list[Path] = []
    scale, found, out = [3.0], grid_of_the_policy(), tmp_path / "out"
    found.save(out / "gains.json")
    monkeypatch.setattr(workers, "run_jobs", here)
    monkeypatch.setattr("recast.sweep.stage.curves_of", lambda *_: (found, None))
    monkeypatch.setattr("recast.sweep.stage.cost_sentence", lambda *_: "")
    monkeypatch.setattr("recast.train.gradients.effects", measure)
    monkeypatch.setattr(figures, "differences_figure", lambda *_: Figure(figsize=(1, 1)))

    def call(verb: str, *changes: str) -> str:
        words = [verb, recipe, f"{verb}.methods=[matched, matched-reversed]", *changes, "--out", out]
        result = CliRunner().invoke(app, list(map(str, words)), env={"COLUMNS": "150"})
        assert result.exit_code == 0, result.output
        return result.output

    first = call("run", "weigh.columns=effect", "weigh.method=matched")
    assert "W by matched, T = 4, steps by their effect" in first
    assert "reversed (matched)" in first
    assert ran == ["matched-s0", "matched-reversed-s0", "base"]
    assert asked == [out]
    measured = effects(found.sigmas)
    for place in ("", "matched-s0", "matched-reversed-s0"):
        np.testing.assert_allclose(WeightMatrix.load(out / place / "weights.json").nu, measured.effect)
    data = (out / "report/index.html").read_text()
    assert json.dumps(measured.effect.tolist()) in data
    ran.clear()
    call("run", "weigh.columns=effect", "weigh.method=matched")
    assert ran == []
    scale[0] = 9.0
    again = call("run", "weigh.columns=effect", "weigh.method=matched")
    assert "was trained with another W; it was renamed to matched-s0.stale-1" in again.replace("\n", " ")
    assert ran[:2] == ["matched-s0", "matched-reversed-s0"]
    asked.clear()
    monkeypatch.setattr("recast.train.gradients.effects", None)  # not called for other columns
    lines = call("sweep", "weigh.columns=[1, 2, 3, 4]", "sweep.seeds=[0]", "--print").splitlines()
    assert len(lines) == 7
    np.testing.assert_allclose(WeightMatrix.load(out / "b1-2/matched-s0/weights.json").nu, [0.1, 0.2, 0.3, 0.4])


@pytest.mark.parametrize(
    ("methods", "seeds", "budgets", "said"),
    [
        (["static", "static"], [0], [{"detail": 1.0}], "method static, seed 0"),
        (["static"], [0, 1, 0], [{"detail": 1.0}], "method static, seed 0"),
        (["static"], [0], [{"detail": 1.0}, {"detail": 1.0}], "method static, seed 0"),
        (["static"], [0], [{"detail": 1.0}, {"detail": 1.0000001}], r"budgets \{'detail': 1.0\} and"),
    ],
)
def test_two_policies_in_one_folder_are_refused(
    methods: Any, seeds: list[int], budgets: list[dict[str, float]], said: str, tmp_path: Path
) -> None:
    settings = config.Recipe.model_validate({"rewards": {"detail": {}}})
    with pytest.raises(RecastError, match=rf"two policies would be trained in .*static-s0 \({said}"):
        planning.jobs_of(settings, tmp_path, methods, seeds, budgets)


def test_two_processes_do_not_train_evaluate_run_or_report_in_one_folder(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    for name, arguments, doing in (
        (".train.lock", ["train", str(recipe), "weigh.method=static"], "training"),
        ("scores/.lock", ["evaluate", str(recipe), "--base"], "evaluating"),
        ("proposals/.lock", ["propose", str(recipe)], "making proposals"),
        (".run.lock", ["run", str(recipe)], "running a recipe"),
    ):
        with lock.alone(out / name, "testing"):
            before = sorted(path for path in out.rglob("*") if path.is_file() and path.name != "settings.json")
            result = CliRunner().invoke(app, [*arguments, "--out", str(out)])
            after = sorted(path for path in out.rglob("*") if path.is_file() and path.name != "settings.json")
        assert (result.exit_code, before) == (2, after)
        assert f"is {doing} in {out}" in result.stderr
        assert result.stderr.count("\n") == 1
