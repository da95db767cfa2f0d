"""Run one of a folder's modules by its name: what `bench` and `stress` share. Finds, parses, runs, prints.

A module is one of them if it has a `run`; its docstring's first line says what it is. What it takes beside
everybody's options it adds with `add_arguments(parser)`.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Shelf:
    """A command over a folder of modules.

    folder: below `scripts/`. add_arguments: adds the options that every module understands. run: runs one.
    show: prints what it found for a person. ok: whether that is a success.
    """

    prog: str
    folder: str
    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[ModuleType, argparse.Namespace], dict[str, Any]]
    show: Callable[[str, Mapping[str, Any]], None]
    ok: Callable[[Mapping[str, Any]], bool]

    def known(self) -> dict[str, str]:
        """Return name -> first line of its docstring, without importing any: their peers load slowly."""
        found = {}
        for path in sorted((HERE / self.folder).glob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            if any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in tree.body):
                found[path.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
        return found

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Parse the command line, run, print; 2 for a name that there is not, 1 for a run that is not ok."""
        words = list(sys.argv[1:] if argv is None else argv)
        names = self.known()
        # Only the named module knows all options, so the name is looked for with everybody's options alone.
        name = self._parser(names).parse_known_args([w for w in words if w not in ("-h", "--help")])[0].name
        if name not in names:  # the value of an option of the module's own, maybe
            name = next((word for word in words if word in names), name)
        if name is None:
            parser = self._parser(names)
            if any(word not in ("-h", "--help") for word in words):
                parser.parse_args(words)  # says what it does not know
            parser.print_help()
            return 0
        if name not in names:
            print(f"{self.prog}: no {name!r}; there are: {', '.join(names)}", file=sys.stderr)
            return 2
        module = importlib.import_module(f"{self.folder}.{name}")
        parser = self._parser(names)
        if hasattr(module, "add_arguments"):
            module.add_arguments(parser)
        args = parser.parse_args(words)
        found = self.run(module, args)
        if args.json:
            print(json.dumps(found))
        else:
            self.show(name, found)
        return 0 if self.ok(found) else 1

    def _parser(self, names: Mapping[str, str]) -> argparse.ArgumentParser:
        width = max(map(len, names))
        parser = argparse.ArgumentParser(
            prog=self.prog,
            description=self.description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            epilog="names:\n" + "\n".join(f"  {name:{width}}  {line}" for name, line in names.items()),
        )
        parser.add_argument("name", nargs="?", metavar="NAME", help="one of those below")
        self.add_arguments(parser)
        parser.add_argument("--json", action="store_true", help="print one JSON object")
        return parser
