"""Names, rings and doorbells that clean up after themselves."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from outfeed.ring import Doorbell, Ring, segment
from outfeed.ring.instance import Instance

from tests.instances import small_config, unique


@pytest.fixture
def name() -> Iterator[str]:
    """A segment name of this test alone; whatever starts with it is gone afterwards."""
    prefix = f"outfeed-{unique('segment')}"
    yield prefix
    for left in segment.listed(prefix):
        segment.unlink(left)


@pytest.fixture
def bell(name: str) -> Iterator[Doorbell]:
    with Doorbell.create(f"{name}.bell") as made:
        yield made


@pytest.fixture
def make_ring(name: str) -> Iterator[Callable[..., Ring]]:
    made: list[Ring] = []

    def make(lanes: int = 1, consumers: int = 1, capacity: int = 4096) -> Ring:
        # Without a dot it is no instance's, which a start in another test would sweep once it is closed.
        ring = Ring.create(f"{name}-r{len(made)}", lanes=lanes, consumers=consumers, capacity=capacity)
        made.append(ring)
        return ring

    yield make
    for ring in made:
        ring.close()
        ring.unlink()


@pytest.fixture
def instance() -> Iterator[Instance]:
    made = Instance.create(small_config("ring", shards=3, readers=2))
    yield made
    made.remove()
    made.close()


ROOT = Path(__file__).resolve().parent.parent.parent
CORE = ROOT / "ring" / "core"
CompileC = Callable[..., Path]


@pytest.fixture
def compile_c(tmp_path: Path) -> CompileC:
    """Build `tests/ring/c/<name>.c` with the ring's core; the test is skipped where the compiler cannot."""

    def build(name: str, *flags: str, compiler: str = "gcc") -> Path:
        if shutil.which(compiler) is None:
            pytest.skip(f"left out: {compiler} is not installed (Debian: apt-get install {compiler})")
        sanitizers = [flag for flag in flags if flag.startswith("-fsanitize")]
        probe = tmp_path / "probe.c"
        probe.write_text("int LLVMFuzzerTestOneInput(void) { return 0; }\n")
        main = [] if "fuzzer" in " ".join(sanitizers) else ["-shared", "-fPIC"]
        tried = subprocess.run(
            [compiler, *sanitizers, *main, probe, "-o", tmp_path / "probe"], capture_output=True, check=False
        )
        if tried.returncode != 0:
            pytest.skip(f"left out: {compiler} has no runtime for {' '.join(sanitizers)}")
        output = tmp_path / name
        command = [compiler, "-std=c11", "-O1", "-g", "-fno-sanitize-recover=all", "-Wall", "-Wextra"]
        sources = [*sorted(CORE.glob("*.c")), ROOT / "tests" / "ring" / "c" / f"{name}.c"]
        subprocess.run(
            [*command, "-Werror", *flags, "-I", CORE, *sources, "-o", output, "-lpthread"], check=True
        )
        return output

    return build
