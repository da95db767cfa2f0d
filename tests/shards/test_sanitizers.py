"""The kernel under Address- and UBSanitizer, against damaged tables and any rows."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "shards" / "core"
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
WRAPPED = ",".join(f"--wrap={name}" for name in ("malloc", "calloc", "realloc"))
TORN = ("-O0", "-DTORN", "-fsanitize-coverage=trace-pc-guard,trace-loads")


def fuzz(folder: Path, runs: int, compiler: str, *more: str) -> None:
    """Build the fuzzer and let it run; skip where the compiler cannot build it."""
    program = folder / "fuzz"
    flags = ["-std=c11", "-D_GNU_SOURCE", "-g", "-DTEXT_FIRST=64", *SANITIZERS]
    warnings = ["-Wall", "-Wextra", "-Werror", "-include", "stddef.h", "-include", "stdint.h"]
    if shutil.which(compiler) is None:
        pytest.skip(f"left out: {compiler} is not installed")
    probe = subprocess.run(
        [compiler, *flags, "-x", "c", "-", "-o", program],
        input="int main(void) { return 0; }\n",
        text=True,
        check=False,
    )
    if probe.returncode:
        pytest.skip(f"left out: {compiler} has no sanitizer runtime")
    sources = [ROOT / "tests" / "shards" / "c" / "fuzz.c", *sorted(CORE.glob("*.c"))]
    subprocess.run([compiler, *flags, *warnings, *more, "-I", CORE, *sources, "-o", program], check=True)
    done = subprocess.run([program, "1", str(runs)], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == f"runs {runs}\n", done.stderr[-4000:]


def test_anything_goes_in_and_only_text_comes_out(tmp_path: Path) -> None:
    fuzz(tmp_path, 600, "gcc", "-O1")


def test_a_table_that_changes_between_two_looks_at_it(tmp_path: Path) -> None:
    fuzz(tmp_path, 100, "clang", *TORN, "-I", str(ROOT / "tests"))


def test_memory_that_runs_out_is_no_more_than_that(tmp_path: Path) -> None:
    fuzz(tmp_path, 600, "gcc", "-O1", "-DSCARCE", f"-Wl,{WRAPPED}", "-I", str(ROOT / "tests"))
