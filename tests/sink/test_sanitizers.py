"""The reader's C loop under Address- and UBSanitizer, against callers that mean harm (hostile.py)."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def library(name: str) -> str:
    """Return where gcc has a sanitizer's runtime; skip where it has none."""
    found = subprocess.run(
        ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if "/" not in found:
        pytest.skip(f"left out: gcc has no {name}")
    return found


def test_no_caller_breaks_it_and_nothing_stays_behind(tmp_path: Path) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("left out: gcc is not installed")
    runtimes = ":".join(map(library, ("libasan.so", "libubsan.so")))
    extension = tmp_path / "_deliver.so"
    flags = ["-std=c11", "-O1", "-g", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", *SANITIZERS]
    include = f"-I{sysconfig.get_path('include')}"
    subprocess.run(
        ["gcc", *flags, include, ROOT / "sink" / "core" / "deliver.c", "-o", extension], check=True
    )
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("hostile.py"), extension, "1", "150"],
        env=os.environ | {"LD_PRELOAD": runtimes, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rounds, grown = map(int, done.stdout.split()[1::2])
    assert rounds == 150
    assert grown < 20_000, "an event that leaks in each round is more"
