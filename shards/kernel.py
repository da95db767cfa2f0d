"""The C kernel, with types: one object per shard, one call per step.

Knows `core/api.h` and nothing above it: rows and bytes in, columns and text out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..ring.batch import Core
from ..ring.columns import I32, U32, U64
from ..ring.frames import Buffer
from . import _kernel
from .errors import BadRegistration, TableError

ffi, lib = _kernel.ffi, _kernel.lib

# How a row ends.
END: Final[int] = lib.OFS_END
END_STRING: Final[int] = lib.OFS_END_STRING
END_TOKENS: Final[int] = lib.OFS_END_TOKENS
# Flags of a registration.
SKIP_SPECIAL: Final[int] = lib.OFS_SKIP_SPECIAL
NO_STOP_TRIM: Final[int] = lib.OFS_NO_STOP_TRIM
DETECT: Final[int] = lib.OFS_DETECT
# What `plan` says of a row that is not to be decoded.
DROPPED: Final[int] = lib.OFS_DROPPED

_u8 = ffi.typeof("uint8_t[]")
_u32 = ffi.typeof("uint32_t[]")
_i32 = ffi.typeof("int32_t[]")


class Finish(NamedTuple):
    """A row that ends its request: `kind` END, END_STRING (matched: UTF-8) or END_TOKENS (matched: i32)."""

    row: int
    kind: int
    matched: bytes


class Failure(NamedTuple):
    """A request that cannot go on: its row was not the one expected, or its text found no room."""

    route: int
    expected: int
    first: int
    tokens: int
    too_much: bool


class Ready(NamedTuple):
    """Text that the caller made: `lens` u32[tokens + rows], each token's, then each row's own tail."""

    text: bytes
    lens: U32


class Look(NamedTuple):
    """One request's state."""

    expected: int
    """Tokens that have come: what the next row's `first` must be."""
    tail: int
    """Bytes at the text's end that only begin a character."""
    run: int
    """Bytes of the run of byte tokens that is not over yet."""
    held: int
    """Bytes of text that were made and not sent."""
    ended: bool
    """Nothing more comes out of it."""


class Kernel:
    """One shard's requests and their text. One thread at a time."""

    def __init__(self, table: Buffer | None) -> None:
        error = ffi.new("int *")
        # Held: the kernel keeps pointing into it.
        self._table = None if table is None else ffi.from_buffer(_u8, table)
        length = 0 if self._table is None else len(self._table)
        shard = lib.ofs_new(ffi.NULL if self._table is None else self._table, length, error)
        if shard == ffi.NULL:
            if error[0] == lib.OFS_NO_MEMORY:
                raise MemoryError("no memory for a decoder")
            raise TableError(f"{length} bytes that are no token table of this version; compile it anew")
        self._shard = ffi.gc(shard, lib.ofs_free)
        self._out = lib.ofs_result(shard)
        self._rows = ffi.new("ofs_rows *")
        self._finishes = ffi.new("ofs_finishes *")
        self._ready = ffi.new("ofs_ready *")
        self._body = ffi.new("const uint8_t **")
        self._views: _Views | None = None

    def register(
        self,
        route: int,
        flags: int,
        stops: Iterable[bytes],
        prompt: Buffer,
        prompt_tokens: int,
        least: int = 0,
    ) -> bool:
        """Start a request; False when it runs already. Raises BadRegistration, MemoryError.

        least: with DETECT, how many tokens must have come, at least, for a stop string to end it.
        """
        kept = [stop for stop in stops if stop]
        lens = ffi.new(_u32, [len(stop) for stop in kept])
        ids = ffi.from_buffer(_i32, prompt)
        code = lib.ofs_register(
            self._shard,
            route,
            flags,
            b"".join(kept),
            lens,
            len(kept),
            least,
            ids,
            len(ids),
            min(prompt_tokens, 0xFFFFFFFF),
        )
        if code == lib.OFS_TAKEN:
            return False
        if code == lib.OFS_TOO_MUCH:
            raise BadRegistration(
                f"{len(kept)} stop strings of {sum(map(len, kept))} UTF-8 bytes; "
                f"at most {lib.OFS_MAX_STOPS} of {lib.OFS_MAX_STOP_BYTES} bytes together"
            )
        if code:
            raise MemoryError(f"no memory for another request (code {code})")
        return True

    def restore(
        self, route: int, ids: Buffer, text_bytes: int, ready: Ready | None = None, part: int = 0
    ) -> tuple[bytes, int]:
        """Bring a request that was just registered to where its delivered ids and text left it.

        Returns the text that was delivered, and how many characters the first `part` of the ids had made,
        those included that waited as they could become a stop string.
        """
        column = ffi.from_buffer(_i32, ids)
        given = ffi.NULL if ready is None else self._set_ready(ready, len(column) + 1)
        made = ffi.new("uint32_t *")
        code = lib.ofs_restore(self._shard, route, column, len(column), text_bytes, given, part, made)
        if code:
            raise MemoryError(f"{len(column)} ids cannot be restored (code {code})")
        sent = bytes(ffi.buffer(self._out.text, self._out.text_bytes)) if self._out.text_bytes else b""
        return sent, made[0]

    def forget(self, route: int) -> bool:
        """Drop a request; False when it was not known."""
        return bool(lib.ofs_forget(self._shard, route))

    def end(self, route: int) -> None:
        """Let nothing more come out of a request."""
        lib.ofs_end(self._shard, route)

    def held(self, route: int) -> bytes:
        """Return the text that a request has made and not sent."""
        size = ffi.new("uint32_t *")
        held = lib.ofs_held(self._shard, route, size)
        return bytes(ffi.buffer(held, size[0])) if size[0] else b""

    def plan(
        self,
        core: Core,
        shard: int,
        reader: int,
        finishes: list[Finish],
    ) -> U32:
        """Return how many ids of each row `decode` would decode (DROPPED for rows it would drop)."""
        keep: U32 = np.zeros(core.rows, dtype=np.uint32)
        self._set_rows(core)
        how, kept = self._set_finishes(finishes)
        code = lib.ofs_plan(self._shard, self._rows, shard, reader, how, ffi.from_buffer(_u32, keep))
        del kept
        if code == lib.OFS_NO_MEMORY:
            raise MemoryError(f"no memory to order {len(keep)} rows")
        if code:
            raise ValueError("counts add up to more than there are ids")
        return keep

    def decode(
        self,
        core: Core,
        shard: int,
        reader: int,
        finishes: list[Finish],
        ready: Ready | None = None,
        token_ends: bool = False,
        merge: int = 0,
    ) -> Step:
        """Decode a step's rows of one shard and reader.

        merge: the step is several joined end to end, and what a request's rows made becomes one row of at
        most so many bytes of ids and text, or several; only without `ready` and `token_ends`.
        """
        self._set_rows(core)
        how, kept = self._set_finishes(finishes) if finishes else (ffi.NULL, None)
        given = ffi.NULL if ready is None else self._set_ready(ready, core.tokens + core.rows)
        code = lib.ofs_decode(self._shard, self._rows, shard, reader, how, given, token_ends, merge)
        del kept
        if code:
            raise MemoryError(f"a step of {core.rows} rows cannot be decoded (code {code})")
        return Step(self)

    def pack(self, header: bytes) -> memoryview:
        """Return the last step's output as a BATCH body behind `header`; valid until the next call."""
        body = self._body
        size = lib.ofs_pack(self._shard, header, len(header), body)
        if size < 0:
            raise MemoryError(f"a frame of {self._out.text_bytes} bytes of text has no room (code {size})")
        return memoryview(ffi.buffer(body[0], size))

    def decode_each(self, ids: I32, counts: U32, flags: int) -> tuple[bytes, U32]:
        """Decode sequences, each a whole request; return their text end to end and its lengths in bytes.

        `counts` are the sequences' lengths, `ids` all of them end to end.
        """
        if int(counts.sum()) != len(ids):
            raise ValueError(f"counts add up to {int(counts.sum())}, there are {len(ids)} ids")
        lens: U32 = np.zeros(len(counts), dtype=np.uint32)
        code = lib.ofs_decode_each(
            self._shard,
            ffi.from_buffer(_i32, ids),
            ffi.from_buffer(_u32, counts),
            len(counts),
            flags,
            ffi.from_buffer(_u32, lens),
        )
        if code:
            raise MemoryError(f"{len(counts)} sequences cannot be decoded at once (code {code})")
        return bytes(ffi.buffer(self._out.text, self._out.text_bytes)), lens

    @property
    def live(self) -> int:
        """Requests registered now."""
        return int(lib.ofs_total(self._shard).live)

    def totals(self) -> dict[str, int]:
        """Return live, pages, tokens, text_bytes and work since the start."""
        totals = lib.ofs_total(self._shard)
        return {name: getattr(totals, name) for name in ("live", "pages", "tokens", "text_bytes", "work")}

    def look(self, route: int) -> Look | None:
        """Return a request's state, None when it is not known."""
        look = ffi.new("ofs_look *")
        if not lib.ofs_peek(self._shard, route, look):
            return None
        return Look(look.expected, look.tail, look.run, look.held, bool(look.ended))

    def token_text(self, token: int) -> str:
        """Return one token's text on its own, special or not; "" for an id that is none."""
        room = 4096
        while True:
            out = ffi.new("uint8_t[]", room)
            size = lib.ofs_token_text(self._shard, token, out, room)
            if size >= 0:
                # Text in a table that is being scribbled over may not even be UTF-8.
                return bytes(ffi.buffer(out, size)).decode(errors="replace")
            if size != lib.OFS_TOO_MUCH:
                raise ValueError("this decoder has no table: ask the tokenizer")
            room *= 16

    def _set_rows(self, core: Core) -> None:
        """Point at a step's columns: `core` must live until the call that reads them is over."""
        raw, at, rows, tokens = core
        if lib.ofs_columns(self._rows, raw, len(raw), at, rows, tokens):
            raise ValueError(f"{rows} rows and {tokens} tokens from {at} on do not lie in {len(raw)} bytes")

    def _set_finishes(self, finishes: list[Finish]) -> tuple[Any, object]:
        how = self._finishes
        entries, offset = [], 0
        for row, kind, matched in finishes:
            entries.append((row, kind, offset, len(matched)))
            offset += len(matched)
        matched_all = b"".join(finish.matched for finish in finishes)
        alive = ffi.new("ofs_finish[]", entries), ffi.from_buffer(_u8, matched_all)
        how.finishes, how.matched = alive
        how.count, how.matched_len = len(entries), offset
        return how, alive

    def _set_ready(self, ready: Ready, entries: int) -> Any:
        if len(ready.lens) != entries:
            raise ValueError(f"{len(ready.lens)} lengths of ready-made text, expected {entries}")
        given = self._ready
        self._alive = ffi.from_buffer(_u8, ready.text), ffi.from_buffer(_u32, ready.lens)
        given.text, given.lens = self._alive
        given.len = len(ready.text)
        return given

    @property
    def views(self) -> _Views:
        """The output arrays, at their full length."""
        out, views = self._out, self._views
        if views is None or views.moves != out.moves:
            views = self._views = _Views(out)
        return views


class Step:
    """One call's output. Columns and text are the kernel's own memory: valid until its next call.

    Columns as in Batch's egress form.
    """

    __slots__ = ("_kernel", "_out", "rows", "text_bytes", "tokens")

    def __init__(self, kernel: Kernel) -> None:
        out = kernel._out
        self._kernel = kernel
        self._out = out
        self.rows: int = out.rows
        self.tokens: int = out.tokens
        self.text_bytes: int = out.text_bytes

    @property
    def routes(self) -> U64:
        """u64[rows]."""
        return self._kernel.views.routes[: self.rows]

    @property
    def first(self) -> U32:
        """u32[rows]."""
        return self._kernel.views.first[: self.rows]

    @property
    def counts(self) -> U32:
        """u32[rows]."""
        return self._kernel.views.counts[: self.rows]

    @property
    def prompt_tokens(self) -> U32:
        """u32[rows]."""
        return self._kernel.views.prompt_tokens[: self.rows]

    @property
    def ids(self) -> I32:
        """i32[tokens]."""
        return self._kernel.views.ids[: self.tokens]

    @property
    def generated(self) -> U32:
        """u32[rows]."""
        return self._kernel.views.generated[: self.rows]

    @property
    def text_lens(self) -> U32:
        """u32[rows], bytes."""
        return self._kernel.views.text_lens[: self.rows]

    @property
    def source(self) -> U32:
        """u32[rows], each row's row in the step that came in; of merged ones, the last."""
        return self._kernel.views.source[: self.rows]

    @property
    def token_ends(self) -> U32:
        """u32[tokens], where each token's text ends in its row's, before any is held back; if asked for."""
        return self._kernel.views.token_ends[: self.tokens]

    @property
    def text(self) -> memoryview:
        """UTF-8, the rows' end to end."""
        return memoryview(ffi.buffer(self._out.text, self.text_bytes)) if self.text_bytes else memoryview(b"")

    @property
    def stops(self) -> list[tuple[int, int]]:
        """(row, index of the stop string) for rows that this shard ended."""
        out = self._out
        return [(out.stops[k].row, out.stops[k].pattern) for k in range(out.stop_count)]

    @property
    def failures(self) -> list[Failure]:
        """Requests that cannot go on."""
        out = self._out
        return [_failure(out.failures[k]) for k in range(out.failure_count)]

    @property
    def stale_rows(self) -> int:
        """Rows of requests that are not registered; dropped."""
        return int(self._out.stale_rows)

    @property
    def doubled(self) -> int:
        """Rows that were decoded before; dropped."""
        return int(self._out.doubled)

    @property
    def stop_count(self) -> int:
        """How many `stops`."""
        return int(self._out.stop_count)

    @property
    def failure_count(self) -> int:
        """How many `failures`."""
        return int(self._out.failure_count)

    @property
    def shared(self) -> bool:
        """Whether other readers have rows of this shard in the step."""
        return bool(self._out.other_readers)

    @property
    def other_readers(self) -> list[int]:
        """Readers beside this one with rows of this shard in the step."""
        out = self._out
        return [64 * word + bit for word in range(4) for bit in range(64) if out.others[word] >> bit & 1]

    def pack(self, header: bytes) -> memoryview:
        """Return this output as a BATCH body behind `header` (see batch.encode_header)."""
        return self._kernel.pack(header)


def _failure(found: Any) -> Failure:
    return Failure(found.route, found.expected, found.first, found.count, found.code == -lib.OFS_TOO_MUCH)


class _Views:
    """The kernel's output arrays as numpy arrays, made once per growth instead of once per step."""

    def __init__(self, out: Any) -> None:
        self.moves: int = out.moves
        rows, tokens = out.row_cap, out.token_cap

        def view(pointer: Any, count: int, dtype: str) -> NDArray[Any]:
            kind = np.dtype(dtype)
            return np.frombuffer(ffi.buffer(pointer, count * kind.itemsize), kind)

        self.routes: U64 = view(out.routes, rows, "<u8")
        self.first: U32 = view(out.first, rows, "<u4")
        self.counts: U32 = view(out.counts, rows, "<u4")
        self.prompt_tokens: U32 = view(out.prompt_tokens, rows, "<u4")
        self.generated: U32 = view(out.generated, rows, "<u4")
        self.text_lens: U32 = view(out.text_lens, rows, "<u4")
        self.source: U32 = view(out.source, rows, "<u4")
        self.ids: I32 = view(out.ids, tokens, "<i4")
        self.token_ends: U32 = view(out.token_ends, tokens, "<u4")
