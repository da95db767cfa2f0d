"""The supervisor: keeps N shard processes running.

A warm parent: it has imported all that a shard needs, so a new shard is one fork away. It watches for
deaths (SIGCHLD, seen by its owner's loop) and for stopped heartbeats, and replaces what it lost, with a
pause that grows when a shard keeps dying young and a limit after which it gives up. Must not know frames
or streams: a new shard sorts those out with the readers.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from ..ring.board import Board, Role, State
from ..ring.process import OWN_SIGNALS, die_with_parent

log = logging.getLogger(__name__)

HEALTHY_AFTER_S: Final = 1.0
"""A shard that ran this long, or handled a row, before it died is not to blame for it: it starts again at
once, and earlier strikes are forgotten. One that dies before that would die again at the same place. The time
that one was silent does not count."""


class ShardsFailed(RuntimeError):
    """A shard could not be started, or kept dying: the instance cannot go on."""


def fork_child(main: Callable[[], None]) -> int:
    """Fork a child that runs `main` and exits: 0 when it returns, 1 with a traceback when it raises.

    The child dies with this process, takes SIGTERM in the default way until it says otherwise, and leaves
    Ctrl-C to its parent. Returns its pid.

    Raises:
        OSError: the system refuses another process.
    """
    parent = os.getpid()
    with suppress(OSError):  # nobody reads what this process says: no reason to have no children
        sys.stdout.flush()
        sys.stderr.flush()
    # A signal that comes while the child still has its parent's handlers would be taken for the parent's.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, OWN_SIGNALS)
    try:
        pid = os.fork()
    finally:
        if os.getpid() == parent:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if pid:
        return pid
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for number in OWN_SIGNALS - {signal.SIGINT}:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        die_with_parent(parent)
        main()
        status = 0
    except SystemExit as leave:
        status = leave.code if isinstance(leave.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:  # whatever a broken pipe says: a child that came back from here would run on as its parent
            os._exit(status)


@dataclass(slots=True)
class RestartPolicy:
    """When a dead shard is started again.

    strikes: this many deaths in a row, each before the shard had handled a row or run HEALTHY_AFTER_S, and
    the supervisor gives up. pause_s: before the second start of such a row; doubles each time, up to
    pause_limit_s.
    """

    strikes: int = 8
    pause_s: float = 0.02
    pause_limit_s: float = 1.0


@dataclass(slots=True)
class _Child:
    shard: int
    pid: int = 0
    started: float = 0.0
    beat: int = 0
    """Its heartbeat when it was looked at last, and when that was new."""
    heard: float = 0.0
    strikes: int = 0
    start_at: float = 0.0
    """When it is due, while it does not run."""
    ever_ran: bool = False
    told: bool = False
    """It was told to end so that a new one takes its place: no fault of its own."""
    hung: bool = False
    """It was killed for its silence; it may take a while to be gone."""


class Supervisor:
    """Runs `run(shard)` in one process per shard. All methods from the launcher's one thread."""

    def __init__(self, board: Board, run: Callable[[int], None], policy: RestartPolicy | None = None) -> None:
        self._board = board
        self._run = run
        self._policy = policy or RestartPolicy()
        self._children = [_Child(shard) for shard in range(board.config.shards)]
        self._rolling: list[int] = []
        self._tended = time.monotonic()

    def tend(self) -> None:
        """Reap the dead, kill the hung, start what is due. Call it often; it never blocks.

        Raises:
            ShardsFailed: a shard died of itself before it ever ran, or its strikes are used up.
        """
        self._allow_for_a_late_look()
        for child in self._children:
            if child.pid:
                self._watch(child)
            if not child.pid and time.monotonic() >= child.start_at:
                self._start(child)
        if self._rolling and self.running and not any(child.told for child in self._children):
            self._replace(self._children[self._rolling.pop(0)])

    def due_in(self) -> float | None:
        """Seconds until `tend` has something to start; None when nothing waits."""
        waiting = [child.start_at for child in self._children if not child.pid]
        return max(0.0, min(waiting) - time.monotonic()) if waiting else None

    @property
    def running(self) -> bool:
        """Whether every shard is up and reading its rings."""
        return all(
            child.pid and self._board.row(Role.SHARD, child.shard).state == State.RUNNING
            for child in self._children
        )

    def roll(self) -> None:
        """Replace every shard, one after the other: `tend` takes the next when the one before it runs."""
        self._rolling = [child.shard for child in self._children]

    def stop(self, grace_s: float = 5.0) -> None:
        """End every shard: SIGTERM, then SIGKILL for what is still there after `grace_s` seconds.

        The last call: nothing is to be tended any more.
        """
        for child in self._children:
            if child.pid:
                os.kill(child.pid, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while any(child.pid for child in self._children):
            for child in self._children:
                if child.pid and os.waitpid(child.pid, os.WNOHANG)[0]:
                    child.pid = 0
                elif child.pid and time.monotonic() > deadline:
                    log.warning(
                        "shard %d (pid %d) did not stop in %.1f s: killed", child.shard, child.pid, grace_s
                    )
                    os.kill(child.pid, signal.SIGKILL)
                    os.waitpid(child.pid, 0)
                    child.pid = 0
            if any(child.pid for child in self._children):
                time.sleep(0.005)

    def _allow_for_a_late_look(self) -> None:
        """Count no more than half a limit of silence since the last look, however long ago that was.

        When this process stood still (Ctrl-Z, a paused container, a suspended machine), so did the shards.
        """
        now = time.monotonic()
        late = now - self._tended - self._board.config.heartbeat_limit_s / 2
        self._tended = now
        if late > 0:
            for child in self._children:
                child.heard += late

    def _replace(self, child: _Child) -> None:
        log.info("shard %d (pid %d) is replaced as asked", child.shard, child.pid)
        child.told = True
        os.kill(child.pid, signal.SIGTERM)

    def _start(self, child: _Child) -> None:
        row = self._board.row(Role.SHARD, child.shard)
        row.state = State.STARTING
        row.put("rows", 0)  # what its predecessor handled does not speak for one that dies as it starts
        gc.collect()
        gc.freeze()  # keep what a shard inherits on pages that it need not copy
        try:
            child.pid = fork_child(lambda: self._run(child.shard))
        except OSError as error:  # no memory, or no process left for this user: both may pass
            child.strikes += 1
            pause = self._pause(child, f"could not be forked: {error}")
            log.error(
                "shard %d could not be forked (%s): tried again in %.0f ms", child.shard, error, pause * 1e3
            )
            return
        child.started = child.heard = time.monotonic()
        child.hung = False

    def _watch(self, child: _Child) -> None:
        row = self._board.row(Role.SHARD, child.shard)
        if row.state == State.RUNNING:
            child.ever_ran = True
        pid, status = os.waitpid(child.pid, os.WNOHANG)
        if pid:
            self._bury(child, os.waitstatus_to_exitcode(status))
            return
        # Whether it changes counts, not what it says: it may have been written over.
        now, beat = time.monotonic(), row.heartbeat_ns
        if beat != child.beat:
            child.beat, child.heard = beat, now
        silent = now - child.heard
        if silent > self._board.config.heartbeat_limit_s and not child.hung:
            child.hung = True
            log.error(
                "shard %d (pid %d) has shown no heartbeat for %.1f s (limit %.1f s): killed and replaced",
                child.shard, child.pid, silent, self._board.config.heartbeat_limit_s,
            )  # fmt: skip
            os.kill(child.pid, signal.SIGKILL)

    def _pause(self, child: _Child, cause: str) -> float:
        """Have a child start after as long a pause as its strikes ask for; return that, in seconds."""
        policy = self._policy
        if child.strikes >= policy.strikes:
            raise ShardsFailed(
                f"shard {child.shard} died {child.strikes} times in a row right after its start, or before "
                f"it (last: {cause}): giving up"
            )
        pause = min(policy.pause_s * 2 ** (child.strikes - 1), policy.pause_limit_s) if child.strikes else 0.0
        child.start_at = time.monotonic() + pause
        return pause

    def _bury(self, child: _Child, code: int) -> None:
        row, ran = self._board.row(Role.SHARD, child.shard), time.monotonic() - child.started
        cause = f"was killed ({signal.strsignal(-code)})" if code < 0 else f"exited with status {code}"
        pid, child.pid = child.pid, 0
        if child.told:
            child.told, child.strikes, cause = False, 0, "ended as told"
        # One that only was slow may be faster the next time, one that was told to end may be let run.
        elif not child.ever_ran and not child.hung and code != -signal.SIGTERM:
            raise ShardsFailed(
                f"shard {child.shard} (pid {pid}) could not start: it {cause} after {ran:.2f} s; its own "
                "message is above"
            )
        else:
            healthy = row.get("rows") > 0 or child.heard - child.started >= HEALTHY_AFTER_S
            child.strikes = 0 if healthy else child.strikes + 1
        pause = self._pause(child, cause)
        row.count_replacement()
        log.warning(
            "shard %d (pid %d) %s after %.2f s: replaced in %.0f ms",
            child.shard,
            pid,
            cause,
            ran,
            pause * 1e3,
        )
