"""The demo: a whole pipeline on real text, every stream checked against the tokenizer's own decode.

Starts a launcher with its shards and a replay scheduler, streams concurrent requests through ingress,
rings, shards and sinks, shows a few of them live, and prints what it measured. Exits 0 only when every
stream was right and nothing is left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from cases import Case, make_cases
from numpy.typing import NDArray
from outfeed.gateway.front import Front
from outfeed.ingress.request import MAX_TOP_LOGPROBS
from outfeed.ring.board import Role
from outfeed.ring.errors import RingError
from outfeed.ring.finish import FinishReason
from outfeed.ring.process import fail, say, settle
from outfeed.shards.launcher import LaunchError, find_tokenizer
from outfeed.sidecar.replay import load_corpus, load_text, replay_start
from outfeed.sidecar.replay_columns import replay_logprobs, replay_top_logprobs
from outfeed.sink import Done, Error, Frame
from outfeed.sink.columns import Columns, Flat, Ragged
from pipeline import Pipeline, PipelineError, demo_tokenizer
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from texts import MULTILINGUAL

LIVE_STREAMS = 4
NONE = np.empty(0, dtype=np.float32)


def _part(name: str, values: bool) -> Callable[[Columns], NDArray[Any]]:
    """Return what takes one column out of an event's, empty when it has none."""

    def take(columns: Columns) -> NDArray[Any]:
        part: Flat | Ragged | None = getattr(columns, name)
        return NONE if part is None else part.values if values else part.ids

    return take


LOGPROB_PARTS = [
    _part(name, values) for name in ("output_logprobs", "output_top_logprobs") for values in (True, False)
]


@dataclass(slots=True)
class Outcome:
    """What one stream turned out to be."""

    case: Case
    text: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    tokens: int = 0
    finish: FinishReason | None = None
    error: str = ""
    latencies_ns: list[int] = field(default_factory=list)
    logprobs: list[Columns] = field(default_factory=list)

    def logprob_mismatches(self, top: int) -> int:
        """Count the log probabilities that are not those generated; one that is missing counts too."""
        if not top:
            return 0
        got = [np.concatenate([part(each) for each in self.logprobs] or [NONE]) for part in LOGPROB_PARTS]
        ids = np.array(self.case.ids[: self.tokens], dtype=np.int32)
        values = replay_logprobs(replay_start(self.case.rid, self.case.corpus), ids)
        want = [values, ids, *(each.reshape(-1) for each in replay_top_logprobs(values, ids, top))]
        wrong = 0
        for a, b in zip(got, want, strict=True):
            both = min(len(a), len(b))
            wrong += max(len(a), len(b)) - int(np.count_nonzero(a[:both] == b[:both]))
        return wrong

    def mismatch(self, tokenizer: Any) -> str:
        """Say how the stream differs from the truth; "" when it does not."""
        if self.error:
            return self.error
        return self.case.difference(tokenizer, "".join(self.text), self.ids, self.tokens, self.finish)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="demo", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=64, help="concurrent requests (default 64)")
    parser.add_argument("--shards", type=int, default=2, help="detokenizer processes (default 2)")
    parser.add_argument(
        "--tokenizer", metavar="PATH", help="a tokenizer.json or its folder (default: deepseek)"
    )
    parser.add_argument("--text", metavar="FILE", default=str(MULTILINGUAL), help="UTF-8 text to replay")
    parser.add_argument(
        "--steps-per-second", type=float, default=150.0, help="decode steps per second; 0: no limit"
    )
    parser.add_argument("--tokens-per-step", type=int, default=1, help="a row carries 1 to this many tokens")
    parser.add_argument(
        "--logprobs", type=int, default=0, metavar="K", help="ask for top-K logprobs, check them"
    )
    parser.add_argument("--instance", default=f"demo-{os.getpid()}", help="instance name (default: demo-PID)")
    parser.add_argument("--seed", type=int, default=1, help="decides lengths and stops (default 1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    args = parser.parse_args(argv)
    if not 1 <= args.requests <= 16384:
        parser.error(f"--requests {args.requests}: give 1 to 16384")
    if not 0 <= args.logprobs <= MAX_TOP_LOGPROBS:
        parser.error(f"--logprobs {args.logprobs}: give 0 to {MAX_TOP_LOGPROBS}")
    return args


async def follow(front: Front, outcome: Outcome, logprobs: int) -> None:
    """Submit one request and read its stream to the end."""
    case = outcome.case
    body = {"rid": case.rid, "input_ids": case.prompt, "sampling_params": case.params, "stream": True}
    if logprobs:
        body |= {"return_logprob": True, "top_logprobs_num": logprobs}
    (stream,) = await front.submit(body)
    async with stream:
        async for item in stream:
            match item:
                case Frame(event) | Done(event):
                    outcome.latencies_ns.append(time.monotonic_ns() - event.stamp_ns)
                    outcome.text.append(event.text)
                    outcome.ids += event.ids.tolist()
                    outcome.tokens += event.generated
                    if event.columns is not None:
                        outcome.logprobs.append(event.columns)
                    outcome.finish = event.finish
                case Error():
                    outcome.error = f"{item.status} {item.type}: {item.message}"


class Display:
    """A few streams live, and how far the whole is."""

    def __init__(self, outcomes: list[Outcome], console: Console) -> None:
        self._outcomes = outcomes
        self._progress = Progress(
            TextColumn("streams"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        )
        self._task = self._progress.add_task("streams", total=len(outcomes))

    def render(self) -> Group:
        """Draw the current state."""
        done = sum(1 for outcome in self._outcomes if outcome.finish or outcome.error)
        self._progress.update(self._task, completed=done)
        table = Table(show_header=False, box=None, padding=(0, 1))
        table.add_column(no_wrap=True, style="cyan")
        table.add_column(no_wrap=True)
        for outcome in self._outcomes[:LIVE_STREAMS]:
            tail = "".join(outcome.text[-40:])[-72:].replace("\n", "⏎")
            table.add_row(f"{outcome.case.rid} {outcome.tokens:4d}", Text(tail))
        return Group(table, self._progress)


async def stream_all(
    front: Front, outcomes: list[Outcome], logprobs: int, pipeline: Pipeline, show: Console | None
) -> float:
    """Stream every case at once; return the seconds it took."""
    begin = time.monotonic()
    tasks = [asyncio.create_task(follow(front, outcome, logprobs)) for outcome in outcomes]
    display = Display(outcomes, show) if show else None
    live = Live(console=show, refresh_per_second=10) if show else None
    if live:
        live.start()
    try:
        while True:
            _, waiting = await asyncio.wait(tasks, timeout=0.1)
            if live and display:
                live.update(display.render())
            pipeline.check()  # first: a request that fails because a process died says less
            if not waiting:
                break
        for task in tasks:
            task.result()
        return time.monotonic() - begin
    finally:
        for task in tasks:
            task.cancel()
        if live:
            live.stop()


def run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run the demo; return what --json prints."""
    from tokenizers import Tokenizer

    path = find_tokenizer(args.tokenizer or demo_tokenizer())
    text = load_text(args.text)
    launch = [f"--shards={args.shards}", f"--tokenizer={path}"]
    replay = [f"--tokenizer={path}", f"--text={args.text}", f"--batch={args.requests}", f"--seed={args.seed}"]
    replay += [f"--tokens-per-step={args.tokens_per_step}", f"--steps-per-second={args.steps_per_second}"]
    pipeline = Pipeline(args.instance, launch, replay)
    show = None if args.json else console
    with pipeline:
        tokenizer = Tokenizer.from_file(path)
        cases = make_cases(tokenizer, load_corpus(tokenizer, text), args.requests, args.seed)
        outcomes = [Outcome(case) for case in cases]
        with Front.attach(args.instance) as front:
            seconds = asyncio.run(stream_all(front, outcomes, args.logprobs, pipeline, show))
            figures = _figures(front, outcomes, seconds, tokenizer, args.logprobs)
    leaked = pipeline.leaked_segments()
    return figures | {"leaked_segments": len(leaked)}


def _figures(
    front: Front, outcomes: list[Outcome], seconds: float, tokenizer: Any, logprobs: int
) -> dict[str, Any]:
    wrong = [(outcome.case.rid, why) for outcome in outcomes if (why := outcome.mismatch(tokenizer))]
    tokens = sum(outcome.tokens for outcome in outcomes)
    latencies = np.array([ns for outcome in outcomes for ns in outcome.latencies_ns] or [0]) / 1e3
    shares = _shard_tokens(front, tokens)
    return {
        "requests": len(outcomes),
        "verified": len(outcomes) - len(wrong),
        "mismatched": len(wrong),
        "logprob_mismatches": sum(outcome.logprob_mismatches(logprobs) for outcome in outcomes),
        "mismatches": [f"{rid}: {why}" for rid, why in wrong[:20]],
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_s": round(tokens / seconds),
        "step_to_sink_us": {
            "p50": round(float(np.percentile(latencies, 50)), 1),
            "p99": round(float(np.percentile(latencies, 99)), 1),
        },
        "shard_share": [round(share / max(1, sum(shares)), 4) for share in shares],
        "ring_high_water_bytes": front.high_water(),
    }


def _shard_tokens(front: Front, tokens: int) -> list[int]:
    """Return the tokens that each shard handled; the board's counters come a moment after the streams."""
    deadline = time.monotonic() + 2.0
    while True:
        counted = [row.get("tokens") for row in front.board.rows(Role.SHARD)]
        if sum(counted) >= tokens or time.monotonic() > deadline:
            return counted
        time.sleep(0.01)


def print_summary(result: dict[str, Any], console: Console) -> None:
    """Print the result as a table, and what was wrong below it."""
    table = Table(title="Outfeed demo", show_header=False)
    table.add_row(
        "requests", f"{result['requests']} ({result['verified']} verified, {result['mismatched']} mismatched)"
    )
    table.add_row("tokens", f"{result['tokens']:,} in {result['seconds']:.2f} s")
    table.add_row("tokens/s", f"{result['tokens_per_s']:,}")
    latency = result["step_to_sink_us"]
    table.add_row("scheduler step → sink", f"p50 {latency['p50']:,.0f} µs, p99 {latency['p99']:,.0f} µs")
    table.add_row("shard share", "  ".join(f"{share:.1%}" for share in result["shard_share"]))
    for ring, mark in result["ring_high_water_bytes"].items():
        table.add_row(f"{ring} ring, high water", f"{mark:,} bytes")
    table.add_row("segments left behind", str(result["leaked_segments"]))
    console.print(table)
    for line in result["mismatches"]:
        console.print(f"[red]mismatch[/red] {line}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo from the command line."""
    settle()
    args = parse(argv)
    console = Console()
    try:
        result = run(args, console)
    except (PipelineError, LaunchError, RingError, ValueError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        return fail("demo", error)
    except KeyboardInterrupt:
        print("demo: stopped", file=sys.stderr)
        return 130
    if args.json:
        say(json.dumps(result))
    else:
        print_summary(result, console)
    wrong = result["mismatched"] + result["logprob_mismatches"] + result["leaked_segments"]
    return 0 if wrong == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
