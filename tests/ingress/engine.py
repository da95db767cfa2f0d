"""A backtracking engine as plain as can be, which tells what it reads: what the analysis is held to.

It takes parsed patterns of characters, classes, word boundaries, alternatives, groups, repeats (possessive
ones too), look-aheads and atomic groups.
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from re import _constants as sre  # type: ignore[attr-defined]
from typing import Any

from outfeed.ingress.regex_settled import PAID
from outfeed.ingress.regex_tree import UNITS

MAX_READS = 4_000


class TooLong(Exception):
    """A search takes longer than a test waits."""


class Engine:
    """Searches a text; `reads` counts by place how often a character was found to match there, `steps` these
    and how often an item of the pattern was tried."""

    def __init__(self, items: Any, text: str) -> None:
        self.items = list(items)
        self.text = text
        self.reads: Counter[int] = Counter()
        self.steps = 0
        self.last_start = 0

    def search(self) -> tuple[int, int] | None:
        """Return the span of the first match."""
        for start in range(len(self.text) + 1):
            self.last_start = start
            for end in self._items(self.items, 0, start):
                return start, end
        return None

    def _items(self, items: list[Any], index: int, at: int) -> Iterator[int]:
        if index == len(items):
            yield at
            return
        for end in self._item(items[index], at):
            yield from self._items(items, index + 1, end)

    def _item(self, item: Any, at: int) -> Iterator[int]:
        op, av = item
        self.steps += 1
        if op in UNITS:
            if self._reads(item, at):
                yield at + 1
        elif op is sre.BRANCH:
            for body in av[1]:
                yield from self._items(list(body), 0, at)
        elif op is sre.SUBPATTERN:
            yield from self._items(list(av[3]), 0, at)
        elif op is sre.MAX_REPEAT or op is sre.MIN_REPEAT:
            least, most, body = av
            if len(body) == 1 and body[0][0] in UNITS:
                yield from self._class_repeat(op, least, most, body[0], at)
            else:
                yield from self._repeat(op, least, most, list(body), at, 0)
        elif op is sre.POSSESSIVE_REPEAT:
            least, most, body = av
            yield from self._possessive(least, most, body, at)
        elif op is sre.ATOMIC_GROUP:
            yield from itertools.islice(self._items(list(av), 0, at), 1)
        elif op is sre.ASSERT or op is sre.ASSERT_NOT:
            assert av[0] > 0, "look-behinds are not known here"
            if self._looks(list(av[1]), at) == (op is sre.ASSERT):
                yield at
        elif op is PAID or (op is sre.AT and self._is_at(av, at)):
            yield at
        elif op is sre.AT or op is sre.FAILURE:
            return
        else:
            raise NotImplementedError(op)

    def _is_at(self, code: Any, at: int) -> bool:
        pattern = {sre.AT_BOUNDARY: r"\b", sre.AT_NON_BOUNDARY: r"\B"}[code]
        return re.compile(pattern).match(self.text, at) is not None

    def _class_repeat(self, op: Any, least: int, most: int, unit: Any, at: int) -> Iterator[int]:
        end = at
        while end - at < (least if op is sre.MIN_REPEAT else most) and self._reads(unit, end):
            end += 1
        if end - at < least:
            return
        if op is sre.MAX_REPEAT:
            yield from range(end, at + least - 1, -1)
            return
        yield end
        while end - at < most and self._reads(unit, end):
            end += 1
            yield end

    def _repeat(self, op: Any, least: int, most: int, body: list[Any], at: int, done: int) -> Iterator[int]:
        if op is sre.MIN_REPEAT and done >= least:
            yield at
        if done < most:
            for end in self._items(body, 0, at):
                if end > at or done < least:
                    yield from self._repeat(op, least, most, body, end, done + 1)
        if op is sre.MAX_REPEAT and done >= least:
            yield at

    def _looks(self, body: list[Any], at: int) -> bool:
        if len(body) == 1 and body[0][0] in UNITS:
            # To the analysis a look at one character is a condition, and nothing is read.
            return at < len(self.text) and _matches(body[0], self.text[at])
        return any(True for _ in self._items(body, 0, at))

    def _possessive(self, least: int, most: int, body: Any, at: int) -> Iterator[int]:
        done, begun = 0, -1
        while done < most and (done < least or at > begun):
            end = next(self._items(list(body), 0, at), None)
            if end is None:
                break
            begun, at, done = at, end, done + 1
        if done >= least:
            yield at

    def _reads(self, unit: Any, at: int) -> bool:
        if at >= len(self.text) or not _matches(unit, self.text[at]):
            return False
        self.reads[at + 1] += 1
        self.steps += 1
        if self.reads.total() > MAX_READS:
            raise TooLong
        return True


def _matches(unit: Any, character: str) -> bool:
    op, av = unit
    if op is sre.ANY:
        return character != "\n"
    if op is sre.LITERAL:
        return bool(ord(character) == av)
    if op is sre.NOT_LITERAL:
        return bool(ord(character) != av)
    spelled = "".join(_spelled(one) for one in av)
    return re.fullmatch(f"[{spelled}]", character) is not None


def _spelled(item: Any) -> str:
    op, av = item
    if op is sre.NEGATE:
        return "^"
    if op is sre.LITERAL:
        return re.escape(chr(av))
    if op is sre.RANGE:
        return f"{re.escape(chr(av[0]))}-{re.escape(chr(av[1]))}"
    return {
        sre.CATEGORY_DIGIT: r"\d", sre.CATEGORY_NOT_DIGIT: r"\D", sre.CATEGORY_SPACE: r"\s",
        sre.CATEGORY_NOT_SPACE: r"\S", sre.CATEGORY_WORD: r"\w", sre.CATEGORY_NOT_WORD: r"\W",
    }[av]  # fmt: skip
