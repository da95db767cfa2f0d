"""The whole pipeline, scheduler to per-request sink, beside the same work over msgpack and zmq.

Ours: a launcher with one shard, the replay scheduler unthrottled with one token per row, and a gateway (this
process) whose handlers take every event. Tokens per second is all tokens over the time from the first
submission to the last ending. Step to sink is measured in a run of its own at a rate that leaves the machine
idle time, from the scheduler's push to the handler that has the event (the peer's: to the request's queue,
where nobody is woken; with 1024 rows it cannot keep that rate up); unthrottled, it would only show how long
the queue is.

The peer does what a Python server does today: a scheduler process encodes a step as msgpack and pushes it
over a zmq ipc socket; a detokenizer process decodes each row with `tokenizers.DecodeStream` and pushes the
texts; a receiver (this process) decodes them into a dict and a queue per request. CPU is user and system
time of each process during the run.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
import zmq
from outfeed.gateway.front import Front, Stream
from outfeed.ring.board import Role
from outfeed.sidecar.replay import load_corpus, load_text
from outfeed.sink import Done, Error, Frame
from pipeline import Pipeline, PipelineError, demo_tokenizer
from texts import MULTILINGUAL
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

ROWS = (16, 256, 1024)
TOKENS = {16: 300_000, 256: 3_000_000, 1024: 4_000_000}
LATENCY_STEPS_PER_S = 100
LATENCY_SECONDS = 4.0
PEER_STEPS = 300


@dataclass
class Handlers:
    """Every stream's handler: takes what is there, counts, notes when."""

    tokens: int = 0
    ended: int = 0
    errors: list[str] = field(default_factory=list)
    delays_ns: list[int] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    wanted: int = 0

    def follow(self, stream: Stream, loop: asyncio.AbstractEventLoop) -> None:
        """Take this stream's events as they come."""
        source = stream.source

        def ready() -> None:
            while (item := source.receive_nowait()) is not None:
                match item:
                    case Frame(event) | Done(event):
                        self.tokens += event.generated
                        self.delays_ns.append(time.monotonic_ns() - event.stamp_ns)
                    case Error():
                        self.errors.append(item.message)
                if not isinstance(item, Frame):
                    self.ended += 1
                    if self.ended == self.wanted:
                        self.done.set()
                    return

        source.call_when_ready(loop, ready)


async def stream_all(front: Front, rows: int, tokens_each: int) -> tuple[Handlers, float]:
    """Run `rows` streams of `tokens_each` tokens; return what the handlers saw and the seconds it took."""
    handlers = Handlers(wanted=rows)
    loop = asyncio.get_running_loop()
    body = {"input_ids": [[1]] * rows, "sampling_params": {"max_new_tokens": tokens_each}, "stream": True}
    began = time.perf_counter()
    streams = await front.submit(body)
    for stream in streams:
        handlers.follow(stream, loop)
    await handlers.done.wait()
    if handlers.errors:
        raise PipelineError(f"{len(handlers.errors)} streams failed: {handlers.errors[0]}")
    return handlers, time.perf_counter() - began


def ours(rows: int, tokens_each: int, steps_per_second: int) -> dict[str, float]:
    """Run our pipeline once; return tokens_per_s, delays and CPU in us per token."""
    path = demo_tokenizer()
    instance = f"bench-{os.getpid()}"
    replay = ["--tokenizer", path, "--text", str(MULTILINGUAL), "--batch", str(rows)]
    replay += ["--steps-per-second", str(steps_per_second)]
    with (
        Pipeline(instance, ["--shards", "1", "--tokenizer", path], replay) as pipeline,
        Front.attach(instance, sink_bytes=1 << 26) as front,
    ):
        shard = front.board.row(Role.SHARD).owner
        assert shard is not None
        pids = {"scheduler": pipeline.schedulers[0].pid, "shard": shard.pid, "gateway": os.getpid()}
        before = {name: cpu_seconds(pid) for name, pid in pids.items()}
        handlers, seconds = asyncio.run(stream_all(front, rows, tokens_each))
        used = {name: cpu_seconds(pid) - before[name] for name, pid in pids.items()}
    figures = {f"cpu_{name}": 1e6 * spent / handlers.tokens for name, spent in used.items()}
    return figures | {"tokens_per_s": handlers.tokens / seconds} | percentiles(handlers.delays_ns)


def cpu_seconds(pid: int) -> float:
    """Return the user and system time that a process has used."""
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# -- the peer ---------------------------------------------------------------------------------------


def peer_scheduler(
    address: str, rows: int, steps: int, steps_per_second: int, corpus: list[int], pipe: Connection
) -> None:
    """Push `steps` steps of one token a row, encoded as today's servers do; 0 steps per second: at once."""
    socket = zmq.Context().socket(zmq.PUSH)
    socket.bind(address)
    rids = [os.urandom(16).hex() for _ in range(rows)]
    encode = msgspec.msgpack.Encoder().encode
    pipe.send("ready")
    pipe.recv()
    due = time.monotonic()
    for step in range(steps):
        ids = [[corpus[(977 * row + step) % len(corpus)]] for row in range(rows)]
        if steps_per_second:
            due += 1 / steps_per_second
            time.sleep(max(0.0, due - time.monotonic()))
        batch = {"rids": rids, "ids": ids, "finish": [None] * rows, "prompt_tokens": [1] * rows}
        socket.send(encode({**batch, "stamp": time.monotonic_ns()}))
    socket.close(linger=-1)
    pipe.send(time.process_time())


def peer_detokenizer(source: str, sink: str, path: str, steps: int, pipe: Connection) -> None:
    """Decode each row with DecodeStream and pass the texts on."""
    tokenizer = Tokenizer.from_file(path)
    context = zmq.Context()
    receive, send = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    receive.connect(source)
    send.connect(sink)
    streams: dict[str, DecodeStream] = {}
    codec, decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder().decode
    pipe.send("ready")
    began = time.process_time()
    for _ in range(steps):
        batch = decode(receive.recv())
        texts = []
        for rid, ids in zip(batch["rids"], batch["ids"], strict=True):
            stream = streams.get(rid)
            if stream is None:
                stream = streams[rid] = DecodeStream(skip_special_tokens=True)
            texts.append("".join(stream.step(tokenizer, token) or "" for token in ids))
        batch["texts"] = texts
        send.send(codec(batch))
    send.close(linger=-1)
    pipe.send(time.process_time() - began)


def peer(rows: int, steps: int, steps_per_second: int) -> dict[str, float]:
    """Run the peer once; return tokens_per_s, delays up to the request's queue and CPU in us per token."""
    path = demo_tokenizer()
    corpus = load_corpus(Tokenizer.from_file(path), load_text(str(MULTILINGUAL))).tolist()
    first, second = (f"ipc:///tmp/outfeed-bench-{os.getpid()}-{name}" for name in ("steps", "texts"))
    receive: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
    receive.bind(second)
    spawn = multiprocessing.get_context("spawn")
    here_s, there_s = spawn.Pipe()
    here_d, there_d = spawn.Pipe()
    processes = [
        spawn.Process(target=peer_scheduler, args=(first, rows, steps, steps_per_second, corpus, there_s)),
        spawn.Process(target=peer_detokenizer, args=(first, second, path, steps, there_d)),
    ]
    for process in processes:
        process.start()
    here_s.recv()
    here_d.recv()
    decode = msgspec.msgpack.Decoder().decode
    queues: dict[str, deque[dict[str, Any]]] = {}
    delays = []
    cpu, began = time.process_time(), time.perf_counter()
    here_s.send("go")
    for _ in range(steps):
        batch = decode(receive.recv())
        for rid, text, ids, finish, prompt in zip(
            batch["rids"], batch["texts"], batch["ids"], batch["finish"], batch["prompt_tokens"], strict=True
        ):
            queue = queues.setdefault(rid, deque(maxlen=8))
            queue.append({"text": text, "ids": ids, "finish": finish, "prompt_tokens": prompt})
            delays.append(time.monotonic_ns() - batch["stamp"])
    seconds, used = time.perf_counter() - began, time.process_time() - cpu
    tokens = rows * steps
    figures = {"tokens_per_s": tokens / seconds, "cpu_gateway": 1e6 * used / tokens}
    figures |= {"cpu_scheduler": 1e6 * here_s.recv() / tokens, "cpu_shard": 1e6 * here_d.recv() / tokens}
    receive.close(linger=0)
    for process in processes:
        process.join()
    return figures | percentiles(delays)


def percentiles(delays_ns: list[int]) -> dict[str, float]:
    """Return p50 and p99, us."""
    p50, p99 = np.percentile(np.array(delays_ns) / 1e3, (50, 99))
    return {"p50": float(p50), "p99": float(p99)}


def run(quick: bool) -> dict[str, Any]:
    """Measure every case once; `quick` does a tenth of the work."""
    results: list[dict[str, Any]] = []

    def note(case: str, impl: str, value: float, unit: str) -> None:
        results.append({"case": case, "impl": impl, "value": round(value, 3), "unit": unit})

    ratios = {}
    for rows in ROWS:
        tokens_each = max(50, TOKENS[rows] // rows // (10 if quick else 1))
        fast = ours(rows, tokens_each, 0)
        seconds = LATENCY_SECONDS / (4 if quick else 1)
        calm = ours(rows, int(LATENCY_STEPS_PER_S * seconds), LATENCY_STEPS_PER_S)
        theirs = peer(rows, max(30, PEER_STEPS * 256 // rows // (10 if quick else 1)), 0)
        theirs_calm = peer(rows, int(LATENCY_STEPS_PER_S * seconds), LATENCY_STEPS_PER_S)
        case = f"{rows} rows"
        for impl, figures in (("outfeed", fast), ("msgpack over zmq", theirs)):
            note(case, impl, figures["tokens_per_s"], "tokens/s")
            for process in ("scheduler", "shard", "gateway"):
                note(case, impl, figures[f"cpu_{process}"], f"us CPU/token, {process}")
        for impl, figures in (("outfeed", calm), ("msgpack over zmq", theirs_calm)):
            for name in ("p50", "p99"):
                note(case, impl, figures[name], f"us step to sink {name} at {LATENCY_STEPS_PER_S} steps/s")
        ratios[f"vs_zmq_msgpack_{rows}"] = round(fast["tokens_per_s"] / theirs["tokens_per_s"], 2)
    return {"bench": "pipeline", "results": results, "ratios": ratios}
