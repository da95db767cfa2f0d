"""A shard's decoder: registrations, and one call that turns a step's rows into text.

The truth is the tokenizer's own: a request's text is decode(prompt + output) beyond decode(prompt), cut at
its stop. The kernel does the work for a tokenizer that has a table; for one that has none the tokenizer
makes each token's text here and the kernel does the rest (rows, stops, what is held back).

Knows Batch and the registration messages; must not know rings or processes.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..ring.batch import Batch, Core
from ..ring.families import Kind, TokenTexts, wanted_ids
from ..ring.finish import FinishReason
from ..ring.frames import DecodeOptions, Register, Restore
from ..ring.route import reader_of, shard_of
from . import kernel
from .budget import Budget
from .decoded import Decoded, cut_positions
from .errors import TokenizerFileError
from .fallback import TextStream, TokenizerText
from .kernel import Failure, Finish, Kernel, Ready, Step
from .patterns import WATCH_BYTES, Compiled, PatternWatch, WatchedRow
from .table import Meta, TokenTable, load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# What a byte of a stop string takes: 24 of the automaton, and text that is held back for it.
STOP_BYTE = 32
# What a request's text stream takes without a table.
STREAM_BYTES = 2048
MAX_I32 = (1 << 31) - 1
NO_LIMIT = np.iinfo(np.uint32).max
# Families with a position for each of a row's tokens.
OUTPUT = (Kind.OUTPUT_LOGPROBS, Kind.OUTPUT_TOP_LOGPROBS, Kind.OUTPUT_IDS_LOGPROBS)
# Texts of single tokens that are kept for the next row that asks.
TOKEN_TEXTS = 1 << 16


@dataclass(slots=True)
class DecoderStatistics:
    """What a decoder has seen since its start."""

    rows: int = 0
    """Rows that came out; of steps that were joined, one for each request."""
    tokens: int = 0
    stale_rows: int = 0
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

    A table that says `fallback` needs its tokenizer: it is loaded unless one is given. `readers` gateways
    share the memory that requests may take. `beat` says "I am alive": what a tokenizer does takes a while,
    and a step or a request that is restored may ask for a great deal of it.
    """

    def __init__(
        self,
        table: TokenTable,
        tokenizer: TokenizerText | None = None,
        readers: int = 1,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self.table = table
        self.statistics = DecoderStatistics()
        self._kernel = Kernel(None if table.fallback else table.buffer)
        self._tokenizer = tokenizer
        if table.fallback and tokenizer is None:
            loaded = _tokenizer_of(table.meta)
            beat()
            self._tokenizer = TokenizerText(loaded, beat)
        self.budget = Budget(readers)
        self._compiled = Compiled(self.budget)
        self._streams: dict[int, TextStream] = {}
        self._watches: dict[int, PatternWatch] = {}
        self._detecting: dict[int, list[str]] = {}
        self._patterns: dict[int, frozenset[str]] = {}  # route → stop patterns that are no stop strings, too
        self._wants_texts: set[int] = set()
        self._token_texts: dict[int, bytes] = {}

    def register(self, message: Register) -> None:
        """Start a request; one that runs already stays as it is. Raises BadRegistration, MemoryError."""
        if self._kernel.look(message.route) is None:
            self._register(message)

    def restore(self, message: Restore) -> None:
        """Go on with a request that another shard was decoding, byte for byte where its client is.

        One that is known here and at least as far stays as it is. Raises BadRegistration, MemoryError.
        """
        known = self._kernel.look(message.route)
        count = len(message.ids) // 4
        if known is not None and known.expected >= count:
            return
        self.forget(message.route)
        self._register(message)
        if not count:
            return
        ready = None
        stream = self._streams.get(message.route)
        if stream is not None:
            parts = [stream.add(token).encode() for token in np.frombuffer(message.ids, "<i4").tolist()]
            ready = _ready(parts, [b""])
        watch = self._watches.get(message.route)
        part = watch.ends_nothing if watch else 0
        try:
            sent, passed = self._kernel.restore(message.route, message.ids, message.text_bytes, ready, part)
            # Text that was made and not delivered waits here, however much the gateway says that is.
            owed = self._kernel.look(message.route)
            self.budget.take(reader_of(message.route), message.route, 2 * owed.held if owed else 0)
        except MemoryError:
            self.forget(message.route)
            raise
        if watch is not None:
            watch.seen(sent.decode(), count, passed)

    def forget(self, route: int) -> bool:
        """Drop a request; False when it was not known."""
        self._streams.pop(route, None)
        if (watch := self._watches.pop(route, None)) is not None:
            watch.close()
        self.budget.give_back(reader_of(route), route)
        self._detecting.pop(route, None)
        self._patterns.pop(route, None)
        self._wants_texts.discard(route)
        return self._kernel.forget(route)

    def knows(self, route: int) -> bool:
        """Whether this request is registered here and has not ended."""
        look = self._kernel.look(route)
        return look is not None and not look.ended

    def end(self, route: int) -> None:
        """Let nothing more come out of a request; its registration stays until it is forgotten."""
        self._kernel.end(route)

    @property
    def joins(self) -> bool:
        """Whether `decode` takes several steps joined to one, now.

        Not while the tokenizer makes the text, or a stop pattern is searched for after each step.
        """
        return not self._tokenizer and not self._watches

    def decode(self, batch: Batch, shard: int, reader: int, merge: int = 0) -> "Outcome":
        """Decode the rows of this shard and reader; stale and doubled rows are dropped.

        A row that does not follow the one before it fails its request: it is in `failures`, behind what the
        rows before it made.

        merge: the batch is several steps joined (`join_steps`, while `joins`). Each row is decoded as it
        would be alone; what a request's rows made comes out as one of at most `merge` bytes.
        """
        core = batch.core
        finishes = self._finishes(batch, shard, reader) if batch.finishes else []
        ready = self._make_text(batch, core, shard, reader, finishes) if self._tokenizer else None
        step = self._kernel.decode(core, shard, reader, finishes, ready, bool(self._watches), merge)
        rows = Decoded(step, batch.stamp_ns, _reasons(batch, step) if finishes else [])
        if step.stop_count:
            for row, pattern in step.stops:
                rows.stop(row, self._detecting[int(step.routes[row])][pattern])
        if self._watches:
            self._watch(rows, step)
        if batch.families:
            self._add_families(rows.batch(), step, batch)
        counted = self.statistics
        counted.rows += step.rows
        counted.tokens += step.tokens
        counted.ended += len(rows.finishes)
        counted.stopped += len(rows.ended)
        counted.stale_rows += step.stale_rows
        counted.doubled += step.doubled
        failures = step.failures if step.failure_count else []
        counted.failed += len(failures)
        return Outcome(rows, failures, step.other_readers if step.shared else [])

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

    def _register(self, message: Register | Restore) -> None:
        route, options = message.route, message.options
        prompt, prompt_tokens = message.prompt_tail, message.prompt_tokens
        stops = [stop for stop in options.stop if stop]
        flags = (
            (kernel.SKIP_SPECIAL if options.skip_special_tokens else 0)
            | (kernel.NO_STOP_TRIM if options.no_stop_trim else 0)
            | (kernel.DETECT if options.detect_stops else 0)
        )
        encoded = [stop.encode("utf-8", "surrogatepass") for stop in stops]
        least = min(max(options.min_new_tokens, 0), NO_LIMIT)
        watch = None
        try:
            self.budget.take(reader_of(route), route, self._weight(encoded, options))
            if options.detect_stops and options.stop_regex:
                watch = PatternWatch(
                    options.stop_regex, self._compiled, reader_of(route), options.no_stop_trim, least
                )
            self._kernel.register(route, flags, encoded, prompt, prompt_tokens, least)
        except BaseException:
            self.budget.give_back(reader_of(route), route)
            if watch is not None:
                watch.close()
            raise
        if options.detect_stops and stops:
            self._detecting[route] = stops
        if watch is not None:
            self._watches[route] = watch
        if patterns := frozenset(options.stop_regex).difference(options.stop):
            self._patterns[route] = patterns
        if options.return_text_in_logprobs:
            self._wants_texts.add(route)
        if self._tokenizer:
            ids = np.frombuffer(prompt, "<i4").tolist()
            whole = prompt_tokens <= len(ids)
            self._streams[route] = self._tokenizer.stream(options.skip_special_tokens, ids, whole)

    def _weight(self, stops: list[bytes], options: DecodeOptions) -> int:
        """Return about how many bytes a registration takes beyond a request's own few."""
        patterns = sum(len(pattern.encode("utf-8", "surrogatepass")) for pattern in options.stop_regex)
        weight = STOP_BYTE * (sum(map(len, stops)) + patterns)
        weight += WATCH_BYTES if options.detect_stops and options.stop_regex else 0
        return weight + (STREAM_BYTES if self._tokenizer else 0)

    def _finishes(self, batch: Batch, shard: int, reader: int) -> list[Finish]:
        """Say how the rows of this shard and reader end that do."""
        made = []
        for row, reason in batch.finishes:
            route = int(batch.routes[row])
            if shard_of(route) == shard and reader_of(route) == reader:
                # A pattern's match stays in the text, which need not have the pattern's own letters in it.
                matched = reason.matched
                if isinstance(matched, str) and matched in self._patterns.get(route, ()):
                    matched = None
                made.append(Finish(row, *_trimmed(matched)))
        return made

    def _make_text(self, batch: Batch, core: Core, shard: int, reader: int, finishes: list[Finish]) -> Ready:
        """Make every token's text, and what ending rows still held, with the tokenizer."""
        routes, counts, ids = batch.routes.tolist(), batch.counts.tolist(), batch.ids.tolist()
        planned = self._kernel.plan(core, shard, reader, finishes).tolist()
        ending = {finish.row for finish in finishes}
        parts, tails, at = [], [], 0
        for row, (route, keep) in enumerate(zip(routes, planned, strict=True)):
            tail = b""
            if keep != kernel.DROPPED:
                stream = self._streams[route]
                parts += [stream.add(token).encode() for token in ids[at : at + keep]]
                parts += [b""] * (counts[row] - keep)
                tail = stream.flush().encode() if row in ending else b""
            else:
                parts += [b""] * counts[row]
            tails.append(tail)
            at += counts[row]
        return _ready(parts, tails, counts)

    def _add_families(self, rows: Batch, step: Step, batch: Batch) -> None:
        """Pass on the optional columns of the rows that came out, with their tokens' texts where asked."""
        place = _places(batch, step)
        families = [None if family is None else family.select(place) for family in batch.families]
        if not any(family is not None for family in families):
            return
        # A row that was cut at a stop has no columns for the tokens behind it either.
        assert rows.generated is not None
        cut = rows.generated < batch.counts[step.source]
        if cut.any():
            most = np.where(cut, rows.generated, NO_LIMIT).astype(np.uint32)
            families = [
                cut_positions(family, most) if family and kind in OUTPUT else family
                for kind, family in enumerate(families)
            ]
        rows.families = families
        asked = [row for row, route in enumerate(step.routes.tolist()) if route in self._wants_texts]
        if not asked:
            return
        ids = wanted_ids(families, asked, step.rows)
        texts = [self._token_bytes(token) for token in ids.tolist()]
        lens = np.array([len(text) for text in texts], dtype=np.uint32)
        rows.texts = TokenTexts(np.array(asked, dtype=np.uint32), ids, lens, b"".join(texts))

    def _token_bytes(self, token: int) -> bytes:
        text = self._token_texts.get(token)
        if text is None:
            if len(self._token_texts) >= TOKEN_TEXTS:
                self._token_texts.clear()
            text = self._token_texts[token] = self.token_text(token).encode()
        return text

    def _watch(self, rows: Decoded, step: Step) -> None:
        """Look for stop patterns in the rows that have some; cut a row where one matched."""
        stops = {
            row: self._detecting[int(step.routes[row])][string].encode("utf-8", "surrogatepass")
            for row, string in step.stops
        }
        ending = {row for row, _ in rows.finishes}
        ended: set[int] = set()
        cuts: list[tuple[int, int, bytes]] = []
        for watched in self._watched(step, stops):
            if watched.route in ended:
                continue  # a further row of a request that has just ended: the reader drops it
            found = watched.search(watched.row in ending)
            if found is None:
                continue
            ended.add(watched.route)
            self._kernel.end(watched.route)
            rows.stop(watched.row, found.pattern)
            cuts.append((watched.row, min(found.token + 1, len(watched.ends)), watched.upto(found.end)))
        if cuts:
            rows.cut(cuts)

    def _watched(self, step: Step, stops: dict[int, bytes]) -> list[WatchedRow]:
        """Return the rows of requests with patterns, in order, with text that was made and not sent, too.

        `stops` are the stop strings that rows were found to end with.
        """
        text_at = (np.cumsum(step.text_lens) - step.text_lens).tolist()
        token_at = (np.cumsum(step.counts) - step.counts).tolist()
        made: list[WatchedRow] = []
        behind: dict[int, bytes] = {}  # route → the text behind the row before
        for row in reversed(range(step.rows)):
            route = int(step.routes[row])
            watch = self._watches.get(route)
            if watch is None:
                continue
            sent = bytes(step.text[text_at[row] : text_at[row] + int(step.text_lens[row])])
            rest, stop = behind.get(route), stops.get(row, b"")
            if rest is None:
                rest = b"" if watch.keeps_stops and stop else stop or self._kernel.held(route)
            ends = step.token_ends[token_at[row] : token_at[row] + int(step.counts[row])].tolist()
            made.append(WatchedRow(row, route, watch, sent + rest, len(sent), ends, len(stop)))
            behind[route] = sent + rest
        return made[::-1]


class Outcome(NamedTuple):
    """What became of one step for one reader."""

    rows: Decoded
    failures: list[Failure]
    """Requests that cannot go on; they have no row here."""
    other_readers: list[int]
    """Readers that have rows of this shard in the same step: decode it for them, too."""


def _tokenizer_of(meta: Meta) -> "Tokenizer":
    """Load the tokenizer that a table was made of, and no other: ids of one mean nothing in another."""
    tokenizer, raw = load_tokenizer(meta.path)
    if (found := hashlib.sha256(raw).hexdigest()) != meta.sha256:
        raise TokenizerFileError(
            f"{meta.path} has changed since this instance started (sha256 {found[:12]}…, it was "
            f"{meta.sha256[:12]}…): put the file back, or start the instance again"
        )
    return tokenizer


def _trimmed(matched: int | str | list[int] | None) -> tuple[int, bytes]:
    """Return how the kernel is to trim a match. A matched token id 0 trims nothing: so the field has it."""
    if isinstance(matched, str):
        return kernel.END_STRING, matched.encode("utf-8", "surrogatepass")
    tokens = matched if isinstance(matched, list) else [matched] if matched else []
    if tokens and all(-MAX_I32 <= token <= MAX_I32 for token in tokens):
        return kernel.END_TOKENS, np.array(tokens, dtype="<i4").tobytes()
    return kernel.END, b""


def _reasons(batch: Batch, step: Step) -> list[tuple[int, FinishReason]]:
    """Map a step's finishes to the rows that came out. A request's last row is its output row's source."""
    place = _places(batch, step)[[row for row, _ in batch.finishes]].tolist()
    placed = [(row, reason) for row, (_, reason) in zip(place, batch.finishes, strict=True) if row >= 0]
    return sorted(placed, key=itemgetter(0))


def _places(batch: Batch, step: Step) -> NDArray[np.intp]:
    """Return each incoming row's output row, -1 for rows that are no output row's source."""
    place = np.full(batch.rows, -1, dtype=np.intp)
    place[step.source] = np.arange(step.rows)
    return place


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
