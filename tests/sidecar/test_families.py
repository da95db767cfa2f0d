"""The optional columns as a scheduler gives them: nothing is cut, bent or left out without a word."""

from typing import Any

import numpy as np
import pytest
from outfeed.ring.batch import Batch, decode_batch
from outfeed.ring.frames import Generate
from outfeed.ring.route import make_route
from outfeed.sidecar import Family, Kind, SchedulerPort, flat_family, hidden_family, ragged_family

from .conftest import Bench

A, B = make_route(0, 0, 1, 1), make_route(0, 0, 2, 1)
ODD: Any = {}
HALF: Any = 1.5
MISSING: Any = None
THREE: Any = ([-1], [7], [8])
ALONE: Any = (1,)
TWO: Any = (1, [-0.5])
LOGPROBS, TOP, HIDDEN = Kind.OUTPUT_LOGPROBS, Kind.OUTPUT_TOP_LOGPROBS, Kind.HIDDEN_STATES


class OnTheGpu:
    """What a tensor says that numpy cannot have."""

    def __array__(self, dtype: object = None, copy: object = None) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


def pushed(bench: Bench, families: Any) -> Batch:
    """Push A with two tokens and B with one, and these families; return what the shards see."""
    bench.send(Generate(A, "a", b"", {}), Generate(B, "b", b"", {}))
    with SchedulerPort.attach(bench.name) as port:
        port.recv()
        try:
            port.push_tokens([A, B], [5, 6, 7], [2, 1], families=families)
        except ValueError:
            assert bench.shard.read() == []
            raise
    ((_, _, body),) = bench.shard.read()
    return decode_batch(body)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: flat_family([(1, [-0.5, -0.6], [7])]), "row 1 has 2 values for 1 ids: expected one"),
        (lambda: flat_family([(0, [-0.5], [5, 6]), (1, [-1, -2], [7])]), "row 0 has 1 values for 2 ids"),
        (lambda: flat_family([(1, -0.5, 7)]), "row 1 has what numpy cannot read: len.. of unsized"),
        (lambda: flat_family([(1, [[-0.5]], [[7]])]), "values have 2 dimensions: expected one"),
        (lambda: flat_family([(0, [-1], [5]), (1, [[-0.5]], [7])]), "values: .*dimension"),
        (lambda: flat_family([(1, [-0.5], [7.0])]), "ids have dtype float64: expected whole"),
        (lambda: flat_family([(1, [-0.5], [1 << 31])]), r"ids\[0\] is 2147483648: expected"),
        (lambda: flat_family([(0, [-1, -2], [5, 6]), (1, [-0.5], [1 << 31])]), r"ids\[2\] is 2147483648"),
        (lambda: flat_family([(1, ["-0.5"], [7])]), "values have dtype <U4: expected numbers"),
        (lambda: flat_family([(1, [-0.5j], [7])]), "values have dtype complex128: expected numbers"),
        (lambda: flat_family([(1, [ODD], [7])]), "values: .*: expected numbers, or None"),
        (lambda: flat_family([(-1, [-0.5], [7])]), r"rows \[-1\]: .*: expected whole numbers from 0"),
        (lambda: flat_family([(HALF, [-0.5], [7])]), r"rows \[1.5\]: .*: expected whole numbers from 0"),
        (lambda: flat_family([(1, OnTheGpu(), [7])]), r"row 1 .* cuda:0 .*give .float\(\).cpu\(\).numpy\(\)"),
        (lambda: ragged_family([(1, [([-1, -2], [7]), ([-3], [8, 9])])]), "row 1 has 2 values for 1 ids"),
        (
            lambda: ragged_family([(1, [HALF])]),
            r"expected rows of \(row, positions\), each position \(values, ids",
        ),
        (lambda: ragged_family([(1, [None, THREE])]), r"another shape: expected rows of \(row"),
        (lambda: ragged_family([ALONE]), r"another shape: expected rows of \(row, positions\)"),
        (lambda: flat_family([TWO]), r"another shape: expected rows of \(row, values, ids\)"),
        (lambda: flat_family([HALF]), r"another shape: expected rows of \(row, values, ids\)"),
        (lambda: hidden_family([THREE]), r"another shape: expected rows of \(row, vectors\)"),
        (lambda: hidden_family([(1, OnTheGpu())]), r"row 1 .* cuda:0 .*give .float\(\).cpu\(\).numpy\(\)"),
        (lambda: flat_family([(1, [MISSING, "x"], [7, 8])]), "values: .*: expected numbers, or None"),
        (lambda: hidden_family([(1, np.zeros(4))]), r"row 1 have shape \(4,\): expected \(vectors, width\)"),
        (lambda: hidden_family([(1, np.zeros((1, 1, 4)))]), r"row 1 have shape \(1, 1, 4\)"),
        (lambda: hidden_family([(0, np.zeros((1, 3))), (1, np.zeros((1, 4)))]), r"widths \[3, 4\]"),
    ],
)
def test_a_column_that_would_be_bent_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("families", "message"),
    [
        ({"output_logprobs": None}, r"names \['output_logprobs'\]: its keys are <Kind.OUTPUT_LOGPROBS: 0>"),
        ({9: flat_family([(1, [-0.5], [7])])}, r"names \[9\]"),
        ({LOGPROBS: [(1, [-0.5], [7])]}, "families has a list: make each with flat_family"),
        ({TOP: flat_family([(1, [-0.5], [7])])}, "output_top_logprobs: the family given is of another kind"),
        ([None], "1 families given; expected 7"),
        ({LOGPROBS: flat_family([(0, [-1], [5])])}, "row 0 has 1 positions for 2 tokens: give one for each"),
        ({TOP: ragged_family([(0, [None, None]), (1, [])])}, "row 1 has 0 positions for 1 tokens"),
        ({Kind.OUTPUT_IDS_LOGPROBS: ragged_family([(1, [None, None])])}, "row 1 has 2 positions for 1"),
        ({LOGPROBS: flat_family([(2, [-1], [5])])}, "2 in a batch of 2 rows"),
        ({LOGPROBS: flat_family([(1, [-1], [5]), (0, [-1, -1], [5, 5])])}, "not ascending"),
        ({LOGPROBS: Family([1], [1], [-0.5], [7])}, "a column is a list, not an array of uint32"),  # type: ignore[arg-type]
    ],
)
def test_families_that_do_not_fit_their_step_are_refused_whole(
    bench: Bench, families: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        pushed(bench, families)


def test_rows_without_positions_are_rows_all_the_same(bench: Bench) -> None:
    families = {
        Kind.INPUT_TOP_LOGPROBS: ragged_family([(0, []), (1, [])]),
        HIDDEN: hidden_family([(1, np.empty((0, 3)))]),
    }
    top, hidden = (pushed(bench, families).families[kind] for kind in families)
    assert top is not None
    assert hidden is not None
    assert (top.rows.tolist(), top.counts.tolist(), top.values.size) == ([0, 1], [0, 0], 0)
    assert (hidden.rows.tolist(), hidden.counts.tolist(), hidden.width) == ([1], [0], 3)


def test_numbers_of_any_kind_arrive_as_they_are(bench: Bench) -> None:
    step = pushed(
        bench,
        {
            LOGPROBS: flat_family(
                [(0, np.array([-0.5, -np.inf], np.float16), [5, 6]), (1, (-7,), np.array([7], np.uint8))]
            ),
            Kind.INPUT_LOGPROBS: flat_family([(0, [MISSING, -1], np.arange(2)), (1, [], [])]),
            TOP: ragged_family([(0, [None, ([], [])]), (1, [(np.array([-1, -2]), [7, 1 << 30])])]),
            HIDDEN: hidden_family([(1, np.arange(12.0).reshape(2, 6)[:, ::2])]),
        },
    )
    flat, prompt, top, hidden = (step.families[kind] for kind in (LOGPROBS, Kind.INPUT_LOGPROBS, TOP, HIDDEN))
    assert flat is not None
    assert prompt is not None
    assert top is not None
    assert hidden is not None
    assert flat.values.tolist() == [-0.5, -np.inf, -7]
    assert prompt.counts.tolist() == [2, 0]
    assert np.isnan(prompt.values[0])
    assert (top.lengths is not None, top.counts.tolist(), top.values.tolist()) == (True, [2, 1], [-1, -2])
    assert top.ids is not None
    assert top.ids.tolist() == [7, 1 << 30]
    assert (hidden.width, hidden.values.tolist()) == (3, [0, 2, 4, 6, 8, 10])
