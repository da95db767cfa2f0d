"""What every process says, in one shape: one logfmt line per fact, and a repeated fault once a second.

    time=2026-11-29T13:22:14.123Z process=shard0 pid=4242 level=error logger=outfeed.shards.loop
        event="a step names no request of this shard" route=r0/s1/5#1        (on one line)

A process calls `start` once; from then on the standard `logging` calls of all rooms come out so. `event` is
the message; `rid` and `route` come from the call's `extra`, or a route from the message itself. A traceback
becomes one escaped field, `trace`. Values with spaces, quotes or line ends are JSON strings.

A fault is a message of level WARNING or above; its kind is the logger and the message before its arguments
are filled in. The first of a kind is written at once; of those that follow within the second the last is
written when the second is over, `suppressed` saying how many others it stands for. "When" is the next call
of `due`, which goes with a process's heartbeat, the next log call, or the process's end: there is no timer. A
fault that comes 10,000 times a second costs a line a second.

Must not know what is logged.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TextIO

from .route import format_route

MAX_VALUE: Final = 4096
"""Characters of one value; the rest is cut, and the cut is shown."""
MAX_KINDS: Final = 256
"""Fault kinds remembered at a time; the longest silent is forgotten first."""
EVERY_S: Final = 1.0

_ROUTE: Final = re.compile(r"\br\d+/s\d+/\d+#\d+")
_PLAIN: Final = re.compile(r"[!#-<>-\[\]-~]+")


class LineFormatter(logging.Formatter):
    """One record, one line."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        event = record.getMessage()
        second = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields: dict[str, object] = {
            "time": f"{second}.{int(record.msecs):03d}Z",
            "process": self._process,
            "pid": record.process,
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": event,
            "rid": getattr(record, "rid", None),
            "route": _route(getattr(record, "route", None), event),
            "suppressed": getattr(record, "suppressed", None),
        }
        if record.exc_info:
            fields["trace"] = self.formatException(record.exc_info)
        return " ".join(f"{key}={_value(value)}" for key, value in fields.items() if value is not None)


@dataclass(slots=True)
class _Kind:
    """One kind of fault: its last line's time, and what was kept back since."""

    written: float
    suppressed: int = 0
    last: logging.LogRecord | None = None


class OncePerSecond(logging.Handler):
    """Passes records on to `target`, faults of one kind once every `every_s` seconds."""

    def __init__(
        self,
        target: logging.Handler,
        every_s: float = EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._target = target
        self._every_s = every_s
        self._clock = clock
        self._kinds: dict[tuple[str, str], _Kind] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record, or keep it back. What was kept back for a second is written first."""
        self.due()
        now = self._clock()
        if record.levelno < logging.WARNING:
            self._target.handle(record)
            return
        key = (record.name, str(record.msg))
        kind = self._kinds.get(key)
        if kind is not None and now - kind.written < self._every_s:
            kind.suppressed += 1
            kind.last = record
            return
        self._kinds.pop(key, None)  # back in at the end: the first in the table is the longest silent
        if len(self._kinds) >= MAX_KINDS:
            oldest = next(iter(self._kinds))
            self._write_kept(self._kinds.pop(oldest))
        self._kinds[key] = _Kind(now)
        self._target.handle(record)

    def flush(self) -> None:
        """Write what is kept back; `logging` does this at the process's end."""
        self.acquire()
        try:
            for kind in list(self._kinds.values()):
                self._write_kept(kind)
            self._target.flush()
        finally:
            self.release()

    def due(self) -> None:
        """Write what was kept back for a second."""
        self.acquire()
        try:
            now = self._clock()
            for kind in list(self._kinds.values()):  # a finalizer that logs may run in here and add one
                if kind.suppressed and now - kind.written >= self._every_s:
                    kind.written = now
                    self._write_kept(kind)
        finally:
            self.release()

    def _write_kept(self, kind: _Kind) -> None:
        """Write the last record that was kept back, with the number of the others."""
        if kind.last is None:
            return
        kind.last.suppressed = kind.suppressed - 1 or None
        record, kind.last, kind.suppressed = kind.last, None, 0
        self._target.handle(record)


def start(process: str, level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Have this process log as `process` (e.g. `shard0`), to stderr unless `stream` is given.

    Again in a forked child, or to rename: the latest call holds.
    """
    root = logging.getLogger()
    for handler in _limiters():
        root.removeHandler(handler)
        handler.close()
    target = logging.StreamHandler(stream or sys.stderr)
    target.setFormatter(LineFormatter(process))
    limiter = OncePerSecond(target)
    root.addHandler(limiter)
    root.setLevel(level)


def due() -> None:
    """Write the faults that were kept back for a second. Call it now and then: a heartbeat does."""
    for handler in _limiters():
        handler.due()


def _limiters() -> list[OncePerSecond]:
    return [handler for handler in logging.getLogger().handlers if isinstance(handler, OncePerSecond)]


def _route(given: object, event: str) -> object:
    if given is None:
        found = _ROUTE.search(event)
        return found.group() if found else None
    return format_route(given) if isinstance(given, int) else given


def _value(value: object) -> str:
    text = str(value)
    if len(text) > MAX_VALUE:
        text = f"{text[:MAX_VALUE]}…({len(text) - MAX_VALUE} more)"
    if _PLAIN.fullmatch(text):
        return text
    # What a client chose (a rid) must neither end the line nor steer a terminal.
    quoted = json.dumps(text, ensure_ascii=False)
    return quoted if quoted.isprintable() else "".join(map(_printable, quoted))


def _printable(char: str) -> str:
    return char if char.isprintable() else json.dumps(char)[1:-1]
