"""A request may have several rows in a step, in order: they are as good as steps of their own."""

import random
from collections.abc import Callable

import pytest
from outfeed.ring.finish import FinishReason
from outfeed.ring.frames import DecodeOptions
from outfeed.shards.table import TokenTable
from tokenizers import Tokenizer

from .conftest import NAMES
from .driver import Driver, Heard
from .tokenizers_here import TEXT

Tables = Callable[[str], TokenTable]
Tokenizers = Callable[[str], Tokenizer]

OPTIONS = [
    DecodeOptions(),
    DecodeOptions(stop=["dog", "ß", "双"]),
    DecodeOptions(stop=["fox", "naïve", "a"], detect_stops=True),
]
Rows = list[tuple[int, list[int]]]
"""(request, ids)"""


def ids_of(tokenizer: Tokenizer, text: str, count: int) -> list[int]:
    """The first ids of a text; any ids, where the tokenizer makes one token of all of it (CTC)."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids[:count] if len(ids) > 1 else [1 + place % 7 for place in range(count)]


def told(driver: Driver, steps: list[Rows], options: DecodeOptions, limits: list[int]) -> list[Heard]:
    """Tell requests in these steps; each ends with its last row."""
    routes = [driver.start(options) for _ in limits]
    left = list(limits)
    for rows in steps:
        finishes = {}
        for request, ids in rows:
            left[request] -= len(ids)
            if not left[request]:
                finishes[routes[request]] = FinishReason.length(limits[request])
        driver.step([(routes[request], ids) for request, ids in rows], finishes)
    assert driver.failures == []
    return [driver.heard[route] for route in routes]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_one_step_say_what_steps_of_their_own_say(
    name: str, options: DecodeOptions, table_of: Tables, tokenizer_of: Tokenizers
) -> None:
    rng, table = random.Random(name), table_of(name)
    for _ in range(8):
        texts = [ids_of(tokenizer_of(name), text, 20) for text in rng.sample(TEXT, 3)]
        limits = [len(ids) for ids in texts]
        rows: Rows = []
        while waiting := [request for request, ids in enumerate(texts) if ids]:
            request = rng.choice(waiting)
            size = rng.randint(1, 4)
            rows.append((request, texts[request][:size]))
            texts[request] = texts[request][size:]
        steps, rest = [], rows
        while rest:
            size = rng.randint(1, 8)
            steps.append(rest[:size])
            rest = rest[size:]
        alone = told(Driver(table), [[row] for row in rows], options, limits)
        together = told(Driver(table), steps, options, limits)
        for want, got in zip(alone, together, strict=True):
            assert (got.text, got.ids, got.generated) == (want.text, want.ids, want.generated)
            assert got.finish == want.finish


@pytest.mark.parametrize("name", NAMES)
def test_a_gap_between_rows_of_a_step_fails_their_request_alone(
    name: str, table_of: Tables, tokenizer_of: Tokenizers
) -> None:
    """What came before the gap is decoded, what comes behind it is dropped, and the others do not notice."""
    ids = ids_of(tokenizer_of(name), TEXT[0], 4)
    driver = Driver(table_of(name))
    lost, well = driver.start(), driver.start()
    driver.step([(lost, ids[:1]), (well, ids[:2])])
    before = driver.heard[lost].ids
    driver.step([(lost, ids[2:3]), (well, ids[2:3]), (lost, ids[3:])], first={lost: 2})
    driver.step([(well, ids[3:])], {well: FinishReason.length(4)})
    assert driver.failures == [(lost, 1, 2)]
    assert driver.heard[lost].ids == before
    assert driver.heard[well].text.decode() == tokenizer_of(name).decode(ids)


@pytest.mark.parametrize("name", NAMES)
def test_doubled_rows_and_rows_after_the_end_are_dropped(
    name: str, table_of: Tables, tokenizer_of: Tokenizers
) -> None:
    ids = ids_of(tokenizer_of(name), TEXT[0], 3)
    driver = Driver(table_of(name))
    route, other = driver.start(), driver.start()
    driver.step([(route, ids[:2])])
    driver.step([(route, ids[:2]), (route, ids[:2]), (other, ids)], first={route: 0})
    driver._next[route] = 2
    driver.step([(route, ids[2:])], {route: FinishReason.length(3)})
    driver.step([(route, ids), (other, [])], {other: FinishReason.length(3)})
    assert driver.heard[route].text == driver.heard[other].text
    assert driver.heard[route].text.decode() == tokenizer_of(name).decode(ids)
    assert driver.failures == []


def test_a_step_may_have_any_number_of_rows(table_of: Tables, tokenizer_of: Tokenizers) -> None:
    """A port sends no such step; whatever else wrote it, it costs no request anything."""
    ids = ids_of(tokenizer_of("ctc"), TEXT[0], 3)
    driver = Driver(table_of("ctc"))
    route = driver.start()
    driver.step([(route, [])] * 70_000 + [(route, ids)], {route: FinishReason.length(3)})
    assert driver.failures == []
    assert driver.heard[route].text.decode() == tokenizer_of("ctc").decode(ids)
