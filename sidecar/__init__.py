"""The scheduler's side: the one port a scheduler imports, and a replay scheduler that uses it.

Knows the request and step rings. Must not know sinks, HTTP or how a shard decodes.
"""

from ..ring.finish import FinishReason
from ..ring.frames import Abort, Control, Generate
from .port import SchedulerPort
from .rows import UnknownRoute

__all__ = ["Abort", "Control", "FinishReason", "Generate", "SchedulerPort", "UnknownRoute"]
