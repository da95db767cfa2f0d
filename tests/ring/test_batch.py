"""A BATCH comes out as it went in, or not at all."""

import pickle

import numpy as np
import pytest
from outfeed.ring import _body
from outfeed.ring._body import probe
from outfeed.ring.batch import BadBatch, Batch, check_batch, decode_batch, encode_batch
from outfeed.ring.checked import PREFIX
from outfeed.ring.finish import FinishReason
from outfeed.ring.frames import Buffer, join


def _columns(order: str) -> list[np.ndarray]:
    """Return routes, first, counts, prompt_tokens and ids of three rows."""
    return [
        np.array([11, 12, 13], f"{order}u8"),
        np.array([0, 5, 9], f"{order}u4"),
        np.array([2, 0, 1], f"{order}u4"),
        np.array([3, 3, 4], f"{order}u4"),
        np.array([101, 102, 103], f"{order}i4"),
    ]


def body_of(parts: list[Buffer]) -> memoryview:
    return memoryview(join(parts))


def step() -> list[Buffer]:
    routes, first, counts, prompt_tokens, ids = _columns("<")
    return encode_batch(
        77,
        routes,
        first,
        counts,
        prompt_tokens,
        ids,
        [(1, FinishReason.length(5)), (2, FinishReason.abort("no", None, None))],
    )


def decoded(parts: list[Buffer]) -> Batch:
    return decode_batch(body_of(parts))


def test_step_form() -> None:
    batch = decoded(step())
    assert (batch.rows, batch.stamp_ns, batch.egress) == (3, 77, False)
    assert batch.routes.tolist() == [11, 12, 13]
    assert batch.first.tolist() == [0, 5, 9]
    assert batch.counts.tolist() == [2, 0, 1]
    assert batch.generated.tolist() == [2, 0, 1]
    assert batch.ids.tolist() == [101, 102, 103]
    assert [(row, reason.to_json()) for row, reason in batch.finishes] == [
        (1, {"type": "length", "length": 5}),
        (2, {"type": "abort", "message": "no", "status_code": None, "err_type": None}),
    ]


def test_columns_that_went_from_process_to_process_are_taken() -> None:
    columns = pickle.loads(pickle.dumps(_columns("<")))
    assert join(encode_batch(77, *columns)) == join(encode_batch(77, *_columns("<")))
    lens = pickle.loads(pickle.dumps(np.array([1, 0, 2], "u4")))
    batch = decoded(encode_batch(77, *columns, generated=lens, text_lens=lens, text=b"abc"))
    assert (batch.generated.tolist(), batch.text) == ([1, 0, 2], b"abc")


@pytest.mark.parametrize(
    ("place", "name"), [*enumerate(("routes", "first", "counts", "prompt_tokens", "ids"))]
)
def test_a_column_of_the_other_byte_order_is_refused_by_name(place: int, name: str) -> None:
    columns = _columns("<")
    columns[place] = _columns(">")[place]
    with pytest.raises(ValueError, match=f"{name} is >"):
        encode_batch(77, *columns)


def test_c_and_python_have_one_layout() -> None:
    """The numbers of core/batch.h against a body that numpy and struct laid out."""
    assert PREFIX.size == _body.PREFIX_BYTES
    starts = np.cumsum([0, *(column.itemsize for column in _columns("<")[:4])]).tolist()
    assert starts == [0, _body.FIRST_AT, _body.COUNTS_AT, _body.PROMPT_TOKENS_AT, _body.ROW_BYTES]
    lens = np.array([1, 0, 2], "<u4")
    egress = join(encode_batch(77, *_columns("<"), generated=lens, text_lens=lens, text=b"abc"))
    step = check_batch(egress)
    assert step.text_at == step.data + 3 * _body.ROW_BYTES + _columns("<")[4].nbytes
    assert egress[step.text_at + 3 * _body.TEXT_LENS_AT :][: lens.nbytes] == lens.tobytes()
    assert egress[step.text_at + 3 * _body.EGRESS_ROW_BYTES :] == b"abc\0"


def test_select_takes_only_those_rows() -> None:
    part = decoded(step()).select([0, 2])
    assert part.routes.tolist() == [11, 13]
    assert part.ids.tolist() == [101, 102, 103]
    assert [row for row, _ in part.finishes] == [1]


def test_a_short_body_is_none() -> None:
    with pytest.raises(BadBatch, match="body_len is 168, the body has 164 bytes"):
        decode_batch(body_of(step())[:-4])


@pytest.mark.parametrize(
    ("rows", "data", "text_at", "text_bytes"),
    [
        (-1, 16, -1, 0),
        (5, 16, -1, 0),
        (2**60, 16, -1, 0),
        (0, 15, -1, 0),
        (0, 101, -1, 0),
        (1, 2**62, -1, 0),
        (1, 16, -2, 0),
        (1, 16, 101, 0),
        (1, 16, 92, 1),
        (1, 16, 36, 57),
        (1, 16, 36, -1),
        (1, 16, 2**62, 2**62),
    ],
)
def test_nothing_outside_the_body_is_looked_at(rows: int, data: int, text_at: int, text_bytes: int) -> None:
    """Whoever calls has checked that already; a mistake there must not become a read elsewhere."""
    assert len(probe(bytes(100), 4, 4, 16, -1, 0)) == 4
    with pytest.raises(ValueError, match="do not lie in the body"):
        probe(bytes(100), 4, rows, data, text_at, text_bytes)


def test_lengths_that_lie_are_added_up_and_walked_no_further_than_the_text() -> None:
    body = bytearray(16 + 3 * 28 + 8)
    text_at = 16 + 3 * 20
    body[text_at + 12 : text_at + 24] = np.array([2, 2**32 - 1, 2**32 - 1], dtype="<u4").tobytes()
    body[text_at + 24 :] = "éàüß".encode()
    assert probe(bytes(body), 0, 3, 16, text_at, 8)[1:3] == (2**33, -1)
    body[text_at + 12] = 3
    assert probe(bytes(body), 0, 3, 16, text_at, 8)[1:3] == (2**33 + 1, 3)
