"""The search for the worst text under Address- and UBSanitizer: random patterns, some that point outside."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "ingress" / "core"
GCC = ["gcc", "-std=c11", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def test_random_patterns_are_followed_or_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.c"
    empty.write_text("int main(void) { return 0; }\n")
    program = tmp_path / "fuzz"
    if subprocess.run([*GCC, empty, "-o", program], check=False, capture_output=True).returncode:
        pytest.skip("left out: gcc has no sanitizer runtime")
    sources = [ROOT / "tests" / "ingress" / "c" / "fuzz.c", CORE / "worst.c", CORE / "states.c"]
    subprocess.run([*GCC, "-Wall", "-Wextra", "-Werror", "-I", CORE, *sources, "-o", program], check=True)
    done = subprocess.run([program, "1", "2000"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.startswith("found ")
