"""What a self-test found, as text to paste into an issue."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

from recast._version import __version__

__all__ = ["Check", "Report", "machine"]

_PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate", "safetensors", "numpy", "scipy")


@dataclass(frozen=True)
class Check:
    """One check: how it ended, in words, and where numbers are compared, how far off they are and how far they may be.

    `outcome` is `passed`, `failed`, or `not run` if this machine has nothing to run it on.
    """

    name: str
    outcome: Literal["passed", "failed", "not run"]
    detail: str = ""
    off: float | None = None
    tolerance: float | None = None
    seconds: float = 0.0

    @classmethod
    def compared(cls, name: str, off: float, tolerance: float, detail: str = "") -> Check:
        """A check that passes if `off` is at most `tolerance`; NaN fails.

        >>> Check.compared("velocity", 0.02, 0.01).outcome, Check.compared("velocity", float("nan"), 0.01).outcome
        ('failed', 'failed')
        """
        return cls(name, "passed" if off <= tolerance else "failed", detail, off, tolerance)


@dataclass(frozen=True)
class Report:
    """The machine, what was tested, and all checks."""

    facts: dict[str, str]
    checks: Sequence[Check]

    @property
    def failed(self) -> list[Check]:
        """The checks that failed."""
        return [check for check in self.checks if check.outcome == "failed"]

    @property
    def verdict(self) -> str:
        """One sentence."""
        count = {kind: sum(check.outcome == kind for check in self.checks) for kind in ("passed", "failed", "not run")}
        return ", ".join(f"{number} {kind}" for kind, number in count.items() if number)

    def text(self) -> str:
        """The report in Markdown.

        >>> print(Report({"recast": "1"}, [Check.compared("decode", 0.0, 0.5, "3 images")]).text())
        | fact | value |
        |---|---|
        | recast | 1 |
        <BLANKLINE>
        | check | outcome | off by | tolerance | seconds | |
        |---|---|---:|---:|---:|---|
        | decode | passed | 0 | 0.5 | 0.0 | 3 images |
        <BLANKLINE>
        1 passed
        <BLANKLINE>
        """
        lines = ["| fact | value |", "|---|---|", *(f"| {key} | {value} |" for key, value in self.facts.items()), ""]
        lines += ["| check | outcome | off by | tolerance | seconds | |", "|---|---|---:|---:|---:|---|"]
        for check in self.checks:
            numbers = [_number(check.off), _number(check.tolerance), f"{check.seconds:.1f}"]
            lines.append(f"| {' | '.join([check.name, check.outcome, *numbers, _cell(check.detail)])} |")
        return "\n".join([*lines, "", self.verdict, ""])


def machine(device: str) -> dict[str, str]:
    """Versions and devices."""
    import torch

    facts = {"recast": __version__, "Python": platform.python_version(), "system": platform.system()}
    facts |= {name: metadata.version(name) for name in _PACKAGES}
    facts["device"] = device
    if torch.cuda.is_available():
        cards = [torch.cuda.get_device_properties(k) for k in range(torch.cuda.device_count())]
        facts["GPUs"] = ", ".join(f"{card.name} ({card.total_memory / 2**30:.0f} GiB)" for card in cards)
        facts["CUDA"] = str(torch.version.cuda)
        facts["cuDNN"] = str(torch.backends.cudnn.version())
    return facts


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


def _cell(words: str) -> str:
    """Text in one cell of a table."""
    return " ".join(words.split()).replace("|", "\\|")
