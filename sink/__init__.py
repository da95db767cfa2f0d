"""Reader and sinks: from the egress ring to the one handler that asked.

Knows frames, per-request sinks, events and how they add up to a response. Must not know tokenizers,
shards' internals or HTTP.
"""

from .channel import SinkClosed, SinkEnded, SinkFull, SinkSender, SinkSource, SinkStatistics, open_sink
from .events import ChunkEvent, Control, Done, Error, Frame, Item
from .reader import Progress, Reader, ReaderStatistics

__all__ = [
    "ChunkEvent",
    "Control",
    "Done",
    "Error",
    "Frame",
    "Item",
    "Progress",
    "Reader",
    "ReaderStatistics",
    "SinkClosed",
    "SinkEnded",
    "SinkFull",
    "SinkSender",
    "SinkSource",
    "SinkStatistics",
    "open_sink",
]
