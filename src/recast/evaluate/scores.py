"""The scores of evaluated policies, as `recast evaluate` has written them."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recast import images, versions
from recast.core import artifact
from recast.errors import RecastError

__all__ = ["FORMAT", "Budget", "Scores", "find", "locate"]

FORMAT = "recast.scores"
Budget = tuple[tuple[str, float], ...]
"""λ by reward, as the user wrote it: hashable, in the order of the rewards."""


@dataclass(frozen=True)
class Scores:
    """The scores of one policy on held-out prompts, and what it was trained with.

    Parameters
    ----------
    folder : Path
        The folder RUN/scores. The files of `images` are relative to it.
    method : str
        The method of the weight matrix, such as "sinkhorn" or "static"; "base" for the untrained policy.
    budget : dict of str to float
        λ by reward, as the user wrote it.
    seed : int
        The seed of the training.
    trained, held_out : tuple of str
        The rewards that the policy was trained on, and those that only evaluate it.
    images : tuple of dict
        One entry per image with its index, prompt, seed and file.
    values : ndarray, shape (rewards, images)
        Scores; the rows are `rewards`. NaN where a reward does not apply to a prompt.
    settings : mapping, optional
        The settings that decide the images, by their dotted names.
    versions : mapping, optional
        What decided the scores besides the options of the rewards, by reward; see `recast.rewards.base.versions`.

    Examples
    --------
    A policy is usually read with `Scores.load("runs/shapes")`; made by hand, it looks like this:

    >>> import numpy as np
    >>> from pathlib import Path
    >>> from recast.evaluate import Scores
    >>> images = tuple({"prompt": f"prompt {k}", "seed": 42 + k, "file": f"images/{k:05d}.png"} for k in range(2))
    >>> values = np.array([[0.25, 0.75], [5.0, np.nan]])
    >>> scores = Scores(Path("runs/a/scores"), "static", {"ocr": 1.0}, 0, ("ocr",), ("aesthetic",), images, values)
    >>> scores.means()
    {'ocr': 0.5, 'aesthetic': 5.0}
    """

    folder: Path
    method: str
    budget: dict[str, float]
    seed: int
    trained: tuple[str, ...]
    held_out: tuple[str, ...]
    images: tuple[dict[str, Any], ...]
    values: NDArray[np.float64]
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, Budget, int]:
        """Method, budget and seed; the untrained base is the same at every budget and seed."""
        return ("base", (), 0) if self.method == "base" else (self.method, tuple(self.budget.items()), self.seed)

    @property
    def run(self) -> Path:
        """RUN of RUN/scores."""
        return self.folder.parent if self.folder.name == "scores" else self.folder

    @property
    def prompts_and_seeds(self) -> list[tuple[str, int]]:
        """Prompt and seed of every image: policies that agree on these can be compared image by image."""
        return [(image["prompt"], image["seed"]) for image in self.images]

    @property
    def rewards(self) -> tuple[str, ...]:
        """All rewards, the trained ones first; the rows of `values`."""
        return (*self.trained, *self.held_out)

    def image(self, number: int) -> Path:
        """The file of an image, which lies in `folder`."""
        return artifact.inside(self.folder, self.images[number].get("file"), self.folder / "scores.jsonl")

    def picture(self, number: int) -> bytes:
        """The content of an image, checked to be the one that was scored where its hash is recorded."""
        remedy = "run recast evaluate again after removing it"
        return images.read(self.image(number), remedy, self.images[number].get("sha256"))

    def images_hash(self) -> str:
        """SHA-256 of what decides the images: the settings they were made with, their prompts and seeds."""
        content = json.dumps([dict(self.settings), self.prompts_and_seeds], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def means(self) -> dict[str, float]:
        """Mean of every reward over the images it applies to; NaN where it applies to none."""
        applies = ~np.isnan(self.values)
        count = applies.sum(1)
        total = np.where(applies, self.values, 0.0).sum(1)
        found = np.where(count > 0, total / np.maximum(count, 1), np.nan)
        return dict(zip(self.rewards, found.tolist(), strict=True))

    @classmethod
    def load(cls, folder: str | Path) -> Scores:
        """Read the scores that `recast evaluate` has written.

        Parameters
        ----------
        folder : str or Path
            RUN, or the folder RUN/scores.

        Returns
        -------
        Scores

        Raises
        ------
        RecastError
            If a file is missing, incomplete or damaged.
        """
        from recast.core import strict  # pydantic, which `recast --help` does without
        from recast.evaluate import written

        path = Path(folder)
        path = path / "scores" if (path / "scores").is_dir() else path
        manifest = strict.read(path / "manifest.json", FORMAT, written.Manifest, written.AGAIN, checked=False)
        run, trained, held_out = manifest["run"], tuple(manifest["trained"]), tuple(manifest["held_out"])
        artifact.slug(run["method"], "run.method", path / "manifest.json")
        if len({*trained, *held_out}) < len(trained) + len(held_out):
            raise RecastError(
                f"{path / 'manifest.json'}: a reward is named twice among {', '.join(trained + held_out)}"
            )
        artifact.verify(manifest, path / "manifest.json")
        rows = strict.read_rows(written.Row, path / "scores.jsonl", "recast evaluate")
        for number, row in enumerate(rows):
            if row["index"] != number:
                where = f"{path / 'scores.jsonl'}, line {number + 1}"
                raise RecastError(f"{where}: the index is {row['index']}, not {number}: {written.AGAIN}")
        try:
            table = [[row["scores"][name] for row in rows] for name in (*trained, *held_out)]
            values = np.array(table, dtype=np.float64).reshape(len(trained) + len(held_out), len(rows))
        except KeyError as error:
            raise RecastError(f"{path / 'scores.jsonl'}: a row lacks the score {error}: {written.AGAIN}") from error
        if manifest.get("images", len(rows)) != len(rows):
            raise RecastError(
                f"{path / 'scores.jsonl'} has {len(rows)} rows, not one for each of {manifest['images']} images: "
                f"{written.AGAIN}"
            )
        shown = tuple({key: value for key, value in row.items() if key != "scores"} for row in rows)
        facts = (run["method"], run["budget"], run["seed"], trained, held_out)
        return cls(path, *facts, shown, values, manifest["settings"], manifest.get("versions", {}))


def find(folders: Sequence[Path]) -> list[Scores]:
    """All evaluated policies in or below some folders, in a fixed order.

    Parameters
    ----------
    folders : sequence of Path
        Runs, or folders that contain runs.

    Returns
    -------
    list of Scores
        One per policy, scored by the same rewards on the same prompts and seeds.

    Raises
    ------
    RecastError
        If a folder does not exist or contains no evaluated run, if two runs have the same method, budget and seed, or
        if runs differ in their prompts, seeds, rewards or versions of rewards.

    Warns
    -----
    UserWarning
        If only some runs have recorded the versions of their rewards, as earlier releases did not do.

    Examples
    --------
    >>> from pathlib import Path
    >>> from recast.evaluate import find
    >>> find([Path("nowhere")])
    Traceback (most recent call last):
        ...
    recast.errors.RecastError: nowhere is not a folder of runs: name folders that recast evaluate has written
    """
    places: dict[Path, None] = {}
    for folder in folders:
        if not folder.is_dir():
            raise RecastError(f"{folder} is not a folder of runs: name folders that recast evaluate has written")
        if not (found := locate(folder)):
            raise RecastError(f"{folder} contains no evaluated run: run recast evaluate with --out {folder} first")
        places |= dict.fromkeys(found)
    policies = [Scores.load(place) for place in places]
    _require_comparable(policies)
    return policies


def locate(folder: Path) -> list[Path]:
    """The folders with scores at or below a folder, except those that were set aside as stale."""
    found = sorted(path.parent for path in folder.glob("**/scores/manifest.json") if ".stale-" not in str(path))
    if (folder / "manifest.json").is_file() and (folder / "scores.jsonl").is_file():
        found.append(folder)
    return [path.resolve() for path in found]


def _require_comparable(policies: Sequence[Scores]) -> None:
    """Refuse two policies of the same method, budget and seed, and policies of other prompts, seeds or rewards."""
    seen: dict[Any, Scores] = {}
    first = policies[0]
    for policy in policies:
        if policy.key in seen:
            both = f"{policy.folder} and {seen[policy.key].folder}"
            raise RecastError(f"{both} are both {policy.method} with the same budget and seed: name only one of them")
        seen[policy.key] = policy
        both = f"{policy.folder} and {first.folder}"
        if policy.prompts_and_seeds != first.prompts_and_seeds:
            raise RecastError(f"{both} were evaluated on different prompts or seeds: evaluate both by one recipe")
        if (policy.trained, policy.held_out) != (first.trained, first.held_out):
            raise RecastError(f"{both} were scored by different rewards: evaluate both by one recipe")
    for name in first.rewards:
        _require_one_version(name, policies)


def _require_one_version(name: str, policies: Sequence[Scores]) -> None:
    """Refuse scores of one reward by two versions; warn if some policies have not recorded theirs."""
    known = [policy for policy in policies if policy.versions.get(name)]
    for policy in known[1:]:
        ours, others = (versions.flat({name: each.versions[name]}) for each in (policy, known[0]))
        remedy = f"remove {policy.folder / 'parts'} and run recast evaluate here"
        versions.require_same(ours, others, f"{policy.folder} has scores", remedy, f"in {known[0].folder}")
    if 0 < len(known) < len(policies):
        without = next(policy for policy in policies if not policy.versions.get(name))
        warnings.warn(
            f"{without.folder} has not recorded the version of {name}, {known[0].folder} has: if they differ, the "
            f"comparison of {name} is wrong",
            stacklevel=4,
        )
