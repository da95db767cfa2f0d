"""One gateway process: a front, the endpoints, a port, and an end that loses nobody's answer.

SIGTERM drains: what runs is finished, what is new is refused with a 503, and the process ends when nothing
runs any more or the time for it is over. SIGINT ends at once. Several processes share a port
(SO_REUSEPORT); the kernel spreads the connections over them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import uvloop

from ..ingress.errors import BadRequest
from ..ingress.request import MAX_TOP_LOGPROBS
from ..ring import logs
from ..ring.board import Role
from ..ring.errors import RingError
from ..ring.instance import Instance
from ..ring.process import (
    die_with_parent,
    drain_seconds,
    fail,
    keep_what_is_loaded,
    raise_file_limit,
    say,
    settle,
)
from .accepting import Acceptor
from .app import App, Options
from .backend import Backend, FrontBackend
from .chat import ChatTemplate, NoTemplate
from .connection import Connections
from .limits import Limits
from .model import NoTokenizer
from .ports import has_stranger
from .readers import attach_reader
from .siblings import Siblings

log = logging.getLogger(__name__)

COMMAND: Final = "outfeed-gateway"
BACKLOG = 4096
MAX_PORT = 65535
GONE_EVERY_S = 0.25
"""How often a gateway looks whether its instance still runs."""
HEARD_WITHIN_S = 0.2
"""How long a gateway whose instance has gone listens whether it was told to stop as well."""
EXIT_GONE = 1

_LIMITS: Final = {
    "--max-body-bytes": ("body_bytes", "bytes of a request's body"),
    "--max-answer-bytes": ("answer_bytes", "bytes of an answer in one piece, and of an event of a stream"),
    "--max-requests": ("requests", "prompts at once"),
    "--max-connections": ("connections", "open connections"),
    "--idle-seconds": (
        "idle_s",
        "seconds that a connection may be idle; give more than a balancer in front keeps it",
    ),
}
"""The limits that are options: each with its field of `Limits`, and what it is of."""


class ServerError(RuntimeError):
    """The gateway cannot start; the message says why and what to do."""


def listen(host: str, port: int) -> socket.socket:
    """Return a socket bound to host and port that other gateway processes may share.

    Raises:
        ServerError: the address cannot be had.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
    except (OSError, UnicodeError) as error:  # no address, or what no name can be
        why = getattr(error, "strerror", None) or error
        raise ServerError(f"cannot listen on {host} port {port}: {why}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
        sock.setblocking(False)
        return sock
    except OSError as error:
        sock.close()
        raise ServerError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another --host or --port"
        ) from None


def refuse_strangers(sock: socket.socket, sharers: Callable[[], Iterable[int]]) -> None:
    """Listen on a bound socket that only this process and those of `sharers`, each a pid, may share.

    Raises:
        ServerError: another program listens there; the socket is closed.
    """
    taken = has_stranger(sock, sharers)  # before: who is there already does not lose a connection to this one
    if not taken:
        sock.listen(BACKLOG)
        taken = has_stranger(sock, sharers)  # again: of two that come at once, one at least sees the other
    if taken:
        host, port = sock.getsockname()[:2]
        sock.close()
        raise ServerError(
            f"cannot listen on {host} port {port}: another program does, which is no gateway of this "
            "instance and would take a part of its connections; choose another --host or --port"
        )


class Server:
    """The endpoints on one socket, in the running loop."""

    def __init__(self, app: App, sock: socket.socket) -> None:
        self.app = app
        self._sock = sock
        self.connections = Connections(app, app.limits)
        self._acceptor: Acceptor | None = None
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port it listens on."""
        port: int = self._sock.getsockname()[1]
        return port

    async def start(self) -> None:
        """Begin to accept."""
        self._sock.listen(BACKLOG)
        self._acceptor = Acceptor(self._sock, self.connections)
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep())

    async def drain(self, seconds: float) -> bool:
        """Refuse what is new and wait for what runs, at most `seconds`.

        True when all of it was finished, and taken by its clients.
        """
        self.app.draining = True
        self.connections.drain()
        deadline = time.monotonic() + seconds
        while not self._finished and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return self._finished

    @property
    def _finished(self) -> bool:
        """In a drain: whether all answers are complete, and none still waits for its client to read it."""
        return self.app.idle and not self.connections.sending

    async def stop(self) -> None:
        """Stop accepting, end what runs with a 503, and let go of everybody when it has gone out."""
        assert self._acceptor is not None
        assert self._sweeper is not None
        self._acceptor.close()
        self._sweeper.cancel()
        self.connections.drain()  # before: each answer has to say that it is its connection's last
        self.app.close()
        deadline = time.monotonic() + 1.0
        while self.connections.open and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        self.connections.abort()
        await asyncio.sleep(0)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self.connections.sweep()


async def _until_gone(alive: Callable[[], bool]) -> None:
    while alive():
        await asyncio.sleep(GONE_EVERY_S)


@dataclass(frozen=True, slots=True)
class Serving:
    """What `serve` needs besides the app."""

    host: str = "127.0.0.1"
    port: int = 8000
    drain_s: float = 30.0
    sharers: Callable[[], Iterable[int]] | None = None
    """The pids of the processes that may listen on the same port now; None: whoever does."""


async def serve(
    app: App,
    serving: Serving,
    ready: str = "",
    siblings: Siblings | None = None,
    alive: Callable[[], bool] = lambda: True,
) -> bool:
    """Serve until a signal (True), or until `alive()` is false (False).

    Prints `ready` and the address when it accepts.

    Raises:
        ServerError: the address cannot be had, or the socket that the other gateways talk to.
    """
    if siblings is not None:
        try:
            siblings.start()
        except OSError as error:
            raise ServerError(
                f"cannot open the socket to the other gateways: {error.strerror}; another process has this "
                "--reader number: end it, or take another number"
            ) from None
        app.siblings = siblings
    sock = listen(serving.host, serving.port)
    if serving.sharers is not None:
        refuse_strangers(sock, serving.sharers)
    server = Server(app, sock)
    await server.start()
    draining = asyncio.Event()
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, draining.set)
    loop.add_signal_handler(signal.SIGINT, ending.set)
    host = f"[{serving.host}]" if ":" in serving.host else serving.host
    say(f"{ready}http://{host}:{server.port}")
    gone = loop.create_task(_until_gone(alive))
    waits = [loop.create_task(draining.wait()), loop.create_task(ending.wait()), gone]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    if draining.is_set() and not ending.is_set():
        drain = loop.create_task(server.drain(serving.drain_s))
        await asyncio.wait([drain, waits[1], gone], return_when=asyncio.FIRST_COMPLETED)
        if not (drain.done() and drain.result()):
            sending = len(server.connections.sending)
            log.warning("stopping with %d prompts unfinished, %d clients still reading", app.live, sending)
        drain.cancel()
    # Whoever ended the instance may have told this process, too, and that be on its way.
    await asyncio.wait(waits[:2], timeout=HEARD_WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    await server.stop()
    if siblings is not None:
        siblings.close()
    return draining.is_set() or ending.is_set()


def port_number(text: str) -> int:
    """Read a port's number for argparse: what is out of range would be taken modulo 65536, unsaid."""
    if text.isascii() and text.isdigit() and int(text) <= MAX_PORT:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no port: give 0 to {MAX_PORT}; 0 takes a free one")


def count(text: str) -> int:
    """Read a number that may be 0, for argparse."""
    if text.isascii() and text.isdigit():
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no count: give 0 or more")


def above_zero(kind: type[int] | type[float]) -> Callable[[str], float]:
    """Make what reads a limit of that kind for argparse."""

    def read(text: str) -> float:
        with contextlib.suppress(ValueError):
            if (value := kind(text)) > 0:
                return value
        what = "a whole number" if kind is int else "a number"
        raise argparse.ArgumentTypeError(f"{text!r} is no limit: give {what} above 0")

    return read


def add_gateway_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that a gateway process and `serve` share."""
    limits = Limits()
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: this machine only)"
    )
    parser.add_argument(
        "--port", type=port_number, default=8000, metavar="N", help="port; 0 takes a free one (default 8000)"
    )
    parser.add_argument(
        "--api-key",
        default="",
        metavar="KEY",
        help="what clients must send as a Bearer token (default: nothing); better in OUTFEED_API_KEY, "
        "where ps does not show it",
    )
    parser.add_argument(
        "--admin-key",
        default="",
        metavar="KEY",
        help="what POST /control/OP wants as a Bearer token (default: there is no such endpoint); better in "
        "OUTFEED_ADMIN_KEY",
    )
    parser.add_argument(
        "--incremental", action="store_true", help="/generate streams send deltas, not all the text so far"
    )
    parser.add_argument(
        "--chat-template", metavar="FILE", help="jinja2 template (default: the tokenizer's own)"
    )
    for name, (field, of) in _LIMITS.items():
        default = getattr(limits, field)
        parser.add_argument(
            name,
            type=above_zero(type(default)),
            default=default,
            metavar="N" if type(default) is int else "S",
            help=f"{of} (default {default:,g})" if type(default) is float else f"{of} (default {default:,})",
        )
    parser.add_argument(
        "--max-top-logprobs",
        type=count,
        default=MAX_TOP_LOGPROBS,
        metavar="N",
        help=f"most top_logprobs_num of a request: what the scheduler can give (default {MAX_TOP_LOGPROBS})",
    )
    parser.add_argument(
        "--drain-seconds",
        type=drain_seconds,
        default=30.0,
        metavar="S",
        help="how long SIGTERM lets requests finish (default 30)",
    )


def gateway_options(args: argparse.Namespace) -> list[str]:
    """Write `add_gateway_arguments`' options as a command line again, but for the port and the keys."""
    names = ["--host", *_LIMITS, "--max-top-logprobs", "--drain-seconds"]
    options = [f"{name}={getattr(args, name[2:].replace('-', '_'))}" for name in names]
    options += ["--incremental"] if args.incremental else []
    return options + ([f"--chat-template={args.chat_template}"] if args.chat_template else [])


def keys(args: argparse.Namespace) -> tuple[str, str]:
    """Return the clients' key and the one for operations, "" for none.

    Raises:
        ServerError: they are the same, or one cannot be sent.
    """
    key = args.api_key or os.environ.get("OUTFEED_API_KEY", "")
    admin = args.admin_key or os.environ.get("OUTFEED_ADMIN_KEY", "")
    for name, one in (("api", key), ("admin", admin)):
        if not one.isprintable() or one != one.strip():  # a file's last line end, most likely
            raise ServerError(
                f"--{name}-key (or OUTFEED_{name.upper()}_KEY) has a space or a line end around it, or a "
                "character that is not printable, which no client can send: give it without"
            )
    if admin and admin == key:
        raise ServerError("--admin-key is the same as --api-key: clients must not have it; give another one")
    return key, admin


def make_app(backend: Backend, tokenizer: str | Path, args: argparse.Namespace) -> App:
    """Make the endpoints that the options describe.

    Raises:
        ServerError: an option cannot be used.
    """
    key, admin = keys(args)
    try:
        limits = Limits(
            **{field: getattr(args, name[2:].replace("-", "_")) for name, (field, _) in _LIMITS.items()}
        )
        template = ChatTemplate.find(tokenizer, args.chat_template)
    except (ValueError, NoTemplate) as error:
        raise ServerError(str(error)) from None
    return App(backend, Options(incremental=args.incremental, api_key=key, admin_key=admin), limits, template)


def reader_pids(instance: Instance) -> list[int]:
    """Return the pids of the instance's gateways that live."""
    rows = instance.board.rows(Role.READER)
    return [owner.pid for row in rows if row.alive and (owner := row.owner) is not None]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a gateway process until a signal (0) or the end of its instance (1); 2 when it cannot start."""
    parser = argparse.ArgumentParser(
        prog=COMMAND,
        usage="%(prog)s --instance NAME [options]",
        description="Serve an Outfeed instance over HTTP.",
    )
    parser.add_argument("--instance", required=True, metavar="NAME", help="the running instance to serve")
    parser.add_argument(
        "--reader",
        type=int,
        metavar="N",
        help="this process's reader number (default: the first that is free)",
    )
    add_gateway_arguments(parser)
    parser.add_argument("--die-with-parent", type=int, metavar="PID", help=argparse.SUPPRESS)
    settle()
    args = parser.parse_args(argv)
    logs.start("reader" if args.reader is None else f"reader{args.reader}")
    if args.die_with_parent:
        die_with_parent(args.die_with_parent)
    raise_file_limit()
    try:
        with attach_reader(args.instance, args.reader, args.max_top_logprobs) as front:
            reader = front.routes.reader
            logs.start(f"reader{reader}")
            app = make_app(FrontBackend(front), front.instance.config.tokenizer, args)
            serving = Serving(
                args.host, args.port, args.drain_seconds, functools.partial(reader_pids, front.instance)
            )
            ready = f"outfeed: gateway {reader} of {args.instance!r} serves on "
            siblings = Siblings(
                args.instance,
                reader,
                front.instance.config.readers,
                app.abort,
                app.state,
            )
            keep_what_is_loaded()
            told = uvloop.run(serve(app, serving, ready, siblings, lambda: front.instance.alive))
            # A new instance of that name is another one: who starts us again gets a gateway of that one.
            if not told:
                print(f"{COMMAND}: instance {args.instance!r} is gone: ended with it", file=sys.stderr)
                return EXIT_GONE
    except (ServerError, NoTokenizer, RingError, IndexError, BadRequest) as error:
        print(f"{COMMAND}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        return fail(COMMAND, error)
    except KeyboardInterrupt:  # before it served
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
