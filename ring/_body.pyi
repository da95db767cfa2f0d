"""One call per frame, built from core/python/body.c."""

def probe(
    raw: bytes, header_len: int, rows: int, data: int, text_at: int, text_bytes: int, /
) -> tuple[int, int, int, int]:
    """Return (sum of counts, sum of text_lens, where a row's text begins inside a character or -1, check)."""
