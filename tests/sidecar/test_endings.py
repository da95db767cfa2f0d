"""The finish reasons of a step: what a shard could not read is refused, and costs nobody anything."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import pytest
from outfeed.ring.batch import decode_batch
from outfeed.ring.families import Kind
from outfeed.ring.family_makers import flat_family
from outfeed.ring.frames import Generate
from outfeed.ring.route import make_route
from outfeed.sidecar import FinishReason, SchedulerPort

from .conftest import Bench

A, B = make_route(0, 0, 1, 1), make_route(0, 0, 2, 1)
LOGPROBS = {Kind.OUTPUT_LOGPROBS: flat_family([(0, [-0.5], [7])])}


def nested(depth: int) -> Any:
    return {} if depth == 0 else {"deeper": nested(depth - 1)}


@dataclass(eq=False)
class Number:
    """A whole number that is no other's equal, as a torch scalar is: a mapping may have two of one row."""

    value: int

    def __index__(self) -> int:
        return self.value


class Ended(StrEnum):
    EARLY = "early"


@pytest.mark.parametrize(
    ("finishes", "message"),
    [
        ([FinishReason.length(1)], "finishes is a list: give a mapping"),
        ({2: FinishReason.length(1)}, "row 2 of a step of 2 rows"),
        ({-1: FinishReason.length(1)}, "row -1 of a step of 2 rows"),
        ({A: FinishReason.length(1)}, "of a step of 2 rows"),
        ({"1": FinishReason.length(1)}, "names row '1': give the row's number"),
        ({1.0: FinishReason.length(1)}, r"names row 1\.0: give the row's number"),
        (
            {Number(1): FinishReason.length(1), 1: FinishReason.length(2)},
            "finishes names row 1 twice",
        ),
        ({1: "stop"}, "reason of row 1 is a str: give a FinishReason"),
        ({0: FinishReason.length(1), 1: None}, "reason of row 1 is a NoneType: .* leave out rows that go on"),
        ({1: {}}, "reason of row 1 has no `type`"),
        ({1: {"type": 3}}, "reason of row 1 has no `type`"),
        ({1: {"type": "x", "text": b"bytes"}}, "reason of row 1 is no JSON object"),
        ({1: {"type": "x", 5: "five"}}, "reason of row 1 is no JSON object"),
        ({1: {"type": "x", "loss": np.float32(0.5)}}, "row 1 is no JSON object: .*0.5.* is a float32"),
        ({1: {"type": "x", "big": 1 << 80}}, "reason of row 1 is no JSON object"),
        ({1: {"type": "x", "half": "\ud800"}}, "reason of row 1 is no JSON object"),
        ({1: {"type": "x", "deep": nested(40)}}, "reason of row 1 is no JSON object"),
        ({1: FinishReason.abort("m", 200)}, "row 1 is aborted with status_code 200: give 400 to 599"),
        ({1: FinishReason.abort("m", 600)}, "row 1 is aborted with status_code 600: give 400 to 599"),
    ],
)
@pytest.mark.parametrize("families", [None, LOGPROBS], ids=["plain", "families"])
def test_a_finish_reason_that_nobody_could_read_is_refused(
    bench: Bench, finishes: Any, message: str, families: Any
) -> None:
    bench.send(Generate(A, "a", b"", {}), Generate(B, "b", b"", {}))
    with SchedulerPort.attach(bench.name) as port:
        port.recv()
        with pytest.raises(ValueError, match=message):
            port.push_tokens([A, B], [1, 2], finishes=finishes, families=families)
        assert bench.shard.read() == []
        assert port.is_live(A)
        assert port.is_live(B)


@pytest.mark.parametrize("families", [None, LOGPROBS], ids=["plain", "families"])
def test_numbers_as_numpy_has_them_are_numbers(bench: Bench, families: Any) -> None:
    """A row from `np.flatnonzero`, the stop token out of the array of ids."""
    bench.send(Generate(A, "a", b"", {}), Generate(B, "b", b"", {}))
    ids = np.array([7, 9], np.int32)
    with SchedulerPort.attach(bench.name) as port:
        port.recv()
        finishes: Any = {
            np.flatnonzero(ids == 9)[0]: {"type": Ended.EARLY, "after": (ids[1],)},
            np.int64(0): FinishReason.stop(ids[0]),
        }
        port.push_tokens([A, B], ids, finishes=finishes, families=families)
        ((_, _, body),) = bench.shard.read()
        assert list(decode_batch(body).finishes) == [
            (0, FinishReason.stop(7)),
            (1, FinishReason({"type": "early", "after": [9]})),
        ]
        assert not port.is_live(A)
        assert not port.is_live(B)


def test_routes_that_have_no_length_are_refused_by_name(bench: Bench) -> None:
    bench.send(Generate(A, "a", b"", {}))
    with SchedulerPort.attach(bench.name) as port:
        port.recv()
        endless: Any = (route for route in [A])
        with pytest.raises(ValueError, match="routes is a generator: expected a list or an array"):
            port.push_tokens(endless, [1], finishes={0: FinishReason.length(1)})
    assert bench.shard.read() == []
