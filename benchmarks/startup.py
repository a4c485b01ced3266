"""Start-up time of `import recast` and `recast weigh`, as ratios to importing only what both need.

    python benchmarks/startup.py
    python benchmarks/startup.py --against OTHER_CHECKOUT

The reference is `python -c "import numpy, typer, rich, rich.table"`. Every command runs once per round in a new
process, the commands of a round one after the other, so that only the ratios of the medians matter. Times are processor
seconds (user and system), which differ little between a busy and an idle machine. With `--against`, the same commands
run on the sources of another checkout in the same rounds. Writes results/startup.json beside this file.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import recast
from recast.core import artifact

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
REFERENCE = ["-c", "import numpy, typer, rich, rich.table"]
ROUNDS = 15


def seconds(source: Path, arguments: list[str]) -> float:
    """Processor seconds that a new Python process takes, with the package from `source`/src."""
    environment = {**os.environ, "PYTHONPATH": str(source / "src"), "OMP_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], env=environment, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(commands: dict[str, tuple[Path, list[str]]], rounds: int) -> dict[str, float]:
    """Median seconds of every command, over rounds that run each of them once, after one round to warm up."""
    times: dict[str, list[float]] = {name: [] for name in commands}
    names = list(commands)
    for number in range(rounds + 1):
        for name in names if number % 2 else reversed(names):  # no command always follows the same one
            spent = seconds(*commands[name])
            if number:
                times[name].append(spent)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Measure, print, and write the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout, measured in the same rounds")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        D = [[0.9, 0.8, 0.5, 0.2, 0.0], [0.9, 0.3, 0.1, 0.05, 0.0]]
        gains = recast.GainCurves(("clip", "ocr"), [0, 0.3, 0.6, 0.8, 1], D).save(Path(folder) / "gains.json")
        ours = {"import": ["-c", "import recast"], "weigh": ["-m", "recast", "weigh", str(gains)]}
        sources = {"": ROOT} | ({"_against": options.against.resolve()} if options.against else {})
        commands = {f"{key}{which}": (path, ours[key]) for key in ours for which, path in sources.items()}
        found = measure({"reference": (ROOT, REFERENCE)} | commands, options.rounds)
    reference = found.pop("reference")
    ratios = {f"{name}_over_reference": value / reference for name, value in found.items()}
    print(f"reference: {1e3 * reference:.0f} ms, {options.rounds} rounds")
    for name, value in found.items():
        print(f"{name}: {1e3 * value:.0f} ms, {value / reference:.3f} times the reference")
    if options.against:
        for key in ours:
            ratios[f"{key}_over_against"] = found[key] / found[f"{key}_against"]
            print(f"{key}: {ratios[f'{key}_over_against']:.3f} times as long as in {options.against}")
    artifact.write(RESULTS / "startup.json", "recast.benchmark.startup", ratios)


if __name__ == "__main__":
    main()
