"""The table of docs/guides/rewards.md, from the results of the comparisons.

    python benchmarks/published/table.py

Reads results/published/*.json and replaces the rows in the section "Compared with the published implementations";
tests/test_published.py checks that page and files agree.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recast.core import artifact
from recast.rewards import NAMES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/guides/rewards.md"
HEADER = "| reward | published implementation | compared (how many): largest difference | not compared |"
RULE = "|---|---|---|---|"


def number(value: float) -> str:
    """One significant digit; 0 only for equal values."""
    return f"{float(f'{value:.0e}'):g}".replace("e-0", "e-")


def row(content: dict[str, Any]) -> str:
    """One row of the table."""
    commits = ", ".join(commit.strip()[:7] for commit in content["commit"].split(";"))
    parts = [f"{each['what']} ({each['count']:,}): {number(each['largest'])}" for each in content["compared"]]
    cells = (
        f"`{content['reward']}`",
        f"{content['source']} ({commits})",
        "<br>".join(parts),
        "; ".join(content["not_compared"]),
    )
    if any("|" in cell for cell in cells):
        raise ValueError(f"a cell of {content['reward']} has a |, which would end it")
    return f"| {' | '.join(cells)} |"


def rows() -> list[str]:
    """A row for every reward of the package that has been compared, in the package's order."""
    folder = ROOT / "benchmarks/results/published"
    found = [folder / f"{name}.json" for name in NAMES]
    return [row(artifact.read(path, "recast.benchmark.published")) for path in found if path.exists()]


def main() -> None:
    """Replace the table."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start = lines.index(HEADER)
    stop = next(place for place in range(start, len(lines)) if not lines[place].startswith("|"))
    lines[start:stop] = [HEADER, RULE, *rows()]
    artifact.write_text(PAGE, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
