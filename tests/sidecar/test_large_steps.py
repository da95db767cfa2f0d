"""Steps as large as they may be, and larger."""

import mmap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from outfeed.ring import Consumer, Doorbell, Ring
from outfeed.ring.batch import decode_batch, encode_endings
from outfeed.ring.names import segment_name
from outfeed.ring.route import make_route
from outfeed.sidecar.rows import RowTable
from outfeed.sidecar.steps import MAX_ROWS, StepWriter

from tests.instances import unique
from tests.waiting_thread import waiting_thread

NOBODY = encode_endings(())
ROUTE = make_route(0, 0, 1, 1)


@pytest.fixture
def ring() -> Iterator[Ring]:
    name = segment_name(unique("large"), "step")
    with Ring.create(name, lanes=1, consumers=1, capacity=1 << 23) as ring:
        yield ring
        ring.unlink()


@pytest.fixture
def shard(ring: Ring) -> Iterator[Consumer]:
    with Doorbell.create(f"{ring.name}.bell") as bell, ring.consumer(0, bell) as shard:
        yield shard


@pytest.fixture
def table() -> RowTable:
    table = RowTable(1, 64)
    table.open(ROUTE, 0)
    return table


def test_a_step_has_as_many_rows_as_it_may(ring: Ring, shard: Consumer, table: RowTable) -> None:
    ids = np.arange(MAX_ROWS, dtype=np.int32)
    with ring.writer(0) as lane:
        stamp = StepWriter(lane, table).push(np.full(MAX_ROWS, ROUTE, np.uint64), ids, None, NOBODY, 3600.0)
    ((_, _, body),) = shard.read()
    step = decode_batch(body)
    assert step.stamp_ns == stamp
    assert step.rows == MAX_ROWS
    assert step.first.tolist() == step.ids.tolist() == ids.tolist()


def test_a_large_step_lets_other_threads_run_while_it_is_written(
    ring: Ring, shard: Consumer, table: RowTable
) -> None:
    routes, ids = np.full(MAX_ROWS, ROUTE, np.uint64), np.zeros(MAX_ROWS, np.int32)
    with waiting_thread() as turns, ring.writer(0) as lane:
        steps = StepWriter(lane, table)
        for _ in range(10_000):  # the other one is not always quick enough
            before = turns()
            steps.push(routes, ids, None, NOBODY, 0.0)
            if turns() > before:
                break
            shard.read()
            shard.release()
        assert turns() > before


def test_more_ids_than_can_be_counted_are_refused(ring: Ring, table: RowTable, tmp_path: Path) -> None:
    """Their number is not cut to 32 bits, where it would be the one that the counts say."""
    many = (1 << 32) + 1
    with open(tmp_path / "ids", "w+b") as file:
        file.truncate(4 * many)  # no byte of it is ever there
        memory = mmap.mmap(file.fileno(), 4 * many, access=mmap.ACCESS_READ)
    ids = np.frombuffer(memory, "<i4")
    with ring.writer(0) as lane, pytest.raises(ValueError, match="ids has 4294967297 entries"):
        StepWriter(lane, table).push(np.array([ROUTE], np.uint64), ids, None, NOBODY, 0.0)
    assert table.pushed == (0, 0, 0)


@pytest.mark.parametrize("place", [0, 1])
def test_more_finish_reasons_or_families_than_a_lane_can_have_are_refused(
    ring: Ring, table: RowTable, place: int
) -> None:
    """Their lengths have 32 bits in the step, as the header's has that they are part of."""
    headers = [NOBODY, b"\x90"]
    headers[place] = bytes((1 << 30) + 1)
    endings, families = headers
    columns = np.array([ROUTE], np.uint64), np.zeros(1, np.int32), None
    with ring.writer(0) as lane, pytest.raises(ValueError, match="take 1073741825 bytes: no lane has room"):
        StepWriter(lane, table).push(*columns, endings, 0.0, families, b"")
