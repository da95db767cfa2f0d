"""Pushing a step in one C call: the same frame that ring/batch.py would make, and the columns it takes."""

import contextlib
import ctypes
import itertools
import os
import pickle
import signal
import threading
import time
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from outfeed.ring import CorruptLane, LaneWriter, Ring, RingClosed, RingFull, WriterBusy
from outfeed.ring.batch import decode_batch, encode_endings
from outfeed.ring.families import FAMILIES, Family, Kind
from outfeed.ring.family_makers import flat_family
from outfeed.ring.frames import Generate, Standing
from outfeed.ring.route import make_route
from outfeed.sidecar import FinishReason, SchedulerPort
from outfeed.sidecar import steps as steps_module
from outfeed.sidecar.rows import RowTable, address
from outfeed.sidecar.steps import StepWriter

from tests.waiting_thread import waiting_thread

from .conftest import Bench

SLOTS = 64
GENERATIONS = itertools.count(1)


@pytest.fixture
def port(bench: Bench) -> Iterator[SchedulerPort]:
    with SchedulerPort.attach(bench.name) as port:
        yield port


def receive(bench: Bench, port: SchedulerPort, rows: int) -> list[int]:
    """Let the port receive requests of 0, 1, 2 … prompt tokens; return their routes."""
    generation = next(GENERATIONS)
    routes = [make_route(0, slot % 2, slot, generation) for slot in range(rows)]
    bench.send(*(Generate(route, f"r{route}", bytes(4 * k), {}) for k, route in enumerate(routes)))
    assert sum(isinstance(message, Generate) for message in port.recv()) == rows
    return routes


REASONS = st.sampled_from(
    [FinishReason.stop("x" * 40), FinishReason.length(7), FinishReason({"type": "new", "深": [None, 1.5]})]
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=SLOTS),
    one_each=st.booleans(),
    ended=st.dictionaries(st.integers(0, SLOTS - 1), REASONS),
    data=st.data(),
)
def test_every_step_decodes_to_what_was_pushed(
    bench: Bench,
    port: SchedulerPort,
    counts: list[int],
    one_each: bool,
    ended: dict[int, FinishReason],
    data: st.DataObject,
) -> None:
    counts = [1] * len(counts) if one_each else counts
    ended = {row: why for row, why in ended.items() if row < len(counts)}
    routes = receive(bench, port, len(counts))
    ids = data.draw(st.lists(st.integers(0, 2**31 - 1), min_size=sum(counts), max_size=sum(counts)))
    for first in (np.zeros(len(counts), dtype=int), np.array(counts)):
        port.push_tokens(
            np.array(routes, "u8"),
            np.array(ids, "i4"),
            None if one_each else np.array(counts, "u4"),
            finishes=ended if first.any() else None,
        )
        ((_, _, body),) = bench.shard.read()
        step = decode_batch(body)
        assert step.routes.tolist() == routes
        assert step.first.tolist() == first.tolist()
        assert step.counts.tolist() == counts
        assert step.prompt_tokens.tolist() == list(range(len(counts)))
        assert step.ids.tolist() == ids
        assert dict(step.finishes) == (ended if first.any() else {})
        assert step.stamp_ns > 0
        bench.shard.release()


def unaligned(values: list[int], dtype: str) -> NDArray[Any]:
    """A column as it lies in a message that came over a socket."""
    return np.frombuffer(b"\0" + np.array(values, dtype).tobytes(), dtype, offset=1)


@pytest.mark.parametrize(
    ("routes", "ids", "counts"),
    [
        (lambda r: array("Q", r), lambda i: array("i", i), lambda c: array("I", c)),
        (
            lambda r: memoryview(array("L", r)),
            lambda i: memoryview(array("i", i)),
            lambda c: memoryview(array("I", c)),
        ),
        (lambda r: np.array(r, "<u8"), lambda i: np.array(i, "<i4"), lambda c: np.array(c, "<u4")),
        (lambda r: np.array(r, ">u8"), lambda i: np.array(i, ">i4"), lambda c: np.array(c, ">u4")),
        (lambda r: np.array(r, "u8"), lambda i: np.array(i, "i8"), lambda c: np.array(c, "i8")),
        (
            lambda r: np.repeat(np.array(r, "u8"), 2)[::2],
            lambda i: np.array(i, "i2"),
            lambda c: np.array(c, "u1"),
        ),
        (lambda r: (ctypes.c_uint64 * len(r))(*r), lambda i: (ctypes.c_int32 * len(i))(*i), tuple),
        (lambda r: unaligned(r, "u8"), lambda i: unaligned(i, "i4"), lambda c: unaligned(c, "u4")),
    ],
    ids=["array", "memoryview", "numpy", "big-endian", "i64", "narrow and strided", "ctypes", "unaligned"],
)
def test_columns_of_any_integer_type_carry_the_same_numbers(
    bench: Bench, port: SchedulerPort, routes: type, ids: type, counts: type
) -> None:
    a, b = receive(bench, port, 2)
    port.push_tokens(routes([b, a]), ids([5, 300, 7]), counts([2, 1]))
    ((_, _, body),) = bench.shard.read()
    step = decode_batch(body)
    assert (step.routes.tolist(), step.ids.tolist(), step.counts.tolist()) == ([b, a], [5, 300, 7], [2, 1])


def memoryviews(*columns: Any) -> tuple[memoryview, ...]:
    """Columns in a format (`<Q`) that goes into a lane as it is, though Python itself cannot index it."""
    types = ctypes.c_uint64, ctypes.c_int32, ctypes.c_uint32
    return tuple(memoryview((kind * len(of))(*of)) for kind, of in zip(types, columns, strict=True))


def test_a_step_that_was_handed_over_is_never_an_error(bench: Bench, port: SchedulerPort) -> None:
    a, b = receive(bench, port, 2)
    port.push_tokens(*memoryviews([b, a], [5, 300, 7], [2, 1]), finishes={1: FinishReason.length(1)})
    ((_, _, body),) = bench.shard.read()
    assert decode_batch(body).routes.tolist() == [b, a]
    assert [port.is_live(route) for route in (a, b)] == [False, True]


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        (([0, 1], [5, 6], [1, 1]), "row 0: .* was never received"),
        (([], [], []), "1 to .* rows, not 0"),
        (([1], [5], [1, 1]), "counts has 2 entries for 1 rows"),
        (([1], [5, -6], [2]), r"ids\[1\] is -6"),
        (([1], [5], [2]), "ids has 1 entries, the counts of 1 rows sum to 2"),
    ],
)
def test_a_refusal_can_say_why_whatever_it_was_given(
    bench: Bench, port: SchedulerPort, columns: tuple[list[int], ...], says: str
) -> None:
    (live,) = receive(bench, port, 1)
    routes, *others = columns
    with pytest.raises(ValueError, match=says):
        port.push_tokens(*memoryviews([live * route for route in routes], *others))


@pytest.mark.parametrize("other", range(4), ids=["all as they are", "routes", "ids", "counts"])
def test_what_was_pushed_belongs_to_its_caller_again(bench: Bench, port: SchedulerPort, other: int) -> None:
    """Whichever column is of another type than the C pass takes: all can grow once the push has returned."""
    (route,) = receive(bench, port, 1)
    codes = ["Q", "i", "I"]
    if other:
        codes[other - 1] = "q"
    columns = [array(code, [number]) for code, number in zip(codes, (route, 7, 1), strict=True)]
    for _ in range(2):
        port.push_tokens(*columns)
    for column in columns:
        column.append(0)


def test_columns_from_another_process_carry_families_too(bench: Bench, port: SchedulerPort) -> None:
    """multiprocessing hands arrays over pickled: same numbers, but a dtype that is another object."""
    a, b = receive(bench, port, 2)
    given = np.array([b, a], "u8"), np.array([5, 300, 7], "i4"), np.array([2, 1], "u4")
    routes, ids, counts = pickle.loads(pickle.dumps(given))
    assert ids.dtype is not given[1].dtype
    logprobs = flat_family([(1, [-0.5], [7])])
    for families in (None, {Kind.OUTPUT_LOGPROBS: logprobs}):
        port.push_tokens(routes, ids, counts, families=families)
        ((_, _, body),) = bench.shard.read()
        step = decode_batch(body)
        assert (step.routes.tolist(), step.ids.tolist(), step.counts.tolist()) == (
            [b, a],
            [5, 300, 7],
            [2, 1],
        )
        assert bool(step.families) == (families is not None)
        bench.shard.release()


@pytest.mark.parametrize(
    ("ids", "counts", "family"),
    [
        ([5, 6, 7, 8], [1, 2], flat_family([(1, [-0.5], [7])])),  # an id too many
        ([5, 6, 7], [1, 2], flat_family([(0, [-0.5, -1.0], [5, 6])])),  # row 0 has one token
        ([5, 6, 7], [1, 2], flat_family([(2, [-0.5], [5])])),  # there is no row 2
        ([5, 6], [2], flat_family([(1, [-0.5, -1.0], [5, 6])])),  # there is no count of row 1
    ],
)
def test_a_refused_step_with_families_counts_for_nothing(
    bench: Bench, port: SchedulerPort, ids: list[int], counts: list[int], family: Family
) -> None:
    routes = receive(bench, port, 2)
    port.push_tokens(routes, [1, 2])
    with pytest.raises(ValueError, match=r"tokens|row"):
        port.push_tokens(routes, ids, counts, families={Kind.OUTPUT_LOGPROBS: family})
    port.push_tokens(routes, [5, 6, 7], [1, 2])
    before, after = (decode_batch(body) for _, _, body in bench.shard.read())
    assert (before.first.tolist(), after.first.tolist()) == ([0, 0], [1, 1])


def test_a_second_thread_is_refused_and_disturbs_nothing(bench: Bench, port: SchedulerPort) -> None:
    """A push that waits for room holds the lane; another one meanwhile is told so."""
    (route,) = receive(bench, port, 1)
    ids, pushed = [0] * 1000, 0
    while True:
        try:
            port.push_tokens([route], ids, [1000])
        except RingFull:
            break
        pushed += 1
    waiting = threading.Thread(target=lambda: port.push_tokens([route], ids, [1000], timeout=60))
    waiting.start()
    refused = False
    while not refused:
        try:
            port.push_tokens([route], [1])
        except RingFull:
            continue  # the other thread has not begun to wait
        except WriterBusy:
            refused = True
    firsts = [int(decode_batch(body).first[0]) for _, _, body in bench.shard.read()]
    bench.shard.release()
    waiting.join()
    firsts += [int(decode_batch(body).first[0]) for _, _, body in bench.shard.read()]
    assert firsts == [1000 * k for k in range(pushed + 1)]


@pytest.fixture
def lane() -> Iterator[LaneWriter]:
    name = f"outfeed-t-steps-{os.getpid()}.step"
    with Ring.create(name, lanes=1, consumers=1, capacity=1 << 16) as ring:
        yield ring.writer(0)
        ring.unlink()


def live_row() -> tuple[RowTable, NDArray[np.uint64]]:
    """A table with one live request, and a step's column of it."""
    table, route = RowTable(1, SLOTS), make_route(0, 0, 1, 1)
    table.open(route, 3)
    return table, np.array([route], np.uint64)


def test_a_push_in_the_middle_of_another_threads_is_told_so(lane: LaneWriter) -> None:
    """Once a step lies in its reservation, the other thread fills it without the GIL."""
    table, routes = live_row()
    steps = StepWriter(lane, table)
    ids, endings, seen = np.zeros(1, np.int32), encode_endings(()), FAMILIES * [None]
    lane.reserve(100)
    with pytest.raises(WriterBusy):
        steps.push(routes, ids, None, endings, 0.0)
    with pytest.raises(WriterBusy):
        steps.push_with_families(routes, ids, None, endings, seen, 0.0)
    assert table.pushed == (0, 0, 0)


def test_a_step_that_a_quarantine_cuts_off_counts_for_nothing(
    lane: LaneWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lane is found corrupt after the step was written into it and before it is published."""
    table, routes = live_row()
    step_type = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    real = step_type(address("outfeed_step"))

    def step_then_quarantine(rows: int, step: int, out: int) -> int:
        code = int(real(rows, step, out))
        lane.native.memory[4096 + 136 : 4096 + 144] = (33).to_bytes(8, "little")
        return code

    callback = step_type(step_then_quarantine)
    cut_off = ctypes.cast(callback, ctypes.c_void_p).value
    monkeypatch.setattr(
        steps_module, "address", lambda name: cut_off if name == "outfeed_step" else address(name)
    )
    ended = make_route(0, 0, 2, 1)
    table.open(ended, 0)
    table.end(ended)
    both, counts = np.append(routes, np.uint64(ended)), np.array([5, 0], np.uint32)
    steps = StepWriter(lane, table)
    for _ in range(2):  # it stays the corrupt lane that it is
        with pytest.raises(CorruptLane, match="position 32"):
            steps.push(both, np.zeros(5, np.int32), counts, encode_endings(()), 0.0)
    assert (table.pushed, table.stale_rows) == ((0, 0, 0), 0)
    assert table.standings(1, 1)[0] == [(int(routes[0]), 0, Standing.RUNNING)]


@pytest.mark.parametrize(
    "more",
    [
        (),
        (b"\x90",),
        ("\x90", 0.0),
        (b"\x90", 0.0, b"\x90"),
        (b"\x90", 0.0, None, b""),
        (b"\x90", 0.0, b"\x90", None),
        (b"\x90", 0.0, b"\x90", b"", b""),
        (b"\x90", None),
    ],
)
def test_a_push_takes_what_it_is_made_for(lane: LaneWriter, more: tuple[Any, ...]) -> None:
    table, routes = live_row()
    with pytest.raises(TypeError):
        StepWriter(lane, table).push(routes, np.zeros(1, np.int32), None, *more)
    assert table.pushed == (0, 0, 0)


def test_a_closed_port_refuses_to_push(bench: Bench, port: SchedulerPort) -> None:
    (route,) = receive(bench, port, 1)
    port.close()
    with pytest.raises(RingClosed):
        port.push_tokens([route], [1])


def test_signals_make_a_wait_for_room_neither_shorter_nor_longer(bench: Bench, port: SchedulerPort) -> None:
    (route,) = receive(bench, port, 1)
    with contextlib.suppress(RingFull):
        while True:
            port.push_tokens([route], [1] * 1000, [1000])
    signals: list[int] = []

    def handle(number: int, frame: object) -> None:
        signals.append(number)
        if len(signals) == 500:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if len(signals) == 3:
            bench.shard.read()
            bench.shard.release()

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    try:
        port.push_tokens([route], [1] * 1000, [1000], timeout=60)
        with contextlib.suppress(RingFull):  # nor do signals make it longer: they would come for ever
            while True:
                port.push_tokens([route], [1] * 1000, [1000], timeout=0.1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert 3 <= len(signals) < 500


def test_a_handler_that_raises_ends_a_wait_for_room(bench: Bench, port: SchedulerPort) -> None:
    """And nothing of the step was handed over: the same can be pushed again."""
    (route,) = receive(bench, port, 1)
    pushed = 0
    with contextlib.suppress(RingFull):
        while True:
            port.push_tokens([route], [1] * 1000, [1000])
            pushed += 1

    def leave(number: int, frame: object) -> None:
        raise InterruptedError

    def push() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        port.push_tokens([route], [1] * 1000, [1000], timeout=60)

    before = signal.signal(signal.SIGALRM, leave)
    try:
        with pytest.raises(InterruptedError):
            push()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(bench.shard.read()) == pushed
    bench.shard.release()
    port.push_tokens([route], [1])
    ((_, _, body),) = bench.shard.read()
    assert decode_batch(body).first.tolist() == [1000 * pushed]


def test_a_push_without_room_is_one_moment_of_fullness(bench: Bench, port: SchedulerPort) -> None:
    """Whether it gives up at once or waits first: the lane tells how often somebody met it full."""
    (route,) = receive(bench, port, 1)
    with bench.instance.step() as ring:
        with contextlib.suppress(RingFull):
            while True:
                port.push_tokens([route], [1] * 1000, [1000])
        for met in range(2, 6):
            with pytest.raises(RingFull, match=r"no room for 4\d\d\d bytes"):
                port.push_tokens([route], [1] * 1000, [1000], timeout=0.001 * (met % 2))
            assert ring.stats().lanes[0].full_events == met


@pytest.mark.parametrize("timeout", [-1.0, float("nan"), 1e9])
def test_a_timeout_that_is_none_is_refused(bench: Bench, port: SchedulerPort, timeout: float) -> None:
    (route,) = receive(bench, port, 1)
    with pytest.raises(ValueError, match="timeout"):
        port.push_tokens(np.array([route], "u8"), np.array([1], "i4"), timeout=timeout)


def test_a_step_of_too_many_rows_is_refused(bench: Bench, port: SchedulerPort) -> None:
    (route,) = receive(bench, port, 1)
    with pytest.raises(ValueError, match="1 to 65536 rows, not 65537"):
        port.push_tokens(np.full(65537, route, "u8"), np.zeros(65537, "i4"))


@pytest.mark.parametrize("route", [-1, 1 << 64, 0])
def test_a_route_that_is_none_cannot_be_answered(port: SchedulerPort, route: int) -> None:
    with pytest.raises(ValueError, match="never received"):
        port.push_error(route, 500, "x", "y")


@pytest.mark.parametrize("place", [*range(17), 99])
@pytest.mark.parametrize("families", [None, {Kind.OUTPUT_LOGPROBS: flat_family([(0, [-0.5], [7])])}])
def test_a_negative_id_is_refused_wherever_it_stands(
    bench: Bench, port: SchedulerPort, place: int, families: object
) -> None:
    """-1 is what many an engine has in the place of a draft token that was not accepted."""
    (route,) = receive(bench, port, 1)
    ids = np.arange(100, dtype=np.int32)
    ids[place] = -1
    column, counts = np.array([route, route], "u8"), np.array([1, 99], "u4")
    with pytest.raises(ValueError, match=rf"ids\[{place}\] is -1: .* leave out what is none"):
        port.push_tokens(column, ids, counts, families=families)  # type: ignore[arg-type]
    assert bench.shard.read() == []
    port.push_tokens(column, np.abs(ids), counts)
    ((_, _, body),) = bench.shard.read()
    assert decode_batch(body).first.tolist() == [0, 1]


def test_a_push_that_finds_room_lets_no_other_thread_in_between(bench: Bench, port: SchedulerPort) -> None:
    """Who gives the GIL up for a moment may get it back a switch interval later: longer than many steps."""
    routes, ids = np.array(receive(bench, port, 1), dtype=np.uint64), np.zeros(1, dtype=np.int32)
    with waiting_thread() as turns:
        for _ in range(100):
            time.sleep(0)
            before = turns()
            for _ in range(250):
                port.push_tokens(routes, ids, timeout=60)
            assert turns() == before
            bench.shard.read()
            bench.shard.release()
