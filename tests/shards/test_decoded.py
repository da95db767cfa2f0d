"""A decoded step that is too large for one frame: each half says of its rows what the whole said."""

from collections.abc import Callable
from typing import Any

import numpy as np
from outfeed.ring.batch import Batch, decode_batch, encode_batch
from outfeed.ring.family_makers import flat_family
from outfeed.ring.finish import FinishReason
from outfeed.ring.frames import DecodeOptions
from outfeed.shards.decoded import encode, halves
from outfeed.shards.table import TokenTable
from tokenizers import Tokenizer

from .driver import READER, SHARD, Driver


def told(batch: Batch) -> list[dict[str, Any]]:
    """What a frame says of each of its rows."""
    batch = decode_batch(memoryview(b"".join(bytes(part) for part in encode(batch))))
    assert batch.text_lens is not None
    finishes, flat = dict(batch.finishes), batch.families[0] if batch.families else None
    places = [] if flat is None else flat.rows.tolist()
    return [
        {
            "route": route,
            "length": size,
            "finish": finishes.get(row),
            "ended here": row in batch.ended,
            "logprob": flat.values.tolist()[places.index(row)] if flat and row in places else None,
            "texts": batch.texts is not None and row in batch.texts.rows.tolist(),
        }
        for row, (route, size) in enumerate(zip(batch.routes.tolist(), batch.text_lens.tolist(), strict=True))
    ]


def test_halves_say_what_the_whole_said(
    table_of: Callable[[str], TokenTable], tokenizer_of: Callable[[str], Tokenizer]
) -> None:
    ids = tokenizer_of("deepseek").encode("alpha beta gamma delta", add_special_tokens=False).ids[:4]
    driver = Driver(table_of("deepseek"))
    asks = DecodeOptions(return_text_in_logprobs=True)
    stops = DecodeOptions(stop=[tokenizer_of("deepseek").decode(ids[2:3])], detect_stops=True)
    # Of the halves one has a logprob, and a text, that the other has not; each has a row that ends.
    for options in ([asks, None, stops, None], [None, stops, None, asks]):
        routes = [driver.start(one) for one in options]
        row, other = options.index(asks), options.index(None)
        said = [ids[2] if one is stops else token for one, token in zip(options, ids, strict=True)]
        ones, zeros = np.ones(4, dtype=np.uint32), np.zeros(4, dtype=np.uint32)
        family = flat_family([(row, [-0.5], [said[row]])])
        parts = encode_batch(
            1,
            np.array(routes, dtype=np.uint64),
            zeros,
            ones,
            zeros,
            np.array(said, np.int32),
            [(at, FinishReason.length(1)) for at in sorted({other, 3} - {options.index(stops)})],
            families=[family, None, None, None, None, None, None],
        )
        step = decode_batch(memoryview(b"".join(bytes(part) for part in parts)))
        whole = driver.decoder.decode(step, SHARD, READER).rows.batch()
        assert whole.ended == [options.index(stops)]
        first, second = halves(whole)
        assert told(first) + told(second) == told(whole)
        assert [one["texts"] for one in told(whole)] == [one is asks for one in options]
