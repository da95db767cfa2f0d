"""The kernel under Address- and UBSanitizer, against damaged tables and any rows."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "shards" / "core"


def test_anything_goes_in_and_only_text_comes_out(tmp_path: Path) -> None:
    program = tmp_path / "fuzz"
    flags = [
        "-std=c11",
        "-D_GNU_SOURCE",
        "-O1",
        "-g",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
    ]
    warnings = ["-Wall", "-Wextra", "-Werror", "-include", "stddef.h", "-include", "stdint.h"]
    probe = subprocess.run(
        ["gcc", *flags, "-x", "c", "-", "-o", program],
        input="int main(void) { return 0; }\n",
        text=True,
        check=False,
    )
    if probe.returncode:
        pytest.skip("left out: gcc has no sanitizer runtime")
    sources = [ROOT / "tests" / "shards" / "c" / "fuzz.c", *sorted(CORE.glob("*.c"))]
    subprocess.run(["gcc", *flags, *warnings, "-I", CORE, *sources, "-o", program], check=True)
    done = subprocess.run([program, "1", "1500"], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "runs 1500\n", done.stderr[-4000:]
