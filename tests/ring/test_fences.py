"""Every ordering that the ring relies on is written down where one looks for it, with what it pairs with."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "ring" / "core"
FENCES = (CORE / "fences.h").read_text(encoding="utf-8")
NAMED = re.compile(r"memory_order_(?!relaxed)|full_fence\(\);")


def orderings() -> set[str]:
    """Return the functions of fences.h that order anything."""
    functions = r"^static inline \w+ (\w+)\([^)]*\) \{(.*?)\}(?: */\*[^\n]*)?$"
    bodies = re.findall(functions, FENCES, re.M | re.S)
    return {name for name, body in bodies if NAMED.search(body) and name != "full_fence"}


def test_no_other_file_names_a_memory_order() -> None:
    sources = [path for path in CORE.rglob("*.[ch]") if path.name != "fences.h"]
    assert len(sources) > 10
    assert [path.name for path in sources if "memory_order" in path.read_text(encoding="utf-8")] == []


def test_each_ordering_is_in_both_tables_and_in_use() -> None:
    head = FENCES.partition("*/")[0]
    page = (
        (ROOT / "docs" / "ring.md")
        .read_text(encoding="utf-8")
        .partition("### Fences")[2]
        .partition("\n## ")[0]
    )
    code = "".join(
        path.read_text(encoding="utf-8") for path in CORE.rglob("*.[ch]") if path.name != "fences.h"
    )
    found = orderings()
    assert len(found) >= 20
    for name in sorted(found):
        assert re.search(rf"\b{name}\b", head), f"{name} is not in the table of fences.h"
        assert f"`{name}`" in page, f"{name} is not in the table of docs/ring.md"
        assert f"{name}(" in code, f"nothing uses {name}"
