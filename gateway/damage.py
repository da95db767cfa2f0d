"""What a gateway does about damage that others found: a lane that is lost, a frame that was rejected.

It ends what cannot be answered any more, and helps the scheduler to find what it never got. Must not know
what a request is.
"""

from __future__ import annotations

import logging

from ..ingress.register import Ingress
from ..ring import Ring
from ..ring.board import Board, Role
from ..ring.errors import RingError
from ..sink import Error, Reader
from .lanes import LaneWatch, Lost
from .ranks import RECEIVER

log = logging.getLogger(__name__)


class Damage:
    """Looked for by one gateway, on its reader's thread."""

    def __init__(
        self, board: Board, egress: Ring, lanes: LaneWatch, reader: Reader, ingress: Ingress
    ) -> None:
        self._egress = egress
        self._lanes = lanes
        self._lost: list[Lost] = []  # lanes whose requests have not been dealt with
        self._reader = reader
        self._ingress = ingress
        self._me = ingress.routes.reader
        self._shards = board.rows(Role.SHARD)
        self._scheduler = board.row(Role.SCHEDULER, RECEIVER)
        self._rejected = self._scheduler.get("bad_frames")
        self._said = ingress.routes.slots  # as many slots' requests have been told to the scheduler

    def look(self) -> None:
        """Look for what is new, and do what there is to do. Call it now and then."""
        self._look_at_lanes()
        self._reader.cut_off(self._cut_off())
        self._ingress.routes.avoid(self._reader.lost_shards)
        self._say_live()

    def _look_at_lanes(self) -> None:
        """End what may be lost with a lane that is found corrupt: whose frames were, nobody knows."""
        self._lost += self._lanes.look()
        while self._lost:
            self._end_those_of(self._lost[0])  # without memory for it again at the next look
            del self._lost[0]

    def _end_those_of(self, lost: Lost) -> None:
        log.error("%s: what is live here and may depend on it ends", lost.what)
        self._reader.fail(
            Error(500, "corrupt_lane", f"{lost.what}; the request may have been lost with it"),
            abort=True,
            rank=lost.rank,
        )

    def _cut_off(self) -> frozenset[int]:
        """Return which shards say on the board that they cannot have their lane to this gateway.

        A shard that has it is not believed: the board may be damaged, too.
        """
        told = [row for row in self._shards if row.get("cut_off") >> self._me & 1]
        if not told:
            return frozenset()
        lanes = self._egress.stats().lanes
        return frozenset(row.index for row in told if lanes[row.index].owner != row.owner)

    def _say_live(self) -> None:
        """Tell the scheduler what is live here when it has rejected a frame: so it finds what was lost."""
        if (rejected := self._scheduler.get("bad_frames")) != self._rejected:
            self._rejected, self._said = rejected, 0
        try:
            while self._said < self._ingress.routes.slots:
                self._said = self._ingress.live_from(self._said)
        except RingError as error:
            log.debug("what is live is told in a moment: %s", error)
