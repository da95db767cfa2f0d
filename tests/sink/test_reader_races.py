"""The reader beside other threads: those that register at any moment, those that read what comes."""

import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from outfeed.ring import CorruptLane
from outfeed.ring.route import make_route
from outfeed.sink import Done, Error, Frame, SinkSource, open_sink

from tests.finalizer import collected

from .front import END, Front, row, step, waiting

FIRST, MORE = 3000, 30_000


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads switched as often as can be."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def lose_a_lane(front: Front) -> None:
    """Find the lane of a shard corrupt that has no request here: all live ones are gone through for it."""

    def read(limit: int = 256, upto: list[int] | None = None) -> list[tuple[int, int, memoryview]]:
        raise CorruptLane("egress0", 5, 128)

    front.egress.read = read  # type: ignore[method-assign]
    front.reader.drain()


def fail_all(front: Front) -> None:
    front.reader.fail(Error(503, "gone", "the scheduler is gone"))
    front.reader.drain()


@pytest.mark.parametrize(
    "walk",
    [
        lose_a_lane,
        fail_all,
        lambda front: front.reader.progress(5),
        lambda front: front.reader.statistics(),
    ],
    ids=["a corrupt lane", "fail", "progress", "statistics"],
)
@pytest.mark.usefixtures("switching")
def test_what_goes_through_all_requests_may_meet_new_ones(walk: Callable[[Front], object]) -> None:
    front = Front()
    sources: list[SinkSource] = []
    enough = threading.Event()

    def register() -> None:
        for slot in range(FIRST + MORE):
            sender, source = open_sink(1 << 10)
            sources.append(source)
            front.reader.register(make_route(0, 0, slot, 1), f"r{slot}", sender)
            if slot == FIRST:
                enough.set()

    thread = threading.Thread(target=register, daemon=True)
    thread.start()
    assert enough.wait(60)
    while thread.is_alive():
        walk(front)
    thread.join()
    if walk is fail_all:
        fail_all(front)
        assert all(isinstance(waiting(source)[-1], Error) for source in sources)
    assert front.aborts == []


class Handlers:
    """Three requests in a reader, and the ids that their handlers have received."""

    def __init__(self) -> None:
        self.front = Front()
        self.routes = [make_route(0, 0, slot, 1) for slot in range(3)]
        self.sources = [self.front.open(route) for route in self.routes]
        self.ids: list[list[int]] = [[], [], []]
        self.tokens = 0

    def arrive(self) -> None:
        self.tokens += 1
        self.front.arrive(step(*[row(route, self.tokens - 1) for route in self.routes]))

    def take(self, at: int) -> None:
        if self.sources[at]._channel.lock.locked():
            return  # another thread would wait here
        for item in waiting(self.sources[at]):
            if isinstance(item, Frame):
                self.ids[at] += item.event.ids.tolist()

    def register(self) -> None:
        """Have the reader's table made anew, larger."""
        for slot in range(100, 300):
            self.front.open(make_route(0, 0, slot, 1))

    def finalize(self, what: str) -> None:
        match what.split():
            case ["take", at]:
                self.take(int(at))
            case ["close", at]:
                self.sources[int(at)].close()
            case ["register"]:
                self.register()
            case ["fail"]:
                fail_all(self.front)


FINALIZERS = ["take 0", "take 1", "take 2", "close 0", "close 1", "close 2", "register", "fail"]


@pytest.mark.parametrize("finalizer", FINALIZERS)
@pytest.mark.parametrize("waits", [0, 8, 20], ids=["nothing waits", "much waits", "some is folded"])
def test_a_finalizer_may_do_anything_in_the_middle_of_a_delivery(finalizer: str, waits: int) -> None:
    for at in range(1, 500):
        handlers = Handlers()
        for _ in range(waits):
            handlers.arrive()
        if not collected(handlers.arrive, at, partial(handlers.finalize, finalizer)):
            assert at > 3
            return
        for each in range(3):
            if finalizer == f"close {each}":
                continue
            handlers.take(each)
            received = len(handlers.ids[each])
            assert handlers.ids[each] == [*range(received)]
            assert received == waits + 1 or (finalizer == "fail" and received == waits)
    raise AssertionError("it does not end")


@pytest.mark.usefixtures("switching")
def test_reader_and_handlers_race_and_nothing_is_lost() -> None:
    """Takes, foldings and wake-ups meet everywhere."""
    rows, steps = 8, 1500
    front = Front()
    routes = [make_route(0, 0, slot, 1) for slot in range(rows)]
    sources = [front.open(route) for route in routes]
    received: list[list[int]] = [[] for _ in routes]

    def handle(slot: int) -> None:
        for item in sources[slot]:
            assert isinstance(item, Frame | Done)
            received[slot] += item.event.ids.tolist()

    bodies = [
        step(*[row(route, first, "x", END if first == steps - 1 else None) for route in routes])
        for first in range(steps)
    ]
    threads = [threading.Thread(target=handle, args=(slot,), daemon=True) for slot in range(rows)]
    for thread in threads:
        thread.start()
    for body in bodies:
        front.arrive(body)
    for thread in threads:
        thread.join(60)
    assert received == [list(range(steps))] * rows
    assert all(source.statistics().waiting_bytes == 0 for source in sources)
    assert sorted(front.ends) == sorted(routes)
