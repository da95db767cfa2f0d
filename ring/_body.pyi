"""One call per frame, built from core/python/body.c."""

VERSION: int
PREFIX_BYTES: int
# Where a column begins, and what the columns take, per row: core/batch.h.
FIRST_AT: int
COUNTS_AT: int
PROMPT_TOKENS_AT: int
ROW_BYTES: int
TEXT_LENS_AT: int
EGRESS_ROW_BYTES: int

def probe(
    raw: bytes, header_len: int, rows: int, data: int, text_at: int, text_bytes: int, /
) -> tuple[int, int, int, int]:
    """Return (sum of counts, sum of text_lens, where a row's text begins inside a character or -1, check)."""
