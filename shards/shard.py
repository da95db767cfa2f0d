"""A shard process, from its instance's name to its end: opens what it needs, runs the loop, says how it is.

A new shard takes its predecessor's place: the same row on the board, cursors where the dead one left them,
the egress lanes it wrote. Must not know how a step is decoded.
"""

import logging
import signal
import time
from contextlib import ExitStack, suppress
from types import FrameType

from ..ring import logs
from ..ring.board import BoardRow, Role, State
from ..ring.doorbell import Doorbell
from ..ring.instance import Instance
from ..ring.names import segment_name
from ..ring.owner import Owner
from ..ring.writer import LaneWriter
from .decoder import Decoder
from .errors import Stopped
from .loop import Shard
from .table import TokenTable

log = logging.getLogger(__name__)

# Each turn beats, the board hears of it no more often than this.
BEAT_EVERY_NS = 5_000_000
# Counters on the board are for people: a look now and then is enough.
REPORT_EVERY_NS = 50_000_000
# How often to look whether the launcher still runs; the kernel kills a shard whose parent died at once.
CHECK_EVERY_NS = 200_000_000


def run_shard(instance: str, shard: int) -> None:
    """Be shard `shard` of a running instance, until it ends or this process is told to (SIGTERM).

    Raises SystemExit when it cannot: there is no such instance, say, or its token table is unreadable, or a
    live process is that shard already. The log says why.
    """
    logs.start(f"shard{shard}")
    try:
        _be_shard(instance, shard)
    except Exception as error:
        log.exception("shard %d cannot go on: %s", shard, error)
        raise SystemExit(1) from error


def _be_shard(instance: str, shard: int) -> None:
    opened = Instance.attach(instance)
    row = opened.board.row(Role.SHARD, shard)
    row.claim(State.STARTING)
    with Doorbell.create(opened.bell(Role.SHARD, shard)) as bell:
        try:
            _run(opened, shard, row, bell)
        finally:
            row.state = State.STOPPED
            opened.close()


def _run(opened: Instance, shard: int, row: BoardRow, bell: Doorbell) -> None:
    table = TokenTable.attach(segment_name(opened.name, "tokens"))
    decoder = Decoder(table, readers=opened.config.readers, beat=row.beat)
    row.put("table", 0 if table.fallback else 1)
    life = _Life(opened, row)
    with ExitStack() as lanes, opened.control() as control, opened.step() as steps:

        def lane_to(reader: int) -> LaneWriter | None:
            """Claim the lane to a reader, when its first row comes."""
            if reader >= opened.config.readers:
                return None
            return lanes.enter_context(opened.egress(reader).writer(shard))

        loop = Shard(
            shard,
            decoder,
            control.consumer(shard, bell),
            steps.consumer(shard, bell),
            lane_to,
            lives=life.lives,
            damaged=lambda: row.count("bad_frames"),
            beat=lambda: life.beat(loop),
            stopping=life.stopping,
            restore_limit_s=opened.config.heartbeat_limit_s,
        )
        signal.signal(signal.SIGTERM, life.stop)
        with suppress(Stopped):  # told to end while it took over: no fault
            if row.epoch:
                loop.take_over(_live_readers(opened))
            row.state = State.RUNNING
            loop.run()
        life.report(loop)


def _live_readers(opened: Instance) -> list[int]:
    return [row.index for row in opened.board.rows(Role.READER) if row.serving]


class _Life:
    """Heartbeat, counters, and whether to go on."""

    def __init__(self, opened: Instance, row: BoardRow) -> None:
        self._opened = opened
        self._row = row
        self._told = False
        self._beaten = self._checked = self._reported = 0
        self._gone = False
        self._readers = opened.board.rows(Role.READER)
        self._owners: dict[int, Owner | None] = {}  # of the readers that live, and when they did
        self._missed: set[int] = set()  # taken for dead since then: frames for them were dropped

    def stop(self, signum: int, frame: FrameType | None) -> None:
        self._told = True

    def beat(self, loop: Shard) -> None:
        now = time.monotonic_ns()
        if now - self._beaten < BEAT_EVERY_NS:
            return
        self._beaten = now
        self._row.beat()
        logs.due()
        if now - self._reported > REPORT_EVERY_NS:
            self.report(loop)
        if now - self._checked > CHECK_EVERY_NS:
            self._checked = now
            self._gone = not self._opened.alive
            self._look_at_readers(loop)
            loop.try_lanes()

    def lives(self, reader: int) -> bool:
        """Whether a reader's process lives, as the board says; when not, what is for it may be dropped."""
        lives = self._readers[reader].serving
        if not lives:
            self._missed.add(reader)
        return lives

    def _look_at_readers(self, loop: Shard) -> None:
        """Forget what the dead had. One that was taken for dead and is not is asked for all it has."""
        for row in self._readers:
            reader, owner = row.index, row.owner
            if owner is not None and not row.alive:
                self._missed.add(reader)
                loop.forget_reader(reader)
            elif owner is not None and row.serving:
                if reader in self._missed and owner == self._owners.get(reader):
                    loop.doubt(reader)
                self._missed.discard(reader)
                self._owners[reader] = owner

    def stopping(self) -> bool:
        return self._told or self._gone

    def report(self, loop: Shard) -> None:
        """Put the counters on the board."""
        self._reported = time.monotonic_ns()
        seen, decoded, put = loop.statistics, loop.decoder.statistics, self._row.put
        put("frames", seen.steps + seen.controls)
        put("rows", decoded.rows)
        put("tokens", decoded.tokens)
        put("live", loop.decoder.live)
        put("errors", seen.errors)
        put("ended", decoded.ended)
        put("stopped", decoded.stopped)
        put("stale_rows", decoded.stale_rows)
        put("doubled_rows", decoded.doubled)
        put("full", seen.waits)
        put("wakes", seen.wakes)
        put("corrupt_lanes", seen.corrupt_lanes)
        put("no_reader", seen.no_reader)
        put("cut_off", sum(1 << reader for reader in loop.cut_off))
