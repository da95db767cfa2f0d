"""The launcher: makes an instance, runs its shards, and leaves nothing behind.

One process, one thread, one loop: it sleeps until a signal or the next check is due. Its children die
with it; what is left in shared memory after a kill -9 is removed by the next start. Must not know
requests or schedulers: those processes attach by themselves.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import stat
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from ..ring import logs
from ..ring.board import (
    MAX_EACH,
    MAX_HEARTBEAT_LIMIT_S,
    MAX_LANE_BYTES,
    MIN_LANE_BYTES,
    InstanceConfig,
    Phase,
    Role,
    State,
)
from ..ring.errors import RingError
from ..ring.instance import Instance, sweep_dead
from ..ring.names import segment_name
from ..ring.process import (
    Signals,
    die_with_parent,
    drain_seconds,
    fail,
    raise_file_limit,
    refusal,
    say,
    settle,
)
from .errors import TokenizerFileError
from .model_options import OptionError, add_model_arguments, model_argv, model_values
from .supervisor import ShardsFailed, Supervisor, fork_child

log = logging.getLogger(__name__)

CHECK_EVERY_S: Final = 0.25

RINGS: Final = ("request", "control", "step", "egress")

COMMAND: Final = "outfeed-launch"
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2


class LaunchError(RuntimeError):
    """The instance could not be started; the message says why and what to do."""


class _Stopped(Exception):
    """The launcher was told to stop while it waited for others to let it begin."""


class Launcher:
    """One instance's life, from its segments to their removal. From when it is made, it hears the signals."""

    def __init__(self, config: InstanceConfig, drain_s: float = 30.0) -> None:
        self._config = config
        self._drain_s = drain_s
        self._signals = Signals(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
        self._draining_ns: int | None = None  # since when

    def run(self) -> int:
        """Start, serve until told to stop, clean up. Returns the process's exit status.

        SIGTERM drains (at most `drain_s` seconds, no new requests), SIGINT or a second SIGTERM stops at once,
        SIGHUP replaces the shards one after the other.

        Raises:
            LaunchError: the instance could not be started.
        """
        try:
            for name in sweep_dead(self._nap):
                log.warning("removed what the dead instance %r had left in /dev/shm", name)
            instance = Instance.create(self._config, self._nap)
        except _Stopped:
            return 0
        except (RingError, OSError) as error:
            why = refusal(error) if isinstance(error, OSError) else None
            raise LaunchError(why or str(error)) from error
        try:
            return self._serve(instance)
        finally:
            try:
                instance.remove()
            except RingError as error:
                log.error("what is left in /dev/shm stays there until an instance is started: %s", error)
            instance.close()

    def _told_to_stop(self, seconds: float) -> bool:
        """Wait so long for a signal while nothing can be drained; whether one came that ends the launcher."""
        return self._signals.wait(seconds) in (signal.SIGINT, signal.SIGTERM)

    def _nap(self, seconds: float) -> None:
        if self._told_to_stop(seconds):
            raise _Stopped

    def _serve(self, instance: Instance) -> int:
        from .shard import run_shard

        instance.close_rings()
        if not self._load_tokenizer():
            return 0
        board = instance.board
        supervisor = Supervisor(board, lambda shard: run_shard(self._config.instance, shard))
        try:
            return self._loop(instance, supervisor)
        except ShardsFailed as failure:
            log.error("instance %r goes down: %s", self._config.instance, failure)
            return EXIT_FAILED
        finally:
            board.phase = Phase.STOPPING
            supervisor.stop()

    def _loop(self, instance: Instance, supervisor: Supervisor) -> int:
        board = instance.board
        row = board.row(Role.LAUNCHER)
        row.claim(State.RUNNING)
        while True:
            supervisor.tend()
            board.keep()
            row.beat()
            logs.due()
            if board.phase == Phase.STARTING and supervisor.running:
                board.phase = Phase.RUNNING
                config = self._config
                say(
                    f"outfeed: instance {config.instance!r} is ready: {config.shards} shard(s), room for "
                    f"{config.readers} reader(s); waiting for a scheduler to attach"
                )
            if self._draining_ns is not None and (
                _idle(instance, self._draining_ns)
                or time.monotonic_ns() > self._draining_ns + self._drain_s * 1e9
            ):
                return 0
            due = supervisor.due_in()
            wait = CHECK_EVERY_S if due is None else min(CHECK_EVERY_S, due)
            if board.phase == Phase.STARTING:
                wait = min(wait, 0.01)
            number = self._signals.wait(wait)
            if number == signal.SIGHUP:
                supervisor.roll()
            elif number == signal.SIGINT or (number == signal.SIGTERM and self._draining_ns is not None):
                return 0
            elif number == signal.SIGTERM:
                board.phase = Phase.DRAINING
                self._draining_ns = time.monotonic_ns()

    def _load_tokenizer(self) -> bool:
        """Compile the token table in a child, so that the tokenizer's memory goes when it exits.

        Returns False when this process was told to stop meanwhile.
        """
        from .table import TokenTable

        def load() -> None:
            # A whole group may be told to end. Its launcher hears it, and ends this process.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            try:
                TokenTable.compile(self._config.tokenizer).share(
                    segment_name(self._config.instance, "tokens")
                )
            except (TokenizerFileError, RingError) as error:
                print(f"{COMMAND}: {error}", file=sys.stderr)
                sys.exit(EXIT_USAGE)
            except OSError as error:
                sys.exit(fail(COMMAND, error))

        try:
            pid = fork_child(load)
        except OSError as error:
            raise LaunchError(
                f"not started: no process for the tokenizer could be forked ({error})"
            ) from error
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            if self._told_to_stop(CHECK_EVERY_S):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return False
        status = os.waitstatus_to_exitcode(ended[1])
        if status < 0:
            how = signal.strsignal(-status)
            raise LaunchError(
                f"not started: the process that compiled the tokenizer was killed ({how}); if a limit on "
                "memory is in force (ulimit -v, the container's), raise it"
            )
        if status:
            raise LaunchError("not started: the tokenizer could not be loaded, as said above")
        return True


def _idle(instance: Instance, since_ns: int) -> bool:
    """Whether every gateway has shown, since draining began, that it has no request left."""
    return all(
        not row.serving or (row.heartbeat_ns > since_ns and row.get("live") == 0)
        for row in instance.board.rows(Role.READER)
    )


def add_instance_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe an instance, which launch and serve share."""
    parser.add_argument(
        "--shards", type=int, default=2, metavar="N", help="detokenizer processes (default 2)"
    )
    parser.add_argument("--tokenizer", metavar="PATH", help="a tokenizer.json, or a folder that holds one")
    parser.add_argument(
        "--ranks", type=int, default=1, metavar="N", help="scheduler ranks that push steps (default 1)"
    )
    parser.add_argument(
        "--heartbeat-limit",
        type=float,
        default=5.0,
        metavar="S",
        help="seconds without a sign of life until a shard is replaced (default 5)",
    )
    sizes = parser.add_argument_group("sizes (bytes per lane, powers of two)")
    for name in RINGS:
        sizes.add_argument(
            f"--{name}-bytes", type=int, default=1 << 23, metavar="N", help=f"{name} ring (default 8 MiB)"
        )
    add_model_arguments(parser)


def instance_options(args: argparse.Namespace) -> list[str]:
    """Write `add_instance_arguments`' options as a command line again, for whoever starts a launcher."""
    names = ["shards", "ranks", "heartbeat_limit", *(f"{ring}_bytes" for ring in RINGS)]
    options = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in names]
    options += model_argv(args)
    return options + ([f"--tokenizer={args.tokenizer}"] if args.tokenizer else [])


def find_tokenizer(path: str) -> str:
    """Return the tokenizer.json at `path`, a file or a folder that holds one.

    Raises:
        LaunchError: there is none.
    """
    place, why = Path(path), " (not a file)"
    try:
        # Asked of `stat`: from Python 3.14 on `is_file` and `is_dir` keep the reason to themselves.
        file = place / "tokenizer.json" if stat.S_ISDIR(place.stat().st_mode) else place
        if stat.S_ISREG(file.stat().st_mode):
            with file.open("rb"):
                return str(file.resolve())
    except OSError as error:
        why = f" ({error.strerror})"
    raise LaunchError(f"no tokenizer at {path}{why}: give a tokenizer.json, or a folder that holds one")


def make_config(instance: str, args: argparse.Namespace, readers: int = 1) -> InstanceConfig:
    """Make an instance's configuration from `add_instance_arguments`' options.

    Raises:
        LaunchError: an option is out of its range.
    """
    for option, count, most in (
        ("--shards", args.shards, MAX_EACH),
        ("--readers", readers, MAX_EACH),
        ("--ranks", args.ranks, MAX_EACH),
    ):
        if not 1 <= count <= most:
            raise LaunchError(f"{option} {count}: give 1 to {most}")
    limit = args.heartbeat_limit
    if not 0 < limit <= MAX_HEARTBEAT_LIMIT_S:
        raise LaunchError(
            f"--heartbeat-limit {limit:g}: give more than 0 and at most {MAX_HEARTBEAT_LIMIT_S} seconds"
        )
    try:
        model = model_values(args)
    except OptionError as error:
        raise LaunchError(str(error)) from None
    config = InstanceConfig(
        instance=instance,
        tokenizer=find_tokenizer(args.tokenizer),
        shards=args.shards,
        readers=readers,
        ranks=args.ranks,
        request_bytes=_lane_bytes("request", args.request_bytes),
        control_bytes=_lane_bytes("control", args.control_bytes),
        step_bytes=_lane_bytes("step", args.step_bytes),
        egress_bytes=_lane_bytes("egress", args.egress_bytes),
        heartbeat_limit_s=limit,
        **model,
    )
    try:
        msgspec.json.encode(config)  # as the board is to hold it
    except UnicodeEncodeError as error:
        raise LaunchError(f"{error.object!r} is not UTF-8: give a name, or a path, that is") from None
    return config


def _lane_bytes(ring: str, size: int) -> int:
    if MIN_LANE_BYTES <= size <= MAX_LANE_BYTES and not size & (size - 1):
        return size
    near = 1 << max(size, 1).bit_length() - 1
    raise LaunchError(
        f"--{ring}-bytes {size}: give a power of two from {MIN_LANE_BYTES} to {MAX_LANE_BYTES} (1 GiB), "
        f"e.g. {min(max(near, MIN_LANE_BYTES), MAX_LANE_BYTES)}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run `launch`: start an instance and serve until a signal."""
    settle()
    parser = argparse.ArgumentParser(
        prog=COMMAND,
        usage="%(prog)s --tokenizer PATH [options]",
        description="Start an Outfeed instance: its rings and its shards.",
    )
    parser.add_argument(
        "--instance", default="outfeed", metavar="NAME", help="the instance's name (default outfeed)"
    )
    add_instance_arguments(parser)
    parser.add_argument(
        "--readers", type=int, default=1, metavar="N", help="gateway processes there is room for (default 1)"
    )
    parser.add_argument(
        "--drain-seconds",
        type=drain_seconds,
        default=30.0,
        metavar="S",
        help="how long SIGTERM lets requests finish (default 30)",
    )
    parser.add_argument("--die-with-parent", type=int, metavar="PID", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    logs.start("launcher")
    raise_file_limit()
    if args.die_with_parent:
        die_with_parent(args.die_with_parent)
    if not args.tokenizer:
        parser.error("--tokenizer is required: give a tokenizer.json, or a folder that holds one")
    try:
        config = make_config(args.instance, args, args.readers)
        return Launcher(config, args.drain_seconds).run()
    except LaunchError as error:
        print(f"{COMMAND}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except OSError as error:
        return fail(COMMAND, error)


if __name__ == "__main__":
    sys.exit(main())
