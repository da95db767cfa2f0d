"""The row table's C under Address- and UBSanitizer, beside a plain model of it (c/fuzz.c)."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "sidecar" / "core"


def test_every_answer_and_every_body_is_the_models(tmp_path: Path) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("left out: gcc is not installed")
    program = tmp_path / "fuzz"
    flags = ["-std=c11", "-D_GNU_SOURCE", "-g", "-O1", "-Wall", "-Wextra", "-Werror"]
    flags += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    probe = subprocess.run(
        ["gcc", *flags, "-x", "c", "-", "-o", program],
        input="int main(void) { return 0; }\n",
        text=True,
        check=False,
    )
    if probe.returncode:
        pytest.skip("left out: gcc has no sanitizer runtime")
    headers = ["-include", "stddef.h", "-include", "stdint.h", "-I", CORE]
    sources = [ROOT / "tests" / "sidecar" / "c" / "fuzz.c", *sorted(CORE.glob("*.c"))]
    subprocess.run(["gcc", *flags, *map(str, (*headers, *sources)), "-o", program], check=True)
    done = subprocess.run([program, "1", "200"], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "runs 200\n", done.stderr[-4000:]
