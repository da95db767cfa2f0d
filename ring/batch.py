"""The BATCH frame: one decode step, as columns.

    0            4          8       16                       16 + header_len (then 8-aligned)
    ┌────────────┬──────────┬───────┬────────────────────────┬──────────────┬─────────────────────┐
    │ header_len │ body_len │ check │ msgpack header (array) │ zero padding │ columns, end to end │
    └────────────┴──────────┴───────┴────────────────────────┴──────────────┴─────────────────────┘

    header   [version 1, stamp_ns, rows, tokens, [[row, finish reason] ...], text_bytes | nil,
              families: [] or 7 of ([k, p, e] | nil), token texts: [k, m, bytes] | nil,
              ended: [row ...] (may be missing: none)]
    columns  routes u64[rows] │ first u32[rows] │ counts u32[rows] │ prompt_tokens u32[rows] │ ids i32[tokens]
             egress form only: generated u32[rows] │ text_lens u32[rows] │ text, zero-padded to 4
             families, token texts: see `families`

`text_bytes` nil is the step form (scheduler to shard), a number the egress form (shard to reader). All
numbers are little-endian. `body_len` is the whole body's, `check` (core/check.h) covers all that is behind
it and is seeded with header_len: what no range check can see, a changed token id, two swapped routes, it
sees.

The layout's numbers are core/batch.h's. Decoding is all or nothing: a Batch exists only when every check
passed.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ._body import (
    COUNTS_AT,
    EGRESS_ROW_BYTES,
    FIRST_AT,
    PREFIX_BYTES,
    PROMPT_TOKENS_AT,
    ROW_BYTES,
    TEXT_LENS_AT,
    VERSION,
    check,
    join,
)
from .checked import MAX_ROWS, PREFIX, Checked, check_batch
from .columns import I32, I32_TYPE, U32, U32_TYPE, U64, U64_TYPE
from .families import FAMILIES, Families, TokenTexts, encode_family, encode_texts, spans
from .finish import FinishReason
from .frames import Buffer

_PADS: Final = tuple(bytes(n) for n in range(8))
_VIEWS: Final = frozenset(("routes", "first", "counts", "prompt_tokens", "ids", "generated"))

_encode_header: Final = msgspec.msgpack.Encoder().encode


class Core(NamedTuple):
    """A step's core columns (routes, first, counts, prompt_tokens, ids), end to end in `raw` from `at` on."""

    raw: bytes
    at: int
    rows: int
    tokens: int


class Batch:
    """One decode step. The arrays of a decoded Batch are read-only views of its own copy of the frame.
    They are made when one is first asked for: a plain step goes from frame to frame without.

    rows          number of rows, one per request in this step
    stamp_ns      CLOCK_MONOTONIC nanoseconds at the scheduler's push
    routes        u64[rows]
    first         u32[rows], tokens of the request before this row
    counts        u32[rows], how many of `ids` belong to each row
    prompt_tokens u32[rows], length of the request's prompt
    ids           i32[tokens], the rows' ids end to end
    finishes      (row, reason) for each row that ended its request, rows ascending
    generated     u32[rows], tokens each row stands for: what the next row's `first` grows by. In the egress
                  form `ids` may lack a trimmed stop token that `generated` counts; in the step form it is
                  `counts` itself
    text_lens     u32[rows] bytes of text per row, and `text` the UTF-8 end to end; None in the step form
    families      the seven optional families by `Kind`, None where absent; () when all are
    texts         the texts of their tokens, for rows that asked (egress form only), or None
    ended         rows whose finish reason is the shard's own: it found a stop that the scheduler does not
                  know of, so whoever reads the frame must send an ABORT (egress form only)
    """

    __slots__ = (
        "_core",
        "counts",
        "ended",
        "families",
        "finishes",
        "first",
        "generated",
        "ids",
        "prompt_tokens",
        "routes",
        "rows",
        "stamp_ns",
        "text",
        "text_lens",
        "texts",
    )

    def __init__(
        self,
        stamp_ns: int,
        routes: U64,
        first: U32,
        counts: U32,
        prompt_tokens: U32,
        ids: I32,
        finishes: Sequence[tuple[int, FinishReason]] = (),
        generated: U32 | None = None,
        text_lens: U32 | None = None,
        text: bytes | None = None,
        families: Families = (),
        texts: TokenTexts | None = None,
        ended: Sequence[int] = (),
    ) -> None:
        self._core: Core | None = None
        self.rows: int = len(routes)
        self.stamp_ns = stamp_ns
        self.routes = routes
        self.first = first
        self.counts = counts
        self.prompt_tokens = prompt_tokens
        self.ids = ids
        self.finishes = finishes
        self.generated = counts if generated is None else generated
        self.text_lens = text_lens
        self.text = text
        self.families = families
        self.texts = texts
        self.ended = ended

    @classmethod
    def of_core(
        cls,
        stamp_ns: int,
        core: Core,
        finishes: Sequence[tuple[int, FinishReason]] = (),
        families: Families = (),
    ) -> "Batch":
        """Return the step form of columns that lie end to end."""
        batch = cls.__new__(cls)
        batch._core = core
        batch.rows = core.rows
        batch.stamp_ns = stamp_ns
        batch.finishes = finishes
        batch.families = families
        batch.text_lens = batch.text = batch.texts = None
        batch.ended = ()
        return batch

    if not TYPE_CHECKING:  # so that no misspelt name passes

        def __getattr__(self, name: str) -> Any:
            if name not in _VIEWS or self._core is None:
                raise AttributeError(f"a Batch has no {name!r}")
            raw, at, rows, tokens = self._core
            self.routes = np.frombuffer(raw, U64_TYPE, rows, at)
            self.first = np.frombuffer(raw, U32_TYPE, rows, at + FIRST_AT * rows)
            self.counts = np.frombuffer(raw, U32_TYPE, rows, at + COUNTS_AT * rows)
            self.prompt_tokens = np.frombuffer(raw, U32_TYPE, rows, at + PROMPT_TOKENS_AT * rows)
            self.ids = np.frombuffer(raw, I32_TYPE, tokens, at + ROW_BYTES * rows)
            if self.text_lens is None:
                self.generated = self.counts
            return getattr(self, name)

    @property
    def core(self) -> Core:
        """The core columns as they lie in a body."""
        if self._core is not None:
            return self._core
        columns: list[Any] = [self.routes, self.first, self.counts, self.prompt_tokens, self.ids]
        _check_core(*columns)
        return Core(b"".join(columns), 0, self.rows, len(self.ids))

    @property
    def egress(self) -> bool:
        """Whether this is the egress form, with text."""
        return self.text_lens is not None

    def select(self, rows: NDArray[np.intp] | Sequence[int]) -> "Batch":
        """Return the step form of the given rows alone (indices, ascending), as arrays of their own.

        `finishes` and `families` are those rows' own, renumbered.
        """
        keep = np.asarray(rows, dtype=np.intp)
        if keep.size and not (keep[0] >= 0 and keep[-1] < self.rows and bool((keep[1:] > keep[:-1]).all())):
            raise ValueError(f"rows to select are not ascending within 0..{self.rows - 1}")
        finishes: Sequence[tuple[int, FinishReason]] = ()
        families: Families = ()
        if self.finishes or self.families:
            place = np.full(self.rows, -1, dtype=np.intp)
            place[keep] = np.arange(keep.size)
            finishes = [(int(place[row]), why) for row, why in self.finishes if place[row] >= 0]
            families = [None if family is None else family.select(place) for family in self.families]
            if not any(families):
                families = ()
        return Batch(
            self.stamp_ns,
            self.routes[keep],
            self.first[keep],
            self.counts[keep],
            self.prompt_tokens[keep],
            self.ids[spans(self.counts, keep)],
            finishes,
            families=families,
        )


def encode_endings(finishes: Iterable[tuple[int, FinishReason]]) -> bytes:
    """Return the finish reasons as they stand in a header, for whoever writes the rest of it in C itself."""
    return _encode_header(_endings(finishes))


def encode_header(
    stamp_ns: int,
    rows: int,
    tokens: int,
    text_bytes: int | None,
    finishes: Iterable[tuple[int, FinishReason]] = (),
    ended: Sequence[int] = (),
    families: Sequence[tuple[int, int, int] | None] = (),
    texts: tuple[int, int, int] | None = None,
) -> bytes:
    """Return a header, for whoever writes the columns in C itself; `families` and `texts` are their sizes."""
    header = (VERSION, stamp_ns, rows, tokens, _endings(finishes), text_bytes, families, texts)
    return _encode_header((*header, ended) if ended else header)


def encode_batch(
    stamp_ns: int,
    routes: U64,
    first: U32,
    counts: U32,
    prompt_tokens: U32,
    ids: I32,
    finishes: Iterable[tuple[int, FinishReason]] = (),
    *,
    generated: U32 | None = None,
    text_lens: U32 | None = None,
    text: Buffer | None = None,
    families: Families = (),
    texts: TokenTexts | None = None,
    ended: Sequence[int] = (),
) -> list[bytes]:
    """Return a BATCH body as the parts (two) for one lane write.

    Shapes and types are those of Batch; `generated`, `text_lens` and `text` come together (egress form) or
    not at all (step form). Raises ValueError naming the column when they do not fit each other. The text is
    taken as it is, token texts too: a reader rejects the frame if it is not UTF-8, or a part of it begins
    inside a character.
    """
    rows = len(routes)
    columns: list[Any] = [routes, first, counts, prompt_tokens, ids]
    _check_core(*columns)
    text_bytes = None
    if text_lens is not None or generated is not None or text is not None:
        text_bytes = _add_text(columns, rows, generated, text_lens, text)
    sizes: list[tuple[int, int, int] | None] = []
    texts_size = None
    if families:
        sizes = _add_families(columns, rows, families)
    if texts is not None:
        texts_size, added = encode_texts(texts)
        columns += added
    header = encode_header(stamp_ns, rows, len(ids), text_bytes, finishes, ended, sizes, texts_size)
    header_len = len(header)
    # One part: a copy here is cheaper than many parts in the lane's write.
    rest = _joined([header + _PADS[-header_len % 8], *columns])
    return [PREFIX.pack(header_len, PREFIX_BYTES + len(rest), check(rest, header_len)), rest]


def encode_families(families: Families, rows: int) -> tuple[bytes, bytes]:
    """Return the families of a step of `rows` rows as they stand in its header, and their columns end to end.

    Raises ValueError naming the family when they do not fit each other or the step.
    """
    columns: list[Any] = []
    sizes = _add_families(columns, rows, families)
    return _encode_header(sizes), _joined(columns)


def decode_batch(body: Buffer) -> Batch:
    """Return the Batch in a frame's body; raise BadBatch and deliver nothing. See `check_batch`."""
    return as_batch(check_batch(body))


def as_batch(step: Checked) -> Batch:
    """Return a body that passed its checks as a Batch."""
    raw, rows = step.raw, step.rows
    core = Core(raw, step.data, rows, step.tokens)
    batch = Batch.of_core(step.stamp_ns, core, step.finishes, step.families)
    if step.text_at is not None and step.text_bytes is not None:
        at = step.text_at
        batch.generated = np.frombuffer(raw, U32_TYPE, rows, at)
        batch.text_lens = np.frombuffer(raw, U32_TYPE, rows, at + TEXT_LENS_AT * rows)
        text = at + EGRESS_ROW_BYTES * rows
        batch.text = raw[text : text + step.text_bytes]
        batch.texts, batch.ended = step.texts, step.ended
    return batch


def join_steps(steps: list[Checked]) -> Batch:
    """Return steps as one, their rows end to end: a request may have several. The stamp is the last one's.

    Raises ValueError for the egress form and for steps with families.
    """
    finishes: list[tuple[int, FinishReason]] = []
    rows = tokens = 0
    for step in steps:
        if step.families or step.text_at is not None:
            raise ValueError("only plain steps can be joined: no families, no text")
        if step.finishes:
            finishes += [(rows + row, reason) for row, reason in step.finishes]
        rows += step.rows
        tokens += step.tokens
    return Batch.of_core(steps[-1].stamp_ns, Core(join(steps), 0, rows, tokens), finishes)


def _add_text(
    columns: list[Any], rows: int, generated: U32 | None, text_lens: U32 | None, text: Buffer | None
) -> int:
    """Append the egress form's columns; return the number of bytes of text."""
    if generated is None or text_lens is None or text is None:
        raise ValueError("the egress form needs generated, text_lens and text together")
    _check_column("generated", generated, U32_TYPE, rows)
    _check_column("text_lens", text_lens, U32_TYPE, rows)
    text_bytes = text.nbytes if isinstance(text, np.ndarray | memoryview) else len(text)
    total = int(np.add.reduce(text_lens))
    if total != text_bytes:
        raise ValueError(f"text_lens add up to {total} bytes, but text has {text_bytes}")
    columns += (generated, text_lens, text, _PADS[-text_bytes % 4])
    return text_bytes


def _add_families(columns: list[Any], rows: int, families: Families) -> list[tuple[int, int, int] | None]:
    """Append the families' columns; return their header entries."""
    if len(families) != FAMILIES:
        raise ValueError(
            f"{len(families)} families given; expected {FAMILIES}, None for an absent one, or none"
        )
    sizes: list[tuple[int, int, int] | None] = []
    for kind, family in enumerate(families):
        if family is None:
            sizes.append(None)
        else:
            entry, added = encode_family(kind, family, rows)
            sizes.append(entry)
            columns += added
    return sizes if any(sizes) else []


def _endings(finishes: Iterable[tuple[int, FinishReason]]) -> Sequence[tuple[int, Any]]:
    return [(row, reason.to_json()) for row, reason in finishes] if finishes else ()


def _check_core(routes: U64, first: U32, counts: U32, prompt_tokens: U32, ids: I32) -> None:
    """Raise ValueError unless the core columns fit each other."""
    rows = len(routes)
    if rows > MAX_ROWS:
        raise ValueError(f"{rows} rows in a BATCH; at most {MAX_ROWS}: split the step")
    _check_column("routes", routes, U64_TYPE, rows)
    _check_column("first", first, U32_TYPE, rows)
    _check_column("counts", counts, U32_TYPE, rows)
    _check_column("prompt_tokens", prompt_tokens, U32_TYPE, rows)
    _check_column("ids", ids, I32_TYPE, len(ids))
    total = int(np.add.reduce(counts))
    if total != len(ids):
        raise ValueError(f"counts add up to {total} tokens, but ids has {len(ids)}")


def _check_column(name: str, column: NDArray[Any], dtype: np.dtype[Any], length: int) -> None:
    if column.dtype != dtype or len(column) != length:
        raise ValueError(f"{name} is {column.dtype}[{len(column)}], not {dtype}[{length}]")


def _joined(columns: list[Any]) -> bytes:
    try:
        return b"".join(columns)
    except TypeError as error:  # which is what `join` makes of a BufferError
        raise ValueError(f"a column is not a contiguous buffer: {error}") from error
