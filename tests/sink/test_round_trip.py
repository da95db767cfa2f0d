"""Whatever goes into a step comes out of the event: every family, in every mix, empty ones included."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from outfeed.ring.batch import decode_batch, encode_batch
from outfeed.ring.families import RAGGED, Kind
from outfeed.sink import Columns, Done, Frame, Hidden, Ragged

from .front import Front
from .material import Row, Step, bits, draw_step, family_in, token_text


class Drawn:
    """Choices from hypothesis."""

    def __init__(self, draw: Any) -> None:
        self._draw = draw

    def integer(self, low: int, high: int) -> int:
        chosen: int = self._draw(st.integers(low, high))
        return chosen


@st.composite
def steps(draw: Any, egress: bool = True) -> Step:
    return draw_step(Drawn(draw), egress)


def columns_out(columns: Columns | None) -> dict[Kind, Any]:
    """An event's families in the same comparable form as `family_in`."""
    found: dict[Kind, Any] = {}
    for kind, part in zip(Kind, columns.parts() if columns else (), strict=False):
        if part is None:
            continue
        if isinstance(part, Hidden):
            found[kind] = ((part.vectors, part.width), bits(part.values))
        elif isinstance(part, Ragged):
            entries, start = [], 0
            for length in part.lengths.tolist():
                ids = part.ids[start : start + length].tolist()
                values = bits(part.values[start : start + length])
                entries.append((values, ids) if length else None)
                start += length
            found[kind] = entries
        else:
            found[kind] = (bits(part.values), part.ids.tolist())
    return found


def assert_event(row: Row, item: object) -> None:
    assert isinstance(item, Frame if row.finish is None else Done)
    event = item.event
    assert (event.text, event.ids.tolist()) == (row.text, row.ids)
    assert (event.first, event.generated, event.prompt_tokens) == (
        row.first,
        row.generated,
        row.prompt_tokens,
    )
    if row.finish is not None:
        assert event.finish is not None
        assert event.finish.to_json() == row.finish
        assert list(event.finish.to_json()) == list(row.finish)
    assert columns_out(event.columns) == {
        kind: family_in(kind, given) for kind, given in row.families.items()
    }
    if event.columns is not None and event.columns.texts is not None:
        named = {
            token
            for part in event.columns.parts()
            if part is not None and not isinstance(part, Hidden)
            for token in part.ids.tolist()
        }
        assert event.columns.texts == {token: token_text(token) for token in named}
    else:
        assert event.columns is None or not row.wants_texts


@given(steps())
@settings(max_examples=150)
def test_from_the_frame_to_the_event(step: Step) -> None:
    front = Front()
    sources = [front.open(row.route, first=row.first) for row in step.rows]
    front.arrive(step.encode())
    for row, source in zip(step.rows, sources, strict=True):
        assert_event(row, source.receive_nowait())
        assert front.reader.statistics().delivered == len(step.rows)


@given(steps(egress=False), st.data())
@settings(max_examples=150)
def test_a_shard_selects_its_rows_with_all_they_have(step: Step, data: st.DataObject) -> None:
    """Step frame → select → egress frame → event, as a shard does it."""
    batch = decode_batch(step.encode())
    keep = [row for row in range(len(step.rows)) if data.draw(st.booleans())]
    mine = batch.select(keep)
    parts = encode_batch(
        mine.stamp_ns,
        mine.routes,
        mine.first,
        mine.counts,
        mine.prompt_tokens,
        mine.ids,
        mine.finishes,
        generated=mine.counts,
        text_lens=np.zeros(len(keep), "u4"),
        text=b"",
        families=mine.families,
    )
    front = Front()
    sources = {row: front.open(step.rows[row].route, first=step.rows[row].first) for row in keep}
    front.arrive(b"".join(parts))
    for row, source in sources.items():
        assert_event(step.rows[row], source.receive_nowait())


def test_who_asked_for_nothing_carries_nothing() -> None:
    """One row of 256 with logprobs adds its own bytes and a fixed header, and no other row has columns."""
    plain = [Row(slot + (1 << 36), 0, [5], 1, 3, "x", None) for slot in range(256)]
    asked = [
        *plain[:100],
        Row(100 + (1 << 36), 0, [5], 1, 3, "x", None, {Kind.OUTPUT_LOGPROBS: ([-1.0], [5])}),
    ]
    asked += plain[101:]
    without, with_one = Step(1, plain, True).encode(), Step(1, asked, True).encode()
    assert len(with_one) - len(without) <= 16 + 16
    front = Front()
    sources = [front.open(row.route) for row in asked]
    front.arrive(with_one)
    having = []
    for index, source in enumerate(sources):
        item = source.receive_nowait()
        assert isinstance(item, Frame)
        if item.event.columns is not None:
            having.append(index)
    assert having == [100]


def test_every_kind_is_flat_ragged_or_hidden() -> None:
    assert set(Kind) - RAGGED == {Kind.OUTPUT_LOGPROBS, Kind.INPUT_LOGPROBS, Kind.HIDDEN_STATES}
