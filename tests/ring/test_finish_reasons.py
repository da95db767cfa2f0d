"""A finish reason is what the scheduler wrote, key for key; we only look at what we act on."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outfeed.ring.finish import MAX_DEPTH, FinishReason, is_json

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), JSON, max_size=5))
def test_json_in_is_json_out(raw: dict[str, Any]) -> None:
    assert json.dumps(FinishReason(raw).to_json()) == json.dumps(raw)
    assert isinstance(FinishReason(raw).type, str)
    assert FinishReason(raw).abort_status is None or raw["type"] == "abort"


@pytest.mark.parametrize(
    ("raw", "kind", "matched", "status"),
    [
        ({"type": "stop", "matched": 0}, "stop", 0, None),
        ({"type": "stop", "matched": "END"}, "stop", "END", None),
        ({"type": "stop", "matched": [1, 2]}, "stop", [1, 2], None),
        ({"type": "stop", "matched": None}, "stop", None, None),
        ({"type": "stop", "matched": True}, "stop", None, None),
        ({"type": "stop", "matched": [1, "x"]}, "stop", None, None),
        ({"type": "stop"}, "stop", None, None),
        ({"type": "length", "length": 5, "matched": 7}, "length", None, None),
        ({"type": "abort", "message": None, "status_code": None, "err_type": None}, "abort", None, None),
        ({"type": "abort", "status_code": 400}, "abort", None, 400),
        ({"type": "abort", "status_code": "400"}, "abort", None, None),
        ({"type": "abort", "status_code": 599}, "abort", None, 599),
        ({"type": "abort", "status_code": 399}, "abort", None, None),
        ({"type": "abort", "status_code": 600}, "abort", None, None),
        ({"type": "new", "status_code": 400}, "new", None, None),
        ({"type": 5}, "unknown", None, None),
        ({}, "unknown", None, None),
    ],
)
def test_what_we_act_on(raw: dict[str, Any], kind: str, matched: object, status: int | None) -> None:
    reason = FinishReason(raw)
    assert (reason.type, reason.matched, reason.abort_status) == (kind, matched, status)


def test_the_fields_three() -> None:
    assert FinishReason.stop(7).to_json() == {"type": "stop", "matched": 7}
    assert FinishReason.length(9).to_json() == {"type": "length", "length": 9}
    assert FinishReason.abort("m", 400, "E").to_json() == {
        "type": "abort",
        "message": "m",
        "status_code": 400,
        "err_type": "E",
    }
    assert FinishReason.abort("m").message == "m"
    assert FinishReason.stop(7) == FinishReason.stop(7) != FinishReason.stop(8)
    assert len({FinishReason.stop(7), FinishReason.stop(7)}) == 1
    assert repr(FinishReason.stop(7)) == "FinishReason({'type': 'stop', 'matched': 7})"


def test_only_json_is_json() -> None:
    deep: object = 1
    for _ in range(MAX_DEPTH):
        deep = [deep]
    assert is_json(deep)
    assert not is_json([deep])
    assert not is_json({"a": b"x"})
    assert not is_json({1: "a"})
    assert not is_json(object())
