"""Detokenizing: a shard's whole loop, frame in to frame out, against the ways of the field.

One decode step of N rows with one token each, real text in many scripts, the same ids for everyone:

    shard loop      step frames lie in the ring; the loop reads, decodes and writes egress frames, each alone
    backlog         the same, as the loop does it when they wait: as many as fit together are decoded as one
    kernel          the kernel's call alone, on columns already decoded
    DecodeStream    tokenizers.DecodeStream.step per row
    decode_batch    two tokenizer.decode_batch calls per step over each row's last ids (with offsets), and the
                    text beyond the first call's, as servers do that keep offsets per request

Everyone runs in this process, in turns. CPU time is counted, all threads', and the best round: other load on
the machine only adds.
Then shards are started as an instance starts them, and their private memory and start time are read.
"""

import gc
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from outfeed.ring import Doorbell, Ring
from outfeed.ring.batch import decode_batch, encode_batch
from outfeed.ring.board import InstanceConfig, Phase, Role, State
from outfeed.ring.checked import check_batch
from outfeed.ring.columns import I32, U32, U64
from outfeed.ring.frames import DecodeOptions, Register, Tag, encode
from outfeed.ring.instance import Instance
from outfeed.ring.names import segment_name
from outfeed.ring.route import make_route
from outfeed.shards import loop as shards_loop
from outfeed.shards.decoder import Decoder
from outfeed.shards.loop import Shard
from outfeed.shards.shard import run_shard
from outfeed.shards.supervisor import fork_child
from outfeed.shards.table import TokenTable
from pipeline import demo_tokenizer
from texts import MULTILINGUAL
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

ROWS = (1, 16, 256, 4096)
SHARDS = 8
# Ids that a server with offsets decodes again per step, before the new one.
CONTEXT = 5

Step = tuple[U64, U32, U32, U32, I32]


def run(quick: bool) -> dict[str, Any]:
    """Return CPU microseconds per token of each way and number of rows, ratios, memory and start times."""
    path = Path(demo_tokenizer())
    table, tokenizer = TokenTable.compile(path), Tokenizer.from_file(str(path))
    ids = tokenizer.encode(MULTILINGUAL.read_text(encoding="utf-8"), add_special_tokens=False).ids
    results, best = [], {}
    for rows in ROWS:
        for impl, value in _compare(table, tokenizer, ids, rows, quick).items():
            best[impl, rows] = value
            results.append({"case": f"{rows} rows", "impl": impl, "value": value, "unit": "us/token"})
    started = _shards(path)
    stream = {rows: best["DecodeStream", rows] for rows in ROWS}
    return {
        "bench": "detok",
        "results": results,
        "ratios": {
            **{f"vs_decodestream_{rows}": stream[rows] / best["shard loop", rows] for rows in ROWS},
            **{f"backlog_vs_decodestream_{rows}": stream[rows] / best["backlog", rows] for rows in ROWS},
            **{f"kernel_vs_decodestream_{rows}": stream[rows] / best["kernel", rows] for rows in ROWS},
            **{
                f"vs_decode_batch_{rows}": best["decode_batch", rows] / best["shard loop", rows]
                for rows in ROWS
            },
        },
        **started,
    }


def _compare(
    table: TokenTable, tokenizer: Tokenizer, ids: list[int], rows: int, quick: bool
) -> dict[str, float]:
    """Return each way's best CPU microseconds per token."""
    steps = max(4, min(200, (8192 if quick else 32768) // rows))
    rounds = 3 if quick else 7
    loop, backlog = _ShardLoop(table, rows, joined=0), _ShardLoop(table, rows, joined=shards_loop.JOINED)
    ways: dict[str, Callable[[list[I32]], float]] = {
        "shard loop": loop,
        "backlog": backlog,
        "kernel": _KernelAlone(table, rows),
        "DecodeStream": _Streams(tokenizer, rows),
        "decode_batch": _Offsets(tokenizer, rows),
    }
    # The peers' cost per token does not depend on the number of steps: fewer of them, in the same time.
    share = {"DecodeStream": 4, "decode_batch": 8}
    fastest = dict.fromkeys(ways, float("inf"))
    try:
        for turn in range(rounds):
            for name, way in ways.items():
                count = max(4, steps // share.get(name, 1))
                at = turn * steps
                columns = [_column(ids, rows, at + step) for step in range(count)]
                gc.collect()
                fastest[name] = min(fastest[name], way(columns) / (count * rows) * 1e6)
    finally:
        loop.close()
        backlog.close()
    return fastest


def _column(ids: list[int], rows: int, step: int) -> I32:
    """One step's ids: every row reads the same text, each from a place of its own."""
    return np.array([ids[(row * 37 + step) % len(ids)] for row in range(rows)], dtype=np.int32)


def _routes(rows: int) -> U64:
    return np.array([make_route(0, 0, slot, 1) for slot in range(rows)], dtype=np.uint64)


def _registered(table: TokenTable, routes: U64) -> Decoder:
    decoder = Decoder(table)
    for route in routes.tolist():
        decoder.register(Register(route, "", DecodeOptions(), b"", 0))
    return decoder


class _ShardLoop:
    """The loop of shards/loop.py on real rings; only its turns are timed. `joined`: its JOINED."""

    made = itertools.count()

    def __init__(self, table: TokenTable, rows: int, joined: int) -> None:
        self.joined = joined
        self.routes = _routes(rows)
        self.zeros = np.zeros(rows, dtype=np.uint32)
        self.ones = np.ones(rows, dtype=np.uint32)
        self.done = 0
        name = f"outfeed-bench-detok-{os.getpid()}-{next(self.made)}"
        self.bell = Doorbell.create(f"{name}.bell")
        self.rings = [
            Ring.create(f"{name}.{what}", lanes=1, consumers=1, capacity=1 << 23)
            for what in ("control", "step", "egress")
        ]
        control, step, egress = self.rings
        self.steps = step.writer(0)
        self.reader = egress.consumer(0, self.bell)
        lane = egress.writer(0)
        self.shard = Shard(
            0,
            Decoder(table),
            control.consumer(0, self.bell),
            step.consumer(0, self.bell),
            lambda reader: lane,
        )
        writer = control.writer(0)
        for route in self.routes.tolist():
            writer.write(Tag.REGISTER, encode(Register(route, "", DecodeOptions(), b"", 0)))
            if route % 1024 == 1023:
                self.shard.turn()
        self.shard.turn()

    def __call__(self, columns: list[I32]) -> float:
        spent = 0.0
        for part in _chunks(columns, max(1, (1 << 21) // (40 * len(self.routes)))):
            for ids in part:
                first = np.full(len(ids), self.done, dtype=np.uint32)
                self.steps.write(
                    Tag.BATCH,
                    *encode_batch(time.monotonic_ns(), self.routes, first, self.ones, self.zeros, ids),
                )
                self.done += 1
            shards_loop.JOINED = self.joined
            begin = time.process_time()
            while self.shard.turn():
                pass
            spent += time.process_time() - begin
            tokens = 0
            while got := self.reader.read():
                tokens += sum(check_batch(body).tokens for _, _, body in got)
                self.reader.release()
            assert tokens == len(part) * len(self.routes), f"{tokens} tokens for {len(part)} steps"
        return spent

    def close(self) -> None:
        for ring in self.rings:
            ring.close()
            ring.unlink()
        self.bell.close()


def _chunks(columns: list[I32], size: int) -> Iterator[list[I32]]:
    for at in range(0, len(columns), size):
        yield columns[at : at + size]


class _KernelAlone:
    """Decoder.decode: the kernel and the finding of its columns, no frames."""

    def __init__(self, table: TokenTable, rows: int) -> None:
        self.routes = _routes(rows)
        self.decoder = _registered(table, self.routes)
        self.done = 0

    def __call__(self, columns: list[I32]) -> float:
        rows = len(self.routes)
        zeros, ones = np.zeros(rows, dtype=np.uint32), np.ones(rows, dtype=np.uint32)
        batches = []
        for ids in columns:
            first = np.full(rows, self.done, dtype=np.uint32)
            parts = encode_batch(0, self.routes, first, ones, zeros, ids)
            batches.append(decode_batch(b"".join(bytes(part) for part in parts)))
            self.done += 1
        decode = self.decoder.decode
        begin = time.process_time()
        for batch in batches:
            decode(batch, 0, 0)
        return time.process_time() - begin


class _Streams:
    """One DecodeStream per row."""

    def __init__(self, tokenizer: Tokenizer, rows: int) -> None:
        self.tokenizer = tokenizer
        self.streams = [DecodeStream(skip_special_tokens=True) for _ in range(rows)]

    def __call__(self, columns: list[I32]) -> float:
        tokenizer, streams = self.tokenizer, self.streams
        steps = [ids.tolist() for ids in columns]
        begin = time.process_time()
        for ids in steps:
            for stream, token in zip(streams, ids, strict=True):
                stream.step(tokenizer, token)
        return time.process_time() - begin


class _Offsets:
    """Offsets per request, two batch decodes per step."""

    def __init__(self, tokenizer: Tokenizer, rows: int) -> None:
        self.tokenizer = tokenizer
        self.read: list[list[int]] = [[] for _ in range(rows)]
        self.fresh: list[list[int]] = [[] for _ in range(rows)]

    def __call__(self, columns: list[I32]) -> float:
        read, fresh, decode = self.read, self.fresh, self.tokenizer.decode_batch
        steps = [ids.tolist() for ids in columns]
        begin = time.process_time()
        for ids in steps:
            for new, token in zip(fresh, ids, strict=True):
                new.append(token)
            before = decode(read)
            after = decode([old + new for old, new in zip(read, fresh, strict=True)])
            for row, (old, text) in enumerate(zip(before, after, strict=True)):
                if len(text) > len(old) and not text.endswith("\ufffd"):
                    text[len(old) :]
                    read[row] = (read[row] + fresh[row])[-CONTEXT:]
                    fresh[row] = []
        return time.process_time() - begin


def _shards(path: Path) -> dict[str, Any]:
    """Start shards as a launcher does; return each one's private memory and seconds until it reads."""
    name = f"bench-detok-{os.getpid()}"
    size = 1 << 20
    config = InstanceConfig(
        instance=name,
        tokenizer=str(path),
        shards=SHARDS,
        request_bytes=size,
        control_bytes=size,
        step_bytes=size,
        egress_bytes=size,
    )
    instance = Instance.create(config)
    pids, private, seconds = [], [], []
    try:
        instance.board.phase = Phase.RUNNING
        _forked(lambda: _share(path, name))
        for shard in range(SHARDS):
            begin = time.perf_counter()
            pids.append(fork_child(lambda number=shard: run_shard(name, number)))  # type: ignore[misc]
            row = instance.board.row(Role.SHARD, shard)
            _until(lambda row=row: row.state == State.RUNNING)  # type: ignore[misc]
            seconds.append(round(time.perf_counter() - begin, 4))
        private = [_private_mb(pid) for pid in pids]
    finally:
        instance.board.phase = Phase.STOPPING
        for pid in pids:
            os.waitpid(pid, 0)
        instance.remove()
        instance.close()
    return {"shard_private_mb": private, "shard_start_s": seconds}


def _share(path: Path, name: str) -> None:
    TokenTable.compile(path).share(segment_name(name, "tokens"))


def _forked(main: Callable[[], None]) -> None:
    _, status = os.waitpid(fork_child(main), 0)
    if status:
        raise RuntimeError("a child failed; its own message is above")


def _until(ready: Callable[[], bool]) -> None:
    for _ in itertools.repeat(None, 30_000):
        if ready():
            return
        time.sleep(0.0005)
    raise RuntimeError("a shard did not come up")


def _private_mb(pid: int) -> float:
    """Return a process's private resident memory."""
    kib = sum(
        int(line.split()[1])
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        if line.startswith("Private_")
    )
    return round(kib / 1024, 2)
