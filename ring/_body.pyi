"""Calls made once per frame, built from core/python/body.c."""

from .checked import Checked

VERSION: int
PREFIX_BYTES: int
# Where a column begins, and what the columns take, per row: core/batch.h.
FIRST_AT: int
COUNTS_AT: int
PROMPT_TOKENS_AT: int
ROW_BYTES: int
TEXT_LENS_AT: int
EGRESS_ROW_BYTES: int

def check(raw: bytes, seed: int, /) -> int:
    """Return the check over bytes that core/check.h describes. A BATCH's seed is its header's length."""

def probe(
    raw: bytes, header_len: int, rows: int, data: int, text_at: int, text_bytes: int, /
) -> tuple[int, int, int, int]:
    """Return (sum of counts, sum of text_lens, where a row's text begins inside a character or -1, check)."""

def total(raw: bytes, at: int, count: int, /) -> int:
    """Return the sum of `count` u32 at `at`. Raises ValueError when they do not lie in the body."""

def ascends(raw: bytes, at: int, count: int, limit: int, /) -> bool:
    """Return whether each of `count` u32 at `at` is above the one before it and below `limit`."""

def plain(raw: bytes, /) -> tuple[int, int, int, int, int] | None:
    """Return (data, stamp_ns, rows, tokens, text_bytes) of a body that passes every check.

    None of one that has finish reasons, families or token texts, or that anything is wrong with. `data` is
    where the core columns begin; text_bytes is -1 in the step form.
    """

def join(steps: list[Checked], /) -> bytes:
    """Return their core columns, each column of one behind the other's, as one body has them.

    Raises ValueError when one's columns do not lie in its body.
    """
