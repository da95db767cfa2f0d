"""Reader and sinks: from the egress ring to the one handler that asked.

Knows frames, per-request sinks, events and how they add up to a response. Must not know tokenizers,
shards' internals or HTTP.
"""

from .accumulate import Response, render_columns, request_error
from .channel import (
    SinkBusy,
    SinkClosed,
    SinkEnded,
    SinkFull,
    SinkSender,
    SinkSource,
    SinkStatistics,
    open_sink,
)
from .columns import Columns, Flat, Hidden, Ragged
from .events import ChunkEvent, Control, Done, Error, Frame, Item
from .live import Progress, ReaderStatistics
from .reader import Reader

__all__ = [
    "ChunkEvent",
    "Columns",
    "Control",
    "Done",
    "Error",
    "Flat",
    "Frame",
    "Hidden",
    "Item",
    "Progress",
    "Ragged",
    "Reader",
    "ReaderStatistics",
    "Response",
    "SinkBusy",
    "SinkClosed",
    "SinkEnded",
    "SinkFull",
    "SinkSender",
    "SinkSource",
    "SinkStatistics",
    "open_sink",
    "render_columns",
    "request_error",
]
