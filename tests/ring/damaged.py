"""The checks of BATCH bodies against bodies and numbers that lie: run under sanitizers by test_sanitizers.py.

    python damaged.py EXTENSION SEED ROUNDS

EXTENSION is ring/core/python/body.c built with sanitizers. Whoever damaged a body made its check right as
well, so that every other check is reached; and each ends with its memory: one byte read beyond it is seen.
"""

import ctypes
import importlib.machinery
import importlib.util
import itertools
import random
import struct
import sys
from types import SimpleNamespace
from typing import Any

PREFIX, ROW, ID, EGRESS_ROW = 16, 20, 4, 8
TEXT = "aß水🌊".encode() * 5
# What, times the bytes of a row or an id, is next to nothing again in 64 bits.
WRAPPED = (1 << 62, (1 << 62) + 1, 1 << 61, 1 << 63, (1 << 64) - 1)
poison = ctypes.CDLL(None).__asan_poison_memory_region
poison.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def load(path: str) -> Any:
    loader = importlib.machinery.ExtensionFileLoader("_body", path)
    spec = importlib.util.spec_from_file_location("_body", path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


core = load(sys.argv[1])
assert (core.PREFIX_BYTES, core.ROW_BYTES, core.EGRESS_ROW_BYTES) == (PREFIX, ROW, EGRESS_ROW)


def exact(body: bytes | bytearray) -> bytes:
    """A copy whose memory ends with it: Python's own byte behind it is not to be read either."""
    copy = bytes(bytearray(body))
    if len(copy) > 1:  # shorter ones are shared
        poison(id(copy) + bytes.__basicsize__ - 1 + len(copy), 1)
    return copy


def sealed(body: bytes | bytearray, header_len: int) -> bytes:
    rest = exact(body[PREFIX:])
    check = core.probe(bytes(PREFIX) + rest, header_len, 0, PREFIX, -1, 0)[3]
    return exact(struct.pack("<IIQ", header_len, PREFIX + len(rest), check) + rest)


def packed(value: int, width: int) -> bytes:
    """An msgpack number of so many bytes, or of as many as it needs."""
    while value >> (8 * width or 7):
        width = 2 * width or 1
    return value.to_bytes(1) if not width else bytes([0xCC + width.bit_length() - 1]) + value.to_bytes(width)


class Damage:
    """A sound body, then others in its place."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        rows = self.random.randrange(6)
        self.counts = [self.random.randrange(3) for _ in range(rows)]
        self.lens = self.random.choice((None, [self.random.randrange(9) for _ in range(rows)]))
        text = None if self.lens is None else sum(self.lens)
        self.numbers = [1, self.random.getrandbits(self.random.randrange(65)), rows, sum(self.counts), text]
        self.widths = [self.random.choice((0, 0, 1, 2, 4, 8)) for _ in range(5)]

    def header(self) -> bytes:
        version, stamp, rows, tokens, text = map(self.number, range(5))
        return b"\x98" + version + stamp + rows + tokens + b"\x90" + text + b"\x90\xc0"

    def number(self, place: int) -> bytes:
        value = self.numbers[place]
        return b"\xc0" if value is None else packed(value, self.widths[place])

    def columns(self) -> bytes:
        rows = len(self.counts)
        made = (
            bytes(12 * rows) + struct.pack(f"<{rows}I", *self.counts) + bytes(4 * rows + 4 * sum(self.counts))
        )
        if self.lens is not None:
            text = TEXT[: sum(self.lens)] if self.random.random() < 0.5 else b"t" * sum(self.lens)
            made += bytes(4 * rows) + struct.pack(f"<{rows}I", *self.lens) + text + bytes(-len(text) % 4)
        return made

    def body(self) -> tuple[bytearray, int]:
        header = self.header()
        return bytearray(bytes(PREFIX) + header + bytes(-len(header) % 8) + self.columns()), len(header)

    def look(self, body: bytes | bytearray, header_len: int) -> bool:
        raw = sealed(body, header_len)
        usual = core.plain(raw)
        if usual is None:
            return False
        data, _, rows, tokens, text = usual
        text_part = 0 if text < 0 else EGRESS_ROW * rows + text + -text % 4
        assert data + ROW * rows + ID * tokens + text_part == len(raw)
        return True

    def cut(self) -> None:
        """Ends everywhere, and headers that end there too, or beyond."""
        body, header_len = self.body()
        for size in range(PREFIX, len(body)):
            self.look(body[:size], header_len)
            self.look(body[:size], min(header_len, size - PREFIX))
        for size in range(PREFIX):
            assert core.plain(exact(bytes(size))) is None
        for far in (1, 8, 1 << 20, (1 << 32) - 1 - header_len):
            self.look(body, header_len + far)

    def renumber(self) -> None:
        """Numbers that do not fit the columns, or fit them only where a sum wraps."""
        sound, place = self.numbers[:], self.random.choice((2, 3, 4))
        columns = self.columns()
        for value in (*((sound[place] or 0) + by for by in (1, 2, 5, 1000)), *WRAPPED):
            self.numbers[place] = value
            header = self.header()
            self.look(bytes(PREFIX) + header + bytes(-len(header) % 8) + columns, len(header))
        self.numbers = sound

    def change(self) -> None:
        """Bytes that are others."""
        body, header_len = self.body()
        for _ in range(self.random.choice((1, 1, 2, 4))):
            if len(body) > PREFIX:
                body[self.random.randrange(PREFIX, len(body))] = self.random.randrange(256)
        self.look(body, header_len)

    def near(self, number: int) -> int:
        by = self.random.choice((0, 0, 0, 0, 1, -1, 4, -4, 2))
        return (
            self.random.choice((0, -1, 1 << 58, (1 << 63) - 1))
            if self.random.random() < 0.05
            else number + by
        )

    def ask(self) -> None:
        """Look where the numbers say, when that lies in the body."""
        raw = exact(self.random.randbytes(self.random.randrange(PREFIX, 300)))
        rows = self.near(self.random.randrange(1 + (len(raw) - PREFIX) // ROW))
        data = self.near(self.random.choice((PREFIX, len(raw) - ROW * rows, len(raw) - ROW * rows)))
        tokens = self.near((len(raw) - data - ROW * rows) // ID)
        text_at = self.random.choice(
            (-1, self.near(len(raw) - EGRESS_ROW * rows - self.random.randrange(40)))
        )
        text = self.near(len(raw) - EGRESS_ROW * rows - text_at)
        lies = rows >= 0 and data >= PREFIX and data + ROW * rows <= len(raw)
        text_lies = text_at >= 0 and text >= 0 and text_at + EGRESS_ROW * rows + text <= len(raw)
        held = tuple(max(-1 << 63, min(number, (1 << 63) - 1)) for number in (rows, data, text_at, text))
        assert self.refused(core.probe, raw, 3, *held) == (not (lies and (text_at == -1 or text_lies)))
        if lies and text_lies:
            self.walk(raw, rows, data, text_at, text)
        column_lies = rows >= 0 and data >= 0 and data + 4 * rows <= len(raw)
        assert self.refused(core.total, raw, held[1], held[0]) == (not column_lies)
        assert self.refused(core.ascends, raw, held[1], held[0], 1 << 32) == (not column_lies)
        step = SimpleNamespace(raw=raw, data=held[1], rows=held[0], tokens=tokens)
        fits = lies and tokens >= 0 and data + ROW * rows + ID * tokens <= len(raw)
        assert self.refused(core.join, [step, step]) == (not fits)

    def walk(self, raw: bytes, rows: int, data: int, text_at: int, text: int) -> None:
        """Rows whose texts end just where the text does, inside it, or beyond."""
        body = bytearray(raw)
        ends = sorted(self.near(text) % (1 << 32) for _ in range(rows))
        lens = [end - start for start, end in itertools.pairwise((0, *ends))]
        struct.pack_into(f"<{rows}I", body, text_at + 4 * rows, *lens)
        body[text_at + EGRESS_ROW * rows :] = b"t" * (len(raw) - text_at - EGRESS_ROW * rows)
        core.probe(exact(body), 3, rows, data, text_at, text)

    def refused(self, call: Any, *given: Any) -> bool:
        try:
            call(*given)
        except (ValueError, OverflowError):
            return True
        return False


if __name__ == "__main__":
    seed, count = int(sys.argv[2]), int(sys.argv[3])
    for number in range(seed, seed + count):
        damage = Damage(number)
        sound = damage.look(*damage.body())
        assert sound or damage.lens, "only a text can begin inside a character"
        for _ in range(10):
            damage.random.choice((damage.renumber, damage.change, damage.ask, damage.ask))()
        damage.cut()
    print("rounds", count)
