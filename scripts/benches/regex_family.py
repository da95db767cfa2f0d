"""A family of stop patterns, and texts that are bad for each: what the admission is measured against.

Patterns: realistic ones and mutations of them, shapes known to be slow, and random trees over every
construct of the dialect. Texts: samples of the pattern's own language (drawn from the parsed tree, so from
the automaton), pumped where it loops, repeated, cut short, and ended by a character that makes it fail.
"""

import random
import warnings
from collections.abc import Iterator
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

REALISTIC = [
    r"[.!?]\s*$", "and|or", "colou?r", r"\d{6}", r"\d+", "Answer: .*", "END(ING)?", "https?://",
    r"(?i)\d{4}-\d{2}", r"\bword\b", "[a-f0-9]{40}", ".{100}", "(?:foo|bar)+", r"END(?=\n)", "(?P<n>a)",
    r"\n\n(?:User|Human|Assistant):", r"</?(?:think|answer)>", r"```\w*\n", r"\n#{1,6} ", r"(?m)^---$",
    r"\bQ\d{1,3}:", r"(?i)final answer\s*[:=]\s*\S+", r"\\boxed\{[^{}]*\}", r"\[/?INST\]", r"<\|[a-z_]+\|>",
    r"(?:\d{1,3}\.){3}\d{1,3}", r"[\w.+-]{1,64}@[\w-]{1,63}\.[a-z]{2,8}", r"\$\d+(?:,\d{3})*(?:\.\d\d)?",
    r"(?<!\d)\d{3}(?!\d)", r"(?<=\n)\s{0,8}}", r"\A\s*\{", r"\}\s*\Z", r"(?s)<a>.{0,200}?</a>",
    r"[一-龥]{2,8}。",
    r"(\w)\1\1\1", r"(['\"])(?:x|y)\1", r"(a)?b(?(1)c|d)", r"(?>ab|a)c", r"x*+y", r"(?i:stop|halt)[.!]?",
    r"\s+$", r"\d+x", r"(?i)[a-z]+\d", r"<think>.*?</think>", r"\"(?:[^\"\\]|\\.)*\"", r"\w+\s*=\s*\w+;",
    r"(?:\w+\s)*end", r"^\s*\S+", r"(?m)^.*END", r"(?x) stop \s+ here  # now", r"🙂{2,5}", r"[^\x00-\x7f]{3}",
    r"\b[A-Z]\w*\b\.", r"(?:yes|no|maybe|unknown|none|other)\b", r"=+\s*\n", r"(?:ab){2,5}", r"\t{2,}\S",
]  # fmt: skip
HOSTILE = [
    r"(a+)+b", r"(?:a+)+b", r"(a|a)*b", r"(?:.|.)*Z", r"(?:a*){10}b", r"a*a*a*a*b", r".*.*.*Z",
    r"(?:.?){20}Z",
    r"(?:.?.?){8}Z", r"(?:a|ab|b)*c", r"(?:\w+\s?)+$", r"(x+x+)+y", r"^(?:[a-z]+)*$", r"(.*?,)*x",
    r"(?:a?a?)*b", r"\w*\w*\w*!", r"(?:(?:ab)+|a|b)*c", r"(\w+)\s\1!", r"(a+)\1+b", r"(?=(a+)+b)",
    r"(?:a{1,9}){2,9}b",
    r"[\s\S]*?x[\s\S]*?y", r"(?:[ab]+c?)+d", r"(?i)(?:a|A)+!", r"(?:\d+,?)+;", r"a.*b.*c",
    r"(?<=x)\w+\s*\w+$",
    r"(?:\w{500})+", r"(?:x\w{9000}|y)+", r"(?:\d{16} ?)+", r"(?:ax{26})+b",
]  # fmt: skip
CLASSES = [
    r"\d", r"\w", r"\s", r"\S", r"\W", ".", "[a-c]", "[^a-c]", "[abx]", r"[\s\d]", "[a-zA-Z]", "[^\\n]",
    "[é-ü]", "[a-c0-9_]", r"[^\w]",
]  # fmt: skip
QUANTIFIERS = ["?", "*", "+", "{2}", "{3}", "{1,3}", "{0,2}", "{2,}", "{5}", "{0,20}"]
LETTERS = "abcxyz01 _-\né中"


def patterns(count: int, seed: int) -> Iterator[str]:
    """Draw `count` different patterns of at most 256 bytes; some do not compile, as clients' do not."""
    rng = random.Random(seed)
    seen: set[str] = set()
    for pattern in [*REALISTIC, *HOSTILE]:
        seen.add(pattern)
        yield pattern
    while len(seen) < count:
        kind = rng.random()
        if kind < 0.35:
            pattern = _mutated(rng)
        elif kind < 0.6:
            pattern = _joined(rng)
        else:
            pattern = _random(rng, rng.choice((1, 1, 2, 2, 3)))
            if rng.random() < 0.15:
                pattern = rng.choice(["(?i)", "(?s)", "(?m)", "(?a)", "(?im)"]) + pattern
        if len(pattern.encode()) <= 256 and pattern not in seen:
            seen.add(pattern)
            yield pattern


def _mutated(rng: random.Random) -> str:
    pattern = rng.choice(REALISTIC if rng.random() < 0.7 else HOSTILE)
    for _ in range(rng.randint(1, 2)):
        at = rng.randrange(len(pattern) + 1)
        change = rng.random()
        if change < 0.35:
            pattern = (
                pattern[:at]
                + rng.choice([*LETTERS, *QUANTIFIERS, *CLASSES, "|", r"\b", "$", "^"])
                + pattern[at:]
            )
        elif change < 0.55:
            pattern = pattern[:at] + pattern[at + 1 :]
        elif change < 0.8:
            pattern = f"(?:{pattern}){rng.choice(QUANTIFIERS)}{rng.choice(LETTERS)}"
        else:
            pattern = rng.choice(["", "x", r"\s*", r"\b", "^", ".*?", "(?:a|b)"]) + pattern
    return pattern


def _joined(rng: random.Random) -> str:
    """Write a flat row of what stop patterns are made of."""
    return "".join(
        _atom(rng, 0) + (rng.choice(QUANTIFIERS) if rng.random() < 0.4 else "")
        for _ in range(rng.randint(1, 7))
    )


def _random(rng: random.Random, depth: int) -> str:
    parts = []
    for _ in range(rng.randint(1, 3)):
        part = _atom(rng, depth)
        if rng.random() < 0.45 and part[-1] not in "^$" and part not in (r"\b", r"\B", r"\Z"):
            part += rng.choice(QUANTIFIERS) + rng.choice(["", "", "", "?", "+"])
        parts.append(part)
    return "".join(parts)


def _atom(rng: random.Random, depth: int) -> str:
    kind = rng.random()
    if depth <= 0 or kind < 0.45:
        what = rng.random()
        if what < 0.5:
            return rng.choice(LETTERS) if rng.random() < 0.6 else rng.choice(["ab", "foo", "END", "1,"])
        if what < 0.92:
            return rng.choice(CLASSES)
        return rng.choice([r"\b", r"\B", "^", "$", r"\Z", r"\A"])
    inner = _random(rng, depth - 1)
    if kind < 0.62:
        return "(?:" + "|".join([inner, *(_random(rng, depth - 1) for _ in range(rng.randint(1, 2)))]) + ")"
    if kind < 0.74:
        return f"(?:{inner})"
    if kind < 0.82:
        return f"({inner})"
    if kind < 0.90:
        return rng.choice(["(?=", "(?!", "(?<=a", "(?<!b", "(?>"]) + inner + ")"
    if kind < 0.94:
        return rng.choice(["(?i:", "(?s:", "(?-i:"]) + inner + ")"
    if kind < 0.97:
        return f"({inner})" + rng.choice(["", "x", r"\s"]) + r"\1"
    return f"({inner})?" + rng.choice(["", "x"]) + "(?(1)" + _random(rng, 0) + "|" + _random(rng, 0) + ")"


# -- patterns in which something is hidden

MANY = ["?", "*", "+", "{2}", "{1,3}", "{2,}", "*?", "+?", "??", "{2,}?", "++", "*+", "?+", "{1,3}+"]
SMALL = [
    *("a", "b", "ab", "x", "[ab]", "[^a]", ".", r"\w", r"\s", r"\d", r"\b", r"\B", "^", "$", r"\Z", "(?<=a)"),
    *("(?<!b)", "(?=a)", "(?!b)", " ", "1", r"\W", r"\S", r"\n", "(?s:.)", "(?m:^)", "(?m:$)"),
    *("(?i:s)", "(?i:[k-t])", "[😀🎉🔥✨]", r"[\w🙂-🙄😀]", "(?i:é)", r"(?a:\w)"),
]
HEAVY = [
    *("(?:ab?x?1?_?A?)*", "(?:a(?:xy)?(?:1b)?(?: b)?)*", "(?:ab*?x*?1*?A*?)+", "(?:(?:a|xy)(?:b|1x|))*"),
    f"[{''.join(map(chr, range(0x1F300, 0x1F3F0, 3)))}]",
]
"""What may take long each time around, for what it makes the engine keep or look through."""
LOOK_BEHINDS = ["(?<=ab)", "(?<!a.)", r"(?<=\w\b)", "(?<=(?=a)b)", r"(?<!a\Bb)"]
BOMBS = [
    *(r"(?:|a?|b?){7}c", r"(?:\b|\B|){7}c", "(?:a?){20}b", r"(?:\w+)+!", "(?:a|a)*!", "(?:(?:x|xx)+y)?"),
    *(r"\w*\w*c", "(?:.*.*)?!", "(?:|a?|b?){7}"),
]


class Patterns:
    """Draws patterns of every construct, with groups that are asked for again anywhere after them."""

    def __init__(self, rng: random.Random, bombs: float = 0.0) -> None:
        """`bombs`: how many of the rows in a pattern are something that explodes."""
        self.rng = rng
        self._bombs = bombs
        self._groups = 0
        self._closed: list[int] = []

    def draw(self) -> str:
        """Return a pattern; the engine refuses some."""
        self._groups, self._closed = 0, []
        if not self._bombs or self.rng.random() > 0.1:
            return self._row(3)
        # Groups that are set all along: the engine saves them at each choice inside a repeat.
        self._groups = self.rng.choice((3, 9, 30))
        return "#" * self.rng.randint(0, 1) + "()" * self._groups + self._row(3)

    def _row(self, depth: int) -> str:
        rng = self.rng
        if rng.random() < self._bombs:
            opening, quantifiers = rng.choice(
                [("(?:", ["", "?", "??", "?+", "{2}"]), ("(?>", ["", "?"]), ("(?=", [""]), ("(?!", [""])]
            )
            return f"{opening}{rng.choice(BOMBS)}){rng.choice(quantifiers)}"
        parts = []
        for _ in range(rng.randint(1, 3)):
            part = self._piece(depth)
            if rng.random() < 0.4 and part[-1] not in "^$" and part not in (r"\b", r"\B", r"\Z"):
                part += rng.choice(MANY)
            parts.append(part)
        return "".join(parts)

    def _piece(self, depth: int) -> str:
        rng, kind = self.rng, self.rng.random()
        if depth <= 0 or kind < (0.43 if self._bombs else 0.45):
            return rng.choice(SMALL)
        if kind < 0.45 and self._bombs:
            return rng.choice(HEAVY)
        if kind < 0.6:
            return "(?:" + "|".join(self._row(depth - 1) for _ in range(rng.randint(1, 3))) + ")"
        if kind < 0.75:
            self._groups += 1
            number = self._groups
            inner = "|".join(self._row(depth - 1) for _ in range(rng.randint(1, 2)))
            self._closed.append(number)
            return f"({inner})"
        if kind < 0.82:
            return rng.choice(["(?=", "(?!", "(?>", "(?>"]) + self._row(depth - 1) + ")"
        if kind < 0.86:
            return rng.choice(LOOK_BEHINDS)
        if kind < 0.94 and self._closed:
            return f"\\{rng.choice(self._closed)}"
        if self._closed:
            return f"(?({rng.choice(self._closed)}){self._row(0)}|{self._row(0)})"
        return f"(?i:{self._row(depth - 1)})"


# -- texts


def words(pattern: str, rng: random.Random, count: int) -> list[str]:
    """Draw texts that a pattern, or a look-around in it, probably matches."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parsed = _parser.parse(pattern)
    flags = parsed.state.flags
    drawn = [_word(parsed, rng, flags, loops) for loops in (1, 2, 1, 3)[:count]]
    drawn += [_word(av[1], rng, flags, 1) for op, av in parsed if op in (sre.ASSERT, sre.ASSERT_NOT)][:2]
    return list(dict.fromkeys(word[:40] for word in drawn if word))


def texts(pattern: str, length: int, rng: random.Random, limit: int = 16) -> list[str]:
    """Return up to `limit` texts of about `length` characters that are hard for a pattern."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parsed = _parser.parse(pattern)
    flags = parsed.state.flags
    words = list(dict.fromkeys(_word(parsed, rng, flags, loops) for loops in (1, 1, 2, 0, 3, 1, 2)))
    loops = list(_loops(parsed, rng, flags))
    chars = sorted(
        {char for word in [*words, *(body for _, body, _ in loops)] for char in word}
        | {char for char in pattern if char not in "\\()[]{}?*+|^$<=:.!"}
    )
    ends = ["", rng.choice("!\x00~"), "\n!"]
    found: dict[str, None] = {}

    def add(head: str, body: str, end: str) -> None:
        if body:
            found.setdefault(
                (head + body * (max(1, (length - len(head) - len(end)) // len(body))))[: length - len(end)]
                + end
            )

    for prefix, body, _ in loops:
        add(prefix, body, ends[1])
    # What follows the loop and matches: a search that fails for a look-ahead's success goes on.
    for prefix, body, after in rng.sample(loops, min(len(loops), limit // 4)):
        if after:
            add(rng.choice(["", prefix]), body, after)
    for char in rng.sample(chars, min(len(chars), limit // 3)):
        add("", char, ends[1])
    for prefix, body, _ in loops:
        add("", prefix + body, ends[1])
        add("", body, ends[1])
    for word in words:
        for cut in {len(word), len(word) - 1, (len(word) + 1) // 2}:
            if cut > 0:
                add("", word[:cut], ends[1])
    if chars:
        for _ in range(limit // 3):
            add("", "".join(rng.choice(chars) for _ in range(rng.randint(2, 4))), ends[1])
        add("", chars[0], ends[0])
    # In this order: what loops first, then what nearly matches.
    first, rest = list(found)[: limit - 6], list(found)[limit - 6 :]
    return first + rng.sample(rest, min(len(rest), 6))


def _one_of(items: Any, rng: random.Random, flags: int) -> str:
    """Draw a character of a class."""
    negate = items and items[0][0] is sre.NEGATE
    options: list[str] = []
    for op, av in items:
        if op is sre.LITERAL:
            options.append(chr(av))
        elif op is sre.RANGE:
            options += [chr(av[0]), chr(av[1]), chr((av[0] + av[1]) // 2)]
        elif op is sre.CATEGORY:
            options += {"DIGIT": "07", "SPACE": " \n", "WORD": "a7_"}.get(str(av)[9:], "-a ")
    if negate:
        options = [char for char in 'a0 -"\\{bz\n' if char not in options] or ["~"]
    return rng.choice(options) if options else "a"


def _word(
    items: Any, rng: random.Random, flags: int, loops: int, groups: dict[int, str] | None = None
) -> str:
    """Draw a text that a parsed piece probably matches, its loops taken `loops` times where they may be."""
    groups = {} if groups is None else groups
    out: list[str] = []
    for op, av in items:
        if op is sre.LITERAL:
            out.append(chr(av))
        elif op is sre.NOT_LITERAL:
            out.append("a" if av != 97 else "b")
        elif op is sre.ANY:
            out.append(rng.choice("a 1"))
        elif op is sre.IN:
            out.append(_one_of(av, rng, flags))
        elif op in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
            times = max(av[0], min(av[1], loops))
            out.append("".join(_word(av[2], rng, flags, loops, groups) for _ in range(min(times, 60))))
        elif op is sre.SUBPATTERN:
            text = _word(av[3], rng, flags, loops, groups)
            if av[0] is not None:
                groups[av[0]] = text
            out.append(text)
        elif op is sre.ATOMIC_GROUP:
            out.append(_word(av, rng, flags, loops, groups))
        elif op is sre.BRANCH:
            out.append(_word(rng.choice(av[1]), rng, flags, loops, groups))
        elif op is sre.GROUPREF:
            out.append(groups.get(av, ""))
        elif op is sre.GROUPREF_EXISTS:
            branch = av[1] if av[0] in groups else av[2]
            out.append("" if branch is None else _word(branch, rng, flags, loops, groups))
        elif op is sre.ASSERT and (rng.random() < 0.5 if av[0] > 0 else not out):
            out.append(_word(av[1], rng, flags, loops, groups))
    return "".join(out)[:400]


def _loops(
    items: Any, rng: random.Random, flags: int, head: str = "", rest: str = ""
) -> Iterator[tuple[str, str, str]]:
    """Return each repeat of the tree: a text that leads to it, one time around, and a text that follows."""
    for at, (op, av) in enumerate(items):
        inner: list[Any] = []
        after = (_word(items[at + 1 :], rng, flags, 1) + rest)[:200]
        if op in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
            for loops in (1, 2, 1):
                body = _word(av[2], rng, flags, loops)
                if body:
                    yield head, body, after
            inner = [av[2]]
        elif op is sre.SUBPATTERN:
            inner = [av[3]]
        elif op is sre.ATOMIC_GROUP:
            inner = [av]
        elif op is sre.BRANCH:
            inner = av[1]
        elif op is sre.ASSERT or op is sre.ASSERT_NOT:
            inner, after = [av[1]], ""
        elif op is sre.GROUPREF_EXISTS:
            inner = [one for one in av[1:] if one is not None]
        for one in inner:
            yield from _loops(one, rng, flags, head, after)
        if op is not sre.ASSERT or av[0] > 0 or not head:
            head = (head + _word([(op, av)], rng, flags, 1))[-200:]
