"""A BATCH comes out as it went in, or not at all."""

import pickle
import sys
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest
from outfeed.ring import _body
from outfeed.ring._body import ascends, check, plain, probe, total
from outfeed.ring._body import join as join_columns
from outfeed.ring.batch import Batch, Core, decode_batch, encode_batch, join_steps
from outfeed.ring.checked import MAX_ROWS, PREFIX, BadBatch, Checked, _check_all, check_batch
from outfeed.ring.families import FAMILIES, Family, Kind, TokenTexts
from outfeed.ring.family_makers import flat_family, hidden_family, ragged_family
from outfeed.ring.finish import FinishReason

LENS = np.array([1, 0, 2], "<u4")


def _columns(order: str) -> list[np.ndarray]:
    """Return routes, first, counts, prompt_tokens and ids of three rows."""
    return [
        np.array([11, 12, 13], f"{order}u8"),
        np.array([0, 5, 9], f"{order}u4"),
        np.array([2, 0, 1], f"{order}u4"),
        np.array([3, 3, 4], f"{order}u4"),
        np.array([101, 102, 103], f"{order}i4"),
    ]


def body_of(parts: list[bytes]) -> memoryview:
    return memoryview(b"".join(parts))


def step() -> list[bytes]:
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


def decoded(parts: list[bytes]) -> Batch:
    return decode_batch(body_of(parts))


def test_step_form() -> None:
    batch = decoded(step())
    assert (batch.rows, batch.stamp_ns, batch.egress) == (3, 77, False)
    assert batch.routes.tolist() == [11, 12, 13]
    assert batch.first.tolist() == [0, 5, 9]
    assert batch.counts.tolist() == [2, 0, 1]
    assert batch.generated.tolist() == [2, 0, 1]
    assert batch.ids.tolist() == [101, 102, 103]
    assert (batch.text_lens, batch.text, batch.texts, batch.ended, batch.families) == (
        None,
        None,
        None,
        (),
        (),
    )
    assert [(row, reason.to_json()) for row, reason in batch.finishes] == [
        (1, {"type": "length", "length": 5}),
        (2, {"type": "abort", "message": "no", "status_code": None, "err_type": None}),
    ]


def test_columns_that_went_from_process_to_process_are_taken() -> None:
    columns = pickle.loads(pickle.dumps(_columns("<")))
    assert b"".join(encode_batch(77, *columns)) == b"".join(encode_batch(77, *_columns("<")))
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


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"ids": np.array([1, 2], "<i4")}, "counts add up to 3 tokens, but ids has 2"),
        ({"counts": np.array([2, 1], "<u4")}, r"counts is uint32\[2\], not uint32\[3\]"),
        ({"first": np.array([1, 2, 3], "<u8")}, r"first is uint64\[3\], not uint32\[3\]"),
        ({"prompt_tokens": np.array([9, 3, 9, 3, 9, 4], "<u4")[1::2]}, "a column is not a contiguous buffer"),
        ({"text": b"abc"}, "needs generated, text_lens and text together"),
        ({"text": b"abc", "text_lens": LENS}, "needs generated, text_lens and text together"),
        ({"text": b"abc", "text_lens": LENS, "generated": LENS[:2]}, r"generated is uint32\[2\], not uint32"),
        (
            {"text": b"abc", "text_lens": LENS.astype("u8"), "generated": LENS},
            r"text_lens is uint64\[3\], not",
        ),
        (
            {"text": b"ab", "text_lens": LENS, "generated": LENS},
            "text_lens add up to 3 bytes, but text has 2",
        ),
        ({"families": [None] * 6}, "6 families given; expected 7"),
    ],
)
def test_columns_that_do_not_fit_each_other_are_refused_by_name(changed: Any, says: str) -> None:
    named = dict(zip(("routes", "first", "counts", "prompt_tokens", "ids"), _columns("<"), strict=True))
    with pytest.raises(ValueError, match=says):
        encode_batch(77, **{**named, **changed})


def test_a_step_has_no_more_rows_than_a_reader_takes() -> None:
    rows = MAX_ROWS + 1
    columns = np.ones(rows, "<u8"), *(np.zeros(rows, "<u4") for _ in range(3)), np.zeros(0, "<i4")
    with pytest.raises(ValueError, match="1048577 rows in a BATCH; at most 1048576: split the step"):
        encode_batch(77, *columns)


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (7, [0, 0, 0], "token_texts in the step form; only the egress form has them"),
        (8, [1], "ended rows in the step form; only the egress form has them"),
    ],
)
def test_what_only_a_reader_gets_is_refused_in_the_step_form(place: int, value: object, says: str) -> None:
    rest = b"".join(step())[PREFIX.size :]
    header_len = PREFIX.unpack_from(b"".join(step()))[0]
    header = [*msgspec.msgpack.decode(rest[:header_len]), []]
    header[place] = value
    packed = msgspec.msgpack.encode(header)
    body = bytearray(16) + packed + bytes(-len(packed) % 8) + rest[header_len + -header_len % 8 :]
    body[:16] = PREFIX.pack(len(packed), 0, 0)
    with pytest.raises(BadBatch, match=says):
        decode_batch(sealed(body))


def test_c_and_python_have_one_layout() -> None:
    """The numbers of core/batch.h against a body that numpy and struct laid out."""
    assert PREFIX.size == _body.PREFIX_BYTES
    starts = np.cumsum([0, *(column.itemsize for column in _columns("<")[:4])]).tolist()
    assert starts == [0, _body.FIRST_AT, _body.COUNTS_AT, _body.PROMPT_TOKENS_AT, _body.ROW_BYTES]
    lens = np.array([1, 0, 2], "<u4")
    egress = b"".join(encode_batch(77, *_columns("<"), generated=lens, text_lens=lens, text=b"abc"))
    step = check_batch(egress)
    assert step.text_at == step.data + 3 * _body.ROW_BYTES + _columns("<")[4].nbytes
    assert egress[step.text_at + 3 * _body.TEXT_LENS_AT :][: lens.nbytes] == lens.tobytes()
    assert egress[step.text_at + 3 * _body.EGRESS_ROW_BYTES :] == b"abc\0"


def test_select_takes_only_those_rows() -> None:
    part = decoded(step()).select([0, 2])
    assert part.routes.tolist() == [11, 13]
    assert part.ids.tolist() == [101, 102, 103]
    assert [row for row, _ in part.finishes] == [1]
    for rows in ([2, 0], [1, 1], [-1, 0], [0, 3]):
        with pytest.raises(ValueError, match=r"not ascending within 0\.\.2"):
            decoded(step()).select(rows)


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


def egress() -> list[bytes]:
    """The three rows with a text in which characters have one to four bytes."""
    text = "aß水🌊".encode()
    lens, generated = np.array([1, 2, 7], "<u4"), np.array([2, 1, 1], "<u4")
    return encode_batch(2**63, *_columns("<"), generated=generated, text_lens=lens, text=text)


def held_back() -> list[bytes]:
    """One row whose text waits for more: the egress form, without a byte of text."""
    one, none = np.array([1], "<u4"), np.array([0], "<u4")
    columns = np.array([11], "<u8"), none, one, one, np.array([5], "<i4")
    return encode_batch(1, *columns, generated=one, text_lens=none, text=b"")


def found(step: Checked) -> tuple[object, ...]:
    """What a checked body says."""
    core = (step.data, step.stamp_ns, step.rows, step.tokens, step.text_bytes, step.text_at)
    return (*core, step.finishes, step.families, step.texts, step.ended)


def all_checks(body: bytes) -> tuple[object, ...] | None:
    try:
        return found(_check_all(body))
    except BadBatch:
        return None


def sealed(body: bytearray) -> bytes:
    """Make the prefix right again, so that the other checks stand alone."""
    rest, header_len = bytes(body[16:]), PREFIX.unpack_from(body)[0]
    return PREFIX.pack(header_len, len(body), check(rest, header_len)) + rest


@pytest.mark.parametrize("parts", [encode_batch(1, *_columns("<")), egress(), held_back()])
def test_the_quick_look_passes_what_all_checks_pass_and_nothing_else(parts: list[bytes]) -> None:
    """Every byte of a usual body in every other value, with a check that fits."""
    body = bytearray(b"".join(parts))
    assert plain(bytes(body)) is not None
    passed = 0
    for place in range(len(body)):
        before = body[place]
        for value in range(256):
            body[place] = value
            changed = sealed(body) if place >= 16 else bytes(body)
            if (usual := plain(changed)) is not None:
                data, stamp_ns, rows, tokens, text_bytes = usual
                quick = Checked(changed, data, stamp_ns, rows, tokens, None if text_bytes < 0 else text_bytes)
                assert found(quick) == all_checks(changed), (place, value)
                passed += 1
            elif (checked := all_checks(changed)) is not None:
                assert any(checked[6:]), (place, value)
        body[place] = before
    assert passed > 256


@pytest.mark.parametrize(
    ("column", "values", "says"),
    [
        ("flat rows", [0, 0], "output_logprobs rows: not ascending"),
        ("flat rows", [2, 1], "output_logprobs rows: not ascending"),
        ("flat rows", [2**32 - 1, 0], "output_logprobs rows: not ascending"),
        ("flat rows", [0, 3], "output_logprobs rows: 3 in a batch of 3 rows"),
        ("flat rows", [1, 2**32 - 1], "output_logprobs rows: 4294967295 in a batch of 3 rows"),
        ("flat counts", [1, 1], "output_logprobs: sum of counts 2, positions 3"),
        ("flat counts", [2**32 - 1, 4], "output_logprobs: sum of counts 4294967299, positions 3"),
        ("ragged rows", [3], "output_top_logprobs rows: 3 in a batch of 3 rows"),
        ("ragged counts", [1], "output_top_logprobs: sum of counts 1, positions 2"),
        ("ragged lengths", [2, 2], "output_top_logprobs: sum of lengths 4, entries 3"),
    ],
)
def test_a_family_whose_numbers_lie_is_refused(column: str, values: list[int], says: str) -> None:
    """Whoever wrote them made the check right as well."""
    families: list[Family | None] = [None] * FAMILIES
    families[Kind.OUTPUT_LOGPROBS] = flat_family([(0, [-1, -2], [5, 6]), (2, [-3], [7])])
    tops = [([-1], [5]), ([-2, -3], [6, 7])]
    families[Kind.OUTPUT_TOP_LOGPROBS] = ragged_family([(1, tops)])
    body = bytearray(body_of(encode_batch(1, *_columns("<"), families=families)))
    assert len(decode_batch(sealed(body)).families) == FAMILIES
    ragged, flat = len(body) - 40, len(body) - 80
    at = {
        "flat rows": flat,
        "flat counts": flat + 8,
        "ragged rows": ragged,
        "ragged counts": ragged + 4,
        "ragged lengths": ragged + 8,
    }[column]
    body[at : at + 4 * len(values)] = np.array(values, "<u4").tobytes()
    with pytest.raises(BadBatch, match=says):
        decode_batch(sealed(body))


def test_hidden_states_of_no_width_are_refused() -> None:
    """No byte of the body would bound how many there are, and room is made for each that is taken out."""
    families = [*[None] * Kind.HIDDEN_STATES, hidden_family([(1, [[0.5]])])]
    body = bytearray(body_of(encode_batch(1, *_columns("<"), families=families)))
    entry = body.index(b"\x93\x01\x01\x01")  # one row, one position, the width
    body[entry + 3] = 0
    with pytest.raises(BadBatch, match="hidden_states: 1 positions of width 0"):
        decode_batch(sealed(body[:-4]))


@pytest.mark.parametrize(
    ("at", "count"),
    [(41, 0), (44, 1), (40, 1), (37, 1), (0, 11), (0, 2**62), (2**63 - 1, 1), (-4, 1), (0, -1)],
)
def test_numbers_outside_a_body_are_not_looked_at(at: int, count: int) -> None:
    body = np.arange(1, 11, dtype="<u4").tobytes()
    assert total(body, 0, 10) == 55
    assert total(body, 40, 0) == 0  # none, at the very end
    assert ascends(body, 0, 10, 11)
    assert ascends(body, 40, 0, 0)
    outside = pytest.raises(ValueError, match="the column does not lie in the body")
    with outside:
        total(body, at, count)
    with outside:
        ascends(body, at, count, 11)


@pytest.mark.parametrize(
    ("column", "limit", "so"),
    [
        ([0, 2**32 - 1], 2**32, True),
        ([0, 2**32 - 1], 2**32 - 1, False),
        ([1, 1], 9, False),
        ([2, 1], 9, False),
        ([2**31, 2**31 - 1], 2**32, False),
        ([0], 0, False),
    ],
)
def test_rows_ascend_to_below_their_number(column: list[int], limit: int, so: bool) -> None:
    body = np.array(column, "<u4").tobytes()
    assert ascends(body, 0, len(column), limit) is so


def test_text_that_is_none_is_seen_wherever_it_is_spoilt() -> None:
    columns, generated = _columns("<"), np.array([2, 1, 1], "<u4")
    for size in range(1, 18):
        lens = np.array([0, size, 0], "<u4")
        whole = bytearray(
            body_of(encode_batch(1, *columns, generated=generated, text_lens=lens, text=b"a" * size))
        )
        assert decode_batch(sealed(whole)).text == b"a" * size
        for place in range(size):
            for value in (0x80, 0xC3):
                changed = bytearray(whole)
                changed[len(whole) - size - -size % 4 + place] = value
                with pytest.raises(BadBatch):
                    decode_batch(sealed(changed))


def test_a_rows_text_that_begins_inside_a_character_is_seen() -> None:
    whole = bytearray(body_of(egress()))
    at = len(whole) - 12 - 12
    assert np.frombuffer(whole, "<u4", 3, at).tolist() == [1, 2, 7]
    for lens in ([2, 1, 7], [1, 3, 6], [1, 6, 3]):
        whole[at : at + 12] = np.array(lens, "<u4").tobytes()
        with pytest.raises(BadBatch):
            decode_batch(sealed(whole))


def test_a_tokens_text_that_begins_inside_a_character_is_seen() -> None:
    named: Any = {"generated": LENS, "text_lens": LENS, "text": b"abc"}
    ids, lens = np.array([5, 6, 7], "<i4"), np.array([1, 3, 2], "<u4")
    texts = TokenTexts(np.array([1], "<u4"), ids, lens, "a水ß".encode())
    whole = bytearray(body_of(encode_batch(1, *_columns("<"), **named, texts=texts)))
    found = decode_batch(sealed(whole)).texts
    assert found is not None
    assert found.as_dict() == {5: "a", 6: "水", 7: "ß"}
    at = len(whole) - 8 - 12
    for wrong in ([2, 2, 2], [1, 4, 1], [1, 1, 4]):
        whole[at : at + 12] = np.array(wrong, "<u4").tobytes()
        with pytest.raises(BadBatch, match="token_texts: a part begins inside a character"):
            decode_batch(sealed(whole))


def test_a_header_ends_where_it_says() -> None:
    whole = bytearray(body_of(encode_batch(1, *_columns("<"))))
    header_len = PREFIX.unpack_from(whole)[0]
    assert header_len % 8
    whole[:4] = (header_len + 1).to_bytes(4, "little")  # into its own padding
    with pytest.raises(BadBatch):
        decode_batch(sealed(whole))


def test_a_body_has_no_more_rows_than_a_reader_takes() -> None:
    for rows, fits in ((MAX_ROWS, True), (MAX_ROWS + 1, False)):
        header = msgspec.msgpack.encode((1, 7, rows, 0, (), None, (), None))
        padded = header + bytes(-len(header) % 8)
        body = sealed(bytearray(PREFIX.pack(len(header), 0, 0) + padded + bytes(20 * rows)))
        assert (plain(body) is not None) == fits
        assert (all_checks(body) is not None) == fits


def test_what_has_more_than_rows_and_tokens_is_left_to_all_checks() -> None:
    assert plain(b"".join(step())) is None
    assert plain(b"".join(egress())[:-1]) is None
    assert plain(b"") is None
    with pytest.raises(TypeError, match="bytes"):
        plain(bytearray(b"".join(egress())))  # type: ignore[arg-type]


def test_a_batch_of_arrays_has_its_core_as_a_body_has_it() -> None:
    routes, first, counts, prompt_tokens, ids = columns = _columns("<")
    lying = decoded(encode_batch(77, *columns)).core
    assert lying.raw[lying.at :] == b"".join(map(bytes, columns))
    assert Batch(77, routes, first, counts, prompt_tokens, ids).core == Core(lying.raw[lying.at :], 0, 3, 3)
    with pytest.raises(ValueError, match=r"counts is uint32\[2\]"):
        Batch(77, routes, first, counts[:2], prompt_tokens, ids).core  # noqa: B018


def test_joined_steps_are_one_whose_rows_lie_end_to_end() -> None:
    plain, ending = (check_batch(b"".join(parts)) for parts in (encode_batch(78, *_columns("<")), step()))
    joined = join_steps([ending, plain, ending])
    assert (joined.rows, joined.stamp_ns, joined.routes.tolist()) == (9, 77, [11, 12, 13] * 3)
    assert (joined.counts.tolist(), joined.ids.tolist()) == ([2, 0, 1] * 3, [101, 102, 103] * 3)
    assert [(row, reason.type) for row, reason in joined.finishes] == [
        (1, "length"),
        (2, "abort"),
        (7, "length"),
        (8, "abort"),
    ]
    with pytest.raises(ValueError, match="only plain steps can be joined"):
        join_steps([ending, check_batch(b"".join(egress()))])


def test_only_columns_that_lie_in_their_bodies_are_joined() -> None:
    raw = b"".join(encode_batch(1, *_columns("<")))
    whole = _check_all(raw)
    assert join_columns([]) == b""
    assert join_columns([whole]) == raw[whole.data :]
    for place in (
        (0, 3, 3),
        (whole.data + 8, 3, 3),
        (whole.data, 4, 3),
        (whole.data, 3, 4),
        (whole.data, 3, -1),
    ):
        data, rows, tokens = place
        with pytest.raises(ValueError, match="do not lie in the body"):
            join_columns([whole, Checked(raw, data, 1, rows, tokens, None)])
    with pytest.raises(TypeError, match="a list"):
        join_columns((whole,))  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        join_columns([raw])  # type: ignore[list-item]


def test_nothing_stays_of_what_was_looked_at_and_joined() -> None:
    raw, broken = b"".join(encode_batch(1 << 40, *_columns("<"))), sealed(bytearray(body_of(egress())[:-12]))
    text, whole = bytes(body_of(egress())), _check_all(raw)
    far = int("1" * 30)
    elsewhere = Checked(raw, far, 1, 3, 3, None)

    def look() -> tuple[int, int]:
        for _ in range(1000):
            assert plain(raw) is not None
            assert plain(text) is not None
            assert plain(broken) is None
            join_columns([whole, whole])
            with suppress(ValueError, OverflowError):
                join_columns([whole, elsewhere])
        return sys.getallocatedblocks(), sum(map(sys.getrefcount, (raw, whole, far)))

    look()
    blocks, references = look()
    more_blocks, more_references = look()
    assert more_blocks - blocks < 500
    assert more_references - references < 500
