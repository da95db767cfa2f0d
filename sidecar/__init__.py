"""The scheduler's side: the one port a scheduler imports, SGLang's way to it, and a replay scheduler.

Knows the request and step rings. Must not know sinks, HTTP or how a shard decodes.
"""

from ..ring.errors import CorruptLane, FrameTooLarge, LaneOwned, RingClosed, RingError, RingFull, WriterBusy
from ..ring.families import Family, Kind
from ..ring.family_makers import flat_family, hidden_family, ragged_family
from ..ring.finish import FinishReason
from ..ring.frames import Abort, Control, Generate
from ..ring.instance import InstanceGone
from .port import SchedulerPort
from .requests import Requests
from .rows import UnknownRoute

__all__ = [
    "Abort",
    "Control",
    "CorruptLane",
    "Family",
    "FinishReason",
    "FrameTooLarge",
    "Generate",
    "InstanceGone",
    "Kind",
    "LaneOwned",
    "Requests",
    "RingClosed",
    "RingError",
    "RingFull",
    "SchedulerPort",
    "UnknownRoute",
    "WriterBusy",
    "flat_family",
    "hidden_family",
    "ragged_family",
]
