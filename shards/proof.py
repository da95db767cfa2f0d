"""A table's proof: the kernel's text against the tokenizer's own decode.

Every id alone, every id after another token, with special tokens kept and skipped; then random sequences,
fed whole and one token at a time. A table that passes agrees on what each token adds and on what depends on
its neighbours.
"""

import itertools
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from .errors import TokenizerFileError, is_crash
from .kernel import SKIP_SPECIAL, Kernel
from .table import BYTE, CLEAN, ENTRY_BYTES, HEADER_BYTES, KNOWN, SPECIAL, TokenTable

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Ids that are no token of any vocabulary; they decode to nothing, and to nothing they must decode.
BEYOND = 3
SEQUENCES = 400
LENGTH = 24
BATCH = 8192


def disagreement(table: TokenTable, tokenizer: "Tokenizer") -> str | None:
    """Return what the first disagreement is, for a log line; None when there is none."""
    kernel = Kernel(table.buffer)
    for samples in _batches(table):
        for skip in (False, True):
            expected = _decode_with(tokenizer, samples, skip)
            text, lens = _decode(kernel, samples, skip)
            # One comparison for all; who differs is looked for only when something does.
            wanted = [len(sample.encode()) for sample in expected]
            if lens == wanted and text == "".join(expected).encode():
                continue
            return _first_difference(samples, expected, text, lens, skip)
    return None


def _decode_with(tokenizer: "Tokenizer", samples: list[list[int]], skip: bool) -> list[str]:
    try:
        texts: list[str] = tokenizer.decode_batch(samples, skip_special_tokens=skip)
    except BaseException as error:
        if not is_crash(error):
            raise
        raise TokenizerFileError(
            f"the tokenizer crashes in its own decode: {error}; mend its decoder"
        ) from None
    return texts


def _decode(kernel: Kernel, samples: list[list[int]], skip: bool) -> tuple[bytes, list[int]]:
    counts = np.fromiter(map(len, samples), np.uint32, len(samples))
    ids = np.fromiter(itertools.chain.from_iterable(samples), np.int32, int(counts.sum()))
    text, lens = kernel.decode_each(ids, counts, SKIP_SPECIAL if skip else 0)
    return text, lens.tolist()


def _first_difference(
    samples: list[list[int]], expected: list[str], text: bytes, lens: list[int], skip: bool
) -> str:
    at = 0
    for sample, want, size in zip(samples, expected, lens, strict=True):
        got = text[at : at + size].decode(errors="replace")
        at += size
        if got != want:
            return f"ids {sample[:32]} (skip_special_tokens={skip}) are {want!r}, the table says {got!r}"
    raise AssertionError("the texts differ, but no sample does")


def _batches(table: TokenTable) -> Iterator[list[list[int]]]:
    vocab = table.meta.vocab
    packed = np.frombuffer(table.buffer, np.uint8, ENTRY_BYTES * vocab, HEADER_BYTES)
    entries = packed.reshape(vocab, ENTRY_BYTES)
    lengths, flags, first_bytes = entries[:, 0], entries[:, 1], entries[:, 2]
    known = np.flatnonzero((flags & KNOWN != 0) & (flags & SPECIAL == 0))
    if not len(known):
        return
    # A plain ASCII token that is no byte token: what follows it does not follow another token's open end.
    plain = known[(flags[known] & BYTE == 0) & (lengths[known] == 1) & (first_bytes[known] < 0x80)]
    anchor = int(plain[0] if len(plain) else known[0])
    every = range(vocab + BEYOND)
    for begin in range(0, len(every), BATCH):
        part = every[begin : begin + BATCH]
        yield [[token] for token in part] + [[anchor, token] for token in part]
    rng = random.Random(vocab)
    odd = np.flatnonzero((flags & (BYTE | SPECIAL) != 0) | (flags & CLEAN == 0))
    sources = [range(vocab + BEYOND), odd.tolist() or known.tolist()]
    yield [[rng.choice(sources[place % 4 == 3]) for _ in range(LENGTH)] for place in range(SEQUENCES)]
    # Runs of odd tokens (bytes, specials, pieces of characters) between plain ones.
    yield [
        [token for _ in range(4) for token in (*rng.choices(sources[1], k=rng.randint(1, 5)), anchor)]
        for _ in range(SEQUENCES)
    ]
