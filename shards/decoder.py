"""A shard's decoder: registrations, and one call that turns a step's rows into text.

The truth is the tokenizer's own: a request's text is decode(prompt + output) beyond decode(prompt), cut at
its stop. The kernel does the work for a tokenizer that has a table; for one that has none the tokenizer
makes each token's text here and the kernel does the rest (rows, stops, what is held back).

Knows Batch and the registration messages; must not know rings or processes.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from ..ring.batch import I32, U32, U64, Batch
from ..ring.families import Families, TokenTexts, wanted_ids
from ..ring.finish import FinishReason
from ..ring.frames import DecodeOptions, Register, Restore
from ..ring.route import MAX_READERS, MAX_SHARDS, READER_SHIFT, SHARD_SHIFT
from . import kernel
from .fallback import TextStream, TokenizerText
from .kernel import Failure, Finish, Kernel, Ready, Step
from .patterns import PatternWatch
from .table import TokenTable, load_tokenizer

SHARD_MASK = (MAX_SHARDS - 1) << SHARD_SHIFT
READER_MASK = (MAX_READERS - 1) << READER_SHIFT
MAX_I32 = (1 << 31) - 1
# Texts of single tokens that are kept for the next row that asks.
TOKEN_TEXTS = 1 << 16

Columns = tuple[U64, U32, U32, U32, I32]


@dataclass(slots=True)
class Decoded:
    """The rows of one reader, as its egress frame wants them; columns as in Batch's egress form.

    Arrays and text are valid until the decoder's next call.
    """

    rows: int
    stamp_ns: int
    routes: U64
    first: U32
    counts: U32
    prompt_tokens: U32
    ids: I32
    finishes: list[tuple[int, FinishReason]]
    generated: U32
    text_lens: U32
    text: bytes | memoryview
    source: U32
    """Each row's row in the step."""
    families: Families = ()
    texts: TokenTexts | None = None
    ended: list[int] = field(default_factory=list)
    """Rows that this shard ended at a stop: the scheduler does not know, and is still at work on them."""
    failures: list[Failure] = field(default_factory=list)

    def halves(self) -> "list[Decoded]":
        """Split the rows in two, for a lane that cannot take them in one frame; failures stay behind."""
        middle = self.rows // 2
        return [self._part(0, middle), self._part(middle, self.rows)]

    def _part(self, begin: int, end: int) -> "Decoded":
        ids, texts = (np.concatenate(([0], np.cumsum(lens))) for lens in (self.counts, self.text_lens))
        place = np.full(self.rows, -1, dtype=np.intp)
        place[begin:end] = np.arange(end - begin)
        token_texts = self.texts
        if token_texts is not None:
            asked = token_texts.rows[(token_texts.rows >= begin) & (token_texts.rows < end)] - begin
            token_texts = (
                TokenTexts(asked, token_texts.ids, token_texts.lens, token_texts.text) if len(asked) else None
            )
        return Decoded(
            end - begin,
            self.stamp_ns,
            self.routes[begin:end],
            self.first[begin:end],
            self.counts[begin:end],
            self.prompt_tokens[begin:end],
            self.ids[int(ids[begin]) : int(ids[end])],
            [(row - begin, reason) for row, reason in self.finishes if begin <= row < end],
            self.generated[begin:end],
            self.text_lens[begin:end],
            memoryview(self.text)[int(texts[begin]) : int(texts[end])],
            self.source[begin:end],
            [None if family is None else family.select(place) for family in self.families],
            token_texts,
            [row - begin for row in self.ended if begin <= row < end],
        )


@dataclass(slots=True)
class DecoderStatistics:
    """What a decoder has seen since its start."""

    rows: int = 0
    tokens: int = 0
    unknown: int = 0
    """Rows whose request is not registered (ended, forgotten, or never announced); dropped."""
    doubled: int = 0
    """Rows that were decoded before; dropped."""
    failed: int = 0
    ended: int = 0
    """Rows that came out with a finish reason."""
    stopped: int = 0
    """Requests that this shard ended at a stop string or pattern."""


class Decoder:
    """One shard's requests. One thread at a time.

    A table that says `fallback` needs its tokenizer: it is loaded unless one is given.
    """

    def __init__(self, table: TokenTable, tokenizer: TokenizerText | None = None) -> None:
        self.table = table
        self.statistics = DecoderStatistics()
        self._kernel = Kernel(None if table.fallback else table.buffer)
        self._tokenizer = tokenizer
        if table.fallback and tokenizer is None:
            self._tokenizer = TokenizerText(load_tokenizer(table.meta.path)[0])
        self._streams: dict[int, TextStream] = {}
        self._watches: dict[int, PatternWatch] = {}
        self._detecting: dict[int, list[str]] = {}
        self._wants_texts: set[int] = set()
        self._token_texts: dict[int, bytes] = {}

    def register(self, message: Register) -> None:
        """Start a request; one that runs already stays as it is. Raises BadRegistration, MemoryError."""
        self._register(message.route, message.options, message.prompt_tail, message.prompt_tokens)

    def restore(self, message: Restore) -> None:
        """Go on with a request that another shard was decoding, byte for byte where its client is.

        One that is known here and at least as far stays as it is. Raises BadRegistration, MemoryError.
        """
        known = self._kernel.look(message.route)
        count = len(message.ids) // 4
        if known is not None and known.expected >= count:
            return
        self.forget(message.route)
        self._register(message.route, message.options, message.prompt_tail, message.prompt_tokens)
        if not count:
            return
        ready = None
        stream = self._streams.get(message.route)
        if stream is not None:
            parts = [stream.add(token).encode() for token in np.frombuffer(message.ids, "<i4").tolist()]
            ready = _ready(parts, [b""])
        self._kernel.restore(message.route, message.ids, message.text_bytes, ready)
        # A pattern's window restarts: text that went out before is not searched again.

    def forget(self, route: int) -> bool:
        """Drop a request; False when it was not known."""
        self._streams.pop(route, None)
        self._watches.pop(route, None)
        self._detecting.pop(route, None)
        self._wants_texts.discard(route)
        return self._kernel.forget(route)

    def knows(self, route: int) -> bool:
        """Whether this request is registered here and has not ended."""
        look = self._kernel.look(route)
        return look is not None and not look.ended

    def end(self, route: int) -> None:
        """Let nothing more come out of a request; its registration stays until it is forgotten."""
        self._kernel.end(route)

    def readers(self, batch: Batch, shard: int) -> list[int]:
        """Return the readers that have rows of this shard in a step."""
        if batch.rows == 0:
            return []
        return self._kernel.readers(batch.routes, SHARD_MASK, shard << SHARD_SHIFT)

    def decode(self, batch: Batch, shard: int, reader: int) -> Decoded:
        """Decode the rows of this shard and reader; rows of unknown requests and doubled rows are dropped.

        A row that does not follow the one before it fails its request: it is in `failures`, not in the rows.
        """
        mask, want = SHARD_MASK | READER_MASK, shard << SHARD_SHIFT | reader << READER_SHIFT
        columns = (batch.routes, batch.first, batch.counts, batch.prompt_tokens, batch.ids)
        finishes = _finishes(batch, mask, want) if batch.finishes else []
        ready = self._make_text(columns, mask, want, finishes) if self._tokenizer else None
        step = self._kernel.decode(columns, mask, want, finishes, ready, bool(self._watches))
        decoded = Decoded(
            step.rows,
            batch.stamp_ns,
            step.routes,
            step.first,
            step.counts,
            step.prompt_tokens,
            step.ids,
            _reasons(batch.finishes, step) if finishes else [],
            step.generated,
            step.text_lens,
            step.text,
            step.source,
            failures=step.failures,
        )
        for row, pattern in step.stops:
            self._stopped(decoded, row, self._detecting[int(step.routes[row])][pattern])
        if self._watches:
            self._watch(decoded, step)
        if batch.families:
            self._add_families(decoded, batch)
        counted = self.statistics
        counted.rows += step.rows
        counted.tokens += len(step.ids)
        counted.unknown += step.unknown
        counted.doubled += step.doubled
        counted.failed += len(step.failures)
        counted.ended += len(decoded.finishes)
        return decoded

    @property
    def live(self) -> int:
        """Requests registered now."""
        return self._kernel.live

    def totals(self) -> dict[str, int]:
        """Return the kernel's totals: live, pages, tokens, text_bytes, work."""
        totals = self._kernel.totals()
        if self._tokenizer:
            totals["work"] += self._tokenizer.work
        return totals

    def token_text(self, token: int) -> str:
        """Return one token's text on its own, as logprobs want it."""
        return self._tokenizer.token_text(token) if self._tokenizer else self._kernel.token_text(token)

    def _register(self, route: int, options: DecodeOptions, prompt: bytes, prompt_tokens: int) -> None:
        watch = PatternWatch(options.stop_regex) if options.detect_stops and options.stop_regex else None
        stops = [stop for stop in options.stop if stop]
        flags = (
            (kernel.SKIP_SPECIAL if options.skip_special_tokens else 0)
            | (kernel.NO_STOP_TRIM if options.no_stop_trim else 0)
            | (kernel.DETECT if options.detect_stops else 0)
        )
        encoded = [stop.encode("utf-8", "surrogatepass") for stop in stops]
        if not self._kernel.register(route, flags, encoded, prompt, prompt_tokens):
            return
        if options.detect_stops and stops:
            self._detecting[route] = stops
        if watch is not None:
            self._watches[route] = watch
        if options.return_text_in_logprobs:
            self._wants_texts.add(route)
        if self._tokenizer:
            ids = np.frombuffer(prompt, "<i4").tolist()
            self._streams[route] = self._tokenizer.stream(options.skip_special_tokens, ids)

    def _make_text(self, columns: Columns, mask: int, want: int, finishes: list[Finish]) -> Ready:
        """Make every token's text, and what ending rows still held, with the tokenizer."""
        routes, counts, ids = columns[0].tolist(), columns[2].tolist(), columns[4].tolist()
        keep = self._kernel.plan(columns, mask, want, finishes).tolist()
        ending = {finish.row for finish in finishes}
        parts, tails, at = [], [], 0
        for row, route in enumerate(routes):
            stream = self._streams.get(route) if keep[row] or row in ending else None
            if stream is not None and (keep[row] or self.knows(route)):
                parts += [stream.add(token).encode() for token in ids[at : at + keep[row]]]
                parts += [b""] * (counts[row] - keep[row])
                tails.append(stream.flush().encode() if row in ending else b"")
            else:
                parts += [b""] * counts[row]
                tails.append(b"")
            at += counts[row]
        return _ready(parts, tails, counts)

    def _add_families(self, decoded: Decoded, batch: Batch) -> None:
        """Pass on the optional columns of the rows that came out, with their tokens' texts where asked."""
        place = np.full(batch.rows, -1, dtype=np.intp)
        place[decoded.source] = np.arange(decoded.rows)
        families = [None if family is None else family.select(place) for family in batch.families]
        if not any(family is not None for family in families):
            return
        decoded.families = families
        rows = [row for row, route in enumerate(decoded.routes.tolist()) if route in self._wants_texts]
        if not rows:
            return
        ids = wanted_ids(families, rows, decoded.rows)
        texts = [self._token_bytes(token) for token in ids.tolist()]
        lens = np.array([len(text) for text in texts], dtype=np.uint32)
        decoded.texts = TokenTexts(np.array(rows, dtype=np.uint32), ids, lens, b"".join(texts))

    def _token_bytes(self, token: int) -> bytes:
        text = self._token_texts.get(token)
        if text is None:
            if len(self._token_texts) >= TOKEN_TEXTS:
                self._token_texts.clear()
            text = self._token_texts[token] = self.token_text(token).encode()
        return text

    def _stopped(self, decoded: Decoded, row: int, matched: str) -> None:
        """The shard found a stop: that is how the row ends, whatever the scheduler says or does not say."""
        known = [reason for place, reason in decoded.finishes if place == row]
        if not known:
            decoded.ended.append(row)
        decoded.finishes = sorted(
            [(place, reason) for place, reason in decoded.finishes if place != row]
            + [(row, FinishReason.stop(matched))],
            key=lambda entry: entry[0],
        )
        self.statistics.stopped += 1

    def _watch(self, decoded: Decoded, step: Step) -> None:
        """Look for stop patterns in the rows that have some; cut a row where one matched."""
        assert step.token_ends is not None
        text_at = np.cumsum(step.text_lens) - step.text_lens
        token_at = np.cumsum(step.counts) - step.counts
        cuts: list[tuple[int, int, int]] = []
        for row, route in enumerate(step.routes.tolist()):
            watch = self._watches.get(route)
            if watch is None or not step.counts[row]:
                continue
            begin, size = int(text_at[row]), int(step.text_lens[row])
            raw = bytes(step.text[begin : begin + size])
            token, count = int(token_at[row]), int(step.counts[row])
            # A token's text may be held back: it ends where the row's text ends, at most.
            ends = [
                len(raw[: min(end, size)].decode(errors="ignore"))
                for end in step.token_ends[token : token + count].tolist()
            ]
            found = watch.search(raw.decode(), ends)
            if found is None:
                continue
            last, end, pattern = found
            self._kernel.end(route)
            self._stopped(decoded, row, pattern)
            cuts.append((row, last + 1, len(raw.decode()[:end].encode())))
        if cuts:
            _cut(decoded, cuts, text_at.tolist(), token_at.tolist())


def _finishes(batch: Batch, mask: int, want: int) -> list[Finish]:
    made = []
    for row, reason in batch.finishes:
        if int(batch.routes[row]) & mask == want:
            made.append(Finish(row, *_trimmed(reason.matched)))
    return made


def _trimmed(matched: int | str | list[int] | None) -> tuple[int, bytes]:
    """Return how the kernel is to trim a match. A matched token id 0 trims nothing: so the field has it."""
    if isinstance(matched, str):
        return kernel.END_STRING, matched.encode("utf-8", "surrogatepass")
    tokens = matched if isinstance(matched, list) else [matched] if matched else []
    if tokens and all(-MAX_I32 <= token <= MAX_I32 for token in tokens):
        return kernel.END_TOKENS, np.array(tokens, dtype="<i4").tobytes()
    return kernel.END, b""


def _reasons(finishes: Iterable[tuple[int, FinishReason]], step: Step) -> list[tuple[int, FinishReason]]:
    """Map a step's finishes to the rows that came out."""
    placed = []
    for source, reason in finishes:
        row = int(np.searchsorted(step.source, source))
        if row < step.rows and step.source[row] == source:
            placed.append((row, reason))
    return placed


def _ready(parts: list[bytes], tails: list[bytes], counts: list[int] | None = None) -> Ready:
    """Lay text out as the kernel reads it: each row's tokens, then its tail."""
    lens = np.array([len(part) for part in (*parts, *tails)], dtype=np.uint32)
    if counts is None:
        return Ready(b"".join((*parts, *tails)), lens)
    laid, at = [], 0
    for count, tail in zip(counts, tails, strict=True):
        laid += parts[at : at + count]
        laid.append(tail)
        at += count
    return Ready(b"".join(laid), lens)


def _cut(decoded: Decoded, cuts: list[tuple[int, int, int]], text_at: list[int], token_at: list[int]) -> None:
    """End rows early: (row, ids kept, text bytes kept). Columns become arrays of their own."""
    text, ids = bytes(decoded.text), decoded.ids
    counts, lens, generated = decoded.counts.copy(), decoded.text_lens.copy(), decoded.generated.copy()
    for row, kept, size in cuts:
        counts[row], lens[row], generated[row] = kept, size, kept
    decoded.ids = np.concatenate(
        [ids[at : at + count] for at, count in zip(token_at, counts.tolist(), strict=True)]
    )
    decoded.text = b"".join(text[at : at + size] for at, size in zip(text_at, lens.tolist(), strict=True))
    decoded.counts, decoded.text_lens, decoded.generated = counts, lens, generated
