"""The board: what an instance is, and how each of its processes is doing.

One small segment per instance. The launcher writes header and configuration before anyone else can see
the segment; after that each process writes only its own row, so nothing here needs a lock. Whoever looks
at an instance (another process of it, `top`, a health check) reads the rows and disturbs nobody.

    0       header: magic, version, rows, configuration's length and CRC-32 │ launcher's owner word │ phase
            │ what pids count in
    4096    configuration, JSON
    65536   rows, 256 bytes each: launcher, ranks, shards, readers

    row     u64 owner │ heartbeat (CLOCK_MONOTONIC ns) │ state │ epoch │ counters[25] │ epoch │ epoch │ owner

Every u64 is aligned and written with one store, so a reader sees the old or the new value, never a mix.

Any word may be scribbled over, and one rule holds for all: a word has one keeper, who knows by itself what is
in it and stores it again with each heartbeat (`Board.keep`, `BoardRow.beat`). Until then no single word makes
a live process look dead or new, or an instance stopped: owners stand twice, epochs three times; phases and
states are words of eight letters, and what is none of them says nothing. What is added to a word wraps at
2^64.
The board must not know what a row's counters mean to its owner beyond their names.
"""

from __future__ import annotations

import mmap
import struct
import time
from array import array
from enum import IntEnum, StrEnum
from functools import partial
from itertools import accumulate
from typing import Annotated, Any, Final
from zlib import crc32

import msgspec

from .errors import NotARing, OtherNamespace, WrongVersion
from .names import check_instance, segment_name
from .owner import Owner, space
from .segment import Segment, attach, create

MAGIC: Final = b"OUTFEEDB"
VERSION: Final = 4
MAX_EACH: Final = 64
"""Shards, readers and ranks of an instance, each at most; fewer than a route could name."""
MIN_LANE_BYTES: Final = 1 << 12
MAX_LANE_BYTES: Final = 1 << 30
MAX_HEARTBEAT_LIMIT_S: Final = 3600

_HEADER: Final = struct.Struct("<8sIIII24xQ")
_LAUNCHER_WORD: Final = 4  # u64 index of the launcher's owner word in the header
_PHASE_WORD: Final = 5
_CONFIG_AT: Final = 4096
_ROWS_AT: Final = 65536
_ROW_WORDS: Final = 32
_HEARTBEAT: Final = 1
_STATE: Final = 2
_COUNTERS_AT: Final = 4
_OWNER_AGAIN: Final = _ROW_WORDS - 1
_EPOCHS: Final = (3, _ROW_WORDS - 3, _ROW_WORDS - 2)
_CLAIM: Final = (0, _OWNER_AGAIN, *_EPOCHS)
_WORD: Final = (1 << 64) - 1

COUNTERS: Final = (
    "frames",  # frames handled
    "rows",  # rows handled
    "tokens",  # tokens handled
    "live",  # requests alive right now; of one rank among several those that it has adopted
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


def _letters(name: str) -> int:
    """Return a word that reads as `name` in memory: no accident makes one of another, or of nothing."""
    return int.from_bytes(name.encode().ljust(8, b"\0"), "little")


class Phase(IntEnum):
    """Where an instance is in its life."""

    STARTING = _letters("STARTING")
    RUNNING = _letters("RUNNING")
    DRAINING = _letters("DRAINING")
    STOPPING = _letters("STOPPING")


class State(IntEnum):
    """Where one process is in its life."""

    ABSENT = 0
    STARTING = _letters("STARTING")
    RUNNING = _letters("RUNNING")
    STOPPED = _letters("STOPPED")
    UNKNOWN = _letters("UNKNOWN")
    """The word was written over; the next heartbeat sets it right."""


_PHASES: Final = {int(phase): phase for phase in Phase}
_STATES: Final = {int(state): state for state in State}


_Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_EACH)]
_Bytes = Annotated[int, msgspec.Meta(ge=MIN_LANE_BYTES, le=MAX_LANE_BYTES)]


class InstanceConfig(msgspec.Struct, frozen=True, kw_only=True):
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

    __slots__ = ("_base", "_kept", "_words", "index", "role")

    def __init__(self, words: memoryview, base: int, role: Role, index: int) -> None:
        self._words = words
        self._base = base
        self._kept: array[int] | None = None  # the whole row, once this process has claimed it
        self.role = role
        self.index = index

    def claim(self, state: State = State.STARTING) -> None:
        """Make the row this process's own, with a fresh heartbeat and zeroed counters."""
        me = Owner.me().pack()
        kept = array("Q", bytes(8 * _ROW_WORDS))
        kept[0] = kept[_OWNER_AGAIN] = me
        kept[_STATE] = state
        for at in _EPOCHS:
            kept[at] = self.epoch
        self._kept = kept
        self.beat()

    def beat(self, at: int | None = None) -> None:
        """Say that the row's process is alive now, or was `at` (CLOCK_MONOTONIC ns), when it counted.

        Who claimed the row says everything in it again: a word that was written over is right from here on.
        """
        now = time.monotonic_ns() if at is None else at
        if (kept := self._kept) is None:
            self._words[self._base + _HEARTBEAT] = now
            return
        kept[_HEARTBEAT] = now
        self._words[self._base : self._base + _ROW_WORDS] = kept

    def _put(self, at: int, value: int) -> None:
        if self._kept is not None:
            self._kept[at] = value
        self._words[self._base + at] = value

    def _get(self, at: int) -> int:
        return int(self._words[self._base + at] if self._kept is None else self._kept[at])

    @property
    def owner(self) -> Owner | None:
        """The process that claimed the row, or None if none ever did.

        Where its two words differ one was written over, or another process is claiming the row: the one that
        lives is meant.
        """
        word, again = self._words[self._base], self._words[self._base + _OWNER_AGAIN]
        return Owner.unpack(word) if word == again else _living(Owner.unpack(word), Owner.unpack(again))

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
        return int(self._words[self._base + _HEARTBEAT])

    @property
    def state(self) -> State:
        """Where the process is in its life."""
        return _STATES.get(self._words[self._base + _STATE], State.UNKNOWN)

    @state.setter
    def state(self, state: State) -> None:
        self._put(_STATE, state)

    @property
    def epoch(self) -> int:
        """How many times the process in this row has been replaced, as most of its three words say."""
        return sorted(map(self._get, _EPOCHS))[1]

    @property
    def holder(self) -> tuple[Owner | None, int]:
        """Who has the row: the process, and its epoch. One that attaches anew is another holder."""
        return self.owner, self.epoch

    @property
    def claim_words(self) -> list[int]:
        """The words that say who has the row, as they stand: as long as they stay, it is the same holder."""
        return [self._words[self._base + at] for at in _CLAIM]

    def count_replacement(self) -> None:
        """Note that another process takes the place of the one in this row. The epoch is never 0 again."""
        after = (self.epoch + 1) & _WORD or 1
        for at in _EPOCHS:
            self._put(at, after)

    def count(self, name: str, more: int = 1) -> None:
        """Add `more` to the counter `name` (one of COUNTERS)."""
        at = _COUNTERS_AT + COUNTERS.index(name)
        self._put(at, (self._get(at) + more) & _WORD)

    def put(self, name: str, value: int) -> None:
        """Set the counter `name` (one of COUNTERS) to `value`."""
        self._put(_COUNTERS_AT + COUNTERS.index(name), value & _WORD)

    def get(self, name: str) -> int:
        """Read the counter `name` (one of COUNTERS)."""
        return int(self._words[self._base + _COUNTERS_AT + COUNTERS.index(name)])


class Board:
    """An instance's board, open in this process."""

    def __init__(self, segment: Segment, config: InstanceConfig) -> None:
        self._segment = segment
        self._words = memoryview(segment.memory).cast("Q")
        # header and configuration, if this process made them
        self._kept: tuple[array[int], bytes] | None = None
        self._places = _places(config)
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

        header = array("Q", _HEADER.pack(MAGIC, VERSION, rows, len(data), crc32(data), space()))
        header[_PHASE_WORD] = Phase.STARTING
        header[_LAUNCHER_WORD] = Owner.me().pack()
        name = segment_name(config.instance, "board")
        fill = partial(_store, header=header, data=data)
        board = cls(create(name, _ROWS_AT + rows * _ROW_WORDS * 8, fill), config)
        board._kept = header, data
        return board

    def keep(self) -> None:
        """Store header and configuration again, as whoever made the board knows them: its heartbeat."""
        if self._kept is not None:
            _store(self._segment.memory, *self._kept)

    @classmethod
    def attach(cls, instance: str) -> Board:
        """Open the board of a running instance.

        Raises:
            FileNotFoundError: no instance of that name is there.
            NotARing: the segment is there, but what is in it is no board.
            WrongVersion: it was made by another version of Outfeed.
            OtherNamespace: it was made in another pid or time namespace.
            NotOurs: it is another user's, or open to others.
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
        """The process that started the instance, as header or row says; None if both were wiped."""
        named, row = Owner.unpack(self._words[_LAUNCHER_WORD]), self.row(Role.LAUNCHER).owner
        return named if named == row else _living(named, row)

    @property
    def phase(self) -> Phase:
        """Where the instance is in its life. What is no phase was written over, by no launcher that stops."""
        words = self._words if self._kept is None else self._kept[0]
        return _PHASES.get(words[_PHASE_WORD], Phase.RUNNING)

    @phase.setter
    def phase(self, phase: Phase) -> None:
        if self._kept is not None:
            self._kept[0][_PHASE_WORD] = phase
        self._words[_PHASE_WORD] = phase

    def row(self, role: Role, index: int = 0) -> BoardRow:
        """Return the row of process `index` of that role.

        Raises:
            IndexError: the instance has no such process.
        """
        first, count = self._places[role]
        if not 0 <= index < count:
            raise IndexError(
                f"instance {self.config.instance!r} has {count} {role} process(es), no number {index}"
            )
        return BoardRow(self._words, _ROWS_AT // 8 + (first + index) * _ROW_WORDS, role, index)

    def rows(self, role: Role) -> list[BoardRow]:
        """Return the rows of every process of that role."""
        _, count = self._places[role]
        return [self.row(role, index) for index in range(count)]

    def close(self) -> None:
        """Let go of the board; the segment stays."""
        self._words.release()
        self._segment.close()

    def has_name(self) -> bool:
        """Whether the segment still has a name: nobody has removed it. Not to be asked of a closed one."""
        return self._segment.has_name()


def _living(*owners: Owner | None) -> Owner | None:
    """Return the first of them that lives, or else the first that is one."""
    named = [owner for owner in owners if owner is not None]
    return next((owner for owner in named if owner.alive()), named[0] if named else None)


def _store(memory: mmap.mmap, header: array[int], data: bytes) -> None:
    memory[: _HEADER.size] = header.tobytes()
    memory[_CONFIG_AT : _CONFIG_AT + len(data)] = data


def _places(config: InstanceConfig) -> dict[Role, tuple[int, int]]:
    """Return, by role, which row is the first of its processes, and how many they are."""
    counts = {
        Role.LAUNCHER: 1,
        Role.SCHEDULER: config.ranks,
        Role.SHARD: config.shards,
        Role.READER: config.readers,
    }
    firsts = accumulate(counts.values(), initial=0)
    return {role: (first, count) for first, (role, count) in zip(firsts, counts.items(), strict=False)}


def _rows(config: InstanceConfig) -> int:
    return sum(count for _, count in _places(config).values())


def _read_config(segment: Segment, name: str) -> InstanceConfig:
    if segment.size < _ROWS_AT:
        raise NotARing(f"{name} holds {segment.size} bytes, a board at least {_ROWS_AT}: not a board")
    magic, version, rows, length, check, there = _HEADER.unpack_from(segment.memory)
    if magic != MAGIC:
        raise NotARing(f"{name} starts with {magic!r}, a board with {MAGIC!r}: not a board, or one half made")
    if version != VERSION:
        raise WrongVersion(
            f"{name} is a board of version {version}, this Outfeed speaks {VERSION}: use one version"
        )
    if there != space():
        raise OtherNamespace(name)
    data = bytes(segment.memory[_CONFIG_AT : _CONFIG_AT + length])
    if crc32(data) != check:
        raise NotARing(
            f"{name} holds another configuration than was written: something wrote over it; a launcher sets "
            "that right with its next heartbeat, try again"
        )
    try:
        config = msgspec.json.decode(data, type=InstanceConfig)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise NotARing(f"{name} holds no readable configuration: {error}") from error
    need = _ROWS_AT + rows * _ROW_WORDS * 8
    if rows != _rows(config) or segment.size < need:
        raise NotARing(
            f"{name} has {rows} rows in {segment.size} bytes, its configuration needs {_rows(config)}"
        )
    return config
