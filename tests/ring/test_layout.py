"""The exact bytes: what is written where, so that a change of layout cannot go unnoticed."""

import struct
from collections.abc import Callable
from pathlib import Path

from outfeed.ring import Doorbell, Owner, Ring
from outfeed.ring.owner import space

MakeRing = Callable[..., Ring]
PAGE = 4096
LANE, CONSUMER, HEAD = 512, 384, 128


def bytes_of(ring: Ring) -> bytes:
    return (Path("/dev/shm") / ring.name).read_bytes()


def u64(data: bytes, at: int) -> int:
    return int(struct.unpack_from("<Q", data, at)[0])


def test_the_header_page(make_ring: MakeRing) -> None:
    ring = make_ring(lanes=3, consumers=2, capacity=8192)
    data = bytes_of(ring)
    heads = PAGE + 3 * LANE + 2 * CONSUMER
    area = -(-(heads + 6 * HEAD) // PAGE) * PAGE
    assert len(data) == area + 3 * 8192
    assert data[:8] == b"OUTFRING"
    assert struct.unpack_from("<IIII", data, 8) == (3, 3, 2, 128)
    assert struct.unpack_from("<QQQ", data, 24) == (8192, len(data), area)
    assert Owner.unpack(u64(data, 56)) == Owner.me()
    assert data[64:128].rstrip(b"\0") == ring.name.encode()[:63]
    assert u64(data, 128) == space()
    assert not any(data[136:])


def test_records_padding_tails_and_heads(make_ring: MakeRing, bell: Doorbell) -> None:
    ring = make_ring(lanes=2, consumers=2, capacity=4096)
    writer, consumer = ring.writer(1), ring.consumer(1, bell)
    heads = PAGE + 2 * LANE + 2 * CONSUMER
    area = 8192 + 4096
    writer.write(7, b"abc")
    writer.write(8, b"")
    data = bytes_of(ring)
    assert data[area : area + 19] == struct.pack("<IBBHQ", 3, 7, 0, 0, 0) + b"abc"
    assert data[area + 32 : area + 48] == struct.pack("<IBBHQ", 0, 8, 0, 0, 32)
    assert (u64(data, PAGE), u64(data, PAGE + LANE)) == (0, 48)
    assert Owner.unpack(u64(data, PAGE + LANE + 128)) == Owner.me()
    for size in (1024, 1024, 924):
        writer.write(1, bytes(size))
    consumer.read(2)
    consumer.release()
    data = bytes_of(ring)
    at = 48 + 1040 + 1040 + 944
    assert u64(data, PAGE + LANE) == at
    line = heads + (1 * 2 + 1) * HEAD
    assert u64(data, line) == 48
    assert u64(data, line + 8) == at
    ring.detach_consumer(0)
    consumer.read()
    consumer.release()
    writer.write(9, bytes(1024))
    data = bytes_of(ring)
    left = 4096 - at
    assert data[area + at : area + at + 16] == struct.pack("<IBBHQ", left - 16, 0, 1, 0, at)
    assert data[area : area + 16] == struct.pack("<IBBHQ", 1024, 9, 0, 0, 4096)
    assert u64(data, PAGE + LANE) == 4096 + 1040


def test_the_consumer_table_names_its_doorbell(make_ring: MakeRing, bell: Doorbell) -> None:
    ring = make_ring()
    consumer = ring.consumer(0, bell)
    data = bytes_of(ring)
    block = PAGE + LANE
    assert Owner.unpack(u64(data, block + 128)) == Owner.me()
    assert struct.unpack_from("<II", data, block + 136) == (0, 2)
    assert data[block + 144 : block + 208].rstrip(b"\0") == bell.name.encode()
    consumer.close()
    assert u64(bytes_of(ring), block + 128) == 0


def test_a_doorbell_is_two_lines_magic_and_owner_then_its_word(bell: Doorbell) -> None:
    data = Path(f"/dev/shm/{bell.name}").read_bytes()
    assert len(data) == 256
    assert data[:8] == b"OUTFBELL"
    assert Owner.unpack(u64(data, 8)) == Owner.me()
    assert u64(data, 128) == 0
    bell.ring()
    assert u64(Path(f"/dev/shm/{bell.name}").read_bytes(), 128) == 1
