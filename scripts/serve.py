"""Serve: the launcher, a scheduler that replays a text (unless you bring yours), and gateways on one port.

Ctrl-C stops at once; SIGTERM lets what runs finish first. A gateway that dies is started again under its
own reader number. Leaves nothing behind.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from outfeed.gateway.server import ServerError, add_gateway_arguments, gateway_options, keys, listen
from outfeed.ring.board import MAX_EACH
from outfeed.ring.errors import RingError
from outfeed.ring.instance import InstanceGone
from outfeed.ring.process import Signals, fail, readable, say, settle
from outfeed.shards.launcher import LaunchError, add_instance_arguments, instance_options, make_config
from pipeline import START_LIMIT_S, Pipeline, PipelineError, demo_tokenizer, hangup
from texts import MULTILINGUAL, TEMPLATE

CHECK_EVERY_S = 0.25
MAX_DEATHS = 5
"""Gateways that may die within a minute before serving is given up."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="serve", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--instance", default="outfeed", help="the instance's name (default: outfeed)")
    parser.add_argument("--gateways", type=int, default=1, metavar="N", help="gateway processes on the port")
    parser.add_argument(
        "--readers",
        type=int,
        metavar="M",
        help="gateways there is room for: more than --gateways lets others join (default: --gateways)",
    )
    add_instance_arguments(parser)
    scheduler = parser.add_argument_group("the scheduler")
    scheduler.add_argument("--text", metavar="FILE", help="UTF-8 text to replay (default: a demo text)")
    scheduler.add_argument("--no-replay", action="store_true", help="wait for a scheduler of yours to attach")
    scheduler.add_argument("--batch", type=int, default=256, help="replay: rows per step (default 256)")
    scheduler.add_argument("--tokens-per-step", type=int, default=1, help="replay: a row has 1 to this many")
    scheduler.add_argument(
        "--steps-per-second", type=float, default=50.0, help="replay: decode steps; 0: no limit (default 50)"
    )
    add_gateway_arguments(parser)
    args = parser.parse_args(argv)
    if not 1 <= args.gateways <= MAX_EACH:
        parser.error(f"--gateways {args.gateways}: give 1 to {MAX_EACH}")
    if args.readers is not None and not args.gateways <= args.readers <= MAX_EACH:
        parser.error(f"--readers {args.readers}: give {args.gateways}, which --gateways takes, to {MAX_EACH}")
    if args.no_replay and args.text:
        parser.error("--text and --no-replay exclude each other")
    return args


def reserve(host: str, port: int) -> socket.socket:
    """Return a socket that holds the port for our gateways, which share it, against everybody else.

    Raises:
        ServerError: another program listens there, or nobody can.
    """
    try:
        # Sharing would let us bind beside a gateway of another instance: first see that nobody is there.
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, UnicodeError) as error:  # it is taken, or what no name can be
        why = getattr(error, "strerror", None) or error
        raise ServerError(
            f"cannot listen on {host} port {port}: {why}; choose another --host or --port"
        ) from None
    return listen(host, port)


class Gateways:
    """The gateway processes, started again when they die."""

    def __init__(self, args: argparse.Namespace, port: int) -> None:
        self._args = args
        self._options = ["--instance", args.instance, "--port", str(port), *gateway_options(args)]
        self._environment = dict(os.environ)
        if args.api_key:
            self._environment["OUTFEED_API_KEY"] = args.api_key
        if args.admin_key:
            self._environment["OUTFEED_ADMIN_KEY"] = args.admin_key
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._starting: set[int] = set()
        """Pids of those that have not said yet that they serve."""
        self._deaths: list[float] = []

    def start(self) -> None:
        """Start each and wait until it serves.

        Raises:
            PipelineError: one ended, or did not get there.
        """
        for reader in range(self._args.gateways):
            self._processes[reader] = self._spawn(reader)
        deadline = time.monotonic() + START_LIMIT_S
        for process in self._processes.values():
            assert process.stdout is not None
            if not readable(process.stdout, deadline - time.monotonic()):
                raise PipelineError(f"the gateways were not ready within {START_LIMIT_S:.0f} s")
            if not process.stdout.readline():
                raise PipelineError("a gateway could not start; what it said is above")
            self._starting.discard(process.pid)

    def tend(self) -> None:
        """Start again what has died.

        Raises:
            PipelineError: too many have.
        """
        for reader, process in self._processes.items():
            if process.poll() is None:
                assert process.stdout is not None
                if process.pid in self._starting and readable(process.stdout, 0):
                    self._starting.discard(process.pid)
                continue
            self._starting.discard(process.pid)
            now = time.monotonic()
            self._deaths = [*(then for then in self._deaths if now - then < 60), now]
            print(
                f"serve: gateway {reader} ended with status {process.returncode}; starting it again",
                file=sys.stderr,
            )
            if len(self._deaths) > MAX_DEATHS:
                raise PipelineError(f"{len(self._deaths)} gateways have died within a minute: giving up")
            self._processes[reader] = self._spawn(reader)

    def stop(self, how: signal.Signals, seconds: float) -> None:
        """Signal each and wait at most `seconds`; then kill. One that serves nobody yet is killed at once."""
        deadline = time.monotonic() + seconds
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGKILL if process.pid in self._starting else how)
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _spawn(self, reader: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "outfeed.gateway.server", "--die-with-parent", str(os.getpid())]
        process = subprocess.Popen(
            [*command, "--reader", str(reader), *self._options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,  # one line, when it serves
            env=self._environment,
            start_new_session=True,
        )
        self._starting.add(process.pid)
        return process


def serve(args: argparse.Namespace) -> None:
    """Start everything, and serve until a signal."""
    keys(args)
    args.chat_template = args.chat_template or (None if args.tokenizer else str(TEMPLATE))
    args.tokenizer = args.tokenizer or demo_tokenizer()
    readers = args.readers or args.gateways
    tokenizer = make_config(args.instance, args, readers).tokenizer
    launch = [*instance_options(args), "--readers", str(readers)]
    text = args.text or str(MULTILINGUAL)
    replay = [f"--tokenizer={tokenizer}", f"--text={text}", f"--batch={args.batch}"]
    replay += [f"--tokens-per-step={args.tokens_per_step}", f"--steps-per-second={args.steps_per_second}"]
    with reserve(args.host, args.port) as held:
        port = held.getsockname()[1]
        with Pipeline(args.instance, launch, None if args.no_replay else replay, args.ranks) as pipeline:
            gateways = Gateways(args, port)
            try:
                gateways.start()
                signals = Signals(signal.SIGINT, signal.SIGTERM, *hangup())
                announce(args, port, text)
                number = None
                while number is None:
                    pipeline.check()  # first: gateways end with their instance
                    gateways.tend()
                    number = signals.wait(CHECK_EVERY_S)
                if number == signal.SIGTERM:
                    say("outfeed: draining")
                    gateways.stop(signal.SIGTERM, args.drain_seconds + 5)
            finally:
                gateways.stop(signal.SIGINT, 5.0)
    say("outfeed: stopped")


def announce(args: argparse.Namespace, port: int, text: str) -> None:
    """Print what runs and how to try it."""
    host = f"[{args.host}]" if ":" in args.host else args.host
    if args.no_replay:
        say(f"outfeed: waiting for a scheduler to attach to instance {args.instance!r}")
    else:
        say(f"outfeed: no model runs here: every request is answered with a piece of {text}")
    key = " -H 'Authorization: Bearer KEY'" if args.api_key or os.environ.get("OUTFEED_API_KEY") else ""
    say(
        f"outfeed: {args.gateways} gateway(s), {args.shards} shard(s); Ctrl-C stops. Try:\n"
        f"  curl -N http://{host}:{port}/generate{key} "
        """-d '{"text": "hello", "stream": true, "sampling_params": {"max_new_tokens": 32}}'\n"""
        f"outfeed: serving on http://{host}:{port}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run `serve` from the command line."""
    settle()
    args = parse(argv)
    try:
        serve(args)
    except (ServerError, PipelineError, LaunchError, RingError, InstanceGone) as error:
        print(f"serve: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        return fail("serve", error)
    except KeyboardInterrupt:  # told to stop before it served
        say("outfeed: stopped")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
