"""Kill -9 writers and consumers of a ring at random points and account for every frame.

Three writers and two consumers run as processes on one small ring. Every few milliseconds one of them is
killed, wherever it happens to be, and a new one takes its place over. A frame's body says which number it
is on its lane and fills the rest with a pattern of that number. What each process did lies in a ledger
that its successor and this process read:

- a writer notes the lane's tail and the number before it writes; its successor sees by the tail whether
  that write got out;
- a consumer notes the number it expects after it has handled a frame, and what it has released.

`lost` counts numbers that were skipped, `doubled` frames seen again that no take-over explains, `corrupt`
bodies that are wrong and CorruptLane, `hung` processes without a sign of life for five seconds. At the
end this process takes all cursors over and counts what is left: `sent` = `received` + `queued`, per consumer.

The rest of the time goes to the C core: threads under ThreadSanitizer and AddressSanitizer, and the
fuzzer over segment bytes; from a minute on also to the protocol's model with two deaths. `left_out` names
what the machine had no tools for.
"""

import argparse
import contextlib
import mmap
import os
import random
import shutil
import signal
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from outfeed.ring import Consumer, CorruptLane, Doorbell, LaneWriter, Ring, RingFull, View, segment, wait

LANES = 3
CONSUMERS = 2
CAPACITY = 1 << 15
HEAD = struct.Struct("<QI")
PATTERN = bytes(range(251)) * 64
HUNG_AFTER_S = 5.0
ROOT = Path(__file__).resolve().parent.parent.parent


class Ledger:
    """What the processes of the run tell each other, in memory that all of them share."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, 1 << 16)
        words = np.frombuffer(self.memory, dtype=np.uint64)
        self.sent = words[0:LANES]
        self.intent_tail = words[16 : 16 + LANES]
        self.intent = words[32 : 32 + LANES]
        """1 + the number that a writer is about to write; stored after the tail it found before."""
        self.expected = words[64 : 64 + CONSUMERS * LANES].reshape(CONSUMERS, LANES)
        self.released = words[192 : 192 + CONSUMERS * LANES].reshape(CONSUMERS, LANES)
        self.alive = words[256 : 256 + LANES + CONSUMERS]
        self.faults = words[512 : 512 + 3 * (LANES + CONSUMERS)].reshape(-1, 3)
        """Per process: lost, doubled, corrupt."""
        self.reread = words[768 : 768 + CONSUMERS]
        self.stop = words[1024:1025]


LOST, DOUBLED, CORRUPT = range(3)


def body_of(number: int, rng: random.Random) -> bytes:
    """A body that says its number; now and then one of the largest size."""
    size = rng.randrange(0, 200) if rng.random() < 0.95 else rng.randrange(0, CAPACITY // 4 - HEAD.size)
    start = number % 251
    return HEAD.pack(number, size) + PATTERN[start : start + size]


def write_one(writer: LaneWriter, body: bytes, tag: int, rng: random.Random) -> None:
    """Write a body in one of the ways there are."""
    if rng.random() < 0.3:
        view = writer.reserve(len(body), timeout=0.2)
        view[:] = body
        writer.commit(tag, len(body))
    elif rng.random() < 0.5:
        cut = rng.randrange(len(body) + 1)
        writer.write(tag, body[:cut], memoryview(body)[cut:], timeout=0.2)
    else:
        writer.write(tag, body, timeout=0.2)


def writing(ring: Ring, ledger: Ledger, lane: int, seed: int) -> None:
    """A writer's life: settle what its predecessor got out, then write on."""
    rng = random.Random(seed)
    writer = ring.writer(lane)
    unsettled = ledger.intent[lane] == ledger.sent[lane] + 1
    if unsettled and ring.stats().lanes[lane].tail > ledger.intent_tail[lane]:
        ledger.sent[lane] += 1
    while not ledger.stop[0]:
        number = int(ledger.sent[lane])
        body = body_of(number, rng)
        ledger.intent_tail[lane] = ring.stats().lanes[lane].tail
        ledger.intent[lane] = number + 1
        try:
            write_one(writer, body, number % 256, rng)
        except RingFull:
            ledger.alive[lane] += 1
            continue
        except CorruptLane:
            ledger.faults[lane, CORRUPT] += 1
            return
        ledger.sent[lane] += 1
        ledger.alive[lane] += 1


def check(ledger: Ledger, index: int, lane: int, tag: int, body: View, position: Any) -> None:
    """Account for one frame. `position`: per lane, the number this process expects; 0 before its first."""
    faults = ledger.faults[LANES + index]
    number, size = HEAD.unpack_from(body) if len(body) >= HEAD.size else (-1, 0)
    start = number % 251
    if number < 0 or tag != number % 256 or body[HEAD.size :] != PATTERN[start : start + size]:
        faults[CORRUPT] += 1
        return
    expected = int(ledger.expected[index, lane])
    # Its first frame may be any that its predecessor had not released; from then on one follows the other.
    due = int(position[lane]) or min(number, expected)
    if number > due:
        faults[LOST] += number - due
    elif number < due or number < ledger.released[index, lane]:
        faults[DOUBLED] += 1
    position[lane] = number + 1
    ledger.reread[index] += number < expected
    ledger.expected[index, lane] = max(expected, number + 1)


def reading(ring: Ring, ledger: Ledger, index: int, seed: int) -> None:
    """A consumer's life: read, check, note, release."""
    rng = random.Random(seed)
    bell = Doorbell.create(f"{ring.name}.bell-{index}")
    consumer = ring.consumer(index, bell)
    position = np.zeros(LANES, dtype=np.uint64)
    while not ledger.stop[0]:
        ledger.alive[LANES + index] += 1
        if not wait([consumer], 0.5):
            continue
        upto = consumer.tails() if rng.random() < 0.3 else None
        read_batch(consumer, ledger, index, rng.randrange(1, 64), upto, position)
        if rng.random() < 0.8:
            consumer.release()
            ledger.released[index] = np.maximum(ledger.released[index], position)
    consumer.release()


def read_batch(
    consumer: Consumer, ledger: Ledger, index: int, limit: int, upto: list[int] | None, position: Any
) -> None:
    """Read once and account for what came."""
    try:
        frames = consumer.read(limit, upto)
    except CorruptLane:
        ledger.faults[LANES + index, CORRUPT] += 1
        return
    for lane, tag, body in frames:
        check(ledger, index, lane, tag, body, position)


def child(main: Callable[[], None]) -> NoReturn:
    """Run a process's life; never return into the parent's code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    status = 1
    try:
        main()
        status = 0
    finally:
        os._exit(status)


class Run:
    """The processes of one run and their killer."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.name = f"outfeed-stress-{os.getpid()}"
        segment.sweep("outfeed-stress-")
        self.ring = Ring.create(self.name, lanes=LANES, consumers=CONSUMERS, capacity=CAPACITY)
        self.ledger = Ledger()
        self.pids = [0] * (LANES + CONSUMERS)
        self.seen = [(0, time.monotonic())] * len(self.pids)
        self.kills = self.hung = self.failed = 0
        for who in range(len(self.pids)):
            self.start(who)

    def start(self, who: int) -> None:
        """Fork process `who`: a writer below LANES, a consumer from there on."""
        seed = self.rng.getrandbits(60)
        pid = os.fork()
        if pid == 0:
            if who < LANES:
                child(lambda: writing(self.ring, self.ledger, who, seed))
            child(lambda: reading(self.ring, self.ledger, who - LANES, seed))
        self.pids[who] = pid
        self.seen[who] = (int(self.ledger.alive[who]), time.monotonic())

    def kill(self, who: int) -> None:
        """Kill process `who` and put a new one in its place."""
        os.kill(self.pids[who], signal.SIGKILL)
        _, status = os.waitpid(self.pids[who], 0)
        if os.WIFEXITED(status):  # it was gone already: a fault of its own
            self.failed += 1
        self.kills += 1
        self.start(who)

    def look(self) -> None:
        """Count processes that show no sign of life."""
        for who, (count, since) in enumerate(self.seen):
            now = int(self.ledger.alive[who])
            if now != count:
                self.seen[who] = (now, time.monotonic())
            elif time.monotonic() - since > HUNG_AFTER_S:
                self.hung += 1
                self.kill(who)

    def go(self, seconds: float) -> None:
        """Kill somebody every few milliseconds."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(self.rng.uniform(0.005, 0.08))
            self.kill(self.rng.randrange(len(self.pids)))
            self.look()

    def finish(self) -> dict[str, Any]:
        """Stop everyone, take every lane and cursor over, and close the books."""
        self.ledger.stop[0] = 1
        deadline = time.monotonic() + HUNG_AFTER_S
        for pid in self.pids:
            while os.waitpid(pid, os.WNOHANG) == (0, 0):
                if time.monotonic() > deadline:
                    self.hung += 1
                    os.kill(pid, signal.SIGKILL)
                time.sleep(0.01)
        ledger = self.ledger
        received = int(ledger.expected.sum())
        for lane in range(LANES):
            writing(self.ring, ledger, lane, 0)  # only settles: it is told to stop
        with Doorbell.create(f"{self.name}.bell-last") as bell:
            for index in range(CONSUMERS):
                consumer = self.ring.consumer(index, bell)
                position = np.zeros(LANES, dtype=np.uint64)
                while consumer.pending():
                    read_batch(consumer, ledger, index, 256, None, position)
                    consumer.release()
        sent = int(ledger.sent.sum()) * CONSUMERS
        queued = int(ledger.expected.sum()) - received
        lost, doubled, corrupt = (int(count) for count in ledger.faults.sum(axis=0))
        return {
            "sent": sent,
            "received": received,
            "queued": queued,
            "lost": lost + sent - received - queued,
            "doubled": doubled,
            "corrupt": corrupt,
            "read_again": int(ledger.reread.sum()),
            "kills": self.kills,
            "hung": self.hung,
            "failed": self.failed,
        }

    def close(self) -> None:
        """Leave nothing behind."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        self.ring.close()
        self.ring.unlink()
        segment.sweep(self.name)


def build(folder: Path, name: str, compiler: str, *flags: str) -> Path | None:
    """Build a C program of tests/ring/c with the core; None where the tools are missing."""
    if shutil.which(compiler) is None:
        return None
    output = folder / f"{name}-{compiler}-{'-'.join(flags).replace('/', '')}"
    sources = [*sorted((ROOT / "ring" / "core").glob("*.c")), ROOT / "tests" / "ring" / "c" / f"{name}.c"]
    command = [compiler, "-std=c11", "-O1", "-g", "-fno-sanitize-recover=all", *flags]
    command += ["-I", str(ROOT / "ring" / "core"), *map(str, sources), "-o", str(output), "-lpthread"]
    done = subprocess.run(command, capture_output=True, check=False)
    return output if done.returncode == 0 else None


def plans(seconds: float, seed: int, corpus: Path) -> list[tuple[str, str, str, list[str], list[object]]]:
    """Return what to build and how to run it: (what, C file, compiler, flags, arguments)."""
    milliseconds = int(seconds * 1000 / 4)
    threads: list[object] = [seed, milliseconds]
    memory = "-fsanitize=address,undefined"
    replayed: list[object] = [seed, milliseconds, *sorted(corpus.iterdir())]
    torn = ["-DSTANDALONE", "-DTORN", "-O0", f"-I{ROOT / 'tests'}", memory]
    torn.append("-fsanitize-coverage=trace-pc-guard,trace-loads")
    if shutil.which("clang"):
        limits = ["-max_total_time=" + str(milliseconds // 1000 + 1), "-timeout=10", "-max_len=2048"]
        fuzz = ("fuzz", "fuzz", "clang", ["-fsanitize=fuzzer,address,undefined"])
        words: list[object] = [*limits, f"-seed={seed}", "grown", corpus]
    else:
        fuzz = ("fuzz", "fuzz", "gcc", ["-DSTANDALONE", memory])
        words = replayed
    return [
        ("threads_tsan", "stress", "gcc", ["-fsanitize=thread"], threads),
        ("threads_asan", "stress", "gcc", [memory], threads),
        (*fuzz, words),
        ("torn", "fuzz", "clang", torn, replayed),
    ]


def core(seconds: float, seed: int) -> dict[str, Any]:
    """Run the C programs, `seconds` in all; a program that fails is a fault."""
    found: dict[str, Any] = {"core_faults": 0, "left_out": []}
    with tempfile.TemporaryDirectory(prefix="outfeed-stress-") as folder:
        (Path(folder) / "grown").mkdir()
        for what, name, compiler, flags, words in plans(seconds, seed, ROOT / "tests" / "ring" / "corpus"):
            program = build(Path(folder), name, compiler, *flags)
            if program is None:
                found["left_out"].append(f"{what}: {compiler} or its {flags[-1]} runtime is not installed")
                continue
            command = [str(program), *map(str, words)]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            lines = (done.stdout + done.stderr).strip().splitlines()
            found["core_faults"] += done.returncode != 0
            found[what] = lines[-1] if done.returncode == 0 else "\n".join(lines[-40:])
    return found


def model(seconds: float) -> dict[str, Any]:
    """Search the protocol's model with two deaths, for at most twice `seconds`."""
    if shutil.which("spin") is None:
        return {"model": "left out: spin is not installed"}
    with tempfile.TemporaryDirectory(prefix="outfeed-stress-") as folder:
        source = ROOT / "tests" / "ring" / "model" / "ring.pml"
        subprocess.run(["spin", "-DKILLS=2", "-a", source], cwd=folder, check=True, capture_output=True)
        subprocess.run(["cc", "-O2", "-w", "-DSAFETY", "-o", "pan", "pan.c"], cwd=folder, check=True)
        try:
            done = subprocess.run(
                ["./pan", "-m1000000"],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=2 * seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"model": f"not finished in {2 * seconds:.0f} s"}
    lines = done.stdout.splitlines()
    found = next((line for line in lines if "errors:" in line), "no result")
    return {"model": found, "model_faults": int("errors: 0" not in found)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which parts to run."""
    parser.add_argument("--kills-only", action="store_true", help="only the kill -9 run, not the C core's")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run everything for about `args.seconds`."""
    share = 1.0 if args.kills_only else 0.7
    stress = Run(args.seed)
    try:
        stress.go(args.seconds * share)
        found = stress.finish()
    finally:
        stress.close()
    found["core_faults"] = 0
    if not args.kills_only:
        found.update(core(args.seconds * (1 - share), args.seed))
        if args.seconds >= 60:
            found.update(model(args.seconds))
    bad = ("lost", "doubled", "corrupt", "hung", "failed", "core_faults", "model_faults")
    found["seed"] = args.seed
    found["ok"] = (
        not any(found.get(key) for key in bad) and found["sent"] == found["received"] + found["queued"]
    )
    return found
