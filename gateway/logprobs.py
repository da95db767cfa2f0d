"""Log probabilities in OpenAI's two shapes, from an event's columns.

A token's text is what the shard sent with the columns; one it did not send is shown by its id. That is its
text alone: a part of a character has none, and a word may have lost the space before it. What a token adds to
a text, the token table knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import msgspec

from ..sink.columns import Columns, Flat, Ragged
from .answer import Unanswerable
from .offsets import Offsets

_encode: Final = msgspec.json.Encoder().encode

TokenBytes = Callable[[int], bytes | None]
"""Which bytes a token id stands for; None when that is not known."""
Skipped = Callable[[int], bool]
"""Whether a token id is left out of the output's text."""


class Entry(NamedTuple):
    """A token and its log probability. `text` is None for one whose text the shard did not send."""

    token: int
    text: str | None
    value: float | None

    @property
    def name(self) -> str:
        """What the client reads."""
        return f"token_id:{self.token}" if self.text is None else self.text

    def bytes(self, token_bytes: TokenBytes) -> bytes | None:
        """Return what the token stands for behind others, if that is known."""
        known = token_bytes(self.token)
        if known is not None or self.text is None or "\ufffd" in self.text:
            return known
        return self.text.encode("utf-8", "surrogatepass")


Position = tuple[Entry, list[Entry] | None]


class CompletionLogprobs:
    """The `logprobs` of one text completion, event by event.

    skipped: which of the output's tokens its text has not.
    echo: the prompt's text, when the client gets it before the output: then its tokens are told too.
    """

    def __init__(
        self, token_bytes: TokenBytes, echo: str | None, skipped: Skipped = lambda token: False
    ) -> None:
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._echo = echo
        self._begun = False
        self._places = Offsets(len(echo or ""))

    def render(self, columns: Columns | None, text: str, last: bool) -> dict[str, Any]:
        """Return the object for what came with `text`, which is the output's alone.

        Raises:
            Unanswerable: an echo's log probabilities have not come with the first event. Who adds up those of
                a prompt to weigh it would take none for a sum of 0.
        """
        if not self._begun:
            self._begun = True
            if self._echo is not None and (columns is None or columns.input_logprobs is None):
                raise Unanswerable(
                    "no_prompt_logprobs",
                    "echo: with logprobs it tells the log probabilities of the prompt, and this scheduler "
                    "sends none; leave out one of the two",
                )
        if columns is None:
            positions, prompt = [], []
        else:
            positions = list(_positions(columns, columns.output_logprobs, columns.output_top_logprobs))
            echoed = columns.input_logprobs if self._echo is not None else None
            prompt = list(_positions(columns, echoed, columns.input_top_logprobs))
        places = Offsets().places(self._bytes(prompt), self._echo or "", last=True)
        # Whoever waited for a skipped token's text would take what comes behind it for held back.
        made = [
            b"" if self._skipped(entry.token) else known
            for (entry, _), known in zip(positions, self._bytes(positions), strict=True)
        ]
        places += self._places.places(made, text, last)
        both = prompt + positions
        return {
            "tokens": [entry.name for entry, _ in both],
            "token_logprobs": [entry.value for entry, _ in both],
            "top_logprobs": [
                None if top is None else {one.name: one.value for one in top} for _, top in both
            ],
            "text_offset": places,
        }

    def _bytes(self, positions: list[Position]) -> list[bytes | None]:
        return [entry.bytes(self._token_bytes) for entry, _ in positions]


def chat_logprobs(columns: Columns | None, token_bytes: TokenBytes) -> dict[str, Any]:
    """Return the `logprobs` of a chat choice."""

    def shown(entry: Entry) -> dict[str, Any]:
        stands_for = entry.bytes(token_bytes)
        return {
            "token": entry.name,
            "logprob": entry.value,
            "bytes": None if stands_for is None else list(stands_for),
        }

    found = (
        () if columns is None else _positions(columns, columns.output_logprobs, columns.output_top_logprobs)
    )
    return {
        "content": [
            {**shown(entry), "top_logprobs": [shown(one) for one in top or ()]} for entry, top in found
        ]
    }


class LogprobsSum:
    """The `logprobs` of a whole choice, each event's rendered once, as it comes.

    `echo`, `skipped`: as for one of its events.
    """

    __slots__ = ("_completion", "_end", "_held", "_lists", "_token_bytes")

    def __init__(
        self,
        chat: bool,
        token_bytes: TokenBytes,
        echo: str | None,
        skipped: Skipped = lambda token: False,
    ) -> None:
        self._token_bytes = token_bytes
        self._completion = None if chat else CompletionLogprobs(token_bytes, echo, skipped)
        names = ("content",) if chat else ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        self._lists = {name: bytearray() for name in names}
        self._end = len(echo or "")
        self._held: list[int] = []
        """Places behind the text that has come: a stop may cut off what would have been there."""

    @property
    def size(self) -> int:
        """Bytes rendered so far."""
        return sum(map(len, self._lists.values()))

    def add(self, columns: Columns | None, text: str, last: bool) -> None:
        """Append an event's; `text` came with it."""
        if self._completion is None:
            rendered = chat_logprobs(columns, self._token_bytes)
        else:
            rendered = self._completion.render(columns, text, last)
            rendered["text_offset"] = self._settle(rendered["text_offset"], len(text), last)
        for name, known in self._lists.items():
            if more := _encode(rendered[name])[1:-1]:
                known += b"," + more if known else more

    def _settle(self, places: list[int], came: int, last: bool) -> list[int]:
        """Return the places, of these and the ones before, that the text has reached; all when it is over."""
        self._end += came
        self._held += places
        end, held = self._end, self._held
        beyond = (at for at, place in enumerate(held) if place > end)
        settled = len(held) if last else next(beyond, len(held))
        self._held = held[settled:]
        return [min(place, end) for place in held[:settled]]

    def json(self) -> msgspec.Raw:
        """Return the object."""
        members = [b'"%b":[%b]' % (name.encode(), bytes(inner)) for name, inner in self._lists.items()]
        return msgspec.Raw(b"{%b}" % b",".join(members))


def _positions(columns: Columns, chosen: Flat | None, top: Ragged | None) -> Iterator[Position]:
    """Yield each token of a family, and the likeliest at its place."""
    if chosen is None:
        return
    texts = columns.texts or {}

    def entry(token: int, value: float) -> Entry:
        # The first token of a prompt has no log probability; it is sent as NaN.
        return Entry(token, texts.get(token), value if value == value else None)

    lengths = [] if top is None else top.lengths.tolist()
    top_ids = [] if top is None else top.ids.tolist()
    top_values = [] if top is None else top.values.tolist()
    at = 0
    for position, (token, value) in enumerate(zip(chosen.ids.tolist(), chosen.values.tolist(), strict=True)):
        likeliest = None
        if position < len(lengths):
            end = at + lengths[position]
            likeliest = [entry(top_ids[i], top_values[i]) for i in range(at, end)]
            at = end
        yield entry(token, value), likeliest
