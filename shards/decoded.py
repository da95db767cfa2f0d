"""A decoded step: one reader's rows with their text, on the way to its egress frame.

Mostly it stays in the kernel, which packs it into a frame's body itself. What needs more (optional columns, a
row cut short, a frame too large for its lane) becomes a Batch first. Knows Batch; must not know requests.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from ..ring.batch import Batch, encode_batch, encode_header
from ..ring.columns import U32
from ..ring.families import Family, TokenTexts, spans
from ..ring.finish import FinishReason
from ..ring.frames import Buffer
from .kernel import Step


class Decoded:
    """One reader's rows of a step. Valid until the decoder's next call.

    `finishes` are (row, reason), rows ascending; `ended` those of these rows that the shard ended itself.
    """

    __slots__ = ("_batch", "_stamp_ns", "_step", "ended", "finishes", "rows")

    def __init__(self, step: Step, stamp_ns: int, finishes: list[tuple[int, FinishReason]]) -> None:
        self.rows = step.rows
        self.finishes = finishes
        self.ended: list[int] = []
        self._step = step
        self._stamp_ns = stamp_ns
        self._batch: Batch | None = None

    def stop(self, row: int, matched: str) -> None:
        """End a row at a stop that the shard found: that is why it ends, whatever the scheduler says."""
        kept = [(place, reason) for place, reason in self.finishes if place != row]
        if len(kept) == len(self.finishes):
            self.ended = sorted([*self.ended, row])
        self.finishes = sorted([*kept, (row, FinishReason.stop(matched))], key=lambda entry: entry[0])

    def batch(self) -> Batch:
        """Return the rows as a Batch in its egress form, for whoever wants to look or to change it."""
        if self._batch is None:
            step = self._step
            self._batch = Batch(
                self._stamp_ns,
                step.routes,
                step.first,
                step.counts,
                step.prompt_tokens,
                step.ids,
                generated=step.generated,
                text_lens=step.text_lens,
                text=bytes(step.text),
            )
        self._batch.finishes, self._batch.ended = self.finishes, self.ended
        return self._batch

    def cut(self, cuts: Iterable[tuple[int, int, bytes]]) -> None:
        """End rows at other places: (row, ids kept, its text)."""
        batch = self.batch()
        assert batch.text is not None
        assert batch.text_lens is not None
        ids_at = _starts(batch.counts)
        texts = [
            batch.text[at : at + size]
            for at, size in zip(_starts(batch.text_lens), batch.text_lens.tolist(), strict=True)
        ]
        batch.counts, batch.generated = batch.counts.copy(), batch.generated.copy()
        batch.text_lens = batch.text_lens.copy()
        for row, kept, text in cuts:
            batch.counts[row] = batch.generated[row] = kept
            batch.text_lens[row], texts[row] = len(text), text
        batch.ids = np.concatenate(
            [batch.ids[at : at + size] for at, size in zip(ids_at, batch.counts.tolist(), strict=True)]
        )
        batch.text = b"".join(texts)

    def encode(self) -> Sequence[Buffer]:
        """Return the egress frame's body, as parts for one lane write."""
        if self._batch is not None:
            return encode(self.batch())
        step = self._step
        header = encode_header(
            self._stamp_ns, step.rows, step.tokens, step.text_bytes, self.finishes, self.ended
        )
        return [step.pack(header)]


def encode(batch: Batch) -> list[bytes]:
    """Return a Batch's body as parts for one lane write."""
    return encode_batch(
        batch.stamp_ns,
        batch.routes,
        batch.first,
        batch.counts,
        batch.prompt_tokens,
        batch.ids,
        batch.finishes,
        generated=batch.generated,
        text_lens=batch.text_lens,
        text=batch.text,
        families=batch.families,
        texts=batch.texts,
        ended=batch.ended,
    )


def halves(batch: Batch) -> tuple[Batch, Batch]:
    """Split an egress Batch in two, for a lane that cannot take it in one frame."""
    middle = batch.rows // 2
    return _part(batch, 0, middle), _part(batch, middle, batch.rows)


def cut_positions(family: Family, most: U32) -> Family:
    """Keep at most most[row] positions of each row of a family."""
    kept = np.minimum(family.counts, most[family.rows])
    of_row = np.repeat(np.arange(len(family.rows)), family.counts)
    starts = np.cumsum(family.counts, dtype=np.int64) - family.counts
    place = np.arange(len(of_row)) - starts[of_row]
    positions = np.flatnonzero(place < kept[of_row])
    entries, lengths = positions, None
    if family.lengths is not None:
        entries, lengths = spans(family.lengths, positions), family.lengths[positions]
    assert family.ids is not None
    return Family(family.rows, kept, family.values[entries], family.ids[entries], lengths)


def _part(batch: Batch, begin: int, end: int) -> Batch:
    assert batch.text is not None
    assert batch.text_lens is not None
    place = np.full(batch.rows, -1, dtype=np.intp)
    place[begin:end] = np.arange(end - begin)
    families = [None if family is None else family.select(place) for family in batch.families]
    texts = batch.texts
    if texts is not None:
        asked = texts.rows[(texts.rows >= begin) & (texts.rows < end)] - np.uint32(begin)
        texts = TokenTexts(asked, texts.ids, texts.lens, texts.text) if len(asked) else None
    ids_at = [*_starts(batch.counts), len(batch.ids)]
    text_at = [*_starts(batch.text_lens), len(batch.text)]
    return Batch(
        batch.stamp_ns,
        batch.routes[begin:end],
        batch.first[begin:end],
        batch.counts[begin:end],
        batch.prompt_tokens[begin:end],
        batch.ids[ids_at[begin] : ids_at[end]],
        [(row - begin, reason) for row, reason in batch.finishes if begin <= row < end],
        batch.generated[begin:end],
        batch.text_lens[begin:end],
        batch.text[text_at[begin] : text_at[end]],
        families if any(family is not None for family in families) else (),
        texts,
        [row - begin for row in batch.ended if begin <= row < end],
    )


def _starts(lens: "np.ndarray[tuple[int], np.dtype[np.uint32]]") -> list[int]:
    starts: list[int] = (np.cumsum(lens, dtype=np.int64) - lens).tolist()
    return starts
