"""From a write to a parked reader's return: round trips between two processes that both sleep.

Method. One process sends 64 bytes, the other, asleep, wakes up and sends them back; the first sleeps
until they come. Before each round the sender pauses (200 us), so that the other side has long parked. For
the figure that the ratios use nobody spins, so every round has two real wake-ups (`wakes_per_round`, from
the ring's own statistics); `outfeed, spinning` is the ring as it comes, which spins a moment first.
Compared, in the same run and in turns, with

- two C processes on two futexes and nothing else (the floor of this kernel and machine),
- multiprocessing.Pipe (send_bytes, recv_bytes),
- pyzmq PAIR over ipc.

Rounds are interleaved in blocks, so that whatever else the machine does hits all alike; p50 and p99 are
over all rounds. `vs_c_futex_p50` is ours over the C futex's; the `_over_` ratios are a peer's over ours.
"""

import ctypes
import multiprocessing
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from outfeed.ring import Consumer, Doorbell, LaneWriter, Ring, segment, wait
from outfeed.ring.doorbell import LONGEST_SPIN_S

FORK = multiprocessing.get_context("fork")
PAUSE_S = 200e-6
BODY = bytes(64)
Trip = Callable[[], object]


def _timed(trip: Trip, rounds: int) -> list[float]:
    """Return each round trip in microseconds."""
    times = []
    for _ in range(rounds):
        time.sleep(PAUSE_S)
        start = time.perf_counter_ns()
        trip()
        times.append((time.perf_counter_ns() - start) / 1e3)
    return times


@contextmanager
def _partner(answer: Callable[[], None]) -> Iterator[None]:
    process = FORK.Process(target=answer, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def _receive(consumer: Consumer, waiting: list[Consumer]) -> None:
    while not consumer.read(1):
        wait(waiting, 1.0)
    consumer.release()


def _echo(there: Ring, back: Ring, name: str, spin: float) -> None:
    with Doorbell.create(f"{name}.bell-echo", longest_spin=spin) as bell:
        consumer, writer = there.consumer(0, bell), back.writer(0)
        waiting = [consumer]
        while True:
            _receive(consumer, waiting)
            writer.write(1, BODY)


@contextmanager
def outfeed(wakes: list[int], spin: float = 0.0) -> Iterator[Trip]:
    """This project's ring: one each way. How often it woke somebody is added to `wakes`."""
    name = f"outfeed-bench-{os.getpid()}"
    there = Ring.create(f"{name}.there", lanes=1, consumers=1, capacity=4096)
    back = Ring.create(f"{name}.back", lanes=1, consumers=1, capacity=4096)
    echo = _partner(lambda: _echo(there, back, name, spin))
    with Doorbell.create(f"{name}.bell", longest_spin=spin) as bell, there, back, echo:
        consumer, writer = back.consumer(0, bell), there.writer(0)
        waiting = [consumer]

        def trip(writer: LaneWriter = writer) -> None:
            writer.write(1, BODY)
            _receive(consumer, waiting)

        trip()
        yield trip
        wakes.append(sum(ring.stats().consumers[0].wakes for ring in (there, back)))
    for ring in (there, back):
        ring.unlink()
    segment.discard(f"{name}.bell-echo")  # the partner was killed and could not do so


@contextmanager
def pipe() -> Iterator[Trip]:
    """multiprocessing.Pipe."""
    near, far = FORK.Pipe()

    def echo(end: Connection = far) -> None:
        while True:
            end.send_bytes(end.recv_bytes())

    with _partner(echo):

        def trip() -> None:
            near.send_bytes(BODY)
            near.recv_bytes()

        yield trip
    near.close()
    far.close()


@contextmanager
def pyzmq() -> Iterator[Trip]:
    """pyzmq PAIR over ipc."""
    import zmq

    with tempfile.TemporaryDirectory(prefix="outfeed-bench-") as folder:
        address = f"ipc://{folder}/wake"

        def echo() -> None:
            socket = zmq.Context().socket(zmq.PAIR)
            socket.connect(address)
            while True:
                socket.send(socket.recv())

        with _partner(echo):
            context = zmq.Context()
            socket = context.socket(zmq.PAIR)
            socket.bind(address)

            def trip() -> None:
                socket.send(BODY)
                socket.recv()

            trip()
            yield trip
            socket.close(linger=0)
            context.term()


def _futex(folder: str) -> Callable[[int], list[float]]:
    """Build the C ping-pong; return what runs it."""
    library = Path(folder) / "futex.so"
    source = Path(__file__).with_name("futex.c")
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-std=gnu11", "-O2", "-shared", "-fPIC", source, "-o", library], check=True)
    call = ctypes.CDLL(str(library)).ping_pong

    def measure(rounds: int) -> list[float]:
        out = (ctypes.c_int64 * rounds)()
        if call(ctypes.c_uint32(rounds), ctypes.c_uint32(int(PAUSE_S * 1e6)), out) != 0:
            raise RuntimeError("the C ping-pong failed")
        return [nanoseconds / 1e3 for nanoseconds in out]

    return measure


def run(quick: bool) -> dict[str, Any]:
    """Measure all four; see the module's docstring."""
    blocks, rounds = (4, 200) if quick else (12, 500)
    wakes: list[int] = []
    peers: dict[str, Callable[[], AbstractContextManager[Trip]]] = {
        "outfeed": lambda: outfeed(wakes),
        "outfeed, spinning": lambda: outfeed([], LONGEST_SPIN_S),
        "multiprocessing.Pipe": pipe,
        "pyzmq": pyzmq,
    }
    times: dict[str, list[float]] = {impl: [] for impl in ("C futex", *peers)}
    with tempfile.TemporaryDirectory(prefix="outfeed-bench-") as folder:
        futex = _futex(folder)
        for _ in range(blocks):
            times["C futex"] += futex(rounds)
            for impl, start in peers.items():
                with start() as trip:
                    times[impl] += _timed(trip, rounds)
    quantiles = {impl: statistics.quantiles(found, n=100) for impl, found in times.items()}
    results = [
        {"case": f"round trip p{percent}", "impl": impl, "value": round(found[percent - 1], 2), "unit": "us"}
        for percent in (50, 99)
        for impl, found in quantiles.items()
    ]
    ours = quantiles["outfeed"][49]
    ratios = {
        "vs_c_futex_p50": ours / quantiles["C futex"][49],
        "pyzmq_over_outfeed_p50": quantiles["pyzmq"][49] / ours,
        "pipe_over_outfeed_p50": quantiles["multiprocessing.Pipe"][49] / ours,
        "wakes_per_round": sum(wakes) / (blocks * rounds),
    }
    return {
        "bench": "wake",
        "results": results,
        "ratios": {name: round(value, 3) for name, value in ratios.items()},
    }
