"""Efficiency of concurrent calls: `recast judge` against a slow server on loopback.

    python benchmarks/judge.py [PAIRS]

The judge of the tests (`tests/judging.py`) answers in a separate process after a fixed latency. 30 % of its answers are
faulty in all the ways it knows, and failed calls wait before the next attempt. The ideal time is the number of requests
times the latency divided by the concurrency; the benchmark prints ideal / measured for several concurrencies. It writes
results/judge.json beside this file and takes about five minutes.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from recast.core import artifact
from recast.judge import stage
from recast.judge.ask import Settings
from recast.progress import no_progress

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from judging import Known, make_run, worths  # type: ignore[import-not-found]
from server import serve  # type: ignore[import-not-found]

LATENCY = 1.0
CONCURRENCIES = (16, 64)
FAULTY = 0.3


def answer_slowly(pipe: Connection) -> None:
    """Serve until a message arrives, then send the number of requests."""
    with serve() as server:
        Known(server, FAULTY)
        server.delay = LATENCY
        pipe.send(server.url)
        pipe.recv()
        pipe.send((len(server.requests), server.busiest))


def measure(folder: Path, pairs: int, concurrency: int) -> dict[str, Any]:
    """Measure one complete run with its own server."""
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    server = context.Process(target=answer_slowly, args=(theirs,), daemon=True)
    server.start()
    settings = Settings("known", ours.recv(), concurrency=concurrency, backoff=0.1)
    first, second = worths(pairs)
    comparison = stage.two(
        make_run(folder / "ours", "sinkhorn", first), make_run(folder / "static", "static", second), None
    )
    begun = time.perf_counter()
    outcome = stage.judge([comparison], settings, no_progress)
    seconds = time.perf_counter() - begun
    ours.send("stop")
    requests, busiest = ours.recv()
    server.join()
    ideal = requests * LATENCY / concurrency
    return {
        "concurrency": concurrency,
        "pairs": len(outcome.verdicts[0].indices),
        "requests": requests,
        "busiest": busiest,
        "ideal_over_measured": ideal / seconds,
        "one_by_one_over_measured": requests * LATENCY / seconds,
    }


def main() -> None:
    """Measure, print, write."""
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    rows = []
    for concurrency in CONCURRENCIES:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(Path(folder), pairs, concurrency))
        print(rows[-1], flush=True)
    fields = {"latency": LATENCY, "faulty": FAULTY, "runs": rows}
    artifact.write(Path(__file__).parent / "results" / "judge.json", "recast.benchmark", fields)


if __name__ == "__main__":
    main()
