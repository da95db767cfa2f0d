"""Character classes as bit masks over an alphabet made for one pattern.

An alphabet has one bit for each ASCII character, and for the rest of Unicode one bit for each *atom*: an
interval between the code points the pattern names, cut into digits, other word characters, spaces and
others. Every class of the pattern is a union of atoms, so intersection and complement are exact. Where the
exact set would need a table of Unicode (case-insensitive matching beyond ASCII) a class has two masks,
`low` ⊆ truth ⊆ `high`; overlap is asked of `high`, and what must surely match of `low`.

Must not know what a class is for.
"""

import re
from bisect import bisect_left, bisect_right
from functools import lru_cache
from re import _constants as sre  # type: ignore[attr-defined]
from typing import Any

ASCII = (1 << 128) - 1
KINDS = 4  # digit, other word character, space, other
DIGIT, WORD, SPACE, OTHER = 1, 2, 4, 8
MAX_CODE = 0x110000
LAST_MAPPED = 0xFFFF
"""Only characters up to here have a bit in the map that the engine makes of a class."""
# The non-ASCII characters that match an ASCII letter when case is ignored: İ ı ſ K.
FOLDED = {0x130: "iI", 0x131: "iI", 0x17F: "sS", 0x212A: "kK"}
_FOLDS_TO = {ord(letter): [c for c in FOLDED if letter in FOLDED[c]] for letter in "iIsSkK"}

Mask = int
Class = tuple[Mask, Mask]
"""(low, high): characters that surely match, characters that may."""


def _ascii(pattern: str, flags: int = 0) -> int:
    """Ask the engine itself which ASCII characters a class has."""
    compiled = re.compile(pattern, flags)
    return sum(1 << code for code in range(128) if compiled.match(chr(code)))


_ASCII_OF = {
    (kind, ascii_only): _ascii(spelled, re.ASCII if ascii_only else 0)
    for kind, spelled in (("DIGIT", r"\d"), ("SPACE", r"\s"), ("WORD", r"\w"))
    for ascii_only in (False, True)
}
_KINDS_OF = {"DIGIT": DIGIT, "SPACE": SPACE, "WORD": DIGIT | WORD}
_CASED = _ascii("[a-zA-Z]")


def kind_of(code: int) -> int:
    """Return which of the four kinds a character is, as `re` sees it."""
    char = chr(code)
    if char.isdecimal():
        return DIGIT
    if char.isspace():
        return SPACE
    return WORD if char.isalnum() else OTHER


SCANNED = 128
"""Intervals of at most so many characters are looked through for the kinds they have."""
_SPACES = [code for code in range(128, 0x3001) if chr(code).isspace()]
"""Unicode has no white space beyond U+3000."""


@lru_cache(maxsize=1024)
def kinds_in(start: int, end: int) -> int:
    """Return the kinds that characters start..end-1 may be of, a bit each."""
    if end - start > SCANNED:
        spaces = bisect_left(_SPACES, start) < bisect_left(_SPACES, end)
        return DIGIT | WORD | OTHER | (SPACE if spaces else 0)
    found = 0
    for code in range(start, end):
        found |= kind_of(code)
    return found


@lru_cache(maxsize=1024)
def words_are_letters(start: int, end: int) -> int:
    """Return WORD if all word characters among start..end-1 are known to be letters, or 0."""
    if end - start > SCANNED:
        return 0
    return WORD if all(chr(code).isalpha() for code in range(start, end) if kind_of(code) == WORD) else 0


class Alphabet:
    """The atoms of one pattern, and its classes as masks over them.

    `codes` are the non-ASCII code points that the pattern's literals and range ends name; `folds` says
    that it ignores case somewhere.
    """

    def __init__(self, codes: set[int], *, folds: bool) -> None:
        starts = {128, *(FOLDED if folds else ())}
        if folds:
            starts.update(code + 1 for code in FOLDED)
        for code in codes:
            starts.add(code)
            starts.add(code + 1)
        self._starts = sorted(start for start in starts if 128 <= start < MAX_CODE)
        self._ends = [*self._starts[1:], MAX_CODE]
        bit = 128
        self._bits: list[int] = []
        present = letters = 0
        per_kind = [0] * KINDS
        for start, end in zip(self._starts, self._ends, strict=True):
            self._bits.append(bit)
            present |= kinds_in(start, end) << bit
            letters |= words_are_letters(start, end) << bit
            for kind in range(KINDS):
                per_kind[kind] |= 1 << (bit + kind)
            bit += KINDS
        self.beyond: Mask = present
        """Every character that is not ASCII."""
        self.all: Mask = ASCII | present
        self.edge: Mask = 1 << bit
        """Stands for the start or the end of the text, in the masks of what lies beside a position."""
        self.goes_on: Mask = 2 << bit
        """Stands, in the mask of what comes after a place, for text behind that: without it a newline must be
        the last of the text."""
        self.anything: Mask = self.all | self.edge | self.goes_on
        """What can lie beside a position."""
        self._per_kind = [mask & present for mask in per_kind]
        self.newline: Mask = 1 << 10
        self.ascii: Mask = ASCII
        self.letters: Mask = _CASED | letters
        """Those known to be found word characters at the first look into Unicode's tables."""
        self._categories: dict[tuple[str, bool], Mask] = {}

    def intervals(self) -> list[tuple[int, int, int]]:
        """Return the intervals beyond ASCII: (first code, end, the first of its KINDS bits)."""
        return list(zip(self._starts, self._ends, self._bits, strict=True))

    def atom(self, code: int) -> Mask:
        """Return the mask of the one atom that a character is in."""
        if code < 128:
            return 1 << code
        bit = self._bits[bisect_right(self._starts, code) - 1]
        return kind_of(code) << bit

    def category(self, name: str, ascii_only: bool) -> Mask:
        """Return the mask of DIGIT, SPACE or WORD."""
        key = (name, ascii_only)
        mask = self._categories.get(key)
        if mask is None:
            mask = _ASCII_OF[key]
            if not ascii_only:
                for kind in range(KINDS):
                    if _KINDS_OF[name] >> kind & 1:
                        mask |= self._per_kind[kind]
            self._categories[key] = mask
        return mask

    def span(self, low: int, high: int) -> Mask:
        """Return the mask of the code points low..high, both ends included and both known to the alphabet."""
        mask = 0
        if low < 128:
            top = min(high, 127)
            mask = ((1 << (top + 1)) - 1) & ~((1 << low) - 1)
        if high >= 128:
            for start, end, bit in zip(self._starts, self._ends, self._bits, strict=True):
                if start <= high and end > max(low, 128):
                    mask |= 15 << bit
        return mask & self.all

    def literal(self, code: int, flags: int) -> Class:
        """Return the class of one character."""
        if not flags & sre.SRE_FLAG_IGNORECASE:
            mask = 1 << code if code < 128 else self.span(code, code)
            return mask, mask
        return self._folded(code, code, flags)

    def _folded(self, low: int, high: int, flags: int) -> Class:
        """Return the class of a range of characters when case is ignored."""
        exact = self.span(low, high)
        letters = exact & _CASED
        if letters:
            # ASCII's two cases lie 32 apart; each half is moved onto the other.
            upper, lower = letters & (((1 << 27) - 1) << 64), letters & (((1 << 27) - 1) << 96)
            exact |= upper << 32 | lower >> 32
        if flags & sre.SRE_FLAG_ASCII:
            # The engine looks for a range that it has no map for in Unicode's cases all the same.
            return exact, exact if high <= LAST_MAPPED else exact | self.beyond
        if letters:
            for code, partners in _FOLDS_TO.items():
                if exact >> code & 1:
                    for partner in partners:
                        exact |= self.span(partner, partner)
        if high < 128:
            return exact, exact
        if low == high and chr(low).lower() == chr(low).upper() and low not in FOLDED:
            return exact, exact
        # Which other characters fold to these takes a table of Unicode: any of them may.
        may = exact | self.beyond
        for partners_of in FOLDED.values():
            for letter in partners_of:
                may |= 1 << ord(letter)
        return exact, may

    def charset(self, items: list[tuple[Any, Any]], flags: int) -> Class:
        """Return the class of a `[...]`."""
        low = high = 0
        negate = False
        folds = flags & sre.SRE_FLAG_IGNORECASE
        ascii_only = bool(flags & sre.SRE_FLAG_ASCII)
        for op, av in items:
            if op is sre.LITERAL:
                if folds:
                    more_low, more_high = self._folded(av, av, flags)
                    if av > LAST_MAPPED and chr(av).lower() != chr(av):
                        # The engine lowers the text's character and then looks for this one as it is.
                        more_low = 0
                else:
                    more_low = more_high = 1 << av if av < 128 else self.span(av, av)
            elif op is sre.RANGE:
                if folds:
                    more_low, more_high = self._folded(av[0], av[1], flags)
                else:
                    more_low = more_high = self.span(av[0], av[1])
            elif op is sre.NEGATE:
                negate = True
                continue
            else:
                name = str(av)[len("CATEGORY_") :]
                wanted = name.removeprefix("NOT_")
                mask = self.category(wanted, ascii_only)
                # Ignoring case changes nothing here: lowering a character keeps its category.
                more_low = more_high = mask if wanted == name else self.all & ~mask
            low |= more_low
            high |= more_high
        if negate:
            return self.all & ~high, self.all & ~low
        return low, high
