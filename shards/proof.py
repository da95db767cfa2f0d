"""A table's proof: the kernel's text against the tokenizer's own decode.

Every id alone, every id after another token, with special tokens kept and skipped; then random sequences,
fed whole and one token at a time. A table that passes agrees on what each token adds and on what depends on
its neighbours.
"""

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from .kernel import END, SKIP_SPECIAL, Finish, Kernel
from .table import BYTE, CLEAN, KNOWN, SPECIAL, TokenTable

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Ids that are no token of any vocabulary; they decode to nothing, and to nothing they must decode.
BEYOND = 3
SEQUENCES = 400
LENGTH = 24
BATCH = 4096


def disagreement(table: TokenTable, tokenizer: "Tokenizer") -> str | None:
    """Return what the first disagreement is, for a log line; None when there is none."""
    kernel = Kernel(table.buffer)
    for skip in (False, True):
        for samples in _batches(table):
            expected = tokenizer.decode_batch(samples, skip_special_tokens=skip)
            for sample, text, want in zip(samples, decode_all(kernel, samples, skip), expected, strict=True):
                if text != want:
                    return (
                        f"ids {sample[:32]} (skip_special_tokens={skip}) are {want!r}, "
                        f"the table says {text!r}"
                    )
    return None


def decode_all(kernel: Kernel, samples: list[list[int]], skip: bool) -> list[str]:
    """Decode whole sequences, each a request of its own that ends at once."""
    routes = np.arange(1, len(samples) + 1, dtype=np.uint64) | np.uint64(1 << 36)
    for route in routes.tolist():
        kernel.register(route, SKIP_SPECIAL if skip else 0, (), b"", 0)
    counts = np.array([len(sample) for sample in samples], dtype=np.uint32)
    zeros = np.zeros(len(samples), dtype=np.uint32)
    ids = np.array([token for sample in samples for token in sample], dtype=np.int32)
    finishes = [Finish(row, END, b"") for row in range(len(samples))]
    step = kernel.decode((routes, zeros, counts, zeros, ids), 0, 0, finishes)
    text, ends = bytes(step.text), np.cumsum(step.text_lens).tolist()
    for route in routes.tolist():
        kernel.forget(route)
    return [text[begin:end].decode() for begin, end in zip([0, *ends], ends, strict=False)]


def _batches(table: TokenTable) -> Iterator[list[list[int]]]:
    vocab = table.meta.vocab
    entries = np.frombuffer(table.buffer, np.uint8, 16 * vocab, 64).reshape(vocab, 16)
    flags = entries[:, 1]
    known = np.flatnonzero((flags & KNOWN != 0) & (flags & SPECIAL == 0))
    if not len(known):
        return
    # A plain ASCII token that is no byte token: what follows it does not follow another token's open end.
    plain = known[(flags[known] & BYTE == 0) & (entries[known, 0] == 1) & (entries[known, 2] < 0x80)]
    anchor = int(plain[0] if len(plain) else known[0])
    every = range(vocab + BEYOND)
    for begin in range(0, len(every), BATCH):
        part = every[begin : begin + BATCH]
        yield [[token] for token in part]
        yield [[anchor, token] for token in part]
    rng = random.Random(vocab)
    odd = np.flatnonzero((flags & (BYTE | SPECIAL) != 0) | (flags & CLEAN == 0))
    sources = [range(vocab + BEYOND), odd.tolist() or known.tolist()]
    yield [[rng.choice(sources[place % 4 == 3]) for _ in range(LENGTH)] for place in range(SEQUENCES)]
    # Runs of odd tokens (bytes, specials, pieces of characters) between plain ones.
    yield [
        [token for _ in range(4) for token in (*rng.choices(sources[1], k=rng.randint(1, 5)), anchor)]
        for _ in range(SEQUENCES)
    ]
