"""The reader's loop over a step's rows, built from core/deliver.c."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..ring.finish import FinishReason
from .columns import Columns

class Event:
    text_utf8: bytes
    ids_raw: bytes
    first: int
    generated: int
    prompt_tokens: int
    stamp_ns: int
    finish: FinishReason | None
    @property
    def columns(self) -> Columns | None: ...
    @property
    def columns_bytes(self) -> int: ...
    def attach(self, columns: Columns | None) -> None: ...
    def __init__(
        self,
        text_utf8: bytes,
        ids_raw: bytes,
        first: int,
        generated: int,
        prompt_tokens: int,
        stamp_ns: int,
        finish: FinishReason | None = None,
        columns: Columns | None = None,
    ) -> None: ...

class ChannelFields:
    fresh: list[Any]
    folded: Any
    waiter: Any
    on_gone: Any
    capacity: int
    sent: int
    taken: int
    freed: int
    limit: int
    received: int
    merged: int
    folding: bool
    gone: bool
    ended: bool
    def take_one(self) -> Any: ...

class LiveFields:
    channel: Any
    ids: bytearray
    next: int
    columns_bytes: int
    def __init__(self, channel: Any) -> None: ...

def deliver(
    table: dict[int, Any],
    body: bytes,
    layout: tuple[int, ...],
    stamp_ns: int,
    ending: list[int],
    having: list[int],
    columns: list[Columns],
    fold_at: int,
    wakes: list[Any],
    odd: Callable[[int, int, Any, Any], object],
) -> int: ...
def cut(
    make: Callable[..., Any],
    counts: NDArray[np.uint32],
    lengths: NDArray[np.uint32] | None,
    values: NDArray[np.float32],
    ids: NDArray[np.int32],
) -> tuple[list[Any], list[int]]: ...
def bind(event: type, frame: type, done: type) -> None: ...
