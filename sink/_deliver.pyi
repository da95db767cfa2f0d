"""The reader's loop over a step's rows, built from core/deliver.c."""

from collections.abc import Callable
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ..ring.finish import FinishReason
from .columns import Columns

class Event:
    finish: FinishReason | None
    @property
    def text_utf8(self) -> bytes: ...
    @property
    def ids_raw(self) -> bytes: ...
    @property
    def first(self) -> int: ...
    @property
    def generated(self) -> int: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def stamp_ns(self) -> int: ...
    @property
    def columns(self) -> Columns | None: ...
    @property
    def columns_bytes(self) -> int: ...
    @property
    def size(self) -> int: ...
    def __new__(
        cls,
        text_utf8: bytes,
        ids_raw: bytes,
        first: int,
        generated: int,
        prompt_tokens: int,
        stamp_ns: int,
        finish: FinishReason | None = None,
        columns: Columns | None = None,
    ) -> Self: ...

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
    def take_quick(self) -> Any: ...
    def pop_plain(self) -> Any: ...

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
