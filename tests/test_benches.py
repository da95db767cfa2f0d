"""What a benchmark leaves behind: nothing, also where its partner is killed in the middle."""

import contextlib
import importlib.util
import os
from pathlib import Path
from typing import Any

from outfeed.ring import segment
from outfeed.ring.process import raise_file_limit

BENCHES = Path(__file__).parents[1] / "scripts" / "benches"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, BENCHES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_wake_bench_sweeps_up_behind_its_killed_partner() -> None:
    name = f"outfeed-bench-{os.getpid()}"
    with load("wake").outfeed([]) as trip:
        trip()
        assert f"{name}.bell-echo" in segment.listed(name)
    assert segment.listed(name) == []


def test_the_regex_bench_may_have_more_than_a_thousand_files_open() -> None:
    """`select` takes no descriptor above 1,023."""
    raise_file_limit()
    worker = load("regex").Worker()
    with contextlib.ExitStack() as open_files:
        for _ in range(1024):
            open_files.enter_context(open(os.devnull, encoding="utf-8"))
        try:
            assert worker.measure("ab", 1)["admitted"]
        finally:
            worker.close()
