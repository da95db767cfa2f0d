"""The protocol as Promela models, searched exhaustively by spin: see model/*.pml for what is checked.

Each fence and each rule is also taken out once, and spin must find the fault that lets in: a model that
cannot fail proves nothing.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

MODELS = Path(__file__).parent / "model"
RULES = [
    "NO_FENCE_PUBLISHED",
    "NO_FENCE_PARKED",
    "NO_FENCE_RELEASED",
    "NO_FENCE_ROOM",
    "NO_SECOND_LOOK",
    "NO_SECOND_COMPARE",
    "NO_WAKE_ON_TAKEOVER",
    "NO_RELEASE_ORDER",
]


def errors(folder: Path, model: str, *defines: str) -> int:
    """Search a model with these macros; return how many errors spin found (it stops at the first)."""
    if shutil.which("spin") is None:
        pytest.skip("left out: spin is not installed (Debian: apt-get install spin)")
    spin = ["spin", *(f"-D{define}" for define in defines), "-a", str(MODELS / model)]
    subprocess.run(spin, cwd=folder, check=True, capture_output=True, timeout=60)
    subprocess.run(
        ["cc", "-O1" if defines in ((), ("KILLS=1",)) else "-O0", "-w", "-DSAFETY", "-o", "pan", "pan.c"],
        cwd=folder,
        check=True,
        timeout=120,
    )
    found = subprocess.run(
        ["./pan", "-m1000000"], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert "search depth too small" not in found.stdout
    count = re.search(r"errors: (\d+)", found.stdout)
    assert count is not None, found.stdout + found.stderr
    return int(count[1])


def test_nothing_is_lost_doubled_or_asleep_whoever_dies(tmp_path: Path) -> None:
    assert errors(tmp_path, "ring.pml", "KILLS=1") == 0


def test_a_cursor_that_is_attached_again_is_not_overrun(tmp_path: Path) -> None:
    assert errors(tmp_path, "attach.pml", "KILLS=1") == 0


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_is_needed(tmp_path: Path, rule: str) -> None:
    assert errors(tmp_path, "ring.pml", rule, "KILLS=1") == 1


@pytest.mark.parametrize(
    "rule", ["NO_FENCE_HEADS", "NO_FENCE_ATTACHED", "NO_SECOND_PASS", "NO_OPENING", "NO_AFRESH"]
)
def test_every_rule_of_attaching_is_needed(tmp_path: Path, rule: str) -> None:
    assert errors(tmp_path, "attach.pml", rule, "KILLS=1") == 1
