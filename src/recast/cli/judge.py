"""The verb `judge`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recast.cli import tables
from recast.cli.console import console, progress
from recast.errors import RecastError
from recast.judge.protocol import GEMINI, MODEL
from recast.report import judged

__all__ = ["judge"]

Runs = Annotated[
    list[Path], typer.Argument(help="Two evaluated runs A and B, or one folder of many runs.", show_default=False)
]


def judge(
    runs: Runs,
    model: Annotated[str, typer.Option("--model", help="Name of the judge model at the endpoint.")] = MODEL,
    base_url: Annotated[str, typer.Option("--base-url", help="Base URL of an OpenAI-compatible endpoint.")] = GEMINI,
    key_variable: Annotated[
        str | None, typer.Option("--key-variable", help="Environment variable that holds the API key.")
    ] = None,
    rubric: Annotated[Path | None, typer.Option("--rubric", help="File with another rubric for the judge.")] = None,
    methods: Annotated[str, typer.Option("--methods", help="Two methods to compare in a folder.")] = "sinkhorn,static",
    count: Annotated[int | None, typer.Option("--count", help="Random pairs per comparison; by default all.")] = None,
    concurrency: Annotated[int, typer.Option("--concurrency", help="Concurrent calls.")] = 16,
    tries: Annotated[
        int, typer.Option("--tries", help="Attempts per call before its pair is dropped; 9 are the paper's 8 retries.")
    ] = 9,
    backoff: Annotated[float, typer.Option("--backoff", help="Seconds before the second attempt; then doubled.")] = 1,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds to wait for an answer.")] = 120,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", help="Maximum length of an answer; by default the server's.")
    ] = None,
    max_calls: Annotated[
        int | None, typer.Option("--max-calls", help="Upper limit on the total number of calls, over all starts.")
    ] = None,
    price: Annotated[
        str | None, typer.Option("--price", help="Dollars per million tokens as SENT,RECEIVED; prints the cost.")
    ] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Retry calls that were dropped.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be sent, and send nothing.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for the verdicts; by default A/verdicts/B.", show_default=False)
    ] = None,
) -> None:
    """Compare two evaluated runs image by image with a multimodal model, each pair in both orders.

    Every answer is stored as soon as it arrives, and an interrupted run asks only for what is missing.

    Example: `GEMINI_API_KEY=… recast judge runs/a/sinkhorn-s0 runs/a/static-s0 --max-calls 500`

    All matched pairs of a sweep: `recast judge runs/sweep --dry-run`

    Your own server: `recast judge A B --base-url http://localhost:8000/v1 --model Qwen/Qwen3-VL-8B-Instruct`
    """
    from recast.judge import stage
    from recast.judge.ask import Settings

    prices = _prices(price)
    if len(runs) == 2:
        comparisons = [stage.two(runs[0], runs[1], out, count)]
    elif len(runs) == 1 and out is None:
        comparisons = stage.matched(runs[0], _two(methods), count)
    else:
        raise RecastError("name two runs, or one folder of runs without --out")
    if dry_run:
        console.print(stage.preview(comparisons, tries), soft_wrap=True)
        return
    settings = Settings(
        model, base_url, key_variable, rubric, concurrency, tries, backoff, timeout, max_tokens, max_calls
    )
    _show(stage.judge(comparisons, settings, progress, retry), prices)


def _show(outcome: object, prices: tuple[float, float] | None) -> None:
    from recast.judge.stage import Outcome

    assert isinstance(outcome, Outcome)
    for table in judged.tables(outcome.verdicts):
        console.print(tables.report_table(table))
    for sentence in judged.sentences(outcome.verdicts):
        console.print(sentence, soft_wrap=True)
    sent, received = outcome.tokens
    cost = f", ${(sent * prices[0] + received * prices[1]) / 1e6:.2f}" if prices else ""
    tokens = f"{sent:,} tokens sent and {received:,} received{cost}" if sent else "the server reported no token counts"
    console.print(f"{outcome.calls:,} calls in total, {tokens}")
    dropped = sum(each.dropped for each in outcome.verdicts)
    if dropped:
        console.print(f"{dropped} pairs were dropped because a call gave no readable answer; --retry tries them again")
    for each in outcome.verdicts:
        console.print(f"wrote {each.folder}", soft_wrap=True)
    if outcome.stopped:
        raise RecastError(outcome.stopped)


def _two(text: str) -> tuple[str, str]:
    names = [name.strip() for name in text.split(",")]
    if len(names) != 2 or not all(names) or names[0] == names[1]:
        raise RecastError(f"--methods takes two different methods, such as sinkhorn,static, not {text!r}")
    return names[0], names[1]


def _prices(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    try:
        sent, received = (float(part) for part in text.split(","))
    except ValueError:
        sent = received = -1.0
    if not (0 <= sent < float("inf") and 0 <= received < float("inf")):
        raise RecastError(f"--price takes two numbers, such as 0.5,3 (dollars per million tokens), not {text!r}")
    return sent, received
