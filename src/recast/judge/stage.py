"""`recast judge`: a multimodal model compares two evaluated runs image by image, each pair in both orders.

The folder of a comparison contains manifest.json (the runs and the judge), calls.jsonl (every reply) and, made from
these, verdicts.jsonl and summary.json. The same command resumes: it makes only the calls without an answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from recast import evaluate, identity, lock
from recast.core import strict
from recast.errors import RecastError
from recast.evaluate import Scores
from recast.judge import ask, criteria, protocol, written
from recast.judge import verdicts as verdicts_file
from recast.judge.ask import VERDICT, Call, CapError, Judge, Settings
from recast.judge.log import Log
from recast.judge.protocol import TEXT_OF
from recast.judge.verdicts import OVERALL, Verdicts
from recast.progress import Progress

__all__ = ["Comparison", "Outcome", "judge", "matched", "preview", "two"]


@dataclass(frozen=True)
class Comparison:
    """Two runs on the same prompts and seeds, the folder of their verdicts, and the numbers of the judged images."""

    first: Scores
    second: Scores
    folder: Path
    chosen: tuple[int, ...]

    def image(self, run: int, number: int) -> Path:
        """The file of an image of the first (0) or the second (1) run."""
        return (self.first, self.second)[run].image(number)

    def shown(self, number: int, order: int) -> tuple[bytes, bytes]:
        """The two images of a pair in the order in which they are shown: A, then B."""
        first, second = ((self.first, self.second)[run].picture(number) for run in ((0, 1), (1, 0))[order])
        return first, second

    def prompt(self, number: int) -> str:
        """The prompt of a pair."""
        return str(self.first.images[number]["prompt"])


@dataclass(frozen=True)
class Outcome:
    """The verdicts, calls and tokens (sent, received) so far, and the reason if judging stopped early."""

    verdicts: tuple[Verdicts, ...]
    calls: int
    tokens: tuple[int, int]
    stopped: str = ""


def two(first: Path, second: Path, out: Path | None, count: int | None = None) -> Comparison:
    """The comparison of two evaluated runs; the verdicts go to `out`, by default FIRST/verdicts/SECOND.

    With `count`, only so many pairs are judged, chosen at random.
    """
    for path in (first, second):
        if not path.is_dir():
            raise RecastError(f"{path} is not a folder: name two runs that recast evaluate has written")
    policies = [Scores.load(path) for path in (first, second)]
    if policies[0].folder.resolve() == policies[1].folder.resolve():
        raise RecastError(f"{first} and {second} are the same run: name two different ones")
    folder = out or policies[0].run / "verdicts" / policies[1].run.resolve().name
    return _comparison(policies[0], policies[1], folder, count)


def matched(folder: Path, methods: tuple[str, str], count: int | None = None) -> list[Comparison]:
    """The comparisons of two methods at every budget and seed at which both were evaluated, below one folder."""
    policies = evaluate.find([folder])
    first, second = ({(tuple(p.budget.items()), p.seed): p for p in policies if p.method == name} for name in methods)
    pairs = [(first[key], second[key]) for key in sorted(first) if key in second]
    if not pairs:
        names = ", ".join(sorted({policy.method for policy in policies}))
        wanted = " and ".join(methods)
        raise RecastError(f"{folder} contains no matched pair of {wanted}, only {names}: see --methods")
    return [_comparison(one, other, one.run / "verdicts" / other.run.name, count) for one, other in pairs]


def _comparison(first: Scores, second: Scores, folder: Path, count: int | None) -> Comparison:
    total = len(first.images)
    if first.prompts_and_seeds != second.prompts_and_seeds:
        both = f"{first.folder} and {second.folder}"
        raise RecastError(f"{both} were evaluated on different prompts or seeds: evaluate both by one recipe")
    if count is not None and not 1 <= count <= total:
        raise RecastError(f"--count must be between 1 and the number of pairs, {total}, not {count}")
    # In a fixed random order: a part of them is a fair sample, and a larger part contains the smaller one.
    order = np.random.default_rng(0).permutation(total)[:count]
    made = Comparison(first, second, folder, tuple(map(int, order)))
    missing = [path for k in made.chosen for path in (made.image(0, k), made.image(1, k)) if not path.is_file()]
    if missing:
        raise RecastError(f"{missing[0]} is missing ({len(missing)} images in all): run recast evaluate again")
    return made


def preview(comparisons: Sequence[Comparison], tries: int = Settings.tries) -> str:
    """A sentence about the calls that judging would make; nothing is sent."""
    pairs = sum(len(each.chosen) for each in comparisons)
    calls = size = gone = done = 0
    for each in comparisons:
        path = each.folder / "calls.jsonl"
        todo = [(k, order) for k in each.chosen for order in (0, 1)]
        if path.exists():
            log = Log(path)
            log.close()
            keys = {key: (*key, VERDICT) for key in todo}
            gone += sum(ask.is_gone(log, key, tries) for key in keys.values())
            done += sum(key in log.answers for key in keys.values())
            todo = [k for k, key in keys.items() if key not in log.answers and not ask.is_gone(log, key, tries)]
        calls += len(todo)
        size += sum(each.image(run, k).stat().st_size for k, _ in todo for run in (0, 1))
    return (
        f"{pairs} pairs in {len(comparisons)} comparison(s): {calls} calls to make with {2 * calls} images "
        f"({size / 1e6:.1f} MB before encoding), {done} answered already, {gone} dropped. In addition, at most "
        f"{4 * pairs} short calls without images read reasons that the patterns cannot."
    )


def judge(comparisons: Sequence[Comparison], settings: Settings, progress: Progress, forget: bool = False) -> Outcome:
    """Request every missing verdict, then ask about the criteria whose texts the patterns cannot read.

    With `forget`, dropped calls are tried again. Raises RecastError if the server refuses or does not answer, and
    StaleError if a folder contains verdicts of another judge, rubric or run. All answers received are kept.
    """
    rubric, server = protocol.rubric(settings.rubric), Judge(settings)
    with ExitStack() as stack:
        for each in comparisons:
            stack.enter_context(lock.alone(each.folder / ".lock", f"judging in {each.folder}"))
            _claim(each, settings, rubric)
        logs = [Log(each.folder / "calls.jsonl", forget) for each in comparisons]
        for log in logs:
            stack.callback(log.close)
        server.cap.spent = sum(log.calls for log in logs)
        stopped = ""
        try:
            server.ask_all(_verdict_calls(comparisons, logs, rubric), lambda found, n: progress(found, "judging", n))
            server.ask_all(_side_calls(comparisons, logs), lambda found, n: progress(found, "reading reasons", n))
        except CapError as error:
            stopped = str(error)
        finally:
            found = [_collect(each, log, settings.tries) for each, log in zip(comparisons, logs, strict=True)]
        sent, received = (sum(log.tokens[k] for log in logs) for k in (0, 1))
        return Outcome(tuple(found), sum(log.calls for log in logs), (sent, received), stopped)


def _verdict_calls(comparisons: Sequence[Comparison], logs: Sequence[Log], rubric: str) -> list[Call]:
    """Both orders of a pair in succession, the comparisons in turn, so that a limit of calls leaves them balanced."""
    ranked = [(rank, row, number) for row, each in enumerate(comparisons) for rank, number in enumerate(each.chosen)]

    def call(row: int, number: int, order: int) -> Call:
        each = comparisons[row]
        shown = partial(each.shown, number, order)
        return ask.verdict_call(logs[row], number, order, rubric, each.prompt(number), shown)

    return [call(row, number, order) for _, row, number in sorted(ranked) for order in (0, 1)]


def _side_calls(comparisons: Sequence[Comparison], logs: Sequence[Log]) -> list[Call]:
    """The criteria that the patterns leave undecided, of pairs with both verdicts."""
    calls = []
    for each, log in zip(comparisons, logs, strict=True):
        for number in each.chosen:
            verdicts = [log.answers.get((number, order, VERDICT)) for order in (0, 1)]
            for order, verdict in enumerate(verdicts):
                for name, text in _reasons(verdict).items() if None not in verdicts else ():
                    if criteria.side(text) is None:
                        calls.append(ask.side_call(log, number, order, name, text))
    return calls


def _reasons(verdict: Mapping[str, Any] | None) -> dict[str, str]:
    """The texts of the two criteria, as far as the judge wrote them."""
    texts = {} if verdict is None else verdict["reasoning"]
    return {name: texts[key] for name, key in TEXT_OF.items() if texts.get(key, "").strip()}


def _claim(comparison: Comparison, settings: Settings, rubric: str) -> None:
    """Record the judge, rubric and runs of the folder, so that verdicts of others are never mixed in."""
    runs = {}
    for name, policy in (("first", comparison.first), ("second", comparison.second)):
        run = {"method": policy.method, "budget": policy.budget, "seed": policy.seed}
        runs[name] = run | {"images": policy.images_hash()}
    wanted = {"model": settings.model, "rubric": hashlib.sha256(rubric.encode()).hexdigest(), **runs}
    path = comparison.folder / "manifest.json"
    if not path.exists() and (comparison.folder / "calls.jsonl").exists():
        raise RecastError(f"{comparison.folder} contains calls.jsonl without its manifest.json: remove the folder")
    if path.exists():
        old = written.read_manifest(path, verdicts_file.FORMAT, f"remove {comparison.folder} and judge again")
        names = {"rubric": "rubric", "first": f"run than {comparison.first.folder}"}
        names["second"] = f"run than {comparison.second.folder}"
        known = {key: old.get(key) for key in wanted}
        identity.require_same(known, wanted, f"{comparison.folder} contains verdicts made", names)
    strict.write(path, verdicts_file.FORMAT, written.Manifest, wanted)


def _collect(comparison: Comparison, log: Log, tries: int) -> Verdicts:
    """Write the rows and the summary of what the log contains."""
    rows = []
    for number in sorted(comparison.chosen):
        image = comparison.first.images[number]
        keys = [(number, order, VERDICT) for order in (0, 1)]
        row: dict[str, Any] = {"index": number, "prompt": image["prompt"], "seed": image["seed"]}
        if all(key in log.answers for key in keys):
            row["status"] = "judged"
        else:
            row["status"] = "dropped" if any(ask.is_gone(log, key, tries) for key in keys) else "pending"
        row["orders"] = [_order(log, number, order) for order, key in enumerate(keys) if key in log.answers]
        rows.append(row)
    manifest = written.read_manifest(comparison.folder / "manifest.json", verdicts_file.FORMAT)
    verdicts = verdicts_file.from_rows(manifest, rows, comparison.folder)
    verdicts_file.save(comparison.folder, verdicts, rows, {"calls": log.calls, "tokens": list(log.tokens)})
    return verdicts


def _order(log: Log, number: int, order: int) -> dict[str, Any]:
    """One answered ordering: the verdict, and by aspect 1 if the first run won, 0 if the second, None if undecided."""
    verdict = log.answers[number, order, VERDICT]
    sides = {OVERALL: verdict["better"]}
    for name in TEXT_OF:
        text = _reasons(verdict).get(name, "")
        sides[name] = criteria.side(text) or log.answers.get((number, order, name))
    won = {name: {"A": 1 - order, "B": order}.get(side or "") for name, side in sides.items()}
    return {"shown_as_a": ("first", "second")[order], **verdict, "won": won}
