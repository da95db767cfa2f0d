"""An extension module under Address- and UBSanitizer."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def library(name: str) -> str:
    """Return where gcc has a sanitizer's runtime; skip where it has none."""
    found = subprocess.run(
        ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if "/" not in found:
        pytest.skip(f"left out: gcc has no {name}")
    return found


def run_with(source: Path, folder: Path, script: Path, *words: str) -> str:
    """Build `source` with sanitizers, run `script EXTENSION WORDS...` on it; return what it printed."""
    if shutil.which("gcc") is None:
        pytest.skip("left out: gcc is not installed")
    runtimes = ":".join(map(library, ("libasan.so", "libubsan.so")))
    extension = folder / f"{source.stem}.so"
    flags = ["-std=c11", "-O1", "-g", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", *SANITIZERS]
    include = f"-I{sysconfig.get_path('include')}"
    subprocess.run(["gcc", *flags, include, source, "-o", extension], check=True)
    # Every object's memory from malloc: only what that gives has an end that the sanitizer knows.
    done = subprocess.run(
        [sys.executable, script, extension, *words],
        env=os.environ | {"LD_PRELOAD": runtimes, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
