"""Steps that wait behind each other are decoded as one: nothing but the number of rows may tell.

Each story runs twice, step by step and joined at random places, and every request must have heard the same.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outfeed.ring.batch import as_batch, join_steps
from outfeed.ring.checked import check_batch
from outfeed.ring.finish import FinishReason
from outfeed.ring.frames import DecodeOptions
from outfeed.shards.decoder import Decoder
from outfeed.shards.table import TokenTable
from tokenizers import Tokenizer

from .driver import READER, SHARD, Driver, Heard
from .tokenizers_here import TEXT

Tables = Callable[[str], TokenTable]
Tokenizers = Callable[[str], Tokenizer]

STOPS = ["fox", "over the", "ß", "👩‍👧", ". ", "é"]
NO_LIMIT = 1 << 20


@dataclass
class Story:
    """What a scheduler pushed: frames in order, and the requests they are about."""

    options: list[DecodeOptions]
    steps: list[tuple[list[tuple[int, list[int]]], dict[int, FinishReason], dict[int, int]]] = field(
        default_factory=list
    )


def options_of(draw: st.DrawFn) -> DecodeOptions:
    return DecodeOptions(
        stop=draw(st.lists(st.sampled_from(STOPS), max_size=2, unique=True)),
        no_stop_trim=draw(st.booleans()),
        detect_stops=draw(st.booleans()),
        skip_special_tokens=draw(st.booleans()),
    )


def finish_of(draw: st.DrawFn, ids: list[int], had: list[int]) -> FinishReason:
    """End at a length, a stop token, several stop tokens (of which some may have gone out), or a string."""
    match draw(st.integers(0, 3)):
        case 1 if ids:
            return FinishReason.stop(ids[-1])
        case 2 if ids:
            return FinishReason({"type": "stop", "matched": (had + ids)[-draw(st.integers(1, 4)) :]})
        case 3:
            return FinishReason.stop(draw(st.sampled_from(STOPS)))
        case _:
            return FinishReason.length(len(had) + len(ids))


@st.composite
def stories(draw: st.DrawFn, corpus: list[list[int]]) -> Story:
    story = Story([options_of(draw) for _ in range(draw(st.integers(1, 4)))])
    texts = [draw(st.sampled_from(corpus)) for _ in story.options]
    starts = [draw(st.integers(0, len(ids) - 1)) for ids in texts]
    had: list[list[int]] = [[] for _ in story.options]
    for _ in range(draw(st.integers(1, 14))):
        rows, finishes, first = [], {}, {}
        for request in draw(st.permutations(range(len(story.options)))):
            what = draw(st.integers(0, 19))
            if what < 4:
                continue  # not in this step
            if what == 4 and had[request]:  # said before: all of it, or the end of it
                first[request] = draw(st.integers(0, len(had[request]) - 1))
                rows.append((request, had[request][first[request] :]))
                continue
            if what == 5 and draw(st.booleans()):
                first[request] = len(had[request]) + draw(st.integers(1, 3))  # some were lost
            at = starts[request] + len(had[request])
            ids = [texts[request][k % len(texts[request])] for k in range(at, at + draw(st.integers(0, 4)))]
            rows.append((request, ids))
            if what == 6:
                finishes[request] = finish_of(draw, ids, had[request])
            had[request] += ids
            first.setdefault(request, len(had[request]) - len(ids))
        story.steps.append((rows, finishes, first))
    return story


def play(story: Story, table: TokenTable, cuts: list[int], merge: int) -> Driver:
    """Tell a story; between two of `cuts` its steps are decoded as one."""
    driver = Driver(table)
    routes = [driver.start(options) for options in story.options]
    frames = [
        driver.frame(
            [(routes[request], ids) for request, ids in rows],
            {routes[request]: why for request, why in finishes.items()},
            {routes[request]: at for request, at in first.items()},
        )
        for rows, finishes, first in story.steps
    ]
    for begin, end in itertools.pairwise([0, *cuts, len(frames)]):
        if end > begin:
            driver.backlog(frames[begin:end], merge)
    return driver


def outcome(heard: Heard) -> tuple[object, ...]:
    finish = None if heard.finish is None else heard.finish.to_json()
    return heard.text.decode(), heard.ids, heard.generated, finish, heard.ended_here


@pytest.mark.parametrize("name", ["bytelevel_added", "metaspace_bpe", "metaspace_unigram"])
@settings(max_examples=200)
@given(data=st.data())
def test_no_request_can_tell_which_steps_were_decoded_as_one(
    name: str, table_of: Tables, tokenizer_of: Tokenizers, data: st.DataObject
) -> None:
    tokenizer = tokenizer_of(name)
    corpus = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXT]
    corpus.append(list(range(tokenizer.get_vocab_size())))  # special, byte and broken ones
    story = data.draw(stories(corpus))
    one_by_one = play(story, table_of(name), list(range(1, len(story.steps))), 0)
    cuts = data.draw(st.lists(st.integers(1, len(story.steps)), unique=True).map(sorted))
    merge = data.draw(st.sampled_from([0, 1, 8, 40, NO_LIMIT]))
    joined = play(story, table_of(name), cuts, merge)
    for route, heard in one_by_one.heard.items():
        assert outcome(joined.heard[route]) == outcome(heard)
    assert sorted(joined.failures) == sorted(one_by_one.failures)
    for counter in ("tokens", "stale_rows", "doubled", "failed", "stopped", "ended"):
        counted = [getattr(driver.decoder.statistics, counter) for driver in (joined, one_by_one)]
        assert counted[0] == counted[1], counter
    for route in one_by_one.heard:
        assert joined.decoder._kernel.look(route) == one_by_one.decoder._kernel.look(route)


def test_a_requests_rows_become_one_row(table_of: Tables, tokenizer_of: Tokenizers) -> None:
    driver = Driver(table_of("deepseek"))
    ids = tokenizer_of("deepseek").encode(TEXT[0], add_special_tokens=False).ids
    routes = [driver.start(), driver.start()]
    frames = [driver.frame([(route, [token]) for route in routes]) for token in ids[:-1]]
    frames.append(driver.frame([(routes[1], ids[-1:])], {routes[1]: FinishReason.length(len(ids))}))
    batch = driver.backlog(frames, NO_LIMIT)
    assert batch.routes.tolist() == routes
    assert batch.first.tolist() == [0, 0]
    assert batch.generated.tolist() == batch.counts.tolist() == [len(ids) - 1, len(ids)]
    assert [(row, why.to_json()["type"]) for row, why in batch.finishes] == [(1, "length")]
    assert driver.heard[routes[1]].text.decode() == TEXT[0]
    assert driver.heard[routes[1]].ids == ids


def test_a_merged_row_stays_within_its_limit(table_of: Tables, tokenizer_of: Tokenizers) -> None:
    """Each row alone would have fitted, so the merged ones must: whatever does not is a row of its own."""
    ids = tokenizer_of("deepseek").encode(TEXT[3], add_special_tokens=False).ids
    for most in (1, 40, 90, 300):
        driver = Driver(table_of("deepseek"))
        route = driver.start()
        batch = driver.backlog([driver.frame([(route, [token])]) for token in ids], most)
        assert batch.text_lens is not None
        sizes = (batch.text_lens + 4 * batch.counts).tolist()
        assert all(size <= most for size, count in zip(sizes, batch.counts, strict=True) if count > 1)
        assert most == 1 or len(sizes) < len(ids)
        assert driver.heard[route].ids == ids


def test_a_request_that_ends_makes_room_for_the_next_in_its_slot(table_of: Tables) -> None:
    """Rows of both generations lie in one backlog; only the live one's are decoded."""
    driver = Driver(table_of("bytelevel_added"))
    late = driver.start()
    driver.decoder.forget(late)
    slot_again = late + (1 << 36)
    driver.decoder.register(driver.registration(slot_again))
    driver.heard[slot_again] = Heard()
    frames = [driver.frame([(late, [65])]), driver.frame([(slot_again, [66]), (late, [67])])]
    assert driver.backlog(frames, NO_LIMIT).routes.tolist() == [slot_again]
    assert driver.decoder.statistics.stale_rows == 2


def test_who_searches_each_step_or_makes_the_text_elsewhere_does_not_join(table_of: Tables) -> None:
    decoder = Decoder(table_of("bytelevel_added"))
    assert decoder.joins
    watched = Driver.registration(1 << 36, DecodeOptions(stop_regex=["a+"], detect_stops=True))
    decoder.register(watched)
    assert not decoder.joins
    decoder.forget(watched.route)
    assert decoder.joins
    assert not Driver(table_of("wordpiece")).decoder.joins


def test_only_plain_steps_are_joined(table_of: Tables) -> None:
    driver = Driver(table_of("bytelevel_added"))
    route = driver.start()
    frame = driver.frame([(route, [65])])
    egress = driver.decoder.decode(as_batch(check_batch(frame)), SHARD, READER).rows.encode()
    with pytest.raises(ValueError, match="only plain steps"):
        join_steps([check_batch(frame), check_batch(b"".join(bytes(part) for part in egress))])
