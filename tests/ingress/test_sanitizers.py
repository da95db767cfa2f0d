"""The search for the worst text under Address- and UBSanitizer: random patterns, some that point outside."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "ingress" / "core"
GCC = ["gcc", "-std=c11", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


WRAPPED = ",".join(f"--wrap={name}" for name in ("malloc", "calloc", "realloc"))


def fuzz(tmp_path: Path, *more: str) -> int:
    """Follow random patterns; return how often there was no memory."""
    empty = tmp_path / "empty.c"
    empty.write_text("int main(void) { return 0; }\n")
    program = tmp_path / "fuzz"
    if subprocess.run([*GCC, empty, "-o", program], check=False, capture_output=True).returncode:
        pytest.skip("left out: gcc has no sanitizer runtime")
    sources = [ROOT / "tests" / "ingress" / "c" / "fuzz.c", CORE / "worst.c", CORE / "states.c"]
    warnings = ["-Wall", "-Wextra", "-Werror"]
    subprocess.run([*GCC, *warnings, *more, "-I", CORE, *sources, "-o", program], check=True)
    done = subprocess.run([program, "1", "2000"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    told = re.fullmatch(r"found \d+ refused \d+ without memory (\d+) of 2000\n", done.stdout)
    assert told is not None
    return int(told[1])


def test_random_patterns_are_followed_or_refused(tmp_path: Path) -> None:
    assert fuzz(tmp_path) == 0


def test_memory_that_runs_out_is_said_and_nothing_is_left(tmp_path: Path) -> None:
    assert fuzz(tmp_path, "-DSCARCE", f"-Wl,{WRAPPED}", "-I", str(ROOT / "tests")) > 100
