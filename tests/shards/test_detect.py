"""A stop that the shard found travels to the reader: the stream ends there and the scheduler is told once."""

from collections.abc import Callable

import pytest
from outfeed.ring.batch import Batch, decode_batch
from outfeed.ring.checked import BadBatch
from outfeed.ring.finish import FinishReason
from outfeed.ring.frames import DecodeOptions, Tag
from outfeed.shards.decoded import encode
from outfeed.shards.table import TokenTable
from outfeed.sink import Done, Reader, open_sink
from tokenizers import Tokenizer

from .driver import Driver


class Egress:
    """A ring of one frame."""

    class Bell:
        def ring(self) -> None:
            pass

    doorbell = Bell()

    def __init__(self) -> None:
        self.frames: list[tuple[int, int, memoryview]] = []

    def read(self, limit: int = 256, upto: list[int] | None = None) -> list[tuple[int, int, memoryview]]:
        taken, self.frames = self.frames, []
        return taken

    def release(self) -> None:
        pass


def frame(rows: Batch) -> memoryview:
    return memoryview(b"".join(bytes(part) for part in encode(rows)))


def test_the_reader_aborts_what_its_shard_ended(
    table_of: Callable[[str], TokenTable], tokenizer_of: Callable[[str], Tokenizer]
) -> None:
    driver = Driver(table_of("deepseek"))
    ids = tokenizer_of("deepseek").encode("all is well, the end", add_special_tokens=False).ids
    stopped = driver.start(DecodeOptions(stop=["well"], detect_stops=True))
    ended = driver.start()
    egress = Egress()
    aborts: list[tuple[int, str]] = []
    ends: list[int] = []
    reader = Reader(
        egress,  # type: ignore[arg-type]
        lambda route, rid: aborts.append((route, rid)),
        ends.append,
    )
    sources = {}
    for route in (stopped, ended):
        sender, sources[route] = open_sink(1 << 20)
        reader.register(route, f"rid-{route}", sender)
    decoded = driver.step([(stopped, ids), (ended, ids)], {ended: FinishReason.length(len(ids))})
    egress.frames.append((0, Tag.BATCH, frame(decoded)))
    reader.drain()
    assert [route for route, _ in aborts] == [stopped]
    assert ends == [stopped, ended]
    done = sources[stopped].receive_sync(1)
    assert isinstance(done, Done)
    assert done.event.text == "all is "
    assert done.event.finish == FinishReason.stop("well")


def test_a_row_cannot_be_ended_without_a_reason(
    table_of: Callable[[str], TokenTable], tokenizer_of: Callable[[str], Tokenizer]
) -> None:
    driver = Driver(table_of("deepseek"))
    decoded = driver.step([(driver.start(), [100])])
    decoded.ended = [0]
    with pytest.raises(BadBatch, match="row 0 has no finish reason"):
        decode_batch(frame(decoded))
