"""Events added up are the response; its JSON is the field's, cumulative and incremental."""

import json
import random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outfeed.ring.batch import decode_batch
from outfeed.ring.families import Kind
from outfeed.ring.finish import FinishReason
from outfeed.sink import (
    ChunkEvent,
    Columns,
    Done,
    Error,
    Flat,
    Frame,
    Hidden,
    Ragged,
    Response,
    open_sink,
    request_error,
)
from outfeed.sink.columns import ColumnsSum, columns_of

from .material import Row, Step, draw_family, token_text
from .test_round_trip import Drawn, columns_out


def events(*rows: Row) -> list[ChunkEvent]:
    """The rows as events of one request."""
    found = []
    for row in rows:
        batch = decode_batch(Step(7, [row], True).encode())
        _, shares = columns_of(batch.families, batch.texts)
        columns = shares[0] if shares else None
        finish = None if row.finish is None else FinishReason(row.finish)
        ids = np.array(row.ids, "<i4").tobytes()
        event = ChunkEvent(
            row.text.encode(), ids, row.first, row.generated, row.prompt_tokens, 7, finish, columns
        )
        found.append(event)
    return found


TWO = (
    Row(
        1,
        0,
        [10],
        1,
        4,
        "Hé",
        None,
        {
            Kind.OUTPUT_LOGPROBS: ([-0.5], [10]),
            Kind.INPUT_LOGPROBS: ([float("nan"), -2.0], [3, 4]),
            Kind.OUTPUT_TOP_LOGPROBS: [([-0.5, -1.5], [10, 11])],
            Kind.INPUT_TOP_LOGPROBS: [None, ([-2.0], [4]), ([-3.0, -4.0], [3, 4])],
            Kind.HIDDEN_STATES: np.array([[1.0, 2.0]], "f4"),
        },
        True,
    ),
    Row(
        1,
        1,
        [],
        1,
        4,
        "!",
        {"type": "stop", "matched": 2},
        {Kind.OUTPUT_LOGPROBS: ([float("-inf")], [2]), Kind.HIDDEN_STATES: np.array([[3.0, 4.0]], "f4")},
    ),
)


def test_a_whole_answer() -> None:
    response = Response("r1")
    for event in events(*TWO):
        response.add(event)
    assert response.cumulative(e2e_latency=0.25) == {
        "text": "Hé!",
        "output_ids": [10],
        "meta_info": {
            "id": "r1",
            "prompt_tokens": 4,
            "completion_tokens": 2,
            "finish_reason": {"type": "stop", "matched": 2},
            "e2e_latency": 0.25,
            "output_token_logprobs": [[-0.5, 10, token_text(10)], [None, 2, None]],
            "input_token_logprobs": [[None, 3, token_text(3)], [-2.0, 4, token_text(4)]],
            "output_top_logprobs": [[[-0.5, 10, token_text(10)], [-1.5, 11, token_text(11)]]],
            "input_top_logprobs": [
                None,
                [[-2.0, 4, token_text(4)]],
                [[-3.0, 3, token_text(3)], [-4.0, 4, token_text(4)]],
            ],
            "hidden_states": [[3.0, 4.0]],
        },
    }


def test_before_the_first_event_there_is_nothing_yet() -> None:
    response = Response("r1")
    meta = {"id": "r1", "prompt_tokens": 0, "completion_tokens": 0, "finish_reason": None}
    assert response.cumulative() == {"text": "", "output_ids": [], "meta_info": meta}
    assert response.whole() == ChunkEvent(b"", b"", 0, 0, 0, 0)
    with pytest.raises(ValueError, match="no event to render yet"):
        response.incremental()


def test_cumulative_grows_and_incremental_does_not() -> None:
    response = Response("r1")
    first, last = events(*TWO)
    response.add(first)
    assert response.cumulative() == response.incremental()
    assert response.incremental()["meta_info"]["finish_reason"] is None
    response.add(last)
    new = response.incremental()
    assert (new["text"], new["output_ids"]) == ("!", [])
    assert new["meta_info"]["completion_tokens"] == 2
    assert new["meta_info"]["output_token_logprobs"] == [[None, 2, None]]
    assert "input_token_logprobs" not in new["meta_info"]
    assert response.cumulative()["text"] == "Hé!"


def test_what_is_rendered_is_json() -> None:
    response = Response("r1")
    for event in events(*TWO):
        response.add(event)
    assert json.loads(json.dumps(response.cumulative(), allow_nan=False)) == response.cumulative()
    assert msgspec.json.decode(msgspec.json.encode(response.cumulative())) == response.cumulative()


def test_finish_reasons_are_echoed_key_for_key() -> None:
    reason = {"zzz": None, "type": "brand_new", "a": [1, {"b": None}]}
    response = Response("r")
    response.add(ChunkEvent(b"", b"", 0, 0, 1, 1, FinishReason(reason)))
    echoed = response.cumulative()["meta_info"]["finish_reason"]
    assert list(echoed.items()) == list(reason.items())


def test_an_abort_with_a_status_is_a_request_error() -> None:
    def ending(reason: FinishReason | None) -> ChunkEvent:
        return ChunkEvent(b"", b"", 0, 0, 1, 1, reason)

    assert request_error(ending(FinishReason.abort("too long", 400, "BadRequest"))) == Error(
        400, "BadRequest", "too long"
    )
    assert request_error(ending(FinishReason.abort(None, 503))) == Error(
        503, "abort", "the request was aborted"
    )
    assert request_error(ending(FinishReason.abort("bye"))) is None
    assert request_error(ending(FinishReason.stop(7))) is None
    assert request_error(ending(None)) is None


def test_each_row_counts_what_it_holds_and_holds_what_is_its_own() -> None:
    rows = [
        Row(1, 0, [10], 1, 4, "", None, {**TWO[0].families, Kind.OUTPUT_IDS_LOGPROBS: [None]}, True),
        Row(2, 0, [20], 1, 4, "", None, {Kind.OUTPUT_LOGPROBS: ([-1.0], [20])}, True),
        Row(3, 0, [30], 1, 4, "", None, {}, True),
        Row(4, 0, [40], 1, 4, "", None, {Kind.HIDDEN_STATES: np.array([[5.0, 6.0], [7.0, 8.0]], "f4")}),
        Row(5, 0, [50], 1, 4, "", None, {Kind.OUTPUT_LOGPROBS: ([-2.0, -3.0], [50, 51])}),
    ]
    batch = decode_batch(Step(7, rows, True).encode())
    having, shares = columns_of(batch.families, batch.texts)
    assert having == [0, 1, 3, 4]
    for share in shares:
        columns: list[Any] = [*share.parts(), share.texts]
        assert share.size == Columns(*columns).size
    assert [share.texts and [*share.texts] for share in shares] == [[10, 3, 4, 11], [20], None, None]
    assert shares[2].hidden_states == Hidden(np.array([5.0, 6.0, 7.0, 8.0], "f4").tobytes(), 2, 2)


def test_what_merging_replaces_is_what_it_frees() -> None:
    """Hidden states and a token's text may be of another length each time: a sink's count stays right."""
    choose, total, waiting = random.Random(4), ColumnsSum(), 0
    for _ in range(200):
        width = choose.randrange(5)
        columns = Columns(
            output_logprobs=Flat(b"1234" * width, b"5678" * width) if choose.random() < 0.5 else None,
            input_top_logprobs=Ragged(b"\1\0\0\0", b"1234", b"5678") if choose.random() < 0.5 else None,
            hidden_states=Hidden(b"1234" * width, 1, width) if choose.random() < 0.5 else None,
            texts={token: "é" * choose.randrange(40) for token in choose.sample(range(9), width)},
        )
        waiting += columns.size - total.add(columns)
        assert total.total().size == waiting


@st.composite
def streams(draw: Any) -> list[ChunkEvent]:
    choose, rows, first = Drawn(draw), [], 0
    for _ in range(choose.integer(1, 20)):
        ids = [choose.integer(0, 9) for _ in range(choose.integer(0, 2))]
        families = {kind: draw_family(choose, kind, 2) for kind in Kind if choose.integer(0, 3) == 0}
        texts = choose.integer(0, 1) == 1
        rows.append(Row(1, first, ids, len(ids), 4, "é" * choose.integer(0, 2), None, families, texts))
        first += len(ids)
    rows[-1].finish = {"type": "length", "length": first}
    return events(*rows)


@given(streams(), st.lists(st.integers(0, 19), max_size=5))
@settings(max_examples=80)
def test_merging_changes_nothing_of_the_sum(stream: list[ChunkEvent], reads: list[int]) -> None:
    """Whenever a client reads, and whatever was merged meanwhile, the response is the same."""
    straight, lagging = Response("r"), Response("r")
    sender, source = open_sink(1 << 20)
    for index, event in enumerate(stream):
        straight.add(event)
        sender.try_send(Frame(event) if event.finish is None else Done(event))
        if index in reads:
            item = source.receive_nowait()
            assert isinstance(item, Frame | Done)
            lagging.add(item.event)
    if lagging.finish is None:
        for item in source:
            assert isinstance(item, Frame | Done)
            lagging.add(item.event)
    one, other = straight.whole(), lagging.whole()
    assert columns_out(one.columns) == columns_out(other.columns)
    assert one._fields()[:-1] == other._fields()[:-1]
    assert source.statistics().waiting_bytes == 0
