"""After a shard was replaced, or lost a frame: hand this gateway's live requests over to it.

It says TAKEOVER on its egress lane, behind all that it or its predecessor had published. From there on
nothing of the shard moves until it has a RESTORE for each request that was live, and RESTORED after the
last. Written a bit at a time, so that a full control ring never holds the reader up. Must not know how a
shard goes on from a RESTORE.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence

from ..ingress.register import Ingress
from ..ring.errors import CorruptLane, FrameTooLarge, RingError
from ..sink import Progress

log = logging.getLogger(__name__)


class Restoring:
    """The handovers of one gateway. On the reader's thread alone.

    lost(route, why) is called for a request that cannot be handed over: its RESTORE is larger than a frame.
    """

    def __init__(self, ingress: Ingress, lost: Callable[[int, str], None]) -> None:
        self._ingress = ingress
        self._lost = lost
        self._waiting: deque[tuple[int, int, deque[Progress]]] = deque()

    def begin(self, shard: int, epoch: int, progress: Sequence[Progress]) -> None:
        """Start handing `progress` over to shard `shard`; one it was still getting is void."""
        self._waiting = deque(entry for entry in self._waiting if entry[0] != shard)
        self._waiting.append((shard, epoch, deque(progress)))
        log.warning(
            "shard %d is new, or lost a frame: handing %d live requests over to it", shard, len(progress)
        )
        self.go_on()

    def go_on(self) -> bool:
        """Write what fits into the control lane now; whether everything has been written."""
        try:
            while self._waiting:
                shard, epoch, left = self._waiting[0]
                while left:
                    self._restore(left[0])
                    left.popleft()
                self._ingress.restored(shard, epoch)
                self._waiting.popleft()
        except CorruptLane as error:  # the new shard finds it lost, too, and does not wait for this gateway
            log.error("handover given up: %s", error)
            self._waiting.clear()
        except RingError as error:
            log.debug("handover goes on in a moment: %s", error)
            return False
        return True

    def _restore(self, progress: Progress) -> None:
        try:
            self._ingress.restore(progress.route, progress.ids, progress.text_bytes)
        except FrameTooLarge as error:
            self._lost(progress.route, str(error))
