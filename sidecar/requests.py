"""A port keyed by rid instead of by route: for a scheduler whose own tables are.

Looking every rid up costs some 30 ns per row. Must not know rings: everything goes through the port.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..ring.frames import Abort, Control, Generate
from ..ring.route import format_route
from .endings import Reason
from .port import Column, OptionalColumns, SchedulerPort
from .rows import UnknownRoute

REMEMBER: Final = 1 << 16


class Requests:
    """A port's requests, by rid. `recv`, `adopt`, `push_tokens` and `push` in place of the port's.

    Two gateways may have a request of the same rid at the same time, and a client may use a rid again while
    a step of its first request is still being computed. So a rid is one request's for as long as `remember`
    further requests have not come: the next request of that rid is handed out as `<rid>@<route>`. That name
    is the scheduler's alone; the client's answers carry the rid the client chose.
    """

    def __init__(self, port: SchedulerPort, remember: int = REMEMBER) -> None:
        if remember < 1:
            raise ValueError(f"remember {remember}: give at least 1 request")
        self._port = port
        self._remember = remember
        self._routes: dict[str, int] = {}  # oldest first
        self._rids: dict[int, str] = {}

    def recv(self, limit: int = 1024) -> list[Generate | Abort | Control]:
        """Return what `SchedulerPort.recv` does, each message with a rid that is its request's alone."""
        return [
            msgspec.structs.replace(message, rid=self._rid(message)) for message in self._port.recv(limit)
        ]

    def adopt(self, message: Generate | Abort) -> str:
        """Take on a request, or end one with its Abort, as the port's; return the rid it has here."""
        self._port.adopt(message)
        return self._rid(message)

    def route_of(self, rid: str) -> int:
        """Return a request's route, for `push_result`, `push_error` and whatever else the port does.

        Raises:
            UnknownRoute: no request of that rid was received, or it ended too long ago.
        """
        try:
            return self._routes[rid]
        except KeyError:
            raise UnknownRoute(f"rid {rid!r} was never received: push only rids from recv()") from None

    def push_tokens(
        self,
        rids: Sequence[str],
        ids: Column,
        counts: Column | None = None,
        *,
        finishes: Mapping[str, Reason] | None = None,
        families: OptionalColumns | None = None,
        timeout: float = 0.0,
    ) -> None:
        """Hand over one decode step: `SchedulerPort.push_tokens` with rids in place of routes and of rows.

        finishes: rid → finish reason, which goes to the last row of that rid.

        Raises what `push_tokens` does; nothing was handed over then, push the same again.
        """
        try:
            routes = np.fromiter(map(self._routes.__getitem__, rids), np.uint64, len(rids))
        except KeyError as unknown:
            self.route_of(unknown.args[0])
            raise
        ended: dict[int, Reason] = {}
        if finishes:
            row_of = {rid: row for row, rid in enumerate(rids)}
            try:
                ended = {row_of[rid]: reason for rid, reason in finishes.items()}
            except KeyError as missing:
                raise ValueError(f"finishes names rid {missing} that has no row in this step") from None
        self._port.push_tokens(routes, ids, counts, finishes=ended, families=families, timeout=timeout)

    def push(
        self,
        tokens: Mapping[str, Sequence[int] | NDArray[Any]],
        *,
        finishes: Mapping[str, Reason] | None = None,
        families: OptionalColumns | None = None,
        timeout: float = 0.0,
    ) -> None:
        """Hand over one decode step as rid → token ids, one row each in this order.

        A rid that is in `finishes` alone ends without a further token; its row comes after the others. The
        easiest way in and the slowest: at many rows a step, use `push_tokens`.

        Raises what `push_tokens` does; nothing was handed over then, push the same again.
        """
        silent = [rid for rid in finishes or () if rid not in tokens]
        self.push_tokens(
            [*tokens, *silent],
            list(chain.from_iterable(tokens.values())),
            [*map(len, tokens.values()), *(0 for _ in silent)],
            finishes=finishes,
            families=families,
            timeout=timeout,
        )

    def _rid(self, message: Generate | Abort | Control) -> str:
        known = self._rids.get(message.route)
        if known is not None:
            return known
        rid = message.rid
        while rid in self._routes:
            rid = f"{rid}@{format_route(message.route)}"
        self._routes[rid] = message.route
        self._rids[message.route] = rid
        while len(self._routes) > self._remember and self._forget_oldest():
            pass  # what was alive the last times is made up for
        return rid

    def _forget_oldest(self) -> bool:
        """Forget the oldest request; False when it is alive: it is moved to the end."""
        rid = next(iter(self._routes))
        route = self._routes.pop(rid)
        if self._port.is_live(route):
            self._routes[rid] = route
            return False
        del self._rids[route]
        return True
