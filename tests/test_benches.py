"""What a benchmark leaves behind: nothing, also where its partner is killed in the middle."""

import importlib.util
import os
from pathlib import Path
from typing import Any

from outfeed.ring import segment

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
