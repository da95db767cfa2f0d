"""The reader's C loop under Address- and UBSanitizer, against callers that mean harm (hostile.py)."""

from pathlib import Path

from tests.sanitized import run_with

DELIVER = Path(__file__).resolve().parents[2] / "sink" / "core" / "deliver.c"


def test_no_caller_breaks_it_and_nothing_stays_behind(tmp_path: Path) -> None:
    said = run_with(DELIVER, tmp_path, Path(__file__).with_name("hostile.py"), "1", "150")
    rounds, grown = map(int, said.split()[1::2])
    assert rounds == 150
    assert grown < 20_000, "an event that leaks in each round is more"
