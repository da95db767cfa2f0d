"""Damage at random: bits flipped in every segment of running instances, shards killed meanwhile.

Each round runs an instance of two shards and two gateways, a scheduler in this process and 40 streams. Bits
of frames that wait in a ring are flipped (control, request, step, egress), and shards killed; a round's last
damage is to words of the segments' tables, of doorbells and the board. Every stream must end: with its own
ids, or with those up to where an error ended it. A stream that waits for ever, an id or text that is not its
own, an instance that does not serve again when only frames of it were damaged: each is a fault.
"""

import argparse
import asyncio
import contextlib
import itertools
import logging
import mmap
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from outfeed.gateway.front import Front, Stream
from outfeed.ingress.errors import Refused
from outfeed.ring.board import Board, Role
from outfeed.ring.errors import CorruptLane
from outfeed.ring.instance import leftovers
from outfeed.ring.names import segment_name
from outfeed.sidecar import Abort, Control, FinishReason, Generate, SchedulerPort
from outfeed.sink import Control as Answer
from outfeed.sink import Done, Error, Frame
from pipeline import Pipeline, demo_tokenizer
from tokenizers import Tokenizer

WORDS = ("river", "stone", "light", "water", "house", "green", "seven", "under", "music", "paper", "night")
STREAMS = 20  # of each gateway
BATCH = 24  # of them run at a time, so that some wait in the scheduler's queue
WAIT_S = 30.0
FRAMES_S = 4.0
TABLES_S = 1.5
RING_BYTES = 1 << 16
FRAMES = ("request", "control", "step", "egress0", "egress1")


class Truth:
    """What a request says follows from its prompt: tokens whose texts just stand one behind the other."""

    def __init__(self, tokenizer: Any) -> None:
        self.ids = [tokenizer.encode(" " + word, add_special_tokens=False).ids[0] for word in WORDS]
        self.texts = [tokenizer.decode([one]) for one in self.ids]

    def at(self, prompt: int, place: int) -> int:
        """Return which of the words stands at that place of a prompt's answer."""
        return (prompt * 31 + place * (prompt % 7 + 1)) % len(self.ids)

    def fault(self, prompt: int, ids: list[int], text: str) -> str | None:
        """Say what is wrong with what has come of an answer; None when nothing is."""
        places = [self.at(prompt, place) for place in range(len(ids))]
        if ids != [self.ids[place] for place in places]:
            return f"ids of {prompt} are not its own"
        right = "".join(self.texts[place] for place in places)
        return None if text == right else f"text of {prompt} is {text!r}"


class Scheduler(threading.Thread):
    """A scheduler: a few tokens for each of BATCH requests at a time, the others wait."""

    def __init__(self, instance: str, truth: Truth, seed: int) -> None:
        super().__init__(daemon=True)
        self.port = SchedulerPort.attach(instance)
        self.pause = threading.Lock()
        self.fault: str | None = None
        self._truth = truth
        self._random = random.Random(seed)
        self._over = threading.Event()
        self._live: dict[int, tuple[int, int, int]] = {}

    def run(self) -> None:
        """Be a scheduler until told to stop, or its lane is gone."""
        try:
            while not self._over.is_set() and self.port.alive:
                with self.pause:
                    self._take()
                    self._step()
                time.sleep(0.003)
        except CorruptLane:
            return
        except Exception as error:
            self.fault = f"the scheduler failed: {error!r}"

    def stop(self) -> None:
        """End, and let go of the instance."""
        self._over.set()
        self.join()
        self.port.close()

    def _take(self) -> None:
        for message in self.port.recv():
            match message:
                case Generate(route=route, input_ids=raw, sampling_params=params):
                    self._live[route] = (int.from_bytes(raw[:4], "little"), params["max_new_tokens"], 0)
                case Abort(route=route):
                    self._live.pop(route, None)
                case Control(route=route, body=body) if self.port.is_live(route):
                    self.port.push_result(route, body, timeout=10.0)

    def _step(self) -> None:
        routes: list[int] = []
        ids: list[int] = []
        counts: list[int] = []
        finishes: dict[int, FinishReason] = {}
        for route, (prompt, length, had) in list(self._live.items())[:BATCH]:
            more = min(self._random.randint(1, 3), length - had)
            places = [self._truth.at(prompt, had + at) for at in range(more)]
            if had + more == length:
                finishes[len(routes)] = FinishReason.length(length)
                del self._live[route]
            else:
                self._live[route] = (prompt, length, had + more)
            routes.append(route)
            ids += [self._truth.ids[place] for place in places]
            counts.append(more)
        if routes:
            self.port.push_tokens(routes, ids, counts, finishes=finishes, timeout=10.0)


class Round:
    """One instance, damaged until it is given up."""

    def __init__(self, name: str, seed: int, truth: Truth, tokenizer: Any) -> None:
        self.name = name
        self.random = random.Random(seed)
        self.truth = truth
        self.ends: Counter[str] = Counter()
        self.faults: list[str] = []
        self.damages: Counter[str] = Counter()
        self.words: list[str] = []
        """Which words of tables were written over, and with what: what a fault is looked for in."""
        self.scheduler = Scheduler(name, truth, seed)
        self.fronts = [Front.attach(name, reader, tokenizer=tokenizer) for reader in (0, 1)]
        self.board = Board.attach(name)
        self._over = False
        self._prompts = itertools.count(1)

    async def run(self) -> None:
        """Run it, and leave what was found in `faults`."""
        self.scheduler.start()
        clients = [asyncio.create_task(self._client(front)) for front in self.fronts for _ in range(STREAMS)]
        try:
            await asyncio.to_thread(self._damage_frames)
            await asyncio.to_thread(self._until_shards_serve)
            await asyncio.to_thread(self._damage_tables)
        finally:
            self._over = True
            await asyncio.gather(*clients)
            for front in self.fronts:
                # Who has just left is ended by the reader's thread, in a moment.
                if not await asyncio.to_thread(_is_idle, front):
                    self.faults.append(f"gateway {front.routes.reader} has requests that nobody has")
                front.close()
            self.scheduler.stop()
            self.faults += [self.scheduler.fault] if self.scheduler.fault else []
            self.board.close()

    async def _client(self, front: Front) -> None:
        while not self._over:
            prompt, length = next(self._prompts), self.random.randint(1, 120)
            try:
                if self.random.random() < 0.1:
                    body = str(prompt).encode()
                    if await front.control("echo", body, timeout=WAIT_S) != body:
                        self.faults.append("a control request got another's answer")
                    self.ends["answered"] += 1
                    continue
                params = {"max_new_tokens": length}
                (stream,) = await front.submit({"input_ids": [prompt, 5], "sampling_params": params})
            except Refused as refusal:
                self.ends[getattr(refusal, "type", "refused")] += 1
                await asyncio.sleep(0.02)
                continue
            except TimeoutError:
                self.faults.append("a control request waited for ever")
                continue
            with stream:
                await self._follow(stream, prompt, length, self.random.random() < 0.1)

    async def _follow(self, stream: Stream, prompt: int, length: int, leaves: bool) -> None:
        ids: list[int] = []
        text = ""
        end = None
        while end is None:
            try:
                item = await stream.source.receive(WAIT_S)
            except TimeoutError:
                self.faults.append(f"{stream.rid} of {len(ids)}/{length} tokens waited for ever")
                return
            if isinstance(item, Frame | Done):
                ids += item.event.ids.tolist()
                text += item.event.text
                end = "done" if isinstance(item, Done) else None
            else:
                end = item.type if isinstance(item, Error) else type(item).__name__
            if leaves and ids:
                end = "left"
        self.ends[end] += 1
        why = self.truth.fault(prompt, ids, text)
        if isinstance(item, Answer) or (end == "done" and len(ids) != length):
            why = f"ended with {len(ids)} of {length} tokens"
        if why is not None:
            self.faults.append(f"{stream.rid}: {why}")

    # -- damage -------------------------------------------------------------------------------------

    def _damage_frames(self) -> None:
        deadline = time.monotonic() + FRAMES_S
        while time.monotonic() < deadline:
            time.sleep(self.random.uniform(0.02, 0.3))
            if self.random.random() < 0.15:
                self.damages["kill"] += 1
                self._signal(self.random.randrange(2), signal.SIGKILL)
                continue
            ring = self.random.choice(FRAMES)
            with _Held(self, ring):
                self._flip_waiting(ring)

    def _signal(self, shard: int, how: signal.Signals) -> None:
        owner = self.board.row(Role.SHARD, shard).owner
        if owner is not None:
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                os.kill(owner.pid, how)

    def signal_shards(self, how: signal.Signals) -> None:
        """Stop every shard where it is, or let it go on."""
        for shard in (0, 1):
            self._signal(shard, how)

    def _flip_waiting(self, ring: str) -> None:
        """Flip a bit in the body of a frame that somebody has yet to read."""
        front = self.fronts[int(ring[-1])] if ring.startswith("egress") else self.fronts[0]
        stats = front.ring_stats()[ring.rstrip("01")]
        lanes = [lane for lane in stats.lanes if lane.used]
        if not lanes:
            return
        lane = self.random.choice(lanes)
        # Behind its first 4 KiB and the tables, lane by lane.
        size = os.stat(path := f"/dev/shm/{segment_name(self.name, ring)}").st_size
        area = size - (len(stats.lanes) - lane.lane) * stats.capacity
        records = list(self._records(path, area, stats.capacity, lane.tail - lane.used, lane.tail))
        if not records:
            return
        at, length = self.random.choice(records)
        with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            memory[at + self.random.randrange(length)] ^= 1 << self.random.randrange(8)
        self.damages[ring] += 1

    def _records(
        self, path: str, area: int, capacity: int, start: int, end: int
    ) -> Iterator[tuple[int, int]]:
        """Yield where the bodies between two positions of a lane are, and their lengths."""
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
            while start < end:
                at = area + (start & (capacity - 1))
                length = int.from_bytes(memory[at : at + 4], "little")
                if memory[at + 5] == 0 and length:
                    yield at + 16, length
                start += 16 + -(-length // 16) * 16

    def _until_shards_serve(self) -> None:
        """Damaged frames and kills must leave an instance that works, through each gateway and shard."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            healths = [asyncio.run(front.health(WAIT_S)) for front in self.fronts]
            if all(health.healthy for health in healths):
                return
        self.faults.append(f"does not recover: {[health.sick for health in healths]}")

    def _damage_tables(self) -> None:
        """Scribble over words that are no frame's, of any segment; all that is asked is that streams end."""
        end = time.monotonic() + TABLES_S
        while time.monotonic() < end:
            time.sleep(TABLES_S / 30)
            name = self.random.choice([one for one in leftovers(self.name) if "tokens" not in one])
            path = Path("/dev/shm", name)
            with (
                contextlib.suppress(ProcessLookupError, FileNotFoundError),
                open(path, "r+b") as file,
                mmap.mmap(file.fileno(), 0) as memory,
            ):
                tables = (0, len(memory) if name.endswith("board") else min(len(memory), 8192))
                used = [at for at in range(*tables, 8) if any(memory[at : at + 8])]
                at = self.random.choice(used or [0])
                value = self.random.choice(
                    [0, (1 << 64) - 1, self.random.getrandbits(64), self.random.getrandbits(8)]
                )
                was = int.from_bytes(memory[at : at + 8], "little")
                memory[at : at + 8] = value.to_bytes(8, "little")
                self.words.append(f"{name.partition('.')[2]}+{at}: {was:#x} -> {value:#x}")
                self.damages[f"word of {name.split('.')[-1].rstrip('0123456789')}"] += 1


def _is_idle(front: Front) -> bool:
    """Whether a gateway has nobody any more, within WAIT_S."""
    deadline = time.monotonic() + WAIT_S
    while (busy := front.reader.statistics().live or front.ingress.live()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not busy


class _Held:
    """Who reads a ring, held up while it is damaged."""

    def __init__(self, round_: Round, ring: str) -> None:
        self._round, self._ring = round_, ring
        self._go_on: Callable[[], object] = lambda: None

    def __enter__(self) -> None:
        if self._ring == "request":
            self._round.scheduler.pause.acquire()
            self._go_on = self._round.scheduler.pause.release
        elif self._ring.startswith("egress"):
            over, held = threading.Event(), threading.Event()
            reader = self._round.fronts[int(self._ring[-1])].reader

            def hold() -> None:
                held.set()
                over.wait(5.0)

            reader.call(hold)
            held.wait(5.0)
            self._go_on = over.set
        else:
            self._round.signal_shards(signal.SIGSTOP)
            self._go_on = lambda: self._round.signal_shards(signal.SIGCONT)
        time.sleep(0.02)

    def __exit__(self, *_: object) -> None:
        self._go_on()


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run rounds for args.seconds."""
    logging.getLogger("outfeed").setLevel(logging.CRITICAL)
    path = demo_tokenizer()
    tokenizer = Tokenizer.from_file(path)
    truth = Truth(tokenizer)
    ends: Counter[str] = Counter()
    damages: Counter[str] = Counter()
    faults: list[str] = []
    words: list[str] = []
    launch = ["--shards", "2", "--readers", "2", "--heartbeat-limit", "2", "--slots", "64"]
    launch += ["--tokenizer", path]
    launch += [f"--{ring}-bytes={RING_BYTES}" for ring in ("request", "control", "step", "egress")]
    deadline = time.monotonic() + args.seconds
    rounds = 0
    while rounds == 0 or time.monotonic() < deadline:
        seed = args.seed + rounds
        name = f"damage-{os.getpid()}-{rounds}"
        with Pipeline(name, launch, None):
            one = Round(name, seed, truth, tokenizer)
            asyncio.run(one.run())
            ends += one.ends
            damages += one.damages
            faults += [f"seed {seed}: {fault}" for fault in one.faults]
            words += [f"seed {seed}: {word}" for word in one.words] if one.faults else []
        rounds += 1
    return {
        "rounds": rounds,
        "damages": dict(damages),
        "ends": dict(ends),
        "faults": len(faults),
        "first_faults": faults[:10],
        "words": words[:500],
        "ok": not faults,
    }
