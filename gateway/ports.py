"""A port that gateways of one instance share must be nobody else's.

The kernel spreads a shared port's connections over all who listen there, and lets any program of the same
user join. A gateway of another instance would take a part of them, for another model. Must not know requests.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

_LISTENS: Final = "0A"
_ALL_IPV4: Final = "0" * 8
_TRIES: Final = 3
"""A sibling that ends between two looks is taken for nobody's once; a stranger is there each time."""


def has_stranger(sock: socket.socket, sharers: Callable[[], Iterable[int]]) -> bool:
    """Whether a process besides this one and `sharers()` listens where `sock` is bound, or on all addresses.

    False where the kernel does not tell.
    """
    for _ in range(_TRIES):
        found = _listeners(sock)
        # Behind that: whoever listens by then is one of the sharers by now.
        ours = {inode for pid in (os.getpid(), *sharers()) for inode in _sockets(pid)}
        if not found - ours:
            return False
    return True


def _listeners(sock: socket.socket) -> set[int]:
    """Return the inodes of the sockets that listen on the same port, and address or all addresses."""
    host, port = sock.getsockname()[:2]
    packed = socket.inet_pton(sock.family, host)
    address = "".join(f"{word:08X}" for word in struct.unpack(f"={len(packed) // 4}I", packed))
    if sock.family == socket.AF_INET:
        return _on_port("tcp", port, address)
    found = _on_port("tcp6", port, address)
    if not any(packed) and not sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY):
        found |= _on_port("tcp", port, _ALL_IPV4)  # [::] is every address of both kinds
    return found


def _on_port(table: str, port: int, address: str) -> set[int]:
    """Return the inodes of what listens on a port there, or on all addresses, as the kernel's table says."""
    everywhere = "0" * len(address)
    try:
        lines = Path(f"/proc/self/net/{table}").read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return set()
    found = set()
    for line in lines:
        fields = line.split()  # number, address:port, peer, state, …; proc_net_tcp.rst of the kernel
        there, _, number = fields[1].partition(":")
        same = there == address or everywhere in (there, address)
        if fields[3] == _LISTENS and int(number, 16) == port and same:
            found.add(int(fields[9]))
    return found


def _sockets(pid: int) -> set[int]:
    """Return the inodes of the sockets that a process has open; none when it is gone, or another user's."""
    found = set()
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                what = os.readlink(f"/proc/{pid}/fd/{fd}")
                if what.startswith("socket:["):
                    found.add(int(what[8:-1]))
    return found
