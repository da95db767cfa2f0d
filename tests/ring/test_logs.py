"""Log lines: one per fact, readable by machines, and no more than one a second of a repeated fault."""

import io
import json
import logging
import shlex
import threading
from collections.abc import Callable, Iterator

import pytest
from outfeed.ring import logs
from outfeed.ring.logs import MAX_KINDS, MAX_VALUE, LineFormatter, OncePerSecond
from outfeed.ring.route import make_route


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Log:
    """A logger of its own whose lines can be looked at."""

    def __init__(self) -> None:
        self.stream = io.StringIO()
        self.clock = Clock()
        target = logging.StreamHandler(self.stream)
        target.setFormatter(LineFormatter("shard0"))
        self.handler = OncePerSecond(target, clock=self.clock)
        self.log = logging.Logger("outfeed.test", logging.INFO)
        self.log.addHandler(self.handler)

    def lines(self) -> list[dict[str, str]]:
        lines = self.stream.getvalue().splitlines()
        self.stream.seek(0)
        self.stream.truncate()
        return [parse(line) for line in lines]


def parse(line: str) -> dict[str, str]:
    fields = {}
    while line:
        key, _, rest = line.partition("=")
        if rest.startswith('"'):
            value, end = json.JSONDecoder().raw_decode(rest)
            line = rest[end:].removeprefix(" ")
        else:
            value, _, line = rest.partition(" ")
        fields[key] = value
    return fields


@pytest.fixture
def log() -> Log:
    return Log()


def test_a_line_says_when_who_what_and_whose(log: Log) -> None:
    log.log.info("request %s is late", "x y", extra={"rid": "x y", "route": make_route(1, 2, 3, 4)})
    (line,) = log.lines()
    assert line["time"].endswith("Z")
    assert (line["process"], line["level"], line["logger"]) == ("shard0", "info", "outfeed.test")
    assert int(line["pid"]) > 0
    assert (line["event"], line["rid"], line["route"]) == ("request x y is late", "x y", "r1/s2/3#4")


def test_a_route_in_the_message_is_found(log: Log) -> None:
    log.log.error("gap in r0/s1/42#7: 3 tokens")
    (line,) = log.lines()
    assert line["route"] == "r0/s1/42#7"
    assert "rid" not in line


def test_nothing_a_client_chose_ends_the_line_or_steers_a_terminal(log: Log) -> None:
    rid = 'a"b\\\n\r\x1b[31m\x7f\x9b\u2028\u202e\U000e0001=日本'
    log.log.error("%s", rid, extra={"rid": rid})
    written = log.stream.getvalue()
    assert written.count("\n") == 1
    assert written.rstrip("\n").isprintable()
    assert "日本" in written
    (line,) = log.lines()
    assert line["rid"] == line["event"] == rid


def test_a_traceback_stays_on_the_line(log: Log) -> None:
    try:
        raise ValueError("no")
    except ValueError:
        log.log.exception("it failed")
    (line,) = log.lines()
    assert line["trace"].startswith("Traceback")
    assert line["trace"].endswith("ValueError: no")


def test_a_huge_value_is_cut_and_says_so(log: Log) -> None:
    log.log.info("x" * 100_000)
    (line,) = log.lines()
    assert len(line["event"]) < MAX_VALUE + 50
    assert line["event"].endswith("…(95904 more)")


def test_a_repeated_fault_costs_a_line_a_second(log: Log) -> None:
    for number in range(1000):
        log.log.error("dropped frame %d", number)
    assert [line["event"] for line in log.lines()] == ["dropped frame 0"]
    log.clock.now += 1.0
    for number in range(1000, 2000):
        log.log.error("dropped frame %d", number)
    (kept,) = log.lines()
    assert (kept["event"], kept["suppressed"]) == ("dropped frame 999", "998")
    log.handler.flush()
    assert [(line["event"], line["suppressed"]) for line in log.lines()] == [("dropped frame 1999", "999")]
    log.handler.flush()
    assert log.lines() == []


def test_the_last_of_a_kind_is_written_when_its_second_is_over_though_nothing_more_is_said(
    root: logging.Logger,
) -> None:
    clock, stream = Clock(), io.StringIO()
    limiter = OncePerSecond(logging.StreamHandler(stream), clock=clock)
    root.addHandler(limiter)
    for shard in range(2):
        logging.getLogger("outfeed.x").warning("shard %d was killed", shard)
    clock.now += 0.9
    logs.due()
    assert stream.getvalue() == "shard 0 was killed\n"
    clock.now += 0.1
    logs.due()
    assert stream.getvalue() == "shard 0 was killed\nshard 1 was killed\n"
    logs.due()
    assert stream.getvalue().count("\n") == 2


def test_a_line_that_stands_for_itself_alone_has_none_suppressed(log: Log) -> None:
    for number in range(2):
        log.log.error("dropped frame %d", number)
    log.handler.flush()
    assert [(line["event"], line.get("suppressed")) for line in log.lines()] == [
        ("dropped frame 0", None),
        ("dropped frame 1", None),
    ]


def test_kinds_do_not_hold_each_other_back(log: Log) -> None:
    for _ in range(3):
        log.log.warning("full")
        log.log.error("corrupt")
        log.log.info("ready")
    assert [line["event"] for line in log.lines()] == ["full", "corrupt", "ready", "ready", "ready"]
    log.clock.now += 1.0
    log.log.info("what was kept back comes before me")
    assert [(line["event"], line.get("suppressed")) for line in log.lines()] == [
        ("full", "1"),
        ("corrupt", "1"),
        ("what was kept back comes before me", None),
    ]


def test_a_fault_that_comes_now_and_then_is_never_held_back(log: Log) -> None:
    for _ in range(5):
        log.log.error("now and then")
        log.clock.now += 1.5
    assert [line.get("suppressed") for line in log.lines()] == [None] * 5


def test_the_table_of_kinds_is_bounded_and_loses_no_count(log: Log) -> None:
    for kind in range(MAX_KINDS * 3):
        for _ in range(2):
            log.log.error(f"kind {kind}")
    log.handler.flush()
    assert len(log.lines()) == MAX_KINDS * 6


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield root
    for handler in list(root.handlers):
        if handler not in handlers:
            root.removeHandler(handler)
    root.setLevel(level)


def test_the_kind_that_was_silent_longest_is_forgotten_first(log: Log) -> None:
    for kind in range(MAX_KINDS - 1):
        log.log.error(f"kind {kind}")
    log.clock.now += 1.0
    for event in ("kind 0", "the last that fits", "one more"):
        log.log.error(event)
    log.lines()
    log.log.error("kind 0")
    assert log.lines() == [], "it is remembered, and so held back"


def test_what_is_written_when_its_time_has_come_lets_other_threads_log(log: Log) -> None:
    for call in (log.handler.due, log.handler.flush):
        call()
        other = threading.Thread(target=log.log.warning, args=("from another",), daemon=True)
        other.start()
        other.join(30)
        assert not other.is_alive()


class LogsAtItsEnd:
    def __init__(self, log: logging.Logger) -> None:
        self.log = log

    def __del__(self) -> None:
        self.log.warning("a task was never looked at")


@pytest.mark.parametrize("way", ["due", "flush", "log"])
def test_what_a_garbage_collection_logs_while_a_line_is_written_is_one_more_line(
    log: Log, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """A collection may come with any line of Python's, and a finalizer may log what was never said before."""
    left = [LogsAtItsEnd(log.log)]
    handle = log.handler._target.handle

    def collected(record: logging.LogRecord) -> bool:
        left.clear()
        return handle(record)

    for _ in range(2):
        log.log.error("a fault")
        log.log.error("another fault")
    log.lines()
    log.clock.now += 1.0
    monkeypatch.setattr(log.handler._target, "handle", collected)
    calls: dict[str, Callable[[], None]] = {
        "due": log.handler.due,
        "flush": log.handler.flush,
        "log": lambda: log.log.info("a fact"),
    }
    calls[way]()
    said = [line["event"] for line in log.lines()]
    more = ["a fact"] if way == "log" else []
    assert sorted(said) == sorted(["a task was never looked at", "a fault", "another fault", *more])


def test_starting_again_renames_the_process_and_doubles_nothing(root: logging.Logger) -> None:
    stream = io.StringIO()
    root.setLevel(logging.WARNING)  # as Python has it
    logs.start("launcher", stream=stream)
    logs.start("shard3", stream=stream)
    logging.getLogger("outfeed.x").info("once")
    logging.getLogger("outfeed.x").debug("never")
    (line,) = stream.getvalue().splitlines()
    assert {"process=shard3", "level=info", "event=once"} <= set(shlex.split(line))
