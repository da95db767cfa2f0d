"""Which package may import which: docs/design.md has the table, and every module is held to it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OURS = {"ring", "ingress", "shards", "sink", "sidecar", "gateway"}
OUTSIDE = {"scripts", "tests"}
ROW = re.compile(r"\| ((?:`\w+`(?:, )?)+) \| (nothing of ours|(?:`\w+`(?:, )?)+) \|")


def allowed() -> dict[str, set[str]]:
    """The table of docs/design.md: package -> those that it may import."""
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    section = page.partition("## 6. Which package may import which")[2].partition("\n## ")[0]
    found = {}
    for importers, imported in ROW.findall(section):
        for package in re.findall(r"`(\w+)`", importers):
            found[package] = set(re.findall(r"`(\w+)`", imported))
    return found


def imports(path: Path, package: str) -> Iterator[tuple[int, str]]:
    """Yield (line, package) of everything of ours that a module imports, at its top or anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # One dot is the package itself, two are `outfeed`: packages have no packages in them.
            base = {0: "", 1: f"outfeed.{package}.", 2: "outfeed."}[node.level] + (node.module or "")
            names = [f"{base.rstrip('.')}.{alias.name}" for alias in node.names]
        for name in names:
            first, *rest = name.split(".")
            if first == "outfeed" and rest and rest[0] in OURS:
                yield getattr(node, "lineno", 0), rest[0]
            elif first in OUTSIDE:
                yield getattr(node, "lineno", 0), first


def against(path: Path, package: str, table: dict[str, set[str]]) -> list[str]:
    """What a module imports against the table, in words."""
    may = table[package]
    return [
        f"{package}/{path.name}:{line}: {package} may not import {imported}, "
        f"only {', '.join(sorted(may)) or 'itself'} (docs/design.md, section 6)"
        for line, imported in imports(path, package)
        if imported != package and imported not in may
    ]


def test_the_table_has_every_package_and_no_circle() -> None:
    table = allowed()
    assert set(table) == OURS
    done: set[str] = set()
    while len(done) < len(table):
        ready = {package for package, may in table.items() if may <= done} - done
        assert ready, f"a circle among {sorted(set(table) - done)}"
        done |= ready


@pytest.mark.parametrize("package", sorted(OURS))
def test_each_module_imports_only_what_its_package_may(package: str) -> None:
    paths = sorted((ROOT / package).rglob("*.py"))
    assert paths
    found = [line for path in paths for line in against(path, package, allowed())]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("source", "imported"),
    [
        ("from ..shards import table", "shards"),
        ("from .. import gateway", "gateway"),
        ("from outfeed.sink.reader import Reader", "sink"),
        ("import outfeed.ingress.request as r", "ingress"),
        ("def f():\n    from scripts import pipeline", "scripts"),
        ("import tests.sink.front", "tests"),
    ],
)
def test_an_import_against_the_table_is_named(tmp_path: Path, source: str, imported: str) -> None:
    path = tmp_path / "module.py"
    path.write_text(source, encoding="utf-8")
    (line,) = against(path, "ring", allowed())
    assert line.startswith("ring/module.py:")
    assert f"ring may not import {imported}, only itself" in line
