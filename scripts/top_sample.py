"""What an instance looks like from outside: read from its board, its rings' statistics and /proc.

Only reads, and only what is there to be read: no process of the instance is stopped, asked or slowed. It
holds an instance open as its processes do, so whoever samples must let go when the instance has ended
(`Watch.alive`), or the next start of that name waits for it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from outfeed.ring import Owner, Ring, RingStats
from outfeed.ring.board import COUNTERS, BoardRow, Role
from outfeed.ring.instance import Instance, InstanceGone, running

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
RATED = ("frames", "rows", "tokens")


class NoInstance(RuntimeError):
    """There is no instance to look at, or not just one; the message says which and what to do."""


@dataclass(slots=True)
class ProcessSample:
    """One process of the instance. Rates are per second over the interval; None where there is none yet."""

    name: str
    role: str
    index: int
    pid: int | None
    state: str
    alive: bool
    cpu_percent: float | None
    """Of one core; above 100 with several busy threads."""
    rss_bytes: int | None
    heartbeat_age_s: float | None
    restarts: int
    live: int
    """Requests it has now."""
    rates: dict[str, float]
    counters: dict[str, int]


@dataclass(slots=True)
class LaneSample:
    """One lane of a ring."""

    ring: str
    lane: int
    pid: int | None
    used_bytes: int
    capacity_bytes: int
    high_water_bytes: int
    frames_per_s: float
    bytes_per_s: float
    full_events: int
    """Writes that met a full lane, since the ring was made."""
    full_seconds: float
    takeovers: int
    quarantined_at: int | None

    @property
    def depth(self) -> float:
        """The part of the lane that is in use, 0 to 1."""
        return self.used_bytes / self.capacity_bytes


@dataclass(slots=True)
class ConsumerSample:
    """One cursor of a ring, over all its lanes."""

    ring: str
    consumer: int
    pid: int | None
    lag_bytes: int
    frames_per_s: float
    parked: bool
    detached: bool
    takeovers: int


@dataclass(slots=True)
class Sample:
    """An instance at one moment; rates over `interval_s` before it."""

    instance: str
    phase: str
    interval_s: float
    tokens_per_s: float
    """Pushed by the scheduler."""
    live_requests: int
    restarts: int
    lag_bytes: int
    """The most that one consumer is behind."""
    shard_share: list[float]
    """Each shard's part of the tokens, in the interval, or since the start when it had none."""
    processes: list[ProcessSample] = field(default_factory=list)
    lanes: list[LaneSample] = field(default_factory=list)
    consumers: list[ConsumerSample] = field(default_factory=list)

    @property
    def quarantined(self) -> list[LaneSample]:
        """Lanes that were found corrupt."""
        return [lane for lane in self.lanes if lane.quarantined_at is not None]

    def to_json(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        return asdict(self) | {
            "quarantined": [[lane.ring, lane.lane, lane.quarantined_at] for lane in self.quarantined]
        }


def choose(name: str | None) -> Instance:
    """Open the instance `name`, or the only one that runs.

    Raises:
        NoInstance: there is none, or there are several and none was named.
    """
    if name is None:
        found = running()
        if len(found) != 1:
            raise NoInstance(
                f"{len(found)} instances are running ({', '.join(found)}): choose one with --instance"
                if found
                else "no instance is running: start one with ./scripts/serve or ./scripts/launch"
            )
        (name,) = found
    try:
        return Instance.attach(name)
    except InstanceGone as error:
        raise NoInstance(str(error)) from None


class Watch:
    """Samples one instance again and again. `sample` is cheap; the rates are those since the one before."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        config = instance.config
        self._rings: dict[str, Ring] = {
            "request": instance.request(),
            "control": instance.control(),
            "step": instance.step(),
            **{f"egress{reader}": instance.egress(reader) for reader in range(config.readers)},
        }
        self._before: dict[tuple[Any, ...], tuple[float, ...]] = {}
        self._taken = 0.0
        self._interval = 0.0

    @property
    def alive(self) -> bool:
        """Whether the instance still runs: when it does not, close."""
        return self._instance.alive

    def sample(self) -> Sample:
        """Look once."""
        now = time.monotonic()
        self._interval, self._taken = (now - self._taken if self._taken else 0.0), now
        board = self._instance.board
        processes = [self._process(row) for role in Role for row in board.rows(role)]
        stats = {name: ring.stats() for name, ring in self._rings.items()}
        lanes = [lane for name, seen in stats.items() for lane in self._lanes(name, seen)]
        consumers = [consumer for name, seen in stats.items() for consumer in self._consumers(name, seen)]
        return Sample(
            instance=self._instance.name,
            phase=board.phase.name.lower(),
            interval_s=round(self._interval, 3),
            tokens_per_s=round(sum(p.rates["tokens"] for p in processes if p.role == Role.SCHEDULER), 1),
            live_requests=sum(p.live for p in processes if p.role == Role.READER and p.alive),
            restarts=sum(p.restarts for p in processes),
            lag_bytes=max((c.lag_bytes for c in consumers if not c.detached), default=0),
            shard_share=_share([p for p in processes if p.role == Role.SHARD]),
            processes=processes,
            lanes=lanes,
            consumers=consumers,
        )

    def close(self) -> None:
        """Let go of the instance."""
        for ring in self._rings.values():
            ring.close()
        self._instance.close()

    def _rates(self, key: tuple[Any, ...], *values: float) -> tuple[float, ...]:
        """Return how fast each value has grown since the sample before; zeros the first time."""
        before, self._before[key] = self._before.get(key), values
        if before is None or self._interval <= 0:
            return (0.0,) * len(values)
        return tuple(
            round(max(0.0, new - old) / self._interval, 1) for new, old in zip(values, before, strict=True)
        )

    def _process(self, row: BoardRow) -> ProcessSample:
        owner = row.owner
        alive = owner is not None and owner.alive()
        used = _cpu_and_memory(owner) if owner is not None and alive else None
        counters = {name: value for name in COUNTERS if (value := row.get(name))}
        key = (row.role, row.index, owner)
        rates = self._rates((*key, "counters"), *(counters.get(name, 0) for name in RATED))
        cpu = None
        if used is not None:
            (cpu,) = self._rates((*key, "cpu"), 100 * used[0])
        return ProcessSample(
            name=row.role.value if row.role == Role.LAUNCHER else f"{row.role}{row.index}",
            role=row.role.value,
            index=row.index,
            pid=owner.pid if owner else None,
            state=row.state.name.lower() if alive or owner is None else "dead",
            alive=alive,
            cpu_percent=cpu,
            rss_bytes=used[1] if used else None,
            heartbeat_age_s=round((time.monotonic_ns() - row.heartbeat_ns) / 1e9, 3) if alive else None,
            restarts=row.epoch,
            live=counters.get("live", 0),
            rates=dict(zip(RATED, rates, strict=True)),
            counters=counters,
        )

    def _lanes(self, name: str, stats: RingStats) -> Iterator[LaneSample]:
        for lane in stats.lanes:
            frames, size = self._rates((name, "lane", lane.lane), lane.frames, lane.bytes)
            yield LaneSample(
                ring=name,
                lane=lane.lane,
                pid=lane.owner.pid if lane.owner else None,
                used_bytes=lane.used,
                capacity_bytes=stats.capacity,
                high_water_bytes=lane.high_water,
                frames_per_s=frames,
                bytes_per_s=size,
                full_events=lane.full_events,
                full_seconds=round(lane.full_seconds, 3),
                takeovers=lane.takeovers,
                quarantined_at=lane.quarantined,
            )

    def _consumers(self, name: str, stats: RingStats) -> Iterator[ConsumerSample]:
        for consumer in stats.consumers:
            (frames,) = self._rates((name, "consumer", consumer.index), consumer.frames)
            yield ConsumerSample(
                ring=name,
                consumer=consumer.index,
                pid=consumer.owner.pid if consumer.owner else None,
                lag_bytes=consumer.lag,
                frames_per_s=frames,
                parked=consumer.parked,
                detached=consumer.detached,
                takeovers=consumer.takeovers,
            )


def _share(shards: list[ProcessSample]) -> list[float]:
    parts = [shard.rates["tokens"] for shard in shards]
    if not any(parts):
        parts = [float(shard.counters.get("tokens", 0)) for shard in shards]
    total = sum(parts)
    return [round(part / total, 4) if total else 0.0 for part in parts]


def _cpu_and_memory(owner: Owner) -> tuple[float, int] | None:
    """Return the CPU seconds a process has used and its resident bytes; None when it has just ended."""
    try:
        with open(f"/proc/{owner.pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / TICKS, int(fields[21]) * PAGE
