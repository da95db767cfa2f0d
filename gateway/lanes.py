"""The lanes that a gateway's requests depend on, watched for damage.

A corrupt egress lane shows itself to the reader. Of the others only the process that reads them notices: it
quarantines the lane, and what it had not read is lost. Nobody can say whose that was, so all that is live
when it is found here, and depends on it, may have been. Must not know requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..ring import Ring


class _Lane(NamedTuple):
    ring: Ring
    lane: int
    what: str
    rank: int | None = None


class Lost(NamedTuple):
    """A lane that was found corrupt. rank: whose step lane it is; None for the gateway's own lanes."""

    what: str
    rank: int | None


class LaneWatch:
    """The request and the control lane of gateway `reader`, and every rank's step lane."""

    def __init__(self, rings: Mapping[str, Ring], reader: int) -> None:
        own = [_Lane(rings[name], reader, f"the gateway's {name} lane") for name in ("request", "control")]
        step = rings["step"]
        ranks = [_Lane(step, rank, f"the step lane of rank {rank}", rank) for rank in range(step.lanes)]
        self._needed = [own[:1], own[1:], ranks]  # of each at least one, or nothing can be served
        self._lost: dict[_Lane, str] = {}
        self.fatal: str | None = None
        """Why no request can be served any more; None when some can. Asked for each request."""

    def look(self) -> list[Lost]:
        """Return what was found corrupt since the last look, each once; see `fatal`."""
        found = []
        for lane in (lane for lanes in self._needed for lane in lanes if lane not in self._lost):
            position = lane.ring.quarantined(lane.lane)
            if position is not None:
                self._lost[lane] = f"{lane.what} is corrupt (at position {position})"
                found.append(Lost(self._lost[lane], lane.rank))
        for lanes in self._needed:
            if self.fatal is None and all(lane in self._lost for lane in lanes):
                self.fatal = self._lost[lanes[0]]
        return found

    @property
    def lost(self) -> list[str]:
        """Everything found corrupt so far."""
        return list(self._lost.values())
