"""The shared-memory ring and the frames on it.

Knows segments, lanes, consumers, doorbells and the bytes of a frame. Must not know what a tokenizer, a
sink, a sampling parameter or a scheduler is: every other room imports this one, it imports none.
"""

from ._fast import View
from .consumer import Consumer, Frame, wait
from .doorbell import Doorbell
from .errors import (
    BadCapacity,
    ConsumerBusy,
    CorruptLane,
    FrameTooLarge,
    LaneOwned,
    LockHeld,
    NoRoom,
    NoSharedMemory,
    NotARing,
    NotOurs,
    OtherNamespace,
    RingClosed,
    RingError,
    RingFull,
    WriterBusy,
    WrongVersion,
)
from .owner import Owner
from .ring import Ring
from .stats import ConsumerStats, LaneStats, RingStats
from .writer import LaneWriter

__all__ = [
    "BadCapacity",
    "Consumer",
    "ConsumerBusy",
    "ConsumerStats",
    "CorruptLane",
    "Doorbell",
    "Frame",
    "FrameTooLarge",
    "LaneOwned",
    "LaneStats",
    "LaneWriter",
    "LockHeld",
    "NoRoom",
    "NoSharedMemory",
    "NotARing",
    "NotOurs",
    "OtherNamespace",
    "Owner",
    "Ring",
    "RingClosed",
    "RingError",
    "RingFull",
    "RingStats",
    "View",
    "WriterBusy",
    "WrongVersion",
    "wait",
]
