"""The C core under ThreadSanitizer and Address- and UBSanitizer, lying bodies, a fuzzer over segment bytes.

The long versions are in `./scripts/stress ring`.
"""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sanitized import run_with

CompileC = Callable[..., Path]
TESTS = Path(__file__).parents[1]
CORE = TESTS.parent / "ring" / "core"
TORN = (
    "-DSTANDALONE",
    "-DTORN",
    "-O0",
    f"-I{TESTS}",
    "-fsanitize-coverage=trace-pc-guard,trace-loads",
)
CORPUS = Path(__file__).parent / "corpus"


def run(*command: object, folder: Path) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_threads_on_one_ring(compile_c: CompileC, tmp_path: Path, sanitizer: str) -> None:
    program = compile_c("stress", f"-fsanitize={sanitizer}")
    for seed in (1, 2):
        found = run(program, seed, 700, folder=tmp_path).split()
        counts = {name: int(value) for name, value in zip(found[::2], found[1::2], strict=True)}
        assert counts["written"] > 1000
        assert counts["received"] == 2 * counts["written"]
        assert counts["takeovers"] > 0


def test_any_bytes_with_gcc(compile_c: CompileC, tmp_path: Path) -> None:
    program = compile_c("fuzz", "-DSTANDALONE", "-fsanitize=address,undefined")
    assert "runs" in run(program, 7, 800, *sorted(CORPUS.iterdir()), folder=tmp_path)


def test_bytes_that_change_between_two_looks_at_them(compile_c: CompileC, tmp_path: Path) -> None:
    program = compile_c("fuzz", *TORN, "-fsanitize=address,undefined", compiler="clang")
    assert "runs" in run(program, 7, 800, *sorted(CORPUS.iterdir()), folder=tmp_path)


def test_any_bytes_with_libfuzzer(compile_c: CompileC, tmp_path: Path) -> None:
    program = compile_c("fuzz", "-fsanitize=fuzzer,address,undefined", compiler="clang")
    grown = tmp_path / "grown"
    grown.mkdir()
    options = ["-max_total_time=2", "-timeout=5", "-max_len=2048", "-seed=7", "-print_final_stats=1"]
    assert "stat::number_of_executed_units" in run(program, *options, grown, CORPUS, folder=tmp_path)


def test_no_body_and_no_numbers_lead_the_checks_out_of_it(tmp_path: Path) -> None:
    said = run_with(CORE / "python" / "body.c", tmp_path, Path(__file__).with_name("damaged.py"), "1", "250")
    assert said == "rounds 250\n"
