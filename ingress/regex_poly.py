"""Counts and costs that grow with the place in the text: polynomials, kept as few numbers.

Must not know of patterns.
"""

from dataclasses import dataclass

from .regex_places import Explosive

Poly = tuple[float, ...]
"""Ways at place j, from above: p[0] are ways that happen once in the whole text, p[1] is a constant,
p[k] counts C(j + k - 1, k - 1), that is about j^(k-1)/(k-1)!. Shifting by one sums over all places before."""

MAX_DEGREE = 3
"""A search may take up to n^3; beyond that nothing is admitted, however short the text."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Nanoseconds of one search: sum of terms[k] · C(n + k, k). `degree` is the power of n."""

    terms: Poly

    @property
    def degree(self) -> int:
        """The highest power of the text's length."""
        return max((k for k, term in enumerate(self.terms) if term), default=0)

    def milliseconds(self, characters: int) -> float:
        """Return the bound for a text of so many characters."""
        total, binomial = 0.0, 1.0
        for k, term in enumerate(self.terms):
            if k:
                binomial = binomial * (characters + k) / k
            total += term * binomial
        return total / 1e6


def add(a: Poly, b: Poly) -> Poly:
    """Return the sum."""
    if len(a) < len(b):
        a, b = b, a
    if len(b) == 2 == len(a):
        return (a[0] + b[0], a[1] + b[1])
    return (*[x + y for x, y in zip(a, b, strict=False)], *a[len(b) :])


def highest(a: Poly, b: Poly) -> Poly:
    """Return what is at least either of the two at every place."""
    if len(a) < len(b):
        a, b = b, a
    return (*[x if x > y else y for x, y in zip(a, b, strict=False)], *a[len(b) :])


def times(a: Poly, factor: float) -> Poly:
    """Return a multiple."""
    if factor == 1.0:
        return a
    return tuple([x * factor for x in a])


def piled(a: Poly, apart: int = 1) -> Poly:
    """Return the ways summed over all places before, or over one of `apart` of them: what a loop holds when
    all that entered it stay."""
    if len(a) > MAX_DEGREE:
        raise Explosive(f"a search takes more than the text's length to the power of {MAX_DEGREE}")
    if apart == 1:
        return (0.0, *a)
    # The last place, and those before it: ways grow with the place, so each has no more than the mean of the
    # places up to the next.
    return add((0.0, *a[1:]), (0.0, a[0], *times(a[1:], 1 / apart)))
