"""One running instance: its segments made together, found together and removed together.

The launcher makes an instance; every other process attaches to it. /dev/shm itself is the register: an
instance is there while its board is, and alive while any process that the board or a ring names is.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from typing import Final

from ._core import lib
from .board import Board, InstanceConfig, Phase, Role
from .errors import NoRoom, RingError
from .names import PREFIX, doorbell_name, egress_name, is_doorbell, segment_name, split_name
from .ring import Ring
from .segment import SHM, folder, free_bytes, in_use, listed, lock, sweep, unlink

STRAGGLERS_S: Final = 3.0
LOOK_EVERY_NS: Final = 50_000_000
# Another instance may be in the making, and the pages of a large one take the kernel some seconds.
LONGEST_REGISTER_S: Final = 30.0

Nap = Callable[[float], object]
"""Sleeps for some seconds. What it raises ends what sleeps in it."""


class InstanceRunning(RingError):
    """The instance id is taken by a live instance."""


class InstanceGone(RingError):
    """There is no live instance of that name."""


class Instance:
    """An instance's board and the names of its rings.

    Rings are opened one by one by who needs them; a process opens only what it reads or writes. Each raises
    InstanceGone when the instance has ended meanwhile.
    """

    def __init__(self, board: Board, made: list[Ring] | None = None) -> None:
        self.board = board
        self.config = board.config
        self._made = made or []
        self._alive = False
        self._look_again = 0

    @classmethod
    def create(cls, config: InstanceConfig, nap: Nap = time.sleep) -> Instance:
        """Make every segment of a new instance, after removing what a dead one of that name left.

        It may have to wait for others, in `nap`: for processes of the dead one, then for the register.

        Raises:
            InstanceRunning: a live process has that instance open.
            NoRoom: /dev/shm cannot hold it; nothing is left behind.
            NoSharedMemory: there is none that can be used.
            BadInstanceName, BadCapacity: the configuration cannot be used.
        """
        _wait_for_stragglers(config.instance, nap)
        with _register(nap):
            _refuse_live(config.instance)
            made: list[Ring] = []
            free = free_bytes()  # before anything is made: what an operator sees, and can compare
            try:
                for name, lanes, consumers, capacity in _plan(config):
                    made.append(Ring.create(name, lanes=lanes, consumers=consumers, capacity=capacity))
                # The board comes last: whoever can find the instance finds all of it.
                return cls(Board.create(config), made)
            except BaseException as error:
                for ring in made:
                    ring.close()  # its files may be what a look at the folder lacks
                _unlink_all(config.instance)
                if isinstance(error, NoRoom) and (needed := _bytes(config)) > free:
                    raise NoRoom(f"instance {config.instance!r}", needed, free) from None
                raise

    @classmethod
    def attach(cls, instance: str) -> Instance:
        """Open a running instance.

        Raises:
            InstanceGone: there is none of that name, or its launcher is dead.
            OtherNamespace: it runs in another pid or time namespace.
            NotOurs: it is another user's.
        """
        try:
            board = Board.attach(instance)
        except FileNotFoundError:
            names = ", ".join(running()) or "none"
            raise InstanceGone(
                f"no instance {instance!r} is running (running: {names}); start it with outfeed-launch"
            ) from None
        launcher = board.launcher
        if launcher is None or not launcher.alive():
            board.close()
            raise InstanceGone(
                f"instance {instance!r} is dead: its launcher ({launcher}) is gone; start it again"
            )
        return cls(board)

    @property
    def name(self) -> str:
        """The instance id."""
        return self.config.instance

    @property
    def alive(self) -> bool:
        """Whether the instance's launcher still runs and has not begun to stop it.

        Asked on every step, so the process itself is looked at every 50 ms at most: that takes longer than a
        step's push.
        """
        if self.board.phase == Phase.STOPPING:
            return False
        if (now := time.monotonic_ns()) >= self._look_again:
            launcher = self.board.launcher
            self._alive = launcher is not None and launcher.alive()
            self._look_again = now + LOOK_EVERY_NS
        return self._alive

    def request(self) -> Ring:
        """Open the request ring: lanes are gateways, the consumer is the scheduler."""
        return self._open(segment_name(self.name, "request"))

    def control(self) -> Ring:
        """Open the control ring: lanes are gateways, consumers are shards."""
        return self._open(segment_name(self.name, "control"))

    def step(self) -> Ring:
        """Open the step ring: lanes are scheduler ranks, consumers are shards."""
        return self._open(segment_name(self.name, "step"))

    def egress(self, reader: int) -> Ring:
        """Open the egress ring of one reader: lanes are shards, the consumer is the reader."""
        return self._open(egress_name(self.name, reader))

    def _open(self, ring: str) -> Ring:
        try:
            return Ring.attach(ring)
        except FileNotFoundError:  # its launcher removed it since the board was opened
            raise InstanceGone(
                f"instance {self.name!r} has ended: its segment {ring} is gone; start it again"
            ) from None

    def bell(self, role: Role, index: int) -> str:
        """Name the doorbell of one process."""
        return doorbell_name(self.name, f"{role}{index}")

    def close_rings(self) -> None:
        """Let go of the rings that `create` made; the board stays open."""
        for ring in self._made:
            ring.close()
        self._made.clear()

    def close(self) -> None:
        """Let go of what this process has open; the segments stay."""
        self.close_rings()
        self.board.close()

    def remove(self) -> None:
        """Remove every segment of the instance, then `close`. For its launcher, when its children have ended.

        A process that still has one open keeps its memory until it lets go. Doorbells go with their owners;
        those of the dead go now.
        """
        with _register(time.sleep):
            if self.board.has_name():  # else somebody has removed it, and what is there may be another one's
                _unlink_all(self.name)
            sweep(segment_name(self.name, ""))


def running() -> list[str]:
    """Name the instances that run and that this process may attach to."""
    return [instance for instance in _found() if _runs(instance)]


def sweep_dead(nap: Nap = time.sleep) -> list[str]:
    """Remove what dead instances left in /dev/shm; return their names. A live one is never touched.

    It waits for the register in `nap`.
    """
    with _register(nap):
        dead = [instance for instance in _found() if not _is_live(instance)]
        return [instance for instance in dead if sweep(segment_name(instance, ""))]


def leftovers(instance: str) -> list[str]:
    """Name the files of an instance that are in /dev/shm now."""
    return listed(segment_name(instance, ""))


def _plan(config: InstanceConfig) -> Iterator[tuple[str, int, int, int]]:
    """Yield (name, lanes, consumers, bytes per lane) of every ring of an instance."""
    yield segment_name(config.instance, "request"), config.readers, 1, config.request_bytes
    yield segment_name(config.instance, "control"), config.readers, config.shards, config.control_bytes
    yield segment_name(config.instance, "step"), config.ranks, config.shards, config.step_bytes
    for reader in range(config.readers):
        yield egress_name(config.instance, reader), config.shards, 1, config.egress_bytes


def _bytes(config: InstanceConfig) -> int:
    """Return what an instance's rings take; its token table, of a size not known yet, comes on top."""
    return sum(int(lib.ring_bytes(lanes, readers, size)) for _, lanes, readers, size in _plan(config))


@contextlib.contextmanager
def _register(nap: Nap) -> Iterator[None]:
    """Hold the register: no instance is made or swept by another process meanwhile.

    The lock is on the folder itself, so it leaves no file and a dead holder's lock is gone with it. Anybody
    may take one there: LockHeld is raised when that lasts.
    """
    shm = folder()
    try:
        lock(shm, fcntl.LOCK_EX, str(SHM), LONGEST_REGISTER_S, nap)
        yield
    finally:
        os.close(shm)


def _found() -> list[str]:
    """Name the instances that have a file in /dev/shm, dead ones and other users' too."""
    return sorted({names[0] for name in listed(PREFIX) if (names := split_name(name))})


def _runs(instance: str) -> bool:
    """Whether its launcher lives; not of one that is another user's, version's or container's."""
    try:
        board = Board.attach(instance)
    except (FileNotFoundError, RingError):
        return False
    try:
        return (launcher := board.launcher) is not None and launcher.alive()
    finally:
        board.close()


def _is_live(instance: str) -> bool:
    """Whether a live process has any segment of the instance open."""
    return any(in_use(name) for name in leftovers(instance) if not is_doorbell(name))


def _unlink_all(instance: str) -> None:
    """Remove every segment of an instance; doorbells are their owners'. For who has the register."""
    for what in leftovers(instance):
        if not is_doorbell(what):
            unlink(what)


def _wait_for_stragglers(instance: str, nap: Nap) -> None:
    """Give processes of a dead instance, which look for their launcher now and then, time to notice."""
    deadline = time.monotonic() + STRAGGLERS_S
    while time.monotonic() < deadline and _is_live(instance):
        try:
            Instance.attach(instance).close()
        except InstanceGone:
            nap(0.02)
            continue
        return  # it is alive and well: `_refuse_live` says so


def _refuse_live(instance: str) -> None:
    if not _is_live(instance):
        sweep(segment_name(instance, ""))
        return
    try:
        running = Instance.attach(instance)
    except InstanceGone:
        raise InstanceRunning(
            f"instance {instance!r} is dead, but a process still has it open {STRAGGLERS_S:.0f} s later, or "
            f"another user has its files: end it (fuser -v /dev/shm/{segment_name(instance, '*')} names it, "
            "ls -l whose they are), or choose another --instance"
        ) from None
    launcher = running.board.launcher
    pid = launcher.pid if launcher else "unknown"
    running.close()
    raise InstanceRunning(
        f"instance {instance!r} is running already (launcher pid {pid}): stop it, or choose another one"
    )
