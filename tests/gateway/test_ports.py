"""A port is shared with the gateways of one instance, and with nobody else."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from outfeed.gateway.ports import has_stranger
from outfeed.gateway.server import ServerError, listen, refuse_strangers

LISTENS = """
import socket, sys
s = socket.socket(socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
s.bind((sys.argv[1], int(sys.argv[2])))
s.listen()
print(flush=True)
sys.stdin.read()
"""


@contextmanager
def another(host: str, port: int) -> Iterator[int]:
    """Another process that listens there and lets others share it; its pid."""
    command = [sys.executable, "-c", LISTENS, host, str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        yield process.pid
        process.communicate()


def nobody() -> list[int]:
    """Return the pids of siblings: there are none."""
    return []


def test_nobody_else_is_there() -> None:
    with listen("127.0.0.1", 0) as sock:
        refuse_strangers(sock, nobody)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.1", "0.0.0.0"),
        ("::1", "::1"),
        ("::", "127.0.0.1"),  # which [::] is, too
        ("::", "0.0.0.0"),
    ],
)
def test_a_stranger_is_refused_and_a_sibling_is_not(here: str, there: str) -> None:
    with listen(here, 0) as sock:
        port = sock.getsockname()[1]
        with another(there, port) as pid:
            assert has_stranger(sock, nobody)
            assert has_stranger(sock, lambda: [os.getppid()])
            assert not has_stranger(sock, lambda: [pid])
            with pytest.raises(
                ServerError, match=f"cannot listen on {here} port {port}: another program does"
            ):
                refuse_strangers(sock, nobody)
        assert sock.fileno() == -1


def test_siblings_that_start_together_are_not_taken_for_strangers() -> None:
    """One comes, and listens, after the other has asked who its siblings are."""
    with listen("127.0.0.1", 0) as sock, ExitStack() as coming:
        known: list[int] = []

        def sharers() -> list[int]:
            before = list(known)
            if not known:
                known.append(coming.enter_context(another("127.0.0.1", sock.getsockname()[1])))
            return before

        refuse_strangers(sock, sharers)
        assert known
        assert has_stranger(sock, nobody)


def test_a_stranger_that_comes_at_the_same_time_is_refused() -> None:
    """It was not there at the first look, so it may not have seen this one either."""
    with listen("127.0.0.1", 0) as sock, ExitStack() as coming:
        port = sock.getsockname()[1]
        came: list[int] = []

        def sharers() -> list[int]:
            if not came:
                came.append(coming.enter_context(another("127.0.0.1", port)))
            return []

        with pytest.raises(ServerError, match="another program does"):
            refuse_strangers(sock, sharers)
        assert sock.fileno() == -1


def test_the_same_port_of_another_address_is_nobodys_business() -> None:
    with listen("127.0.0.1", 0) as sock, another("127.0.0.2", sock.getsockname()[1]):
        assert not has_stranger(sock, nobody)


def test_where_ipv6_is_kept_apart_ipv4_is_nobodys_business() -> None:
    with socket.socket(socket.AF_INET6) as sock:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(("::", 0))
        with another("0.0.0.0", sock.getsockname()[1]):
            assert not has_stranger(sock, nobody)


@pytest.mark.parametrize("host", ["a..b", "x" * 64])
def test_what_can_be_no_name_is_said_in_one_line(host: str) -> None:
    with pytest.raises(ServerError, match=f"cannot listen on {host} port 80"):
        listen(host, 80)
