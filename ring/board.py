"""The board: what an instance is, and how each of its processes is doing.

One small segment per instance. The launcher writes the configuration once, before anyone else can see
the segment; after that each process writes only its own row, so nothing here needs a lock. Whoever looks
at an instance (another process of it, `top`, a health check) reads the rows and disturbs nobody.

    0       header: magic, version, rows, config length │ launcher's owner word │ phase │ what pids count in
    4096    configuration, JSON
    65536   rows, 256 bytes each: launcher, ranks, shards, readers

    row     u64 owner │ u64 heartbeat (CLOCK_MONOTONIC ns) │ u64 state │ u64 epoch │ u64 counters[28]

Every u64 is aligned and written with one store, so a reader sees the old or the new value, never a mix.
Any word may have been scribbled over: what is added to one wraps at 2^64, what is read is only a number.
The board must not know what a row's counters mean to its owner beyond their names.
"""

from __future__ import annotations

import mmap
import struct
import time
from enum import IntEnum, StrEnum
from typing import Annotated, Any, Final

import msgspec

from .errors import NotARing, OtherNamespace, WrongVersion
from .names import check_instance, segment_name
from .owner import Owner, space
from .segment import Segment, attach, create, unlink

MAGIC: Final = b"OUTFEEDB"
VERSION: Final = 2
MAX_EACH: Final = 64
"""Shards, readers and ranks of an instance, each at most; fewer than a route could name."""
MIN_LANE_BYTES: Final = 1 << 12
MAX_LANE_BYTES: Final = 1 << 30
MAX_HEARTBEAT_LIMIT_S: Final = 3600

_HEADER: Final = struct.Struct("<8sIII")
_LAUNCHER_WORD: Final = 4  # u64 index of the launcher's owner word in the header
_PHASE_WORD: Final = 5
_SPACE_WORD: Final = 6
_CONFIG_AT: Final = 4096
_ROWS_AT: Final = 65536
_ROW_WORDS: Final = 32
_COUNTERS_AT: Final = 4
_WORD: Final = (1 << 64) - 1

COUNTERS: Final = (
    "frames",  # frames handled
    "rows",  # rows handled
    "tokens",  # tokens handled
    "live",  # requests alive right now
    "ended",  # requests ended
    "aborts",  # requests aborted
    "errors",  # requests ended with an error
    "stale_rows",  # rows of requests that are not live in this process: ended, or never there
    "doubled_rows",  # rows seen before, dropped
    "bad_frames",  # frames refused by their decoder
    "full",  # times a full lane made this process wait
    "wakes",  # times this process woke up
    "table",  # shard: 1 when the token table decodes, 0 when the fallback does
    "stopped",  # shard: requests it ended at a stop it found; their reader aborts them
    "corrupt_lanes",  # shard: lanes it found corrupt and goes on without
    "no_reader",  # shard: frames for a reader that is not there, dropped
    "cut_off",  # shard: readers that it cannot reach, bit r for reader r
)


class Role(StrEnum):
    """What a process of an instance is."""

    LAUNCHER = "launcher"
    SCHEDULER = "scheduler"
    SHARD = "shard"
    READER = "reader"


class Phase(IntEnum):
    """Where an instance is in its life."""

    STARTING = 1
    RUNNING = 2
    DRAINING = 3
    STOPPING = 4


class State(IntEnum):
    """Where one process is in its life."""

    ABSENT = 0
    STARTING = 1
    RUNNING = 2
    STOPPED = 3
    FAILED = 4


_Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_EACH)]
_Bytes = Annotated[int, msgspec.Meta(ge=MIN_LANE_BYTES, le=MAX_LANE_BYTES)]


class InstanceConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=False, kw_only=True):
    """What an instance was started with. Sizes are bytes per lane, powers of two.

    What its gateways check requests against, and how its shards stop, is here too, so that every process of
    the instance, whenever it comes, does the same.
    """

    instance: str
    tokenizer: str
    shards: _Count = 2
    readers: _Count = 1
    ranks: _Count = 1
    slots: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 1 << 16
    context_length: Annotated[int, msgspec.Meta(ge=1, le=1 << 31)] = 131_072
    served_model_name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)] = "outfeed"
    characters_per_token: Annotated[float, msgspec.Meta(ge=1, le=65_536)] = 8.0
    sampling_defaults: dict[str, Any] = {}
    detect_stops: bool = False
    request_bytes: _Bytes = 1 << 23
    control_bytes: _Bytes = 1 << 23
    step_bytes: _Bytes = 1 << 23
    egress_bytes: _Bytes = 1 << 23
    heartbeat_limit_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_HEARTBEAT_LIMIT_S)] = 5.0


class BoardRow:
    """One process's row. Its owner writes it; anyone may read it."""

    __slots__ = ("_base", "_mine", "_words", "index", "role")

    def __init__(self, words: memoryview, base: int, role: Role, index: int) -> None:
        self._words = words
        self._base = base
        self._mine = 0  # the owner word, once this process has claimed the row
        self.role = role
        self.index = index

    def claim(self, state: State = State.STARTING) -> None:
        """Make the row this process's own, with a fresh heartbeat and zeroed counters."""
        self._words[self._base + 1] = time.monotonic_ns()
        self._words[self._base + 2] = state
        for at in range(_COUNTERS_AT, _ROW_WORDS):
            self._words[self._base + at] = 0
        self._mine = self._words[self._base] = Owner.me().pack()

    def beat(self) -> None:
        """Say that the row's process is alive now.

        Who claimed it says so again, too: were that written over, everybody would take it for dead.
        """
        if self._mine:
            self._words[self._base] = self._mine
        self._words[self._base + 1] = time.monotonic_ns()

    @property
    def owner(self) -> Owner | None:
        """The process that claimed the row, or None if none ever did."""
        return Owner.unpack(self._words[self._base])

    @property
    def alive(self) -> bool:
        """Whether the process that claimed the row still runs."""
        owner = self.owner
        return owner is not None and owner.alive()

    @property
    def serving(self) -> bool:
        """Whether the process still runs and has not said that it stopped."""
        return self.state != State.STOPPED and self.alive

    def trouble(self, quiet_s: float = 10.0) -> str | None:
        """Say why the process cannot be counted on; None when it can.

        `quiet_s` seconds without a heartbeat count as trouble.
        """
        if self.owner is None or self.state == State.STOPPED:
            return "is not running"
        if not self.alive:
            return "has died"
        quiet = (time.monotonic_ns() - self.heartbeat_ns) / 1e9
        return f"has shown no sign of life for {quiet:.0f} s" if quiet > quiet_s else None

    @property
    def heartbeat_ns(self) -> int:
        """When the process last said it was alive, CLOCK_MONOTONIC nanoseconds."""
        return int(self._words[self._base + 1])

    @property
    def state(self) -> State:
        """Where the process is in its life; a value nobody defined reads as FAILED."""
        value = self._words[self._base + 2]
        return State(value) if value <= State.FAILED else State.FAILED

    @state.setter
    def state(self, state: State) -> None:
        self._words[self._base + 2] = state

    @property
    def epoch(self) -> int:
        """How many times the process in this row has been replaced."""
        return int(self._words[self._base + 3])

    def count_replacement(self) -> None:
        """Note that another process takes the place of the one in this row. The epoch is never 0 again."""
        self._words[self._base + 3] = (self.epoch + 1) & _WORD or 1

    def count(self, name: str, more: int = 1) -> None:
        """Add `more` to the counter `name` (one of COUNTERS)."""
        at = self._base + _COUNTERS_AT + COUNTERS.index(name)
        self._words[at] = (self._words[at] + more) & _WORD

    def put(self, name: str, value: int) -> None:
        """Set the counter `name` (one of COUNTERS) to `value`."""
        self._words[self._base + _COUNTERS_AT + COUNTERS.index(name)] = value & _WORD

    def get(self, name: str) -> int:
        """Read the counter `name` (one of COUNTERS)."""
        return int(self._words[self._base + _COUNTERS_AT + COUNTERS.index(name)])


class Board:
    """An instance's board, open in this process."""

    def __init__(self, segment: Segment, config: InstanceConfig) -> None:
        self._segment = segment
        self._words = memoryview(segment.memory).cast("Q")
        self.config = config

    @classmethod
    def create(cls, config: InstanceConfig) -> Board:
        """Make the board of a new instance; this process becomes its launcher.

        Raises:
            NoRoom: /dev/shm has too little room.
            FileExistsError: the instance has a board already.
            ValueError: the configuration has a value out of its limits: nobody could attach to it.
        """
        data = msgspec.json.encode(config)
        try:
            msgspec.json.decode(data, type=InstanceConfig)
        except msgspec.ValidationError as error:
            raise ValueError(f"instance {config.instance!r} cannot be: {error}") from None
        if len(data) > _ROWS_AT - _CONFIG_AT:
            raise ValueError(
                f"the configuration takes {len(data)} bytes, the board holds {_ROWS_AT - _CONFIG_AT}"
            )
        rows = _rows(config)

        def fill(memory: mmap.mmap) -> None:
            memory[: _HEADER.size] = _HEADER.pack(MAGIC, VERSION, rows, len(data))
            memory[_CONFIG_AT : _CONFIG_AT + len(data)] = data
            with memoryview(memory) as view, view.cast("Q") as words:
                words[_PHASE_WORD] = Phase.STARTING
                words[_LAUNCHER_WORD] = Owner.me().pack()
                words[_SPACE_WORD] = space()

        name = segment_name(config.instance, "board")
        return cls(create(name, _ROWS_AT + rows * _ROW_WORDS * 8, fill), config)

    @classmethod
    def attach(cls, instance: str) -> Board:
        """Open the board of a running instance.

        Raises:
            FileNotFoundError: no instance of that name is there.
            NotARing: the segment is there, but what is in it is no board.
            WrongVersion: it was made by another version of Outfeed.
            OtherNamespace: it was made in another pid namespace.
        """
        name = segment_name(check_instance(instance), "board")
        segment = attach(name)
        try:
            return cls(segment, _read_config(segment, name))
        except BaseException:
            segment.close()
            raise

    @property
    def launcher(self) -> Owner | None:
        """The process that started the instance; None if its word was wiped."""
        return Owner.unpack(self._words[_LAUNCHER_WORD])

    @property
    def phase(self) -> Phase:
        """Where the instance is in its life; a value nobody defined reads as STOPPING."""
        value = self._words[_PHASE_WORD]
        return Phase(value) if Phase.STARTING <= value <= Phase.STOPPING else Phase.STOPPING

    @phase.setter
    def phase(self, phase: Phase) -> None:
        self._words[_PHASE_WORD] = phase

    def row(self, role: Role, index: int = 0) -> BoardRow:
        """Return the row of process `index` of that role.

        Raises:
            IndexError: the instance has no such process.
        """
        config = self.config
        base, count = {
            Role.LAUNCHER: (0, 1),
            Role.SCHEDULER: (1, config.ranks),
            Role.SHARD: (1 + config.ranks, config.shards),
            Role.READER: (1 + config.ranks + config.shards, config.readers),
        }[role]
        if not 0 <= index < count:
            raise IndexError(
                f"instance {config.instance!r} has {count} {role} process(es), no number {index}"
            )
        return BoardRow(self._words, _ROWS_AT // 8 + (base + index) * _ROW_WORDS, role, index)

    def rows(self, role: Role) -> list[BoardRow]:
        """Return the rows of every process of that role."""
        config = self.config
        counts = {
            Role.LAUNCHER: 1,
            Role.SCHEDULER: config.ranks,
            Role.SHARD: config.shards,
            Role.READER: config.readers,
        }
        return [self.row(role, index) for index in range(counts[role])]

    def close(self) -> None:
        """Let go of the board; the segment stays."""
        self._words.release()
        self._segment.close()

    def unlink(self) -> None:
        """Remove the segment; processes that have it open keep it until they close it."""
        unlink(self._segment.name)


def _rows(config: InstanceConfig) -> int:
    return 1 + config.ranks + config.shards + config.readers


def _read_config(segment: Segment, name: str) -> InstanceConfig:
    if segment.size < _ROWS_AT:
        raise NotARing(f"{name} holds {segment.size} bytes, a board at least {_ROWS_AT}: not a board")
    magic, version, rows, length = _HEADER.unpack_from(segment.memory)
    if magic != MAGIC:
        raise NotARing(f"{name} starts with {magic!r}, a board with {MAGIC!r}: not a board, or one half made")
    if version != VERSION:
        raise WrongVersion(
            f"{name} is a board of version {version}, this Outfeed speaks {VERSION}: use one version"
        )
    if int.from_bytes(segment.memory[8 * _SPACE_WORD : 8 * _SPACE_WORD + 8], "little") != space():
        raise OtherNamespace(name)
    if length > _ROWS_AT - _CONFIG_AT:
        raise NotARing(
            f"{name} claims a configuration of {length} bytes, at most {_ROWS_AT - _CONFIG_AT} fit"
        )
    try:
        config = msgspec.json.decode(
            bytes(segment.memory[_CONFIG_AT : _CONFIG_AT + length]), type=InstanceConfig
        )
    except msgspec.MsgspecError as error:
        raise NotARing(f"{name} holds no readable configuration: {error}") from error
    need = _ROWS_AT + rows * _ROW_WORDS * 8
    if rows != _rows(config) or segment.size < need:
        raise NotARing(
            f"{name} has {rows} rows in {segment.size} bytes, its configuration needs {_rows(config)}"
        )
    return config
