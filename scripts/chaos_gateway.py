"""One gateway process of a chaos run: keeps many streams going and compares each with the truth.

Started by chaos.py, which may kill it at any moment. It says on stdout, a JSON object a line, when a stream
starts and how it ended; what never ended when the process is killed is chaos' to count. In a small shared
file it notes when each shard delivered something again after chaos had hurt it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from cases import Case, make_case
from outfeed.gateway.front import Front, Stream
from outfeed.ingress.errors import Refused
from outfeed.ring.process import die_with_parent
from outfeed.ring.route import shard_of
from outfeed.sidecar.replay import load_corpus, load_text
from outfeed.sink import Done, Error, Frame
from outfeed.sink.channel import SinkEnded

DROP_SHARE = 0.02
FINISH_LIMIT_S = 60
BUSY_PAUSE_S = 0.05


class Marks:
    """A shared file of u64 words: per shard, when chaos hurt it and when it was seen to deliver again.

    hurt[shard] is written by chaos, healed[gateway, shard] by the gateway: CLOCK_MONOTONIC nanoseconds of the
    first delivery of a step that was pushed after the hurt.
    """

    def __init__(self, path: str, shards: int, gateways: int) -> None:
        self.shards = shards
        size = 8 * shards * (1 + 2 * gateways)
        with open(path, "r+b") as file:
            file.truncate(max(size, mmap.PAGESIZE))
            self._memory = mmap.mmap(file.fileno(), 0)
        self._words = memoryview(self._memory).cast("Q")

    def hurt(self, shard: int) -> int:
        """Return when chaos last hurt a shard."""
        return self._words[shard]

    def set_hurt(self, shard: int, now: int) -> None:
        """Note that a shard is about to be hurt."""
        self._words[shard] = now

    def healed(self, gateway: int, shard: int) -> tuple[int, int]:
        """Return (the hurt it healed from, when)."""
        at = self._at(gateway, shard)
        return self._words[at], self._words[at + 1]

    def set_healed(self, gateway: int, shard: int, hurt: int, now: int) -> None:
        """Note the first delivery after a hurt."""
        at = self._at(gateway, shard)
        self._words[at + 1] = now
        self._words[at] = hurt

    def _at(self, gateway: int, shard: int) -> int:
        return self.shards + 2 * (gateway * self.shards + shard)


def say(**what: object) -> None:
    """Tell chaos something."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


class Gateway:
    """`streams` streams at a time, until told to finish (a line on stdin); it stays until stdin ends."""

    def __init__(self, args: argparse.Namespace) -> None:
        from tokenizers import Tokenizer

        self._args = args
        self._random = random.Random(f"{args.seed}/{args.reader}/{args.life}")
        self._tokenizer: Any = Tokenizer.from_file(args.tokenizer)
        self._corpus = load_corpus(self._tokenizer, load_text(args.text))
        self._marks = Marks(args.marks, args.shards, args.gateways)
        self._front = Front.attach(args.instance, args.reader, tokenizer=self._tokenizer)
        self._number = 0
        self._tokens: dict[str, list[int]] = {}  # of each stream that runs: its shard, and how many it has
        self._finishing = asyncio.Event()
        self._closing = asyncio.Event()

    async def run(self) -> None:
        """Run all streams until a line on stdin, let them finish, and stay until stdin ends: what is live
        then, anywhere, nobody will end."""
        loop = asyncio.get_running_loop()
        loop.add_reader(sys.stdin.fileno(), self._told)
        runners = [asyncio.create_task(self._runner()) for _ in range(self._args.streams)]
        say(ready=True)
        await self._finishing.wait()
        hung = set(runners)
        for _ in range(FINISH_LIMIT_S):  # as they pass here: a machine that was suspended is no hang
            _, hung = await asyncio.wait(hung, timeout=1.0)
            if not hung:
                break
        say(hung=len(hung), streams=self._tokens if hung else {})
        for task in hung:
            task.cancel()
        await self._closing.wait()
        self._front.close()

    def _told(self) -> None:
        if not os.read(sys.stdin.fileno(), 1 << 10):
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            self._closing.set()
        self._finishing.set()

    async def _runner(self) -> None:
        while not self._finishing.is_set():
            self._number += 1
            rid = f"chaos-{self._args.seed}-{self._args.reader}-{self._args.life}-{self._number}"
            case = make_case(self._tokenizer, self._corpus, rid, self._random.randrange(100), self._random)
            drop = self._random.random() < self._args.drop_share
            try:
                (stream,) = await self._front.submit(
                    {"rid": rid, "input_ids": case.prompt, "sampling_params": case.params, "stream": True}
                )
            except Refused as refusal:
                if refusal.status != 503:
                    say(rid=rid, start=True)
                    say(rid=rid, end="mismatched", why=f"refused with {refusal.status}: {refusal}")
                await asyncio.sleep(BUSY_PAUSE_S)
                continue
            say(rid=rid, start=True)
            say(rid=rid, **await self._follow(rid, case, stream, drop))
            del self._tokens[rid]

    async def _follow(self, rid: str, case: Case, stream: Stream, drop: bool) -> dict[str, str]:
        """Read one stream to its end; return how it ended."""
        shard, text, ids, tokens = shard_of(stream.route), "", [], 0
        self._tokens[rid] = [shard, 0]
        give_up = self._random.randint(1, len(case.ids)) if drop else None
        async with stream:
            async for item in stream:
                match item:
                    case Frame(event) | Done(event):
                        self._note(shard, event.stamp_ns)
                        text += event.text
                        ids += event.ids.tolist()
                        tokens += event.generated
                        self._tokens[rid][1] = tokens
                        if isinstance(item, Done):
                            why = case.difference(self._tokenizer, text, ids, tokens, event.finish)
                            return self._ended(
                                stream, {"end": "mismatched", "why": why} if why else {"end": "identical"}
                            )
                        if give_up is not None and tokens >= give_up:
                            return {"end": "dropped"}
                    case Error(status, kind, message):
                        clean = status == 503 and kind in ("scheduler_gone", "instance_gone", "stopping")
                        return self._ended(
                            stream, {"end": kind if clean else "mismatched", "why": f"{status} {message}"}
                        )
        return {"end": "mismatched", "why": "the stream stopped without an ending"}

    def _ended(self, stream: Stream, how: dict[str, str]) -> dict[str, str]:
        try:
            extra = stream.source.receive_nowait()
        except SinkEnded:
            return how
        return {"end": "double_ended", "why": f"{extra} came after the end"}

    def _note(self, shard: int, stamp_ns: int) -> None:
        hurt = self._marks.hurt(shard)
        if stamp_ns > hurt > self._marks.healed(self._args.reader, shard)[0]:
            self._marks.set_healed(self._args.reader, shard, hurt, time.monotonic_ns())


def main() -> int:
    """Run as chaos.py starts it."""
    parser = argparse.ArgumentParser(prog="chaos_gateway")
    parser.add_argument("--instance", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--marks", required=True)
    for name in ("reader", "gateways", "shards", "streams", "seed", "life", "die-with-parent"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--drop-share", type=float, required=True)
    args = parser.parse_args()
    die_with_parent(args.die_with_parent)
    if not Path(args.marks).is_file():
        parser.error(f"--marks {args.marks}: no such file")
    asyncio.run(Gateway(args).run())
    return 0


if __name__ == "__main__":
    sys.exit(main())
