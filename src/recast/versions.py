"""The versions of rewards: what decides scores besides options, such as the release of a package or a model.

Artifacts that hold scores record them by reward, and scores of one reward by two versions are never mixed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recast.errors import RecastError
from recast.rewards import base

__all__ = ["Versions", "flat", "of", "require_same", "without"]

Versions = Mapping[str, Mapping[str, str]]
"""By reward; rewards whose scores are decided by their options alone have no entry."""
_PREFIX, _UNKNOWN = "versions.", "not recorded"


def of(rewards: Mapping[str, Mapping[str, Any] | None]) -> dict[str, dict[str, str]]:
    """The present versions of rewards, given by name with their options; none is loaded.

    >>> of({"composition": None, "ocr": {}})["ocr"]["models"]
    'PP-OCRv6_det_small, PP-OCRv6_rec_small'
    """
    found = {name: base.versions(name, options or {}) for name, options in rewards.items()}
    return {name: each for name, each in found.items() if each}


def flat(versions: Versions) -> dict[str, str]:
    """Versions by dotted names, as one of the settings of an artifact.

    >>> flat({"ocr": {"engine": "rapidocr 3.10.0"}})
    {'versions.ocr.engine': 'rapidocr 3.10.0'}
    """
    return {f"{_PREFIX}{name}.{key}": value for name, each in versions.items() for key, value in each.items()}


def without(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted names without the versions."""
    return {key: value for key, value in settings.items() if not key.startswith(_PREFIX)}


def require_same(
    known: Mapping[str, Any], wanted: Mapping[str, Any], made: str, remedy: str, where: str = "here"
) -> None:
    """Raise if the versions in two sets of settings differ, so that their scores must not be mixed.

    The error is no `StaleError`: results of another version are right in themselves, so nothing sets them aside.

    Parameters
    ----------
    known, wanted : mapping
        Settings by dotted names; other ones than versions are not compared.
    made, remedy : str
        Beginning and end of the sentence.
    where : str, optional
        Where the wanted versions are.

    Examples
    --------
    >>> try:
    ...     require_same({"versions.ocr.engine": "A 1"}, {"versions.ocr.engine": "A 2"}, "runs/a has scores", "wait")
    ... except RecastError as error:
    ...     print(str(error).partition(": ")[0])
    runs/a has scores with ocr.engine = A 1, but here it is A 2
    """
    for key in sorted(key for key in {*known, *wanted} if key.startswith(_PREFIX)):
        was, now = (each.get(key, _UNKNOWN) for each in (known, wanted))
        if was != now:
            install = "" if _UNKNOWN in (was, now) else "install the former version, or "
            raise RecastError(
                f"{made} with {key.removeprefix(_PREFIX)} = {was}, but {where} it is {now}: scores of two versions are "
                f"not mixed: {install}{remedy}"
            )
