"""The text that benchmarks replay."""

from pathlib import Path

MULTILINGUAL = Path(__file__).resolve().parent.parent / "data" / "multilingual.txt"
