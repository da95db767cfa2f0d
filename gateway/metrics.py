"""Counters and histograms of one gateway process, and their Prometheus text.

Observing costs a bisection and two additions: it is done for every event of every stream. Only for the
loop's thread, so there is no lock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import msgspec

from .. import __version__
from .backend import Reading

PREFIX: Final = "outfeed_"
CONTENT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"

FIRST_TOKEN_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
BETWEEN_TOKENS_S: Final = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, *FIRST_TOKEN_S[:11], 5)
REQUEST_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Histogram:
    """How often a value was at most each bound."""

    __slots__ = ("bounds", "counts", "help", "name", "total")

    def __init__(self, name: str, help: str, bounds: tuple[float, ...]) -> None:
        self.name = name
        self.help = help
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def lines(self) -> Iterator[str]:
        """Yield the histogram's text, without its header."""
        running = 0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            running += count
            yield f'{PREFIX}{self.name}_bucket{{le="{bound:g}"}} {running}'
        running += self.counts[-1]
        yield f'{PREFIX}{self.name}_bucket{{le="+Inf"}} {running}'
        yield f"{PREFIX}{self.name}_sum {self.total:.9g}"
        yield f"{PREFIX}{self.name}_count {running}"


_COUNTS: Final = ("prompt_tokens", "output_tokens", "events", "disconnects")


class _State(msgspec.Struct, array_like=True):
    histograms: list[tuple[list[int], float]]
    counts: list[int]
    responses: list[tuple[str, int, int]]
    readings: list[Reading]


class Metrics:
    """What one gateway process has seen."""

    def __init__(self) -> None:
        self.first_token = Histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", FIRST_TOKEN_S
        )
        self.between_tokens = Histogram(
            "inter_token_latency_seconds",
            "Time per token after the first; tokens that came together share theirs.",
            BETWEEN_TOKENS_S,
        )
        self.request = Histogram("request_seconds", "From a request's arrival to its last token.", REQUEST_S)
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.events = 0
        self.disconnects = 0
        self.responses: dict[tuple[str, int], int] = {}
        self.others: list[Reading] = []
        """Figures that are other gateways' own: they stand beside this one's, with labels that say whose."""

    def answered(self, endpoint: str, status: int, times: int = 1) -> None:
        """Count a response. `endpoint` is a known path or "other": a client cannot grow this table."""
        key = (endpoint, status)
        self.responses[key] = self.responses.get(key, 0) + times

    def state(self, own: Iterable[Reading] = ()) -> bytes:
        """Pack every count, and what is this gateway's own, for another gateway to `add`."""
        return msgspec.msgpack.encode(
            _State(
                [(one.counts, one.total) for one in self._histograms()],
                [getattr(self, name) for name in _COUNTS],
                [(endpoint, status, count) for (endpoint, status), count in self.responses.items()],
                list(own),
            )
        )

    def add(self, state: bytes) -> None:
        """Add the counts of another gateway, and note what is its own.

        Raises:
            ValueError: they are not a gateway's of this version; nothing was added.
        """
        try:
            other = msgspec.msgpack.decode(state, type=_State)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ValueError(f"these are no counts of a gateway: {error}") from None
        mine = self._histograms()
        sizes = [len(counts) for counts, _ in other.histograms]
        if sizes != [len(one.counts) for one in mine] or len(other.counts) != len(_COUNTS):
            raise ValueError("these are the counts of a gateway of another version")
        for one, (counts, total) in zip(mine, other.histograms, strict=True):
            one.counts = [here + there for here, there in zip(one.counts, counts, strict=True)]
            one.total += total
        for name, count in zip(_COUNTS, other.counts, strict=True):
            setattr(self, name, getattr(self, name) + count)
        for endpoint, status, count in other.responses:
            self.answered(endpoint, status, count)
        self.others += other.readings

    def _histograms(self) -> tuple[Histogram, ...]:
        return (self.first_token, self.between_tokens, self.request)

    def readings(self) -> Iterator[Reading]:
        """Yield the plain counters, and which version this is."""
        yield Reading("build_info", "gauge", "Always 1; the version is a label.", 1, {"version": __version__})
        for (endpoint, status), count in sorted(self.responses.items()):
            labels = {"endpoint": endpoint, "status": str(status)}
            yield Reading(
                "http_responses_total", "counter", "Answers, by endpoint and status.", count, labels
            )
        for name, help_, value in (
            ("prompt_tokens_total", "Tokens of the prompts answered.", self.prompt_tokens),
            ("generated_tokens_total", "Tokens generated for clients.", self.output_tokens),
            ("stream_events_total", "Events those tokens came in.", self.events),
            ("client_disconnects_total", "Clients gone before their answer was complete.", self.disconnects),
        ):
            yield Reading(name, "counter", help_, value)

    def text(self, more: Iterable[Reading] = ()) -> str:
        """Render everything, and the readings in `more`, as Prometheus text."""
        lines: list[str] = []
        for histogram in self._histograms():
            lines += _head(histogram.name, "histogram", histogram.help)
            lines += histogram.lines()
        families: dict[str, list[Reading]] = {}
        for reading in (*self.readings(), *more, *self.others):
            families.setdefault(reading.name, []).append(reading)
        for name, readings in families.items():
            lines += _head(name, readings[0].kind, readings[0].help)
            lines += [f"{PREFIX}{name}{_labels(one.labels)} {one.value:.17g}" for one in readings]
        return "\n".join(lines) + "\n"


def _head(name: str, kind: str, help: str) -> tuple[str, str]:
    return f"# HELP {PREFIX}{name} {help}", f"# TYPE {PREFIX}{name} {kind}"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    pairs = ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items())
    return f"{{{pairs}}}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
